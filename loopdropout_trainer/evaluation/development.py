"""The development split as a benchmark: greedy completions of held-out training rows, for choosing a learning rate."""

from __future__ import annotations

from datasets import Dataset

from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedBenchmark
from loopdropout_trainer.evaluation.metrics import metamath_gsm8k


DEVELOPMENT = "development"
_SCORED_LIKE = {"metamath_gsm": "metamath_gsm8k", "gsm8k": "gsm8k", "arithmetic": "arithmetic_test"}


def development_benchmark(rows: Dataset | None, preparation: str | None, limit: int | None = None):
    """Return held-out rows (`load_data(...).eval`) as a benchmark, with prompts and metric of the preparation's test set.

    Raises:
        ValueError: if there are no held-out rows, or the preparation has no questions with answers.
    """
    if preparation not in _SCORED_LIKE or not rows:
        raise ValueError(
            f"The benchmark `{DEVELOPMENT}` needs held-out rows (`num_eval_examples`) of a `preparation` with questions and "
            f"answers ({', '.join(_SCORED_LIKE)}); got {preparation!r} with {len(rows or ())}."
        )
    task = BENCHMARKS[_SCORED_LIKE[preparation]]
    rows = rows.select(range(min(limit or len(rows), len(rows))))
    references = rows["answer"][:]
    if preparation == "metamath_gsm":  # its answers are numbers for the scorer, and text for the others
        references = [str(metamath_gsm8k.extract_answer(answer)) for answer in references]
    prompts = [task.prompt(row) for row in rows]
    return GeneratedBenchmark(DEVELOPMENT, prompts, references, task.metric, task.max_new_tokens, task.stop_strings)
