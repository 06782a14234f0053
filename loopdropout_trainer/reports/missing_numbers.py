"""Numbers of tables and figures that the results do not contain, or that the report leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loopdropout_trainer.errors import UserError


class Missing(UserError):
    """A number that the results do not contain."""


class Misspelled(Missing):
    """A number that the results do not contain, but one with a similar name. No command measures it."""


class LeftOut(Missing):
    """A number of results that the report leaves out. No command needs to measure it."""

    def __init__(self, reason: Missing) -> None:
        super().__init__(
            f"{reason} The report leaves out results that have it. Its last lines say how to include them."
        )


def is_found(make: Callable[[], Any]) -> bool:
    """Return whether a function makes its number or its figure without `Missing`."""
    try:
        make()
    except Missing:
        return False
    return True


def describe_missing(missing: list[tuple]) -> list[str]:
    """Return a sentence for each sweep about its missing numbers.

    Args:
        missing: The sweep or the sweeps, the place in the table and the reason of each missing number.
    """
    by_sweep: dict[str, list[tuple]] = {}
    for sweep, place, reason in missing:
        sweeps = sweep if isinstance(sweep, list) else [sweep]
        by_sweep.setdefault(" or ".join(map(str, sweeps)), []).append((place, reason))
    sentences = []
    for sweep, places in by_sweep.items():
        place, reason = places[0]
        if len(places) == 1:
            sentences.append(f"Missing: {place}: {reason}")
            continue
        of_sweep = "" if sweep == "None" else f" of the sweep {sweep}"
        sentences.append(f"Missing: {len(places)} numbers{of_sweep}. The first is {place}: {reason}")
    return sentences
