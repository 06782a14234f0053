"""The metric of Hugging Face's `evaluate` that applies a scorer. Settings are read without that library and its SciPy."""

import sys
from pathlib import Path
from typing import Any

import datasets

from loopdropout_trainer.evaluation.results import SCORERS, Verdict


# The folder of a running script comes first on `sys.path`, and one script is called evaluate.py.
_path, sys.path = sys.path, [folder for folder in sys.path if not Path(folder, "evaluate.py").is_file()]
try:
    import evaluate
finally:
    sys.path = _path


class AnswerMetric(evaluate.Metric):
    """The verdicts of the scorer `config_name` on predictions and references."""

    def _info(self) -> evaluate.MetricInfo:
        texts = datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")})
        about = {"description": self.__doc__, "inputs_description": "texts", "citation": ""}
        return evaluate.MetricInfo(**about, features=texts)

    def _compute(self, predictions: list[str | None], references: list[str | None]) -> dict[str, list[Any]]:
        """Return the fields of all verdicts, each in the predictions' order."""
        score = SCORERS[self.config_name]
        verdicts = [score(*pair) for pair in zip(predictions, references, strict=True)]
        return dict(zip(Verdict._fields, map(list, zip(*verdicts, strict=True)), strict=True))
