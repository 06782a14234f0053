"""Loop Dropout whose p moves over training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopdropout_trainer.gates.loop_dropout import rescaled_masks
from loopdropout_trainer.gates.probabilities import check_one_p
from loopdropout_trainer.gates.rule import Draw, GateRule, register_rule


@register_rule
@dataclass(frozen=True)
class Schedule(GateRule):
    """p goes from `p_start` in the first optimizer step to `p_end` in the last, linearly in steps.

    It depends on the step's number alone, and so goes on in a resumed run where it stood.

    Gate: b_t / q(step), b_t ~ Bernoulli(q(step))
    Mean: 1
    Covariance: (p/q) I at p(step)
    Paper: Table "Structured, scheduled and adaptive masks"
    """

    name = "schedule"
    p_start: float = 0.75
    p_end: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "p_start", check_one_p(self.p_start, "p_start"))
        object.__setattr__(self, "p_end", check_one_p(self.p_end, "p_end"))

    def p_at(self, step: int, num_steps: int) -> float:
        """Return p in optimizer step `step` (from 0) of `num_steps`."""
        progress = min(step / max(num_steps - 1, 1), 1.0)
        return self.p_start + (self.p_end - self.p_start) * progress

    def sample(self, draw: Draw) -> torch.Tensor:
        return rescaled_masks(draw, self.p_at(draw.step, draw.num_steps))
