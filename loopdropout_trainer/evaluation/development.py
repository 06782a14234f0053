"""The development split as a benchmark: greedy completions of held-out training rows, for choosing a learning rate."""

from __future__ import annotations

from datasets import Dataset

from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedBenchmark
from loopdropout_trainer.evaluation.metrics import metamath_gsm8k


DEVELOPMENT = "development"
_SCORED_LIKE = {"metamath_gsm": "metamath_gsm8k", "gsm8k": "gsm8k", "arithmetic": "arithmetic_test"}


def development_benchmark(
    rows: Dataset | None, preparation: str | None, limit: int | None = None
) -> GeneratedBenchmark:
    """Return the held-out rows as a benchmark, with the prompts and the metric of the preparation's test set.

    Args:
        rows: held-out rows with `question` and `answer` (`load_data(...).eval`).
        preparation: its name.
        limit: only the first rows.

    Raises:
        ValueError: if there are no held-out rows, or the preparation has no questions with answers.
    """
    if preparation not in _SCORED_LIKE:
        raise ValueError(
            f"The benchmark `{DEVELOPMENT}` needs a `preparation` with questions and answers "
            f"({', '.join(_SCORED_LIKE)}); got {preparation!r}."
        )
    if not rows:
        raise ValueError(f"The benchmark `{DEVELOPMENT}` needs held-out rows: set `num_eval_examples`.")
    task = BENCHMARKS[_SCORED_LIKE[preparation]]
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    references = rows["answer"][:]
    if preparation == "metamath_gsm":  # its answers are numbers for the scorer, and text for the others
        references = [str(metamath_gsm8k.extract_answer(answer)) for answer in references]
    prompts = [task.prompt(row) for row in rows]
    return GeneratedBenchmark(DEVELOPMENT, prompts, references, task.metric, task.max_new_tokens, task.stop_strings)
