"""Test depth samplers: distributions, limits and messages."""

import math

import numpy as np
import pytest
from scipy.stats import ks_2samp

from helpers.errors import user_error
from loopdropout_trainer import LoopDropoutConfig
from loopdropout_trainer.gates.depth import make_depth_sampler, sample_depth


def lognormal_poisson(rate, sigma, most):
    generator = np.random.default_rng(0)
    tau = generator.normal(math.log(rate) - sigma**2 / 2, sigma, 400_000)
    return np.minimum(generator.poisson(np.exp(tau)) + 1, most)


@pytest.mark.parametrize(
    ("name", "fields", "reference"),
    [
        ("fixed", {}, [4] * 2000),
        ("uniform", {"low": 3, "high": 7}, [3, 4, 5, 6, 7] * 400),
        ("lognormal_poisson", {}, lognormal_poisson(4, 0.5, 1024)),
        ("lognormal_poisson", {"rate": 16, "sigma": 0.8, "most": 40}, lognormal_poisson(16, 0.8, 40)),
        ("poisson", {}, np.random.default_rng(0).poisson(4, 400_000).clip(1)),
        ("poisson", {"rate": 8, "most": 10}, np.random.default_rng(0).poisson(8, 400_000).clip(1, 10)),
    ],
)
def test_depths_follow_distribution(name, fields, reference):
    sampler = make_depth_sampler(name, fields)
    depths = [sample_depth(sampler, 5, step, 4) for step in range(2000)]
    least, most = sampler.limits(4)
    assert set(depths) <= set(reference) and least <= min(depths) and max(depths) <= most
    assert ks_2samp(depths, reference).pvalue > 1e-4


def test_depth_sampler_validates_fields():
    with user_error("`low` in `depth_sampling_args` must be from 1 to `high`, 4, got 5"):
        make_depth_sampler("uniform", {"low": 5}).limits(4)
    with user_error("`low` in `depth_sampling_args` must be from 1 to `high`, 2, got 5.$"):
        LoopDropoutConfig("out", depth_sampling="uniform", depth_sampling_args={"low": 5, "high": 2})
    for low in (2.5, 0, -1, "deep", True):
        with user_error("`low` must be an integer from 1 to 1024, got "):
            make_depth_sampler("uniform", {"low": low})
    for high in (2.5, 0, "deep"):
        with user_error("`high` must be an integer from 1 to 1024, got "):
            make_depth_sampler("uniform", {"high": high})
    for name in (2.5, 0, ["uniform"]):
        with user_error("`depth_sampling` must be one of fixed, .*, got "):
            make_depth_sampler(name)
    for fields in ("low", [1, 2], 2.5):
        with user_error("`depth_sampling_args` must be a mapping, got "):
            make_depth_sampler("uniform", fields)
    with user_error("'lowest'"):
        make_depth_sampler("uniform", {"lowest": 1})
    with user_error("`depth_sampling` must be one of"):
        make_depth_sampler("normal")
