"""Depth sampling: the number of loops that an optimizer step runs.

A draw depends on the seed and the optimizer step only. All processes and micro-batches of a step use the same depth, and a
resumed run draws the same depths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.gates.rule import check_number, make_from_fields
from loopdropout_trainer.gates.streams import Streams


@dataclass(frozen=True)
class FixedDepth:
    """The model's own depth K in every step."""

    def limits(self, num_loops: int) -> tuple[int, int]:
        """Return the smallest and largest depth for a model of K = `num_loops` loops."""
        return num_loops, num_loops

    def sample(self, u: tuple[float, float], num_loops: int) -> int:
        """Return a depth for two uniforms in [0, 1) and the model's own depth K."""
        return num_loops


@dataclass(frozen=True)
class UniformDepth(FixedDepth):
    """Uniform depths from `low` to `high` (default: K)."""

    low: int = 1
    high: int | None = None

    def __post_init__(self) -> None:
        check_number("low", self.low, 1, 1024, int)
        check_number("high", 1 if self.high is None else self.high, 1, 1024, int)
        if self.high is not None:  # else the depth of the model decides
            self.limits(self.high)

    def limits(self, num_loops: int) -> tuple[int, int]:
        high = num_loops if self.high is None else self.high
        if self.low > high:
            hint = " `high` is the model's own depth unless you set it." if self.high is None else ""
            raise UserError(f"`low` in `depth_sampling_args` must be from 1 to `high`, {high}, got {self.low}.{hint}")
        return self.low, high

    def sample(self, u: tuple[float, float], num_loops: int) -> int:
        low, high = self.limits(num_loops)
        return low + int(u[0] * (high - low + 1))


@dataclass(frozen=True)
class PoissonDepth(FixedDepth):
    """The distribution of Parcae's pretraining: r ~ max(1, Poisson(rate)), at most `most` (default of `rate`: K)."""

    rate: float | None = None
    most: int = 1024

    def __post_init__(self) -> None:
        check_number("rate", 1 if self.rate is None else self.rate, 1e-3, 1e4)
        check_number("most", self.most, 1, 1024, int)

    def limits(self, num_loops: int) -> tuple[int, int]:
        return 1, self.most

    def sample(self, u: tuple[float, float], num_loops: int) -> int:
        return self.quantile(u[0], self.rate or num_loops)

    def quantile(self, u: float, rate: float, shift: int = 0) -> int:
        """Return the Poisson number of a uniform in [0, 1) plus a shift, at least 1 and at most `most`."""
        import scipy.stats  # takes half a second

        return min(max(int(scipy.stats.poisson.ppf(u, rate)) + shift, 1), self.most)


@dataclass(frozen=True)
class LogNormalPoissonDepth(PoissonDepth):
    """The distribution of Huginn's pretraining: few deep steps, many shallow ones (Geiping et al. 2025, Section 3.3).

        r ~ Poisson(exp(tau)) + 1,   tau ~ N(log(rate) - sigma^2 / 2, sigma^2)

    Its mean is `rate` + 1 (default of `rate`: K). Depths above `most` become `most`, which bounds the memory of a step.
    """

    sigma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("sigma", self.sigma, 0, 10)

    def sample(self, u: tuple[float, float], num_loops: int) -> int:
        import scipy.stats  # takes half a second

        normal = scipy.stats.norm.ppf(u[0] + 2.0**-54)
        tau = math.log(self.rate or num_loops) - self.sigma**2 / 2 + self.sigma * normal
        return self.quantile(u[1], math.exp(tau), shift=1)


DEPTH_SAMPLERS = {
    "fixed": FixedDepth,
    "uniform": UniformDepth,
    "lognormal_poisson": LogNormalPoissonDepth,
    "poisson": PoissonDepth,
}


def make_depth_sampler(name: str, fields: Mapping[str, Any] | None = None) -> FixedDepth:
    """Return the depth sampler `name` with its fields."""
    if not isinstance(name, str):
        raise UserError(
            f"`depth_sampling` must be one of {', '.join(sorted(DEPTH_SAMPLERS))}, got {short_repr(name)}."
        )
    if not isinstance(fields or {}, Mapping):
        raise UserError(f"`depth_sampling_args` must be a mapping, got {short_repr(fields)}.")
    return make_from_fields(DEPTH_SAMPLERS, "depth_sampling", name, fields or {})


def sample_depth(sampler: FixedDepth, seed: int, step: int, num_loops: int) -> int:
    """Return the depth of an optimizer step."""
    u = Streams(seed, step, ()).step_uniforms("depth", 2).tolist()
    return sampler.sample(u, num_loops)
