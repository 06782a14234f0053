"""What an evaluation gives: a prediction for each problem, the metrics of all, and their rows."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from loopdropout_trainer.errors import user_supplied
from loopdropout_trainer.record.measurement import Measurement
from loopdropout_trainer.saving.files import write_atomically


ANSWERS_FOLDER = "answers"
"""Of an evaluation: `answers/ROW/BENCHMARK` holds the answers and predictions of a benchmark."""

PREDICTIONS_FILE = "predictions.jsonl"
"""A line for each problem, for people."""

LAST_NUMBER = "last_number"
"""Family and metric of the completions whose last number is the reference's."""


class Verdict(NamedTuple):
    """What a scorer says about one completion.

    Attributes:
        correct: whether the answer equals the reference.
        extracted: the answer that was read out of the completion; None if there is none.
        error: name of the exception that reading or comparing raised; such a completion is wrong and has no answer.
    """

    correct: bool
    extracted: str | int | None
    error: str | None = None


Scorer = Callable[[str | None, str | None], Verdict]
"""Judges a completion by a reference, and never raises."""

SCORERS: dict[str, Scorer] = {}


def scorer(function: Scorer) -> Scorer:
    """Make a function a scorer that benchmarks name as their metric."""
    SCORERS[function.__name__] = function
    return function


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
        groups: the parts of the benchmark that the problem belongs to, by what divides it, such as `{"level": "3"}`.
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
    groups: dict[str, str] | None = None
    log_likelihoods: list[float] | None = None
    note: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields; those that only some benchmarks have are left out where they are None."""
        optional = ("values", "groups", "log_likelihoods", "note")
        row = {key: value for key, value in asdict(self).items() if key not in optional or value is not None}
        return {"id": row.pop("id"), **row}


@dataclass(frozen=True)
class Metric:
    """One number of a benchmark.

    Attributes:
        score: in percent, the mean of the verdicts. (A metric that is no share of the problems is as its harness gives it.)
        verdicts: [problems] what each problem counts, from 0 to 1; None for a metric that is no share of the problems.
    """

    score: float
    verdicts: list[float] | None = None

    @classmethod
    def of(cls, values: Sequence[bool | float]) -> Metric:
        """Return the metric of the problems' values, each from 0 to 1."""
        verdicts = [int(value) if value in (0, 1) else value for value in values]
        return cls(100 * float(sum(values)) / len(values), verdicts)

    @property
    def correct(self) -> int | None:
        """Number of correct answers; None with partial credit."""
        whole = self.verdicts is not None and all(verdict in (0, 1) for verdict in self.verdicts)
        return sum(self.verdicts) if whole else None


@dataclass(frozen=True)
class BenchmarkResult:
    """All predictions of one model on one benchmark.

    Attributes:
        name: of the benchmark.
        predictions: in the problems' order.
        metrics: by name, the first one first. Default: the accuracy, under the benchmark's name.
    """

    name: str
    predictions: list[Prediction]
    metrics: dict[str, Metric] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.metrics:
            self.metrics[self.name] = Metric.of([prediction.correct for prediction in self.predictions])

    @property
    def first(self) -> Metric:
        """The first metric."""
        return next(iter(self.metrics.values()))

    @property
    def score(self) -> float:
        """The first metric, in percent."""
        return self.first.score

    @property
    def correct(self) -> int | None:
        """Number of correct answers; None with partial credit."""
        return self.first.correct

    @property
    def total(self) -> int:
        """Number of problems."""
        return len(self.predictions)

    @property
    def missing(self) -> int:
        """Number of completions without an answer."""
        return sum(prediction.extracted is None for prediction in self.predictions)

    @property
    def errors(self) -> int:
        """Number of completions that the scorer could not read; they have no answer."""
        return sum(prediction.error is not None for prediction in self.predictions)

    def measurements(self, **facts: Any) -> list[Measurement]:
        """Return a row for each metric and each group of problems, and for the completions that cannot be scored.

        Those are `missing`, without an answer, and among them `errors`, which the scorer could not read. Where references end
        in `#### N`, one more row counts the completions whose last number is N, whatever stands before it.

        `facts`: fields of `Measurement` that all of them share.
        """
        facts |= {"benchmark": self.name}
        answered = [int(prediction.extracted is not None) for prediction in self.predictions]
        rows = []
        for name, metric in self.metrics.items():
            family, unit = ("score", "") if metric.verdicts is None else ("accuracy", "%")
            counts = {"value": metric.score, "total": self.total, "verdicts": metric.verdicts, "answered": answered}
            rows.append(Measurement(family=family, metric=name, unit=unit, **counts, **facts))
        for (column, group), values in self._values_by_group().items():
            place = {"metric": f"by_{column}", "group": group}
            rows.append(_share(sum(values), len(values), family="groups", **place, **facts))
        rows.append(_share(self.missing, self.total, family="missing", metric="missing", **facts))
        rows.append(_share(self.errors, self.total, family="missing", metric="errors", **facts))
        if all("####" in prediction.reference for prediction in self.predictions):
            same = [
                int(same_last_number(prediction.completion, prediction.reference)) for prediction in self.predictions
            ]
            of_numbers = {"family": LAST_NUMBER, "metric": LAST_NUMBER, "verdicts": same}
            rows.append(_share(sum(same), self.total, **of_numbers, **facts))
        return rows

    def _values_by_group(self) -> dict[tuple[str, str], list[float]]:
        """Return what the problems count in the first metric, by what divides them and group."""
        groups = defaultdict(list)
        for prediction, verdict in zip(self.predictions, self.first.verdicts or (), strict=False):
            for group in (prediction.groups or {}).items():
                groups[group].append(verdict)
        return groups


