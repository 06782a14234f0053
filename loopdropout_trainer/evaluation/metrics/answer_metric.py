"""What the answer metrics share: a verdict on each prediction, and the rates over all of them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import datasets

from loopdropout_trainer.evaluation.metrics import evaluate


@dataclass(frozen=True)
class Verdict:
    """What a scorer says about one prediction.

    Attributes:
        correct: whether the answer equals the reference.
        extracted: the answer that was read out of the prediction; None if there is none.
        error: name of the exception that reading or comparing raised; such a prediction is wrong and has no answer.
    """

    correct: bool
    extracted: str | int | None
    error: str | None = None


class AnswerMetric(evaluate.Metric):
    """An `evaluate` metric that is a pure function of one prediction and one reference at a time."""

    description = ""
    citation = ""
    inputs = "predictions: texts that a model generated. references: what `score` compares them with, as strings."

    @staticmethod
    @abstractmethod
    def score(prediction: str | None, reference: str | None) -> Verdict:
        """Judge one prediction; never raises."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.description,
            citation=self.citation,
            inputs_description=self.inputs,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str | None], references: list[str | None]) -> dict[str, Any]:
        """Return accuracy and missing-answer rate (both from 0 to 1) and the three fields of every verdict, in order."""
        verdicts = [self.score(*pair) for pair in zip(predictions, references, strict=True)]
        return {
            "accuracy": sum(verdict.correct for verdict in verdicts) / len(verdicts),
            "missing_rate": sum(verdict.extracted is None for verdict in verdicts) / len(verdicts),
            "correct": [verdict.correct for verdict in verdicts],
            "extracted": [verdict.extracted for verdict in verdicts],
            "errors": [verdict.error for verdict in verdicts],
        }
