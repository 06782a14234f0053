"""The results of an evaluation: one verdict for each problem, the counts that tables are made of, and their file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock

from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.evaluation.metrics import last_integer
from loopdropout_trainer.record.measurement import Measurement
from loopdropout_trainer.saving.files import write_atomically


FORMAT = 3
"""Version of the results file's format; see docs/evaluation.md."""

PREDICTIONS_FILE = "predictions.jsonl"
"""A line for each problem, for people."""

LAST_NUMBER = "last_number"
"""Family and metric of the completions whose last number is the reference's."""


@dataclass(frozen=True)
class Prediction:
    """One problem, the model's completion and its verdict.

    Attributes:
        prompt, completion, reference: texts.
        extracted: answer that the scorer read out of the completion; None if there is none.
        correct: whether the answer is right; None where a problem gives partial credit.
        error: name of the exception that scoring raised (counted as wrong, without an answer), or None.
        id: of the problem in its benchmark.
        values: by metric, if there are several or they give partial credit.
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
        optional = ("values", "group", "log_likelihoods", "note")
        row = {key: value for key, value in asdict(self).items() if key not in optional or value is not None}
        return {"id": row.pop("id"), **row}


@dataclass(frozen=True)
class Metric:
    """One number of a benchmark.

    Attributes:
        score: in percent, 100 sum / total. (A metric that is no share of the problems is as its harness gives it.)
        correct: number of correct answers; None with partial credit.
        sum: of the problems' values; None for a metric that is no share of the problems.
        total: number of problems.
    """

    score: float
    correct: int | None
    sum: float | None
    total: int

    @classmethod
    def of(cls, values: list[bool | float]) -> Metric:
        """Return the metric of the problems' values, each from 0 to 1; ValueError for NaN, which has no average."""
        total = sum(values)
        if not math.isfinite(total):
            raise UserError("A problem's value is not a finite number: the model's outputs hold NaN or infinity.")
        integers = all(value in (0, 1) for value in values)
        return cls(100 * float(total) / len(values), int(total) if integers else None, total, len(values))


@dataclass(frozen=True)
class BenchmarkResult:
    """All predictions of one model on one benchmark.

    Attributes:
        name: of the benchmark.
        predictions: in the problems' order.
        metrics: by name, the first one first. Default: the accuracy, under the benchmark's name.
        groups: correct answers and problems by column of the published rows and by group.
        extra: what else the results file gets, as JSON values.
    """

    name: str
    predictions: list[Prediction]
    metrics: dict[str, Metric] = field(default_factory=dict)
    groups: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.metrics and self.predictions:
            self.metrics[self.name] = Metric.of([prediction.correct for prediction in self.predictions])

    @property
    def score(self) -> float:
        """The first metric, in percent."""
        return next(iter(self.metrics.values())).score

    @property
    def correct(self) -> int | None:
        """Number of correct answers; None with partial credit."""
        return next(iter(self.metrics.values())).correct

    @property
    def total(self) -> int:
        """Number of problems."""
        return len(self.predictions)

    @property
    def missing(self) -> int:
        """Number of completions without an answer."""
        return sum(prediction.extracted is None for prediction in self.predictions)

    @property
    def missing_rate(self) -> float:
        """Completions without an answer, in percent."""
        return 100 * self.missing / self.total

    @property
    def errors(self) -> int:
        """Number of completions that the scorer could not read."""
        return sum(prediction.error is not None for prediction in self.predictions)

    def as_json(self) -> dict[str, Any]:
        """Return the result's part of the results file."""
        counts = ("score", "correct", "total", "missing", "missing_rate", "errors")
        return {
            **{name: getattr(self, name) for name in counts},
            "metrics": {name: asdict(metric) for name, metric in self.metrics.items()},
            **({"groups": self.groups} if self.groups else {}),
            **self.extra,
            "predictions": [prediction.as_json() for prediction in self.predictions],
        }

    @classmethod
    def from_json(cls, name: str, measured: Mapping[str, Any]) -> BenchmarkResult:
        """Read a benchmark's entry of the results file."""
        predictions = [Prediction(**prediction) for prediction in measured["predictions"]]
        metrics = {metric: Metric(**values) for metric, values in measured["metrics"].items()}
        return cls(name, predictions, metrics, measured.get("groups", {}))

    def verdicts(self, metric: str) -> list[float] | None:
        """Return what each problem counts in a metric, from 0 to 1; None if the metric is no share of the problems."""
        if self.metrics[metric].sum is None:
            return None
        is_first = metric == next(iter(self.metrics))
        found = [(each.values or {}).get(metric, each.correct if is_first else None) for each in self.predictions]
        return None if None in found else [int(value) if value in (0, 1) else value for value in found]

    def measurements(self, **facts: Any) -> list[Measurement]:
        """Return a row for each metric, for each group of problems, and for the completions without an answer.

        Where references end in `#### N`, one more counts the completions whose last number is N, whatever stands before it.
        `facts`: fields of `Measurement` that all of them share.
        """
        facts |= {"benchmark": self.name, "unit": "%"}
        answered = [int(each.extracted is not None) for each in self.predictions]
        rows = []
        for name, metric in self.metrics.items():
            shares = {"family": "accuracy"} if metric.sum is not None else {"family": "score", "unit": ""}
            verdicts, counts = self.verdicts(name), {"value": metric.score, "total": metric.total}
            rows.append(
                Measurement(metric=name, verdicts=verdicts, answered=answered, **{**facts, **shares, **counts})
            )
        for column, groups in self.groups.items():
            for group, of in groups.items():
                share = {"value": 100 * of["correct"] / of["total"], "total": of["total"]}
                rows.append(Measurement(family="groups", metric=f"by_{column}", group=group, **share, **facts))
        missing = {"value": self.missing_rate, "total": self.total}
        rows.append(Measurement(family="missing", metric="missing", **missing, **facts))
        if all("####" in prediction.reference for prediction in self.predictions):
            verdicts = [int(_has_the_last_number(prediction)) for prediction in self.predictions]
            shares = {"value": 100 * sum(verdicts) / self.total, "total": self.total, "verdicts": verdicts}
            rows.append(Measurement(family=LAST_NUMBER, metric=LAST_NUMBER, **shares, **facts))
        return rows


