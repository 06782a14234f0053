"""Drop probabilities p: one number for all loops, or one for each loop; and the ranges of other numbers."""

from __future__ import annotations

from collections.abc import Sequence


def check_p(p: float | Sequence[float], name: str = "p") -> float | tuple[float, ...]:
    """Return p as a float or a tuple of floats; raise ValueError if one is not a number in [0, 1)."""
    values = list(p) if isinstance(p, Sequence) and not isinstance(p, str) else [p]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise ValueError(f"`{name}` is a drop probability and must lie in [0, 1); got {value!r}.")
    if not values:
        raise ValueError(f"`{name}` must be one drop probability, or one for each loop; got an empty list.")
    return float(values[0]) if len(values) == 1 else tuple(float(value) for value in values)


def check_one_p(p: float | Sequence[float], name: str = "p") -> float:
    """Return p as one float for all loops; raise ValueError if it is not one number in [0, 1)."""
    p = check_p(p, name)
    if isinstance(p, tuple):
        raise ValueError(f"`{name}` must be one drop probability for all loops with this rule; got {list(p)}.")
    return p


def check_range(value: float, name: str, low: float, high: float, integer: bool = False) -> None:
    """Raise ValueError unless `value` is a number, or an integer, in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)) or not low <= value <= high:
        kind = "an integer" if integer else "a number"
        raise ValueError(f"`{name}` must be {kind} from {low:g} to {high:g}; got {value!r}.")
