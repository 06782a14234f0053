"""The results of an evaluation: one verdict for each problem, and the counts that tables are made of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


FORMAT = 2
"""Of the results file; see docs/evaluation.md."""


@dataclass(frozen=True)
class Prediction:
    """One problem, the model's completion and its verdict.

    Attributes:
        prompt, completion, reference: texts.
        extracted: answer that the scorer read out of the completion; None if there is none.
        correct: whether it equals the reference; None where a problem gives parts of a point.
        error: name of the exception that scoring raised (wrong, and no answer), or None.
        id: of the problem in its benchmark.
        values: of the metrics, if there are several, or parts of a point.
        group: the part of the benchmark that the problem belongs to, if it has parts.
        log_likelihoods: of the choices, in nats, for multiple choice.
        note: what else the scorer says, such as why a program fails.
    """

    prompt: str
    completion: str
    reference: str
    extracted: str | int | None
    correct: bool | None
    error: str | None = None
    id: str = ""
    values: dict[str, float] | None = None
    group: str | None = None
    log_likelihoods: list[float] | None = None
    note: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the results file; those that only some benchmarks have are left out where they are None."""
        row = asdict(self)
        optional = ("values", "group", "log_likelihoods", "note")
        return {"id": row.pop("id"), **{key: row[key] for key in row if key not in optional or row[key] is not None}}


@dataclass(frozen=True)
class Metric:
    """One number of a benchmark.

    Attributes:
        score: in percent, 100 sum / total. (A metric that is no share of the problems is as its harness gives it.)
        correct: number of correct answers; None for parts of points.
        sum: of the problems' values; None for a metric that is no share of the problems.
        total: number of problems.
    """

    score: float
    correct: int | None
    sum: float | None
    total: int

    @classmethod
    def of(cls, values: list[bool | float]) -> Metric:
        """Return the metric of the problems' values, each from 0 to 1.

        Raises:
            ValueError: for NaN, which has no average.
        """
        total = sum(values)
        if not math.isfinite(total):
            raise ValueError("A problem's value is not a finite number: the model's outputs hold NaN or infinity.")
        integers = all(value in (0, 1) for value in values)
        return cls(100 * float(total) / len(values), int(total) if integers else None, total, len(values))


@dataclass(frozen=True)
class BenchmarkResult:
    """All predictions of one model on one benchmark.

    Attributes:
        name: of the benchmark.
        predictions: in the problems' order.
        metrics: by name, the first one first. Default: the accuracy, under the benchmark's name.
        extra: what else the results file gets, as JSON values.
    """

    name: str
    predictions: list[Prediction]
    metrics: dict[str, Metric] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.metrics and self.predictions:
            self.metrics[self.name] = Metric.of([prediction.correct for prediction in self.predictions])

    @property
    def first(self) -> Metric:
        """The first metric."""
        return next(iter(self.metrics.values()))

    @property
    def total(self) -> int:
        """Number of problems."""
        return len(self.predictions)

    @property
    def correct(self) -> int | None:
        """Number of correct answers; None if problems give parts of a point."""
        return self.first.correct

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
        """The first metric, in percent."""
        return self.first.score

    @property
    def missing_rate(self) -> float:
        """Completions without an answer, in percent."""
        return 100 * self.missing / self.total

    def as_json(self) -> dict[str, Any]:
        """Return the result's part of the results file."""
        counts = ("score", "correct", "total", "missing", "missing_rate", "errors")
        return {
            **{name: getattr(self, name) for name in counts},
            "metrics": {name: asdict(metric) for name, metric in self.metrics.items()},
            **self.extra,
            "predictions": [prediction.as_json() for prediction in self.predictions],
        }

    @classmethod
    def from_json(cls, name: str, measured: Mapping[str, Any]) -> BenchmarkResult:
        """Read a benchmark's entry of the results file."""
        return cls(
            name,
            [Prediction(**prediction) for prediction in measured["predictions"]],
            {metric: Metric(**fields) for metric, fields in measured["metrics"].items()},
        )


def read_evaluation(path: str | Path) -> dict[str, Any]:
    """Read a results file as JSON.

    Raises:
        ValueError: if it is not one, or of another format.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, or no text
        raise ValueError(f"{path} is not a results file: {error}.") from None
    rows = report.get("rows") if isinstance(report, dict) and report.get("format") == FORMAT else None
    if not isinstance(rows, dict) or not all({"meta_info", "benchmarks"} <= {*entry} for entry in rows.values()):
        raise ValueError(f"{path} is not a results file of format {FORMAT}; see docs/evaluation.md.")
    return report


def load_result_rows(path: str | Path) -> dict[str, dict[str, BenchmarkResult]]:
    """Read the results of every row in an `evaluation.json`: row -> benchmark -> result.

    Raises:
        ValueError: if it is not a results file, or something is missing in it.
    """
    try:
        return {
            row: {name: BenchmarkResult.from_json(name, measured) for name, measured in entry["benchmarks"].items()}
            for row, entry in read_evaluation(path)["rows"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a complete results file: {type(error).__name__}: {error}.") from error


def load_results(path: str | Path, row: str | None = None) -> dict[str, BenchmarkResult]:
    """Read the results of one row in an `evaluation.json`, by benchmark.

    Raises:
        ValueError: if there is no such row, or there are several and `row` names none.
    """
    rows = load_result_rows(path)
    if row is None and len(rows) == 1:
        return next(iter(rows.values()))
    if row not in rows:
        raise ValueError(f"`row` must be one of the rows of {path} ({', '.join(rows)}); got {row!r}.")
    return rows[row]
