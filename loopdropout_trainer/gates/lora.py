"""LoRA: g = 1 in every loop, in training as at inference (Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopdropout_trainer.gates.rule import Draw, GateRule, register_rule


@register_rule
@dataclass(frozen=True)
class LoRA(GateRule):
    """g = 1: the unmasked reference. Mean 1, covariance 0."""

    name = "lora"

    def sample(self, draw: Draw) -> torch.Tensor:
        return torch.ones(draw.num_loops, len(draw.places))
