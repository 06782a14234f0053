"""Means and sample standard deviations over training seeds, and the sign test of two methods on the same problems.

Rates are computed from counts: from percentages that were rounded before, a standard deviation can come out 0.01 off.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SeedSummary:
    """One method over its training seeds.

    Attributes:
        mean: of its values, such as rates in percent.
        sd: sample standard deviation (n - 1), in the same unit; None for a single seed.
    """

    mean: float
    sd: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.sd is None else f"{self.mean:.2f} ± {self.sd:.2f}"


def summarize(values: Sequence[float]) -> SeedSummary:
    """Return mean and sample standard deviation of one value for each seed."""
    return SeedSummary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def summarize_seeds(counts: Sequence[int], total: int) -> SeedSummary:
    """Return mean and sample standard deviation of a rate in percent (Appendix "Seeds and Uncertainty").

    Args:
        counts: correct answers (or missing ones) of each seed.
        total: problems, the same ones for every seed.

    Raises:
        ValueError: without seeds or problems, or for a count that is not between 0 and `total`.
    """
    if total < 1 or not counts or not all(0 <= count <= total for count in counts):
        raise ValueError(f"A count must be between 0 and the {total} problems; got {list(counts)}.")
    return summarize([100 * count / total for count in counts])
