"""Test depth samplers: distributions, limits and messages."""

import math

import numpy as np
import pytest
from scipy.stats import ks_2samp

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
    return np.minimum(generator.poisson(np.exp(tau)) + 1, most)


@pytest.mark.parametrize(
    ("sampler", "reference"),
    [
        (FixedDepth(), [4] * 2000),
        (UniformDepth(), [1, 2, 3, 4] * 500),
        (UniformDepth(low=3, high=7), [3, 4, 5, 6, 7] * 400),
        (LogNormalPoissonDepth(), lognormal_poisson(4, 0.5, 1024)),
        (LogNormalPoissonDepth(rate=16, sigma=0.8, most=40), lognormal_poisson(16, 0.8, 40)),
    ],
)
def test_depths_follow_distribution(sampler, reference):
    depths = [sample_depth(sampler, 5, step, 4) for step in range(2000)]
    least, most = sampler.limits(4)
    assert set(depths) <= set(reference) and least <= min(depths) and max(depths) <= most
    assert ks_2samp(depths, reference).pvalue > 1e-4


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
