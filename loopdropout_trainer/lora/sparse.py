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
        if self.gate_state.running.batch.seeds is None:
            return super().down(module, adapter, x)
        mask_in, _ = self._masks(module, x.device)
        return F.linear(x, (module.lora_A[adapter].weight * mask_in).to(x.dtype))

    def up(self, module: LoraLayer, adapter: str, low_rank: torch.Tensor) -> torch.Tensor:
        if self.gate_state.running.batch.seeds is None:
            return super().up(module, adapter, low_rank)
        _, mask_out = self._masks(module, low_rank.device)
        return F.linear(low_rank, (module.lora_B[adapter].weight * mask_out.unsqueeze(1)).to(low_rank.dtype))

    def _masks(self, module: LoraLayer, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [d_in] and [d_out] rescaled masks of the pass, the same for all loops and recomputations."""
        seed = int(self.gate_state.running.batch.seeds[self.module])
        if self._expanded[0] != seed:
            sizes = (module.in_features, module.out_features)
            p = self.rule.p
            generator = torch.Generator(device).manual_seed(seed)
            masks = (torch.rand(sum(sizes), generator=generator, device=device) >= p).to(torch.float32) / (1 - p)
            self._expanded = (seed, masks.split(sizes))
        return self._expanded[1]
