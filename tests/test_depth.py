"""Test depth samplers: distributions, limits and messages."""

import math
from collections import Counter

import numpy as np
import pytest

from loopdropout_trainer.gates.depth import (
    FixedDepth,
    LogNormalPoissonDepth,
    UniformDepth,
    make_depth_sampler,
    sample_depth,
)


def lognormal_poisson(rate, sigma, most, count=400_000):
    generator = np.random.default_rng(0)
    tau = generator.normal(math.log(rate) - sigma**2 / 2, sigma, count)
    depths = Counter(np.minimum(generator.poisson(np.exp(tau)) + 1, most).tolist())
    return {depth: times / count for depth, times in depths.items()}


@pytest.mark.parametrize(
    ("sampler", "probabilities"),
    [
        (FixedDepth(), {4: 1}),
        (UniformDepth(), dict.fromkeys((1, 2, 3, 4), 1 / 4)),
        (UniformDepth(low=3, high=7), dict.fromkeys(range(3, 8), 1 / 5)),
        (LogNormalPoissonDepth(), lognormal_poisson(4, 0.5, 1024)),
        (LogNormalPoissonDepth(rate=16, sigma=0.8, most=40), lognormal_poisson(16, 0.8, 40)),
    ],
)
def test_depths_follow_distribution(sampler, probabilities):
    count = 2000
    depths = Counter(sample_depth(sampler, 5, step, 4) for step in range(count))
    least, most = sampler.limits(4)
    assert set(depths) <= set(probabilities) and least <= min(depths) and max(depths) <= most
    for depth in probabilities:  # cumulated, with Kolmogorov's bound at a level of 1e-4
        got = sum(times for d, times in depths.items() if d <= depth) / count
        want = sum(p for d, p in probabilities.items() if d <= depth)
        assert abs(got - want) < 2.23 / math.sqrt(count), depth


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("uniform", {"low": 5}, "`low` must be from 1 to `high`, 4, got 5"),
        ("uniform", {"lowest": 1}, "'lowest'"),
        ("normal", {}, "`depth_sampling` must be one of"),
    ],
)
def test_depth_sampler_validates_fields(name, fields, message):
    with pytest.raises(ValueError, match=message):
        make_depth_sampler(name, fields).limits(4)
