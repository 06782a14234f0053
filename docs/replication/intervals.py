"""Means over seeds and problems with their 95% intervals and p-values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats


class Estimate(NamedTuple):
    """A mean, its 95% interval, and the two-sided p-value of the hypothesis that it is zero."""

    mean: float
    low: float
    high: float
    p: float


def estimate(gains: np.ndarray) -> Estimate | None:
    """Return the mean of gains over further seeds and problems of the same kind, or None for a single seed.

    Args:
        gains: [seeds, problems], or [seeds, 1] if a seed gives one number.
    """
    if len(gains) < 2 or not np.isfinite(gains).all():
        return None
    return estimate_mean(gains[:, 0]) if gains.shape[1] == 1 else estimate_two_way(gains)


def holm(p_values: list[float]) -> np.ndarray:
    """Return the p-values of one family of tests, adjusted by Holm's method.

    The smallest of n is multiplied by n, the next one by n - 1, and so on, and none is below a smaller one. statsmodels'
    `multipletests` has the same numbers, but starts a garbage collection in each call.
    """
    p_values = np.asarray(p_values)
    order = p_values.argsort()
    products = p_values[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(products), 1)
    return adjusted


def estimate_mean(values: np.ndarray, level: float = 0.95) -> Estimate:
    """Return the mean of independent numbers and its interval at a confidence level, by Student's t."""
    number = len(values)
    return _estimate(values.mean(), values.var(ddof=1) / number, number - 1, level)


def estimate_two_way(gains: np.ndarray) -> Estimate:
    """Return the mean of gains [seeds, problems] with seeds and problems as random effects.

    The mean squares of the two-way analysis of variance give the variance (MS_seeds + MS_problems - MS_rest) / (S P), with
    Satterthwaite's degrees of freedom. Seeds that differ by less than chance do not decrease it.
    """
    num_seeds, num_problems = gains.shape
    of_seed, of_problem, mean = gains.mean(axis=1, keepdims=True), gains.mean(axis=0, keepdims=True), gains.mean()
    free = np.array([num_seeds - 1, num_problems - 1, (num_seeds - 1) * (num_problems - 1)])
    squares_of_seeds = num_problems * ((of_seed - mean) ** 2).sum()
    squares_of_problems = num_seeds * ((of_problem - mean) ** 2).sum()
    squares_of_rest = ((gains - of_seed - of_problem + mean) ** 2).sum()
    mean_squares = np.array([squares_of_seeds, squares_of_problems, squares_of_rest]) / free
    seeds, problems, rest = mean_squares
    variance = problems + max(seeds - rest, 0.0)
    spread = (mean_squares**2 / free).sum()
    # At least the degrees of freedom of the seeds alone: they would fall to zero if problems differ by less than chance.
    freedom = max(variance**2 / spread, free.min()) if spread else np.inf
    return _estimate(mean, variance / gains.size, freedom)


def _estimate(mean: float, variance: float, freedom: float, level: float = 0.95) -> Estimate:
    if variance == 0:  # all the same
        return Estimate(mean, mean, mean, float(mean == 0))
    error = np.sqrt(variance)
    return Estimate(mean, *stats.t.interval(level, freedom, mean, error), 2 * stats.t.sf(abs(mean) / error, freedom))
