"""LoRA Dropout: y = W x + (alpha / r) diag(m_out) B A diag(m_in) x with m ~ Bernoulli(q) / q (Lin et al. 2024).

Masks multiply the factors. Without seeds, as at inference, the layer is plain LoRA, which is the expected masked update.
"""

from __future__ import annotations

import torch
from peft.tuners.lora.layer import LoraLayer
from torch.nn import functional as F

from loopdropout_trainer.lora.gated import GatedLora


class SparseLora(GatedLora, kind="sparse"):
    """A gated layer that masks columns of A and rows of B, with `GatedBatch.seeds` [M] and the rule's `p`."""

    _expanded: tuple[int | None, tuple] = (None, ())  # a seed with its masks

    def down(self, module: LoraLayer, adapter: str, x: torch.Tensor) -> torch.Tensor:
        if self.gate_state.pass_gates.seeds is None:
            return super().down(module, adapter, x)
        mask_in, _ = self._masks(module, x.device)
        weight = module.lora_A[adapter].weight
        thinned = weight * mask_in
        return F.linear(x, thinned.to(x.dtype))

    def up(self, module: LoraLayer, adapter: str, low_rank: torch.Tensor) -> torch.Tensor:
        if self.gate_state.pass_gates.seeds is None:
            return super().up(module, adapter, low_rank)
        _, mask_out = self._masks(module, low_rank.device)
        weight = module.lora_B[adapter].weight
        thinned = weight * mask_out.unsqueeze(1)
        return F.linear(low_rank, thinned.to(low_rank.dtype))

    def _masks(self, module: LoraLayer, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [d_in] and [d_out] rescaled masks of the pass, the same for all loops and recomputations."""
        seed = int(self.gate_state.pass_gates.seeds[self.module])
        if self._expanded[0] == seed:
            return self._expanded[1]
        p = self.rule.p
        d_in = module.in_features
        d_out = module.out_features
        generator = torch.Generator(device).manual_seed(seed)
        drawn = torch.rand(d_in + d_out, generator=generator, device=device)
        masks = (drawn >= p).to(torch.float32) / (1 - p)
        self._expanded = (seed, masks.split((d_in, d_out)))
        return self._expanded[1]
