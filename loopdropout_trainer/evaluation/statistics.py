"""Means and sample standard deviations over training seeds, and how two methods differ on the same problems.

Rates are computed from counts: from percentages that were rounded before, a standard deviation can come out 0.01 off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loopdropout_trainer.evaluation.results import BenchmarkResult


@dataclass(frozen=True)
class SeedSummary:
    """One method over its training seeds.

    Attributes:
        mean: of its values, such as rates in percent.
        sd: sample standard deviation (n - 1), in the same unit; None for a single seed.
        num_seeds: n.
    """

    mean: float
    sd: float | None
    num_seeds: int

    def __str__(self) -> str:
        return plus_minus(self.mean, self.sd)


def plus_minus(mean: float, sd: float | None, form: str = ".2f") -> str:
    """Return `mean ± SD` with both numbers in the same form, or the mean alone if there is no SD."""
    return f"{mean:{form}}" if sd is None else f"{mean:{form}} ± {sd:{form}}"


def mean_and_sd(values: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Return mean and sample standard deviation (n - 1) over the first axis, the seeds.

    Args:
        values: [seeds, ...].

    Returns:
        Two arrays [...]; None in the place of the second for a single seed.

    Raises:
        ValueError: without seeds.
    """
    values = np.asarray(values, dtype=float)
    if not len(values):
        raise ValueError("A summary needs at least one value.")
    return values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else None


def summarize(values: Sequence[float]) -> SeedSummary:
    """Return mean and sample standard deviation of one value for each seed.

    Raises:
        ValueError: without values.
    """
    mean, sd = mean_and_sd(values)
    return SeedSummary(float(mean), None if sd is None else float(sd), len(values))


def summarize_seeds(counts: Sequence[int], total: int) -> SeedSummary:
    """Return mean and sample standard deviation of a rate in percent (Appendix "Seeds and Uncertainty").

    Args:
        counts: correct answers (or missing ones) of each seed.
        total: problems, the same ones for every seed.

    Raises:
        ValueError: without seeds or problems, or for a count that is not between 0 and `total`.
    """
    if total < 1 or not all(0 <= count <= total for count in counts):
        raise ValueError(f"A count must be between 0 and the {total} problems; got {list(counts)}.")
    return summarize([100 * count / total for count in counts])


def summarize_groups(results: Sequence[BenchmarkResult], groups: Sequence[str]) -> dict[str, SeedSummary]:
    """Return the accuracy over seeds for each group of problems, such as the subjects or levels of MATH-500.

    Args:
        results: of one method on one benchmark, one for each seed.
        groups: name of each problem's group, in the order of the predictions.

    Raises:
        ValueError: if a result has another number of problems than there are group names.
    """
    for result in results:
        if result.total != len(groups):
            raise ValueError(f"`{result.name}` has {result.total} problems, but {len(groups)} group names were given.")
    summaries = {}
    for group in sorted(set(groups)):
        members = [place for place, name in enumerate(groups) if name == group]
        counts = [sum(result.predictions[place].correct for place in members) for result in results]
        summaries[group] = summarize_seeds(counts, len(members))
    return summaries


@dataclass(frozen=True)
class DifferenceDecomposition:
    """The net accuracy difference b - a of paired seeds in percentage points of all problems (Appendix "Answer availability").

    Attributes:
        both_extractable: of each seed, from problems where both methods' completions hold an answer.
        missing_in_either: of each seed, from all other problems.
    """

    both_extractable: tuple[float, ...]
    missing_in_either: tuple[float, ...]

    @property
    def total(self) -> tuple[float, ...]:
        """The sum of both parts, for each seed."""
        return tuple(sum(parts) for parts in zip(self.both_extractable, self.missing_in_either, strict=True))


def decompose_difference(a: Sequence[BenchmarkResult], b: Sequence[BenchmarkResult]) -> DifferenceDecomposition:
    """Split the difference between two methods by whether both of their completions hold an answer.

    Args:
        a, b: results of the two methods on one benchmark, one for each seed, in the same order of seeds.

    Raises:
        ValueError: if seeds or problems do not pair up.
    """
    if len(a) != len(b):
        raise ValueError(f"The methods must have the same seeds; got {len(a)} and {len(b)}.")
    both, missing = [], []
    for one, other in zip(a, b, strict=True):
        if [p.prompt for p in one.predictions] != [p.prompt for p in other.predictions]:
            raise ValueError(f"The results on `{one.name}` and `{other.name}` are not about the same problems.")
        gains = {True: 0, False: 0}
        for before, after in zip(one.predictions, other.predictions, strict=True):
            gains[before.extracted is not None and after.extracted is not None] += after.correct - before.correct
        both.append(100 * gains[True] / one.total)
        missing.append(100 * gains[False] / one.total)
    return DifferenceDecomposition(tuple(both), tuple(missing))


def sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p-value of the exact sign test.

    Args:
        wins, losses: problems that only one of two methods solves, and that only the other one does.
    """
    from scipy.stats import binomtest  # late: it takes a second, and an evaluation needs none of it

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
