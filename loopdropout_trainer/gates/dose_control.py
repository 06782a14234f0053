"""Dose control: the sampled strength of Loop Dropout, spread evenly over the loops."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopdropout_trainer.gates.loop_dropout import MaskedRule
from loopdropout_trainer.gates.rule import Draw, register_rule


@register_rule
@dataclass(frozen=True)
class DoseControl(MaskedRule):
    """Every gate of an example is the mean of its Loop Dropout gates: [0, 2, 0, 2] becomes [1, 1, 1, 1].

    Gate: (1/K) sum_s b_s / q_s
    Mean: 1
    Covariance: (p/q) P_par, P_par = 11'/K
    Paper: Section "Training controls"; Appendix "What the Controls Match"
    """

    name = "dose_control"

    def sample(self, draw: Draw) -> torch.Tensor:
        return super().sample(draw).mean(dim=0, keepdim=True).expand(draw.num_loops, -1).contiguous()
