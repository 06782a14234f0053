"""How many loops a training step runs: the model's own depth K, or a depth drawn for each optimizer step.

Also how a recipe chooses such things by a name and its fields: `depth_sampling: uniform`, `depth_sampling_args: {low: 2}`.

A draw is a pure function of (seed, optimizer step), as gates are, so that all processes and all micro-batches of a step run
equally deep, and neither the split into micro-batches nor a resume changes a draw.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from loopdropout_trainer.adapters.gated import ADAPTER_KINDS
from loopdropout_trainer.checks import check_integer, check_number
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gates import GateRule
from loopdropout_trainer.gates.rule import field_names
from loopdropout_trainer.gates.streams import uniforms
from loopdropout_trainer.looped.model import MOST_LOOPS


def make_choice(field: str, choices: Mapping[str, type], name: str, fields: Mapping[str, Any] | None) -> Any:
    """Build the choice `name` from its fields, the value of `<field>_args`.

    Args:
        field: what the recipe calls it.
        choices: dataclasses by name.

    Raises:
        ValueError: for an unknown name, a field that the choice does not take, or a value that it refuses.
    """
    if name not in choices:
        raise UserError(f"`{field}` must be one of {', '.join(sorted(choices))}; got {name!r}.")
    valid = field_names(choices[name])
    for key in fields or {}:
        if key not in valid:
            takes = f"takes {', '.join(valid)}" if valid else "takes no fields"
            raise UserError(f"`{field}: {name}` has no field {key!r} in `{field}_args`; it {takes}.")
    return choices[name](**(fields or {}))


def relative_weights(weights: Sequence[float] | None, name: str) -> tuple[float, ...]:
    """Return weights divided by their sum.

    Raises:
        ValueError: unless they are a list of finite numbers from 0, not all of them 0.
    """
    values = list(weights) if isinstance(weights, Sequence) and not isinstance(weights, str) else []
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    if not numbers or any(not 0 <= value < math.inf for value in values) or not sum(values) > 0:
        raise UserError(f"`{name}` must be a list of numbers of at least 0, one of them above 0; got {weights!r}.")
    return tuple(value / sum(values) for value in values)


@dataclass(frozen=True)
class DepthSampler:
    """The model's own depth K in every step; the base of all samplers, whose fields are those of `depth_sampling_args`."""

    name: ClassVar[str] = "fixed"

    def limits(self, num_loops: int) -> tuple[int, int]:
        """Return the least and the greatest depth of a model whose own depth is K = `num_loops`.

        Raises:
            ValueError: if the sampler's fields do not fit the model.
        """
        return num_loops, num_loops

    def sample(self, u: Sequence[float], num_loops: int) -> int:
        """Return a depth, from two uniforms in [0, 1) and the model's own depth K."""
        return num_loops


@dataclass(frozen=True)
class UniformDepth(DepthSampler):
    """Every depth from `low` to `high` (default: K) alike."""

    name = "uniform"
    low: int = 1
    high: int | None = None

    def __post_init__(self):
        check_integer("low", self.low, 1, MOST_LOOPS)
        if self.high is not None:
            check_integer("high", self.high, self.low, MOST_LOOPS)

    def limits(self, num_loops: int) -> tuple[int, int]:
        high = num_loops if self.high is None else self.high
        if self.low > high:
            raise UserError(f"`low` of `depth_sampling: uniform` is {self.low}, above the greatest depth {high}.")
        return self.low, high

    def sample(self, u: Sequence[float], num_loops: int) -> int:
        low, high = self.limits(num_loops)
        return low + int(u[0] * (high - low + 1))


@dataclass(frozen=True)
class LogNormalPoisson(DepthSampler):
    """What Huginn was pretrained with: mostly shallow steps, and a long tail of deep ones (Geiping et al. 2025, Section 3.3).

        r ~ Poisson(exp(tau)) + 1,   tau ~ N(log(rate) - sigma^2 / 2, sigma^2)

    Its mean is `rate` + 1 (default of `rate`: K), its variance rate + rate^2 (exp(sigma^2) - 1). Depths above `most` become
    `most`, which bounds the memory of a step.
    """

    name = "lognormal_poisson"
    rate: float | None = None
    sigma: float = 0.5
    most: int = MOST_LOOPS

    def __post_init__(self):
        if self.rate is not None:
            check_number("rate", self.rate, 0.01, MOST_LOOPS)
        check_number("sigma", self.sigma, 0, 3)
        check_integer("most", self.most, 1, MOST_LOOPS)

    def limits(self, num_loops: int) -> tuple[int, int]:
        return 1, self.most

    def sample(self, u: Sequence[float], num_loops: int) -> int:
        import scipy.stats  # half a second that most trainings can spare

        rate = num_loops if self.rate is None else self.rate
        tau = math.log(rate) - self.sigma**2 / 2 + self.sigma * scipy.stats.norm.ppf(u[0] + 2.0**-54)
        return min(int(scipy.stats.poisson.ppf(u[1], math.exp(tau))) + 1, self.most) if u[1] else 1


@dataclass(frozen=True)
class WeightedDepth(DepthSampler):
    """The depths of a list, with probabilities in proportion to `weights` (default: all alike)."""

    name = "weighted"
    depths: Sequence[int] | None = None
    weights: Sequence[float] | None = None

    def __post_init__(self):
        depths = self.depths
        if not isinstance(depths, Sequence) or isinstance(depths, str) or not depths or len({*depths}) != len(depths):
            raise UserError(f"`depths` must be a list of different numbers of loops; got {depths!r}.")
        for depth in depths:
            check_integer("depths", depth, 1, MOST_LOOPS)
        weights = relative_weights([1] * len(depths) if self.weights is None else self.weights, "weights")
        if len(weights) != len(depths):
            raise UserError(f"`weights` has {len(weights)} values for {len(depths)} `depths`: give one for each.")
        used = {depth: weight for depth, weight in zip(depths, weights, strict=True) if weight > 0}
        object.__setattr__(self, "depths", [*used])
        object.__setattr__(self, "weights", [*used.values()])

    def limits(self, num_loops: int) -> tuple[int, int]:
        return min(self.depths), max(self.depths)

    def sample(self, u: Sequence[float], num_loops: int) -> int:
        reached = bisect.bisect(list(itertools.accumulate(self.weights)), u[0])
        return self.depths[min(reached, len(self.depths) - 1)]  # the weights' sum may be rounded below 1


DEPTH_SAMPLERS = {cls.name: cls for cls in (DepthSampler, UniformDepth, LogNormalPoisson, WeightedDepth)}


def step_uniforms(seed: int, purpose: str, step: int) -> list[float]:
    """Return two uniforms that are the same on every process and in every micro-batch of an optimizer step."""
    return uniforms(seed, purpose, step, [(0, 0)], 2)[0].tolist()


def check_rule_at_depths(rule: GateRule, limits: tuple[int, int], num_loops: int) -> None:
    """Raise ValueError for depths (`limits`: the least and the greatest) at which a rule or its adapter has no meaning."""
    for depth in sorted({*limits}):
        rule.check(depth)
    if limits == (num_loops, num_loops):
        return
    kind = ADAPTER_KINDS[rule.adapter]
    what = kind.description if kind.one_depth else "an estimate for each loop" if rule.wants_sensitivity else None
    if what is not None:
        raise UserError(
            f"The rule {rule.name!r} has {what}, which belongs to the model's {num_loops} loops: leave `depth_sampling` at "
            "'fixed', or use a rule with a shared adapter and no memory."
        )
