"""Benchmarks of greedy completions that an answer metric scores, one problem at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from datasets import Features, Value, load_dataset

from loopdropout_trainer.data.rows import BadRow, DataError, read_files
from loopdropout_trainer.evaluation.benchmark import AnswerLog, Benchmark, Task
from loopdropout_trainer.evaluation.results import SCORERS, BenchmarkResult, Prediction, Verdict
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.generation.generation import generate_greedy
from loopdropout_trainer.processes import all_processes


Row = dict[str, Any]

GROUPS = ("subject", "level", "num_steps")
"""Columns of published rows that divide their problems, where a benchmark has them."""


@dataclass(frozen=True)
class GeneratedBenchmark(Benchmark):
    """Problems, and how they are asked and scored.

    Attributes:
        name: for reports and files.
        prompts, references: one of each for every problem; references are what the metric compares with.
        metric: name of a scorer.
        max_new_tokens: most tokens of a completion.
        stop_strings: a completion ends before the earliest of them.
        rows: the published rows of the problems, where there are any.
    """

    name: str
    prompts: list[str]
    references: list[str]
    metric: str
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)

    in_turns: ClassVar[bool] = False  # whether the protocol's prompts are turns of a chat
    beginning: ClassVar[str] = ""  # of every completion

    def problems(self) -> list[list[str]]:
        return [self.prompts, self.references]

    def settings(self, subject: Subject) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "max_new_tokens": self.max_new_tokens,
            "stop_strings": list(self.stop_strings),
            **subject.settings(subject.in_turns(self.in_turns)),
        }

    def run(self, subject: Subject, log: AnswerLog, progress: bool = True) -> BenchmarkResult:
        state = all_processes()
        in_turns = subject.in_turns(self.in_turns)
        texts = [subject.prompt_text(prompt, in_turns) + self.beginning for prompt in self.prompts]
        missing = [place for place in range(len(texts)) if place not in log.answers]
        share = missing[state.process_index :: state.num_processes]
        with subject.running():
            generate_greedy(
                subject.model,
                subject.tokenizer,
                [subject.tokenize(texts[place], in_turns) for place in share],
                self.max_new_tokens if subject.max_new_tokens is None else subject.max_new_tokens,
                subject.batch_size,
                self.stop_strings,
                progress=progress and state.is_main_process and bool(share),
                decoding=subject.decoding,
                keep=lambda index, completion: log.keep([(share[index], completion)]),
            )
        log.exchange(share)
        return self.score([log.answers[place] for place in range(len(texts))], texts, log, progress)

    def score(self, completions: list[str], texts: list[str], log: AnswerLog, progress: bool) -> BenchmarkResult:
        """Judge one completion of each text, which is a prompt as the model saw it."""
        return score_completions(replace(self, prompts=texts), completions)


def score_completions(benchmark: GeneratedBenchmark, completions: Sequence[str]) -> BenchmarkResult:
    """Judge one completion for each problem of `benchmark`."""
    metric = answer_metric()(benchmark.metric, keep_in_memory=True)
    scored = metric.compute(predictions=list(completions), references=list(benchmark.references))
    predictions = []
    for index, verdict in enumerate(scored["verdicts"]):
        prediction = Prediction(
            prompt=benchmark.prompts[index],
            completion=completions[index],
            reference=benchmark.references[index],
            id=str(index),
            groups=_groups(benchmark.rows[index]) if benchmark.rows else None,
            **verdict._asdict(),
        )
        predictions.append(prediction)
    return BenchmarkResult(benchmark.name, predictions)


@cache
def answer_metric() -> type:
    """Return the metric of Hugging Face's `evaluate` that applies the scorer of its `config_name`.

    The class is made when it is first asked for: settings are read without that library and its SciPy.
    """
    # The folder of a running script comes first on `sys.path`, and one script is called evaluate.py.
    before = sys.path
    sys.path = [folder for folder in before if not Path(folder, "evaluate.py").is_file()]
    try:
        import evaluate
    finally:
        sys.path = before

    class AnswerMetric(evaluate.Metric):
        """The verdicts of a scorer on predictions and references."""

        def _info(self) -> evaluate.MetricInfo:
            texts = Features({name: Value("string") for name in ("predictions", "references")})
            about = {"description": self.__doc__, "inputs_description": "texts", "citation": ""}
            return evaluate.MetricInfo(**about, features=texts)

        def _compute(self, predictions: list[str | None], references: list[str | None]) -> dict[str, list[Verdict]]:
            """Return the verdicts in the predictions' order."""
            return {"verdicts": list(map(SCORERS[self.config_name], predictions, references))}

    return AnswerMetric


def _groups(row: Row) -> dict[str, str] | None:
    return {column: str(row[column]) for column in GROUPS if column in row} or None


@dataclass(frozen=True)
class GeneratedTask(Task):
    """A generated benchmark without its rows.

    Attributes:
        prompt, reference: of one row; they raise KeyError or ValueError for a bad row.
        rows: the published rows; takes how many to read, None for all.
        metric, max_new_tokens, stop_strings: see `GeneratedBenchmark`.
    """

    prompt: Callable[[Row], str]
    reference: Callable[[Row], str]
    rows: Callable[[int | None], Iterable[Row]]
    metric: str
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()

    def at_revision(self, name: str, revision: str) -> GeneratedTask:
        if not isinstance(self.rows, HubRows):
            return super().at_revision(name, revision)
        return replace(self, rows=replace(self.rows, revision=revision))

    def load(self, name: str, files: list[Path] | None, limit: int | None, confirmed: bool) -> GeneratedBenchmark:
        def problem(row: Row) -> tuple[str, str, Row]:
            reference = self.reference(row)
            if not isinstance(reference, str):
                raise ValueError("it has no answer that completions could be compared with")
            return self.prompt(row), reference, row

        if files is None:
            rows = ((f"{name}, row {number}", row) for number, row in enumerate(self.rows(limit), start=1))
        else:
            rows = read_files(files)
        problems = read_problems(name, islice(rows, limit), problem)
        prompts, references, published = map(list, zip(*problems, strict=True))
        protocol = (self.metric, self.max_new_tokens, self.stop_strings)
        return GeneratedBenchmark(name, prompts, references, *protocol, published)


def read_problems(name: str, rows: Iterable[tuple[str, Row | BadRow]], read: Callable[[Row], Any]) -> list[Any]:
    """Return what `read` gives for each (place, row) of the benchmark `name`; DataError names the place of a bad row."""
    problems = []
    for place, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            json.dumps(row, ensure_ascii=False, default=str).encode()  # half of a surrogate pair is no text
            problems.append(read(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"the field {error} is missing" if isinstance(error, KeyError) else error
            raise DataError(f"{place} is not a problem of `{name}`: {reason}.") from error
    if not problems:
        raise DataError(f"`{name}` has no problems.")
    return problems


@dataclass(frozen=True)
class HubRows:
    """The rows of a dataset's split on the Hub, at a revision: a branch, tag or commit; None: the newest."""

    path: str
    config: str | None = None
    split: str = "test"
    revision: str | None = None

    def __call__(self, limit: int | None) -> Iterable[Row]:
        return load_dataset(self.path, self.config, split=self.split, revision=self.revision)
