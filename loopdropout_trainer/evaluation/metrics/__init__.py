"""The references' scorers, one file each, and the `evaluate` metric that applies one of them.

A file's `score` judges one prediction by one reference, and never raises.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import datasets


# The folder of a running script comes first on `sys.path`, and one script is called evaluate.py.
_path, sys.path = sys.path, [folder for folder in sys.path if not Path(folder, "evaluate.py").is_file()]
try:
    import evaluate
finally:
    sys.path = _path


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
    """The verdicts of a scorer, whose file `config_name` names, on predictions and references."""

    def _info(self) -> evaluate.MetricInfo:
        texts = datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")})
        about = {"description": self.__doc__, "inputs_description": "texts", "citation": ""}
        return evaluate.MetricInfo(**about, features=texts)

    def _compute(self, predictions: list[str | None], references: list[str | None]) -> dict[str, list[Any]]:
        """Return the fields of all verdicts, each in the predictions' order."""
        score = import_module(f"{__name__}.{self.config_name}").score
        verdicts = [score(*pair) for pair in zip(predictions, references, strict=True)]
        return {name: [getattr(verdict, name) for verdict in verdicts] for name in Verdict._fields}


def last_integer(text: str) -> str | None:
    """Return the last integer of a text, without its commas; None if there is none."""
    found = re.findall(r"-?\d[\d,]*", text)
    return found[-1].replace(",", "") if found else None
