"""Find the answer metrics of this package, and the number that an answer ends with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from loopdropout_trainer.evaluation.metrics import METRICS, evaluate


if TYPE_CHECKING:
    from evaluate import EvaluationModule


_NUMBER = re.compile(r"-?\d[\d,]*")


def last_integer(text: str) -> str | None:
    """Return the last integer of a text, without its commas; None if there is none."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def load_metric(name: str) -> EvaluationModule:
    """Load one of this package's answer metrics: `gsm8k_strict`, `metamath_gsm8k` or `metamath_math`.

    Raises:
        ValueError: for another name.
    """
    valid = sorted({path.stem for path in METRICS.glob("*.py")} - {"__init__", "answer_metric"})
    if name not in valid:
        raise ValueError(f"`metric` must be one of {', '.join(valid)}; got {name!r}.")
    return evaluate.load(str(METRICS / f"{name}.py"), keep_in_memory=True)
