"""Intervals over seeds and problems: by other code, by hand, and by how often they hold what they should."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy import stats
from statsmodels.formula.api import ols

from loopdropout_trainer.reports.statistics import estimate, of_numbers, of_seeds_and_problems


def made(rng, seeds, problems, by_seed=0.5, by_problem=1.0, mean=0.3):
    """Gains [seeds, problems] in which seeds and problems differ, and the rest is noise of 1."""
    parts = by_seed * rng.normal(size=(seeds, 1)) + by_problem * rng.normal(size=(1, problems))
    return mean + parts + rng.normal(size=(seeds, problems))


def test_one_number_a_seed_is_students_t():
    values = np.array([4.9, 0.3, 0.2])
    want = stats.ttest_1samp(values, 0)
    found = estimate(values[:, None])
    assert (found.mean, found.p) == pytest.approx((1.8, want.pvalue))
    assert [found.low, found.high] == pytest.approx(list(want.confidence_interval()))
    assert found.low < -4.8 and found.high > 8.4  # the three values lie between 0.2 and 4.9


@pytest.mark.parametrize("by_seed", [0.5, 0.0])
def test_seeds_and_problems_are_a_two_way_analysis_of_variance(by_seed):
    gains = made(np.random.default_rng(3), 4, 30, by_seed)
    table = pd.DataFrame(
        [(s, p, gains[s, p]) for s in range(4) for p in range(30)], columns=["seed", "problem", "gain"]
    )
    anova = sm.stats.anova_lm(ols("gain ~ C(seed) + C(problem)", table).fit())
    seeds, problems, rest = anova["sum_sq"] / anova["df"]
    found = of_seeds_and_problems(gains)
    assert (seeds > rest) == (by_seed > 0)  # drawn so
    variance = problems + max(seeds - rest, 0)
    freedom = variance**2 / (seeds**2 / 3 + problems**2 / 29 + rest**2 / 87)
    want = stats.t(freedom, gains.mean(), np.sqrt(variance / 120)).ppf([0.025, 0.975])
    assert [found.low, found.high] == pytest.approx(want)
    assert found.p == pytest.approx(2 * stats.t.sf(gains.mean() / np.sqrt(variance / 120), freedom))


def test_where_seeds_differ_most_the_problems_hardly_matter():
    gains = made(np.random.default_rng(4), 3, 1000, by_seed=20, by_problem=0.1)
    found, want = of_seeds_and_problems(gains), of_numbers(gains.mean(axis=1))
    assert [found.low, found.high, found.p] == pytest.approx([want.low, want.high, want.p], rel=0.01)


def test_problems_that_differ_by_less_than_chance_cost_no_more_than_students_t():
    gains = made(np.random.default_rng(5), 3, 50, by_seed=0, by_problem=0)
    rest = gains - gains.mean(axis=0) + gains.mean()  # every problem has the same mean
    found = of_seeds_and_problems(rest + 1e-3 * np.arange(50))
    assert np.isfinite(found.p) and found.high - found.low < 2 * stats.t(2).ppf(0.975) * gains.std() / np.sqrt(150)


def test_one_seed_or_a_missing_number_says_nothing_and_equal_numbers_say_all():
    gains = np.ones((2, 3))
    assert estimate(gains[:1]) is None and estimate(gains * [1, np.nan, 1]) is None
    for same in (gains, gains[:, :1]):
        found = estimate(same)
        assert (found.mean, found.low, found.high, found.p) == (1, 1, 1, 0)
        assert estimate(0 * same).p == 1


def verdicts(rng, draws, seeds, problems, by_method, by_seed, shift):
    """Draws of gains [draws, seeds, problems] in points: of two methods on problems of all difficulties."""
    difficulty = rng.normal(1, 2, (draws, 1, 1, problems)) + rng.normal(0, by_method, (draws, 2, 1, problems))
    odds = difficulty + rng.normal(0, by_seed, (draws, 2, seeds, 1))
    odds[:, 0] += shift
    right = rng.random(odds.shape) < 1 / (1 + np.exp(-odds))
    return 100 * (right[:, 0].astype(float) - right[:, 1])


def true_gain(by_method, by_seed, shift):
    """The mean over all problems and seeds, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    spread = np.sqrt(2**2 + by_method**2 + by_seed**2)
    accuracy = lambda mean: weights @ (1 / (1 + np.exp(-mean - spread * nodes))) / weights.sum()
    return 100 * (accuracy(1 + shift) - accuracy(1))


# Seeds and problems of the studies; methods alike and less so; seeds that differ by nothing, by 3, 8 and 25 points.
SIZES = [(3, 500), (3, 1000), (5, 1000), (10, 1000)]
KINDS = [(0.4, 0.0, 0.2), (0.4, 0.15, 0.2), (1.0, 0.0, 0.2), (1.0, 0.15, 0.2), (1.0, 0.5, 0.2), (0.5, 1.5, -1.0)]


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "problems"), SIZES)
def test_intervals_hold_the_truth_in_92_to_98_of_100_draws(seeds, problems):
    rng = np.random.default_rng(seeds + problems)
    for kind in KINDS:
        truth, hits = true_gain(*kind), []
        for _ in range(40):
            for gains in verdicts(rng, 50, seeds, problems, *kind):
                found = estimate(gains)
                hits.append(found.low <= truth <= found.high)
        print(f"{seeds} seeds, {problems} problems, {kind}: {100 * np.mean(hits):.1f}%")
        assert 0.915 <= np.mean(hits) <= 0.99  # 2,000 draws: standard error half a point
    one_number = rng.normal(1, 2, (4000, seeds))
    hits = [found.low <= 1 <= found.high for found in map(of_numbers, one_number)]
    assert 0.935 <= np.mean(hits) <= 0.965