def _share(count: float, total: int, **facts: Any) -> Measurement:
    """Return the row of a count of problems, in percent of all of these."""
    return Measurement(value=100 * count / total, total=total, unit="%", **facts)


def same_last_number(completion: str, reference: str) -> bool:
    """Return whether the last integer of a completion is that of the reference, whatever stands before it."""
    wanted = _last_integer(reference)
    return wanted is not None and _last_integer(completion) == wanted


def _last_integer(text: str) -> str | None:
    numbers = re.findall(r"-?\d[\d,]*", text)
    return numbers[-1].replace(",", "") if numbers else None


def answers_folder(output_dir: str | Path, row: str, benchmark: str) -> Path:
    """Return the folder of the answers of a row, or of a moment of a training, on a benchmark."""
    return Path(output_dir, ANSWERS_FOLDER, row, benchmark.replace("/", "_"))


def write_predictions(folder: str | Path, predictions: Sequence[Prediction]) -> None:
    """Write predictions, a line of JSON for each, beside the answers that they are made of."""
    lines = [json.dumps(prediction.as_json(), ensure_ascii=False) + "\n" for prediction in predictions]
    write_atomically(Path(folder, PREDICTIONS_FILE), "".join(lines))


def load_predictions(folder: str | Path) -> list[Prediction]:
    """Read what `answers/ROW/BENCHMARK`, a folder of an evaluation, holds of the problems; ValueError if it cannot be read."""
    file = Path(folder, PREDICTIONS_FILE)
    with user_supplied(f"{file} holds no predictions"):
        return [Prediction(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def results_table(rows: Sequence[Measurement], names: Sequence[str], averages: Mapping[str, Sequence[str]]) -> str:
    """Return a Markdown table: a column for each of the evaluations `names`, a line for each metric, then the averages."""
    columns: dict[str, dict[str, Measurement]] = {name: {} for name in names}
    for row in rows:
        writer, *name = row.writer.split("/")[:2]
        if writer == "evaluation" and name[0] in columns and row.family in ("accuracy", "score"):
            columns[name[0]][row.metric] = row
    metrics = dict.fromkeys(metric for column in columns.values() for metric in column)
    lines = [["Metric", *names], ["---", *["---:"] * len(names)]]
    for metric in metrics:
        lines.append([metric, *(_counted(column.get(metric)) for column in columns.values())])
    for name, parts in averages.items():
        lines.append([name, *(_average(column, parts) for column in columns.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _counted(row: Measurement | None) -> str:
    """Return a number with its count of correct answers, if each problem is right or wrong."""
    if row is None:
        return "-"
    correct = Metric(row.value, row.verdicts).correct
    return f"{row.value:.2f}" + ("" if correct is None else f" ({correct}/{row.total})")


def _average(column: Mapping[str, Measurement], metrics: Sequence[str]) -> str:
    """Return the mean of some metrics, if all of them were measured."""
    if not all(metric in column for metric in metrics):
        return "-"
    return f"{sum(column[metric].value for metric in metrics) / len(metrics):.2f}"
