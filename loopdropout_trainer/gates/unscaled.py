"""Unscaled masks: Loop Dropout's masks without the 1/q that keeps the expected strength."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopdropout_trainer.gates.loop_dropout import MaskedRule
from loopdropout_trainer.gates.rule import Draw, register_rule


@register_rule
@dataclass(frozen=True)
class Unscaled(MaskedRule):
    """Loop Dropout without rescaling: the expected update in training is q Delta, at inference Delta.

    Gate: b_t, b_t ~ Bernoulli(q_t)
    Mean: q
    Covariance: p q I
    Paper: Section "Training controls"; Appendix "Update Scaling and a Local Curvature View"
    """

    name = "unscaled"

    def sample(self, draw: Draw) -> torch.Tensor:
        return (~draw.removals(self.p)).to(torch.float32)
