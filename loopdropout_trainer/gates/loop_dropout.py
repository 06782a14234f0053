"""Loop Dropout: g_t = b_t / q_t with b_t ~ Bernoulli(q_t) independent for each example and loop, q_t = 1 - p_t (Eq. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loopdropout_trainer.gates.probabilities import check_p, check_p_length
from loopdropout_trainer.gates.rule import Draw, GateRule, register_rule


@dataclass(frozen=True)
class MaskedRule(GateRule):
    """What the rules with one Bernoulli mask for each example and loop share: p, one number or one for each loop."""

    p: float | tuple[float, ...] = 0.5

    def __post_init__(self):
        object.__setattr__(self, "p", check_p(self.p))

    def check(self, num_loops: int) -> None:
        check_p_length(self.p, num_loops)

    def sample(self, draw: Draw) -> torch.Tensor:
        return rescaled_masks(draw, self.p)


def survival(p: float | Sequence[float] | torch.Tensor) -> torch.Tensor:
    """Return q = 1 - p as a float64 column, [1, 1] or [K, 1]."""
    return 1 - torch.as_tensor(p, dtype=torch.float64).view(-1, 1)


def rescaled_masks(draw: Draw, p: float | tuple[float, ...] | torch.Tensor) -> torch.Tensor:
    """Return b / q, [K, N] float32."""
    return (~draw.removals(p) / survival(p)).to(torch.float32)


@register_rule
@dataclass(frozen=True)
class LoopDropout(MaskedRule):
    """The adapter is removed from a loop, or applied at 1/q of its strength.

    Lists of p are the profiles of the paper: early-heavy (.75, .75, .25, .25), late-heavy, ramp down, ramp up.

    Gate: b_t / q_t, b_t ~ Bernoulli(q_t)
    Mean: 1
    Covariance: (p/q) I
    Paper: Eq. 2 and 4, Algorithm 1; Table "Structured, scheduled and adaptive masks" for profiles
    """

    name = "loop_dropout"
