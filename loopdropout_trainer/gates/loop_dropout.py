"""Loop Dropout: g_t = b_t / q_t with b_t ~ Bernoulli(q_t) independent for each example and loop, q_t = 1 - p_t (Eq. 3).

This module also contains the rules that use the same masks in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopdropout_trainer.gates.rule import Draw, GateRule, as_probabilities, register_rule


@dataclass(frozen=True)
class MaskedRule(GateRule):
    """Base of the rules with Bernoulli masks.

    Args:
        p: Drop probability, one number or one for each loop.
    """

    p: float | tuple[float, ...] = 0.5

    def __post_init__(self):
        object.__setattr__(self, "p", as_probabilities(self.p))

    def sample(self, draw: Draw) -> Tensor:
        return (~draw.removals(self.p) / survival(self.p)).to(torch.float32)  # b / q, [K, N]


def survival(p: float | Sequence[float]) -> Tensor:
    """Return q = 1 - p as a float64 column, [1, 1] or [K, 1]."""
    return 1 - torch.as_tensor(p, dtype=torch.float64).view(-1, 1)


@register_rule
@dataclass(frozen=True)
class LoopDropout(MaskedRule):
    """The adapter is removed from a loop, or applied at 1/q of its strength.

    Lists of p are the profiles of the paper: early-heavy (.75, .75, .25, .25), late-heavy, ramp down, ramp up.

    Gate: b_t / q_t, b_t ~ Bernoulli(q_t)
    Mean: 1
    Covariance: (p/q) I
    Paper: Eq. 3 and 4, Algorithm 1, Table "Structured, scheduled and adaptive masks" for profiles
    """

    name = "loop_dropout"
    title = "Loop Dropout"


@register_rule
@dataclass(frozen=True)
class Unscaled(MaskedRule):
    """Loop Dropout without rescaling: the expected update in training is q Delta, at inference Delta.

    Gate: b_t, b_t ~ Bernoulli(q_t)
    Mean: q
    Covariance: p q I
    Paper: Section "Training controls", Appendix "Update Scaling and a Local Curvature View"
    """

    name = "unscaled"
    has_unit_mean = False

    def sample(self, draw: Draw) -> Tensor:
        return (~draw.removals(self.p)).to(torch.float32)


@register_rule
@dataclass(frozen=True)
class DoseControl(MaskedRule):
    """Every gate of an example is the mean of its Loop Dropout gates: [0, 2, 0, 2] becomes [1, 1, 1, 1].

    Gate: (1/K) sum_s b_s / q_s
    Mean: 1
    Covariance: (p/q) P_par, P_par = 11'/K
    Paper: Section "Training controls", Appendix "What the Controls Match"
    """

    name = "dose_control"

    def sample(self, draw: Draw) -> Tensor:
        return super().sample(draw).mean(dim=0, keepdim=True).expand(draw.num_loops, -1).contiguous()


@register_rule
@dataclass(frozen=True)
class ModuleWise(MaskedRule):
    """Drops the updates of single linear maps. Gates are [K, N, M] for M adapted maps.

    Gate: b_tm / q_t, b_tm ~ Bernoulli(q_t) for each module m
    Mean: 1
    Covariance: (p/q) I over loops, and over modules
    Paper: Section "Training controls", Appendix "Sharing, scale and granularity controls"
    """

    name = "module_wise"
    title = "Module-wise"

    def sample(self, draw: Draw) -> Tensor:
        p = torch.as_tensor(self.p, dtype=torch.float64).view(-1, 1, 1)
        return ((draw.module_event_uniforms() >= p) / (1 - p)).to(torch.float32)


@register_rule
@dataclass(frozen=True)
class Learned(MaskedRule):
    """One trainable scalar gamma_t for each loop, initially 1, with or without Loop Dropout.

    The gammas are saved with the adapter and stay at inference. They cannot be merged unless all are equal.

    Gate: gamma_t b_t / q_t, b_t ~ Bernoulli(q_t)
    Mean: gamma
    Covariance: (p/q) diag(gamma^2)
    Paper: Table "Structured, scheduled and adaptive masks"
    """

    name = "learned"
    title = "Learned gates"
    lora_kind = "learned"
    mergeable = False
    p: float | tuple[float, ...] = 0.0


@register_rule
@dataclass(frozen=True)
class Independent(MaskedRule):
    """h_t = F(h_{t-1}; W + g_t Delta_t): every loop has its own A and B of rank `lora_r`.

    Rank 4 matches the parameters of a shared rank-16 adapter at four loops (equal budget), rank 16 its rank (equal rank).

    Gate: b_t / q_t on the update of loop t, b_t ~ Bernoulli(q_t)
    Mean: 1
    Covariance: (p/q) I
    Paper: Table "Sharing x masking on Ouro-1.4B", Appendix "Sharing and masking"
    """

    name = "independent"
    lora_kind = "per_loop"
    mergeable = False
    p: float | tuple[float, ...] = 0.0
