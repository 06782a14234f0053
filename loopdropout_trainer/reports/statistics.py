"""Means and deviations over seeds, and intervals of a difference between two methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from loopdropout_trainer.evaluation.results import BenchmarkResult


@dataclass(frozen=True)
class Summary:
    """Values over seeds: `mean`, sample standard deviation `sd` (n - 1; None for one value), number of values `n`."""

    mean: float
    sd: float | None
    n: int

    def text(self, decimals: int = 2) -> str:
        """Return `mean ± SD`."""
        spread = "" if self.sd is None else f" ± {self.sd:.{decimals}f}"
        return f"{self.mean:.{decimals}f}{spread}"


def summarize(values: Sequence[float]) -> Summary:
    """Return mean and sample standard deviation.

    Raises:
        ValueError: without values.
    """
    if not len(values):
        raise ValueError("A summary needs at least one value.")
    array = np.asarray(values, dtype=float)
    return Summary(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None, len(array))


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
    if len(a) != len(b) or not a:
        raise ValueError(f"The methods must have the same seeds, at least one; got {len(a)} and {len(b)}.")
    gains = []
    for one, other in zip(a, b, strict=True):
        if [p.prompt for p in one.predictions] != [p.prompt for p in other.predictions]:
            raise ValueError(f"The results on `{one.name}` are not about the same problems.")
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
