"""What the answer metrics share: a verdict on each prediction, and the rates over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import datasets

from loopdropout_trainer.evaluation.metrics import evaluate


class Verdict(NamedTuple):
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
    """An `evaluate` metric that is a pure function of one prediction and one reference at a time.

    Attributes:
        description: in a sentence.
        score: judges one prediction; never raises.
    """

    description = ""
    score: Callable[[str | None, str | None], Verdict]

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=self.description,
            citation="",
            inputs_description="predictions: texts that a model generated. references: what `score` compares them with.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str | None], references: list[str | None]) -> dict[str, Any]:
        """Return accuracy and missing-answer rate (both from 0 to 1) and the three fields of every verdict, in order."""
        verdicts = [self.score(*pair) for pair in zip(predictions, references, strict=True)]
        correct, extracted, errors = map(list, zip(*verdicts, strict=True))
        return {
            "accuracy": sum(correct) / len(verdicts),
            "missing_rate": extracted.count(None) / len(verdicts),
            "correct": correct,
            "extracted": extracted,
            "errors": errors,
        }
