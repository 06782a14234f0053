"""The benchmarks by name: which problems, asked how, answered in how many tokens, scored by what (Appendix "Prompts")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import load_dataset

from loopdropout_trainer.data.rows import BadRow, read_files
from loopdropout_trainer.data.templates import PROMPT_TEMPLATES
from loopdropout_trainer.evaluation.metrics.metamath_gsm8k import metamath_gsm8k
from loopdropout_trainer.evaluation.metrics.metamath_math import metamath_math


@dataclass(frozen=True)
class Benchmark:
    """Problems and the rules to answer and score them.

    Attributes:
        name: for reports and files.
        prompts, references: one of each for every problem; references are what the metric compares with.
        metric: name of an answer metric.
        max_new_tokens: most tokens of an answer.
        stop_strings: an answer ends before the earliest of them.
    """

    name: str
    prompts: list[str]
    references: list[str]
    metric: str
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()


Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A benchmark without its rows.

    Attributes:
        prompt, reference: of one row; they raise KeyError or ValueError for a bad row.
        rows: the published rows; takes the number that is wanted, None for all.
    """

    prompt: Callable[[Row], str]
    reference: Callable[[Row], str]
    rows: Callable[[int | None], Iterable[Row]]
    metric: str
    max_new_tokens: int
    stop_strings: tuple[str, ...]


ALPACA_PROMPT = PROMPT_TEMPLATES["alpaca"] + " Let's think step by step."
# Each with and without its colon, as the reference has them; those without are the ones that matter.
METAMATH_STOPS = tuple(
    word + colon for word in ("Question", "USER", "ASSISTANT", "Instruction", "Response") for colon in (":", "")
)
QUESTION_STOPS = ("Question:", "</s>", "<|im_end|>")
ARITHMETIC_PROBLEMS = 500


def _question(row: Row) -> str:
    return PROMPT_TEMPLATES["question"].format(question=row["question"])


def _hub(path: str, config: str | None = None, split: str = "test") -> Callable[[int | None], Iterable[Row]]:
    return lambda limit: load_dataset(path, config, split=split)


def _arithmetic(split: str) -> Callable[[int | None], Iterable[Row]]:
    def rows(limit: int | None) -> Iterable[Row]:
        from loopdropout_trainer.data.arithmetic import arithmetic_problems

        return arithmetic_problems(split, limit or ARITHMETIC_PROBLEMS, seed=0)

    return rows


def _direct(rows: Callable[[int | None], Iterable[Row]], answer: str = "answer", max_new_tokens: int = 256) -> Task:
    """Return a task that asks as lm-eval's `gsm8k` does and is scored by strict match."""
    return Task(_question, lambda row: row[answer], rows, "gsm8k_strict", max_new_tokens, QUESTION_STOPS)


BENCHMARKS: dict[str, Task] = {
    "metamath_gsm8k": Task(
        prompt=lambda row: ALPACA_PROMPT.format(instruction=row["question"]),
        reference=lambda row: str(metamath_gsm8k.extract_gold(row["answer"])),
        rows=_hub("openai/gsm8k", "main"),
        metric="metamath_gsm8k",
        max_new_tokens=512,
        stop_strings=METAMATH_STOPS,
    ),
    "metamath_math500": Task(
        prompt=lambda row: ALPACA_PROMPT.format(instruction=row["problem"]),
        reference=lambda row: metamath_math.extract_gold(row["solution"]),
        rows=_hub("HuggingFaceH4/MATH-500"),
        metric="metamath_math",
        max_new_tokens=2048,
        stop_strings=METAMATH_STOPS,
    ),
    "gsm8k": _direct(_hub("openai/gsm8k", "main")),
    "gsm8k_platinum": _direct(_hub("madrylab/gsm8k-platinum", "main")),
    "gsm_plus_mini": _direct(_hub("qintongli/GSM-Plus", split="testmini"), answer="solution"),
    **{
        f"arithmetic_{split}": _direct(_arithmetic(split), max_new_tokens=80)
        for split in ("test", "hard", "larger", "wording")
    },
}


def load_benchmark(
    name: str, files: str | Path | Sequence[str | Path] | None = None, limit: int | None = None
) -> Benchmark:
    """Load a benchmark's problems.

    Args:
        name: key of `BENCHMARKS`.
        files: local JSONL, JSON, CSV (also `.gz`) or Parquet files to read instead of the Hub; fields as published.
        limit: only the first problems.

    Raises:
        ValueError: for an unknown name, a limit below 1, a file that cannot be read, or a bad row; it names file and row.
    """
    _check_name(name)
    if limit is not None and limit < 1:
        raise ValueError(f"The number of problems (`benchmark_limit`) must be at least 1; got {limit}.")
    if files is None:
        rows = ((f"{name}, row {number}", row) for number, row in enumerate(BENCHMARKS[name].rows(limit), start=1))
    else:
        rows = read_files([files] if isinstance(files, str | Path) else files)
    return _benchmark(name, islice(rows, limit))


def make_benchmark(name: str, rows: Iterable[Row]) -> Benchmark:
    """Ask and score rows of the user's own, such as held-out ones, as the benchmark `name` does.

    Raises:
        ValueError: for an unknown name, or a row without the benchmark's fields.
    """
    return _benchmark(name, ((f"Row {number}", row) for number, row in enumerate(rows, start=1)))


def _check_name(name: str) -> None:
    if name not in BENCHMARKS:
        raise ValueError(f"`benchmarks` must be among {', '.join(BENCHMARKS)}; got {name!r}.")


def _benchmark(name: str, rows: Iterable[tuple[str, Row]]) -> Benchmark:
    _check_name(name)
    task = BENCHMARKS[name]
    prompts, references = [], []
    for place, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            prompts.append(task.prompt(row))
            references.append(task.reference(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"the field {error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{place} is not a problem of `{name}`: {reason}") from error
        if not isinstance(references[-1], str):
            raise ValueError(f"{place} is not a problem of `{name}`: it has no answer.")
    if not prompts:
        raise ValueError(f"`{name}` has no problems.")
    return Benchmark(name, prompts, references, task.metric, task.max_new_tokens, task.stop_strings)
