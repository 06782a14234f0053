"""What an evaluation found: one verdict for each problem, and the counts that tables are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loopdropout_trainer.evaluation.benchmarks import Benchmark
from loopdropout_trainer.evaluation.scorers import load_metric


@dataclass(frozen=True)
class Prediction:
    """One problem, the model's answer and its verdict.

    Attributes:
        prompt, completion, reference: texts.
        extracted: answer that the scorer read out of the completion; None if there is none.
        correct: whether it equals the reference.
        error: name of the exception that scoring raised (wrong, and no answer), or None.
    """

    prompt: str
    completion: str
    reference: str
    extracted: str | int | None
    correct: bool
    error: str | None = None


@dataclass(frozen=True)
class BenchmarkResult:
    """All predictions of one model on one benchmark."""

    name: str
    predictions: list[Prediction]

    @property
    def total(self) -> int:
        """Number of problems."""
        return len(self.predictions)

    @property
    def correct(self) -> int:
        """Number of right answers."""
        return sum(prediction.correct for prediction in self.predictions)

    @property
    def missing(self) -> int:
        """Number of completions without an answer."""
        return sum(prediction.extracted is None for prediction in self.predictions)

    @property
    def errors(self) -> int:
        """Number of completions that the scorer could not read."""
        return sum(prediction.error is not None for prediction in self.predictions)

    @property
    def score(self) -> float:
        """Accuracy in percent."""
        return 100 * self.correct / self.total

    @property
    def missing_rate(self) -> float:
        """Completions without an answer, in percent."""
        return 100 * self.missing / self.total


def score_completions(benchmark: Benchmark, completions: Sequence[str]) -> BenchmarkResult:
    """Judge one completion for each problem of `benchmark`."""
    verdicts = load_metric(benchmark.metric).compute(predictions=completions, references=benchmark.references)
    fields = (benchmark.prompts, completions, benchmark.references)
    fields += (verdicts["extracted"], verdicts["correct"], verdicts["errors"])
    return BenchmarkResult(benchmark.name, [Prediction(*row) for row in zip(*fields, strict=True)])


def load_results(path: str | Path) -> dict[str, BenchmarkResult]:
    """Read the results of every benchmark in an `evaluation.json`, by name."""
    benchmarks = json.loads(Path(path).read_text(encoding="utf-8"))["benchmarks"]
    return {
        name: BenchmarkResult(name, [Prediction(**prediction) for prediction in measured["predictions"]])
        for name, measured in benchmarks.items()
    }
