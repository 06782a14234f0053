"""LoRA: g = 1 in every loop, in training as at inference (Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopdropout_trainer.gates.rule import Draw, GateRule, register_rule


@register_rule
@dataclass(frozen=True)
class LoRA(GateRule):
    """The unmasked reference; with the adapter's own fields also input dropout, rsLoRA and LoRA+.

    Gate: 1
    Mean: 1
    Covariance: 0
    Paper: Section "Training controls"; Appendix "Sharing, scale and granularity controls"
    """

    name = "lora"

    def sample(self, draw: Draw) -> torch.Tensor:
        return torch.ones(draw.num_loops, len(draw.example_ids))
