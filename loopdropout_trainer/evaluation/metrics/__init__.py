"""The references' scorers, one file each, and the `evaluate` metric that applies one of them (`answer_metric.py`).

A file's `score` judges one prediction by one reference, and never raises.
"""

import re
from typing import NamedTuple


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


def last_integer(text: str) -> str | None:
    """Return the last integer of a text, without its commas; None if there is none."""
    found = re.findall(r"-?\d[\d,]*", text)
    return found[-1].replace(",", "") if found else None
