"""Means and sample standard deviations over training seeds, and how two methods differ on the same problems.

Rates are computed from counts: from percentages that were rounded before, a standard deviation can come out 0.01 off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loopdropout_trainer.evaluation.results import BenchmarkResult, Prediction


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

    def text(self, decimals: int = 2) -> str:
        """Return `mean ± SD`, or the mean alone."""
        return plus_minus(self.mean, self.sd, f".{decimals}f")

    def __str__(self) -> str:
        return self.text()


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
    mean, sd = mean_and_sd(counts)
    return SeedSummary(float(100 * mean / total), None if sd is None else float(100 * sd / total), len(counts))


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
    _check_same_problems(one, other)
    return list(zip(one.predictions, other.predictions, strict=True))


def _check_same_problems(one: BenchmarkResult, other: BenchmarkResult) -> None:
    if [p.prompt for p in one.predictions] != [p.prompt for p in other.predictions]:
        raise ValueError(f"The results on `{one.name}` and `{other.name}` are not about the same problems.")


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
class Difference:
    """b - a in percentage points, paired by seed, with a 95% bootstrap interval over problems (None without predictions)."""

    by_seed: tuple[float, ...]
    low: float | None = None
    high: float | None = None

    @property
    def mean(self) -> float:
        return float(np.mean(self.by_seed))

    def text(self, decimals: int = 2) -> str:
        """Return the signed mean, and the interval if there is one."""
        interval = "" if self.low is None else f" [{self.low:+.{decimals}f}, {self.high:+.{decimals}f}]"
        return f"{self.mean:+.{decimals}f}{interval}"


def paired_difference(a: Sequence[BenchmarkResult], b: Sequence[BenchmarkResult], seed: int = 0) -> Difference:
    """Compare two methods on the same problems.

    The interval is over problems, for these training seeds: a problem's value is its mean gain over the pairs of seeds, and
    problems are drawn with replacement (percentile bootstrap of 2,000 draws).

    Args:
        a, b: one result for each seed, in the same order of seeds.
        seed: of the draws.

    Raises:
        ValueError: if seeds or problems do not pair up.
    """
    from scipy import stats  # late: it takes a second, and an evaluation needs none of it

    if len(a) != len(b) or not a:
        raise ValueError(f"The methods must have the same seeds, at least one; got {len(a)} and {len(b)}.")
    gains = []
    for one, other in zip(a, b, strict=True):
        _check_same_problems(one, other)
        gains.append(_values(other) - _values(one))
    gains = 100 * np.stack(gains)  # [seeds, problems]
    by_problem = gains.mean(axis=0)
    by_seed = tuple(gains.mean(axis=1).tolist())
    if np.ptp(by_problem) == 0:  # nothing to draw from
        return Difference(by_seed, float(by_problem[0]), float(by_problem[0]))
    interval = stats.bootstrap(
        (by_problem,), np.mean, n_resamples=2000, batch=100, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return Difference(by_seed, float(interval.low), float(interval.high))


def _values(result: BenchmarkResult) -> np.ndarray:
    """Return what each problem counts, from 0 to 1."""
    return np.array(
        [
            float(p.correct) if p.correct is not None else float(next(iter((p.values or {}).values()), 0.0))
            for p in result.predictions
        ]
    )


def sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p-value of the exact sign test.

    Args:
        wins, losses: problems that only one of two methods answers, and that only the other one does.
    """
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
