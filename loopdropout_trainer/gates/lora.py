"""LoRA, the unmasked reference, and LoRA Dropout (Lin et al. 2024), a baseline with sparse factors.

PEFT's `lora_dropout` field is input dropout instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopdropout_trainer.gates.rule import Draw, GateRule, as_probability, check_number, register_rule


@register_rule
@dataclass(frozen=True)
class LoRA(GateRule):
    """The unmasked reference (Eq. 2). Fields of the adapter add input dropout, rsLoRA and LoRA+.

    Gate: 1
    Mean: 1
    Covariance: 0
    Paper: Section "Training controls", Appendix "Sharing, scale and granularity controls"
    """

    name = "lora"
    title = "LoRA"

    def sample(self, draw: Draw) -> torch.Tensor:
        return torch.ones(draw.num_loops, len(draw.example_ids))


@register_rule
@dataclass(frozen=True)
class LoRADropout(LoRA):
    """Random input dimensions (columns of A) and output dimensions (rows of B) are removed, never the rank.

    Delta = (alpha/r) diag(m_out) B A diag(m_in), m ~ Bernoulli(q) / q for each dimension. Each module has one pair of
    masks for all loops and examples of the optimizer step. The loss is the mean over `num_masks` draws. Masks are
    rescaled, so the expected masked update is (alpha/r) B A, and inference is plain LoRA. The original masks are not
    rescaled and have the expected update q^2 Delta. A new adapter therefore gets q^2 times the requested `lora_alpha`.

    A micro-batch takes `num_masks` forward and backward passes, one after another, with the memory of one pass.

    Gate: 1, on sparse factors
    Mean: 1
    Covariance: 0, E[masked Delta] = Delta
    Paper: Appendix "Baseline Configurations and Per-Seed Results" (LoRA Dropout)
    """

    name = "lora_dropout"
    title = "LoRA Dropout"
    lora_kind = "sparse"
    p: float = 0.5
    num_masks: int = 4

    def __post_init__(self):
        object.__setattr__(self, "p", as_probability(self.p))
        check_number("num_masks", self.num_masks, 1, 64, int)

    @property
    def alpha_factor(self) -> float:
        return (1 - self.p) ** 2

    @property
    def draws_per_batch(self) -> int:
        return self.num_masks

    def seeds(self, draw: Draw) -> torch.Tensor:
        """Return [M] seeds of this draw's masks."""
        u = draw.step_uniforms("lora dropout", self.num_masks * draw.num_modules)
        return (u * 2.0**53).to(torch.int64).view(self.num_masks, -1)[draw.draw_index]
