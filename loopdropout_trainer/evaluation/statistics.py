"""Means and sample standard deviations over training seeds, and where a difference between two methods comes from.

Everything is computed from counts: from percentages that were rounded before, a standard deviation can come out 0.01 off.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from loopdropout_trainer.evaluation.results import BenchmarkResult, Prediction


@dataclass(frozen=True)
class SeedSummary:
    """One method over its training seeds.

    Attributes:
        mean: in percent.
        sd: sample standard deviation (n - 1) in percentage points; None for a single seed.
        num_seeds: n.
    """

    mean: float
    sd: float | None
    num_seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.sd is None else f"{self.mean:.2f} ± {self.sd:.2f}"


def summarize_seeds(counts: Sequence[int], total: int) -> SeedSummary:
    """Return mean and sample standard deviation of a rate (Appendix "Seeds and Uncertainty").

    Args:
        counts: right answers (or missing ones) of each seed.
        total: problems, the same ones for every seed.

    Raises:
        ValueError: without seeds or problems, or for a count that is not between 0 and `total`.
    """
    if not counts or total < 1:
        raise ValueError(f"A summary needs at least one seed and one problem; got {len(counts)} and {total}.")
    if min(counts) < 0 or max(counts) > total:
        raise ValueError(f"A count must be between 0 and the {total} problems; got {list(counts)}.")
    sd = 100 * statistics.stdev(counts) / total if len(counts) > 1 else None
    return SeedSummary(100 * sum(counts) / (total * len(counts)), sd, len(counts))


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
        """The whole difference of each seed."""
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
        gains = {True: 0, False: 0}
        for before, after in _pairs(one, other):
            gains[before.extracted is not None and after.extracted is not None] += after.correct - before.correct
        both.append(100 * gains[True] / one.total)
        missing.append(100 * gains[False] / one.total)
    return DifferenceDecomposition(tuple(both), tuple(missing))


def _pairs(one: BenchmarkResult, other: BenchmarkResult) -> list[tuple[Prediction, Prediction]]:
    if [p.prompt for p in one.predictions] != [p.prompt for p in other.predictions]:
        raise ValueError(f"The results on `{one.name}` and `{other.name}` are not about the same problems.")
    return list(zip(one.predictions, other.predictions, strict=True))


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
