"""Module-wise masks: an independent Bernoulli mask for every adapted linear map in every loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopdropout_trainer.gates.loop_dropout import MaskedRule
from loopdropout_trainer.gates.rule import Draw, register_rule


@register_rule
@dataclass(frozen=True)
class ModuleWise(MaskedRule):
    """Removes single maps instead of complete applications; gates are [K, N, M] for M adapted maps.

    Gate: b_tm / q_t, b_tm ~ Bernoulli(q_t) for each module m
    Mean: 1
    Covariance: (p/q) I over loops, and over modules
    Paper: Section "Training controls"; Appendix "Sharing, scale and granularity controls"
    """

    name = "module_wise"

    def sample(self, draw: Draw) -> torch.Tensor:
        p = torch.as_tensor(self.p, dtype=torch.float64).view(-1, 1, 1)
        return ((draw.module_event_uniforms() >= p) / (1 - p)).to(torch.float32)
