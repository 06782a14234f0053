"""Gates whose probabilities change with the training step or with the sensitivity of the loss to each gate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gates.loop_dropout import LoopDropout
from loopdropout_trainer.gates.rule import Draw, GateRule, as_probability, check_number, register_rule


@register_rule
@dataclass(frozen=True)
class Schedule(GateRule):
    """p changes linearly from `p_start` in the first optimizer step to `p_end` in the last step.

    p depends on the step number only, so that resumed runs continue the schedule.

    Gate: b_t / q(step), b_t ~ Bernoulli(q(step))
    Mean: 1
    Covariance: (p/q) I at p(step)
    Paper: Table "Structured, scheduled and adaptive masks"
    """

    name = "schedule"
    uses_steps = True
    p_start: float = 0.75
    p_end: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "p_start", as_probability(self.p_start, "p_start"))
        object.__setattr__(self, "p_end", as_probability(self.p_end, "p_end"))

    def p_at(self, step: int, num_steps: int) -> float:
        """Return p in optimizer step `step` (from 0) of `num_steps`."""
        progress = min(step / max(num_steps - 1, 1), 1.0)
        return self.p_start + (self.p_end - self.p_start) * progress

    def sample(self, draw: Draw) -> Tensor:
        return LoopDropout(self.p_at(draw.step, draw.num_steps)).sample(draw)


@register_rule
@dataclass(frozen=True)
class CoTo(GateRule):
    """One switch for each of L physical layers, shared by all projections, loops and examples of a step.

    The keep probability q goes linearly from `keep_start` in the first optimizer step to 1 after the fraction `ramp` of
    the steps. If the draw switches all layers off, the layer with the largest draw is on. Gates are not rescaled. A single
    process does not compute inactive layers. Distributed runs compute them with a factor of zero.

    Gate: b_l for the modules of layer l, b_l ~ Bernoulli(q(step)), not all zero
    Mean: q + (1-q)^L / L
    Covariance: m (1-m) 11' for the mean m: one switch for all loops
    Paper: Appendix "Baseline Configurations and Per-Seed Results" (CoTo-on-Ouro)
    """

    name = "coto"
    title = "CoTo"
    uses_steps = True
    has_unit_mean = False
    keep_start: float = 0.1
    ramp: float = 0.75

    def __post_init__(self):
        check_number("keep_start", self.keep_start, 0, 1)
        check_number("ramp", self.ramp, 0, 1)

    def keep_at(self, step: int, num_steps: int) -> float:
        """Return q in optimizer step `step` (from 0) of `num_steps`."""
        ramp_steps = self.ramp * num_steps
        if ramp_steps <= 0:
            return 1.0
        progress = min(step / ramp_steps, 1.0)
        return self.keep_start + (1 - self.keep_start) * progress

    def sample(self, draw: Draw) -> Tensor:
        layers = torch.tensor(draw.layers)  # [M]
        u = draw.step_uniforms("coto", int(layers.max()) + 1)  # [L]
        on = u >= 1 - self.keep_at(draw.step, draw.num_steps)
        on[u.argmax()] = True  # so that the set is never empty
        return on[layers].to(torch.float32).expand(draw.num_loops, 1, -1).contiguous()  # [K, 1, M]


@register_rule
@dataclass
class Adaptive(GateRule):
    """p_t is proportional (`direction: more`) or inversely proportional (`less`) to a running estimate of sensitivity.

    The sensitivity of loop t is the sum of |d loss_b / d g_t| over the examples of an optimizer step, divided by the mean
    over loops. The estimate is its exponential moving average with weight `decay` on the past. The mean of p over loops
    stays `p`, and every p_t stays in [p_min, p_max]. Before the first estimate p_t = p.

    Gate: b_t / q_t, b_t ~ Bernoulli(q_t), p_t = clip(lambda s_t^(+1 or -1), p_min, p_max), mean p_t = p
    Mean: 1
    Covariance: diag(p_t / q_t)
    Paper: Table "Structured, scheduled and adaptive masks", Appendix "Other masks and random-number streams"
    """

    name = "adaptive"
    wants_sensitivity = True
    p: float = 0.5
    direction: str = "more"
    p_min: float = 0.05
    p_max: float = 0.95
    decay: float = 0.95
    estimate: Tensor | None = field(default=None, init=False, repr=False)  # [K] float64, mean 1

    def __post_init__(self):
        self.p = as_probability(self.p)
        if self.direction not in ("more", "less"):
            raise UserError(f"`direction` must be 'more' or 'less', got {self.direction!r}.")
        check_number("decay", self.decay, 0, 1)
        self.p_min = as_probability(self.p_min, "p_min")
        self.p_max = as_probability(self.p_max, "p_max")
        if not self.p_min <= self.p <= self.p_max:
            raise UserError(f"`p` must be from `p_min` ({self.p_min}) to `p_max` ({self.p_max}), got {self.p}.")

    def probabilities(self, num_loops: int) -> Tensor:
        """Return p_t, [K] float64."""
        if self.estimate is None:
            return torch.full((num_loops,), self.p, dtype=torch.float64)
        floor = 1e-9  # a sensitivity of zero has no reciprocal
        weights = self.estimate.clamp(min=floor)
        if self.direction == "less":
            weights = 1 / weights
        return _proportional(weights / weights.mean(), self.p, self.p_min, self.p_max)

    def sample(self, draw: Draw) -> Tensor:
        return LoopDropout(self.probabilities(draw.num_loops).tolist()).sample(draw)

    def observe(self, sensitivity: Tensor) -> None:
        total = sensitivity.double().sum()
        if not (torch.isfinite(total) and total > 0):  # float16 overflow, or B is zero
            return
        share = sensitivity.double() * len(sensitivity) / total
        if self.estimate is None:
            self.estimate = share
        else:
            self.estimate = self.decay * self.estimate + (1 - self.decay) * share

    def state_dict(self) -> dict[str, Any]:
        if self.estimate is None:
            return {"estimate": None}
        return {"estimate": self.estimate.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimate = None
        if state["estimate"] is not None:
            self.estimate = torch.tensor(state["estimate"], dtype=torch.float64)


def _proportional(weights: Tensor, mean: float, low: float, high: float) -> Tensor:
    """Return clip(lambda * weights, low, high) with the lambda that gives the requested mean."""
    # The mean grows with lambda, from `low` at 0 to `high` where even the smallest weight is clipped. So bisection finds it.
    lower = 0.0
    upper = high / float(weights.min())
    for _ in range(200):
        middle = (lower + upper) / 2
        if float((middle * weights).clamp(low, high).mean()) < mean:
            lower = middle
        else:
            upper = middle
    return (upper * weights).clamp(low, high)
