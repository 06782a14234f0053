"""Bounds of the numbers that a field takes."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Integral
from typing import Any


def is_written_number(value: Any) -> bool:
    """Return whether a value in the data is a number that stands for a text, which a file has without quotes."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


@dataclass(frozen=True)
class Bounds:
    """Numbers that a field takes: all finite numbers within the bounds, and the numbers in `also`.

    An infinite number is taken if it is `at_most` itself.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()

    def allow(self, number: float) -> bool:
        """Return whether a number is within the bounds."""
        if number in self.also or number == self.at_most:
            return True
        if not isinstance(number, Integral) and not math.isfinite(number):
            return False
        limits = (
            (operator.ge, self.at_least),
            (operator.gt, self.above),
            (operator.le, self.at_most),
            (operator.lt, self.below),
        )
        return all(limit is None or holds(number, limit) for holds, limit in limits)

    def __str__(self) -> str:
        limits = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        parts = []
        for words, limit in limits.items():
            if limit is not None and math.isfinite(limit):
                parts.append(f"{words} {_number(limit)}")
        text = " and ".join(parts) or "a finite number"
        if self.also:
            text += f", or {', '.join(map(_number, self.also))}"
        return text


def _number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


ADAPTER_BOUNDS = {
    "r": {"at_least": 1, "at_most": 65536},
    "lora_alpha": {"at_least": 1},
    "lora_dropout": {"at_least": 0, "below": 1},
}
"""Bounds of the numbers of a LoRA configuration, by the names of PEFT. A recipe and a program have the same ones."""
