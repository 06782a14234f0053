"""How certain a mean over seeds is: of one number a seed, or of what each seed gives on the same problems."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval, and the two-sided p-value of its being zero."""

    mean: float
    low: float
    high: float
    p: float


def estimate(gains: np.ndarray) -> Estimate | None:
    """Return the mean of gains [seeds, problems], or [seeds, 1] where a seed gives one number; None for a single seed.

    The interval is about the mean over other seeds and other problems of the same kind.
    """
    if len(gains) < 2 or not np.isfinite(gains).all():
        return None
    if gains.shape[1] == 1:
        return of_numbers(gains[:, 0])
    return of_seeds_and_problems(gains)


def of_numbers(values: np.ndarray) -> Estimate:
    """Return the mean of independent numbers, such as one a seed, by Student's t."""
    number = len(values)
    return _of_t(values.mean(), values.var(ddof=1) / number, number - 1)


def of_seeds_and_problems(gains: np.ndarray) -> Estimate:
    """Return the mean of gains [seeds, problems] where each seed met the same problems, both drawn from more of their kind.

    The mean squares of the two-way analysis of variance give the mean's variance, (MS_seeds + MS_problems - MS_rest) / (S P);
    its degrees of freedom are Satterthwaite's. Where seeds differ by less than chance, they take nothing from it.
    """
    num_seeds, num_problems = gains.shape
    of_seed = gains.mean(axis=1, keepdims=True)
    of_problem = gains.mean(axis=0, keepdims=True)
    mean = gains.mean()
    rest = gains - of_seed - of_problem + mean
    free_seeds = num_seeds - 1
    free_problems = num_problems - 1
    squares_of_seeds = num_problems * ((of_seed - mean) ** 2).sum()
    squares_of_problems = num_seeds * ((of_problem - mean) ** 2).sum()
    squares_of_rest = (rest**2).sum()
    free = np.array([free_seeds, free_problems, free_seeds * free_problems])
    mean_squares = np.array([squares_of_seeds, squares_of_problems, squares_of_rest]) / free
    seeds, problems, rest = mean_squares
    variance = problems + max(seeds - rest, 0.0)
    spread = (mean_squares**2 / free).sum()
    # Never fewer than seeds alone have (Student's t): where problems differ by less than chance they would fall to zero.
    freedom = max(variance**2 / spread, free.min()) if spread else np.inf
    return _of_t(mean, variance / gains.size, freedom)


def _of_t(mean: float, variance: float, degrees_of_freedom: float) -> Estimate:
    if variance == 0:  # all the same
        return Estimate(mean, mean, mean, float(mean == 0))
    error = np.sqrt(variance)
    low, high = stats.t.interval(0.95, degrees_of_freedom, mean, error)
    p = 2 * stats.t.sf(abs(mean) / error, degrees_of_freedom)
    return Estimate(mean, low, high, p)