def _has_the_last_number(prediction: Prediction) -> bool:
    wanted = last_integer(prediction.reference)
    return wanted is not None and last_integer(prediction.completion) == wanted


def write_predictions(folder: str | Path, predictions: Sequence[Prediction]) -> None:
    """Write predictions, a line of JSON for each, beside the answers that they are made of."""
    lines = [json.dumps(prediction.as_json(), ensure_ascii=False) + "\n" for prediction in predictions]
    write_atomically(Path(folder, PREDICTIONS_FILE), "".join(lines))


def read_evaluation(path: str | Path) -> dict[str, Any]:
    """Read a results file as JSON; ValueError if it is not one, or of another format."""
    with user_supplied(f"{path} is not a results file (docs/evaluation.md)"):
        report = json.loads(Path(path).read_bytes())
        parts = [row[name] for row in report["rows"].values() for name in ("meta_info", "benchmarks")]
        complete = all(isinstance(part, dict) for part in parts)
        if report["format"] != FORMAT or not complete:
            raise UserError(
                f"{path} is not a complete results file of format {FORMAT}: move it away, or give another `output_dir`."
            )
    return report


def load_results(path: str | Path, row: str | None = None) -> dict[str, BenchmarkResult]:
    """Read the results of one row (None: the only one) in an `evaluation.json`, by benchmark."""
    rows = read_evaluation(path)["rows"]
    row = next(iter(rows)) if row is None and len(rows) == 1 else row
    if row not in rows:
        raise UserError(f"`row` must be one of the rows of {path} ({', '.join(rows)}); got {row!r}.")
    with user_supplied(f"{path} is not a complete results file"):
        return {name: BenchmarkResult.from_json(name, each) for name, each in rows[row]["benchmarks"].items()}


def add_result(
    path: Path, row: str, row_info: Mapping, benchmark: str, entry: Mapping, averages: Mapping[str, Sequence[str]]
) -> None:
    """Write a benchmark's entry to a row of the results file, beside what other evaluations may have written since."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        report = read_evaluation(path) if path.is_file() else {"format": FORMAT, "rows": {}}
        content = report["rows"].setdefault(row, {**row_info, "benchmarks": {}})
        content["benchmarks"][benchmark] = entry
        content["averages"] = {**content.get("averages", {}), **averages_of(content["benchmarks"], averages)}
        write_atomically(path, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def averages_of(benchmarks: Mapping[str, Any], averages: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the averages by name, each the mean score of its metrics, leaving out those with a metric that is missing."""
    scores = {name: metric["score"] for entry in benchmarks.values() for name, metric in entry["metrics"].items()}
    return {
        name: {"score": sum(scores[metric] for metric in metrics) / len(metrics), "metrics": list(metrics)}
        for name, metrics in averages.items()
        if all(metric in scores for metric in metrics)
    }


def results_table(rows: Sequence[Measurement], names: Sequence[str], averages: Mapping[str, Sequence[str]]) -> str:
    """Return a Markdown table: a column for each of the evaluations `names`, a line for each metric, then the averages."""
    columns: dict[str, dict[str, Measurement]] = {name: {} for name in names}
    for row in rows:
        writer, *name = row.writer.split("/")[:2]
        if writer == "evaluation" and name[0] in columns and row.family in ("accuracy", "score"):
            columns[name[0]][row.metric] = row
    metrics = list(dict.fromkeys(metric for found in columns.values() for metric in found))
    lines = [["Metric", *names], ["---", *["---:"] * len(names)]]
    lines += [[metric, *(_counted(found.get(metric)) for found in columns.values())] for metric in metrics]
    for average, parts in averages.items():
        complete = [all(part in found for part in parts) for found in columns.values()]
        means = [
            f"{sum(found[part].value for part in parts) / len(parts):.2f}" if is_complete else "-"
            for found, is_complete in zip(columns.values(), complete, strict=True)
        ]
        lines.append([average, *means])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _counted(row: Measurement | None) -> str:
    """Return a number with its count of correct answers, if each problem is right or wrong."""
    if row is None:
        return "-"
    whole = row.verdicts is not None and all(verdict in (0, 1) for verdict in row.verdicts)
    return f"{row.value:.2f}" + (f" ({sum(row.verdicts)}/{row.total})" if whole else "")


def mean_sd(values: Sequence[float], decimals: int = 2) -> str:
    """Return `mean ± SD` (n - 1) of one value for each training seed, the mean alone for a single one; a NaN makes both NaN.

    Give it rates of counts: of rounded percentages the standard deviation can come out 0.01 off.
    """
    values = pd.Series(values, dtype=float)
    spread = f" ± {values.std(skipna=False):.{decimals}f}" if len(values) > 1 else ""
    return f"{values.mean(skipna=False):.{decimals}f}{spread}"
