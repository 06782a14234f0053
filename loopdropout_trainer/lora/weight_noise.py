"""Low-rank weight noise: y = W x + (alpha / r) B A x + s_t |Delta|_F / sqrt(d_out d_in r_n) G_out (G_in x) where a_t = 1.

s_t = c / sqrt(q_t) (Appendix "Matched noise controls"). The noise is two thin products. The norm
of the update also comes from the factors:

    |Delta|_F^2 = (alpha / r)^2 trace(B'B AA')
"""

from __future__ import annotations

import torch
from peft.tuners.lora.layer import LoraLayer
from torch.nn import functional as F

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.lora.gated import GatedLora


class NoisyLora(GatedLora, kind="weight_noise"):
    """A gated layer with weight noise for examples that have an event in the running loop.

    It reads `GatedBatch.seeds` [K, N, M], with 0 for no event, and the rule's `noise_rank` and `noise_scales`.
    """

    def forward(
        self, module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs
    ) -> torch.Tensor:
        updated = super().forward(module, active_adapter, x, result, **kwargs)
        all_seeds = self.gate_state.running.batch.seeds  # [K, N, M]
        if all_seeds is None:
            return updated
        loop = self.gate_state.loop
        seeds = all_seeds[loop, :, self.module]  # [N]
        events = seeds.nonzero().flatten().tolist()
        if not events:
            return updated

        x = self._cast(x, result)
        g_in, g_out = self._draw_factors(seeds[events], module, x.device)  # [E, r_n, d_in], [E, r_n, d_out]
        noise_rank = self.rule.noise_rank
        size = module.in_features * module.out_features
        scale = self.rule.noise_scales(len(all_seeds))[loop].item() / (size * noise_rank) ** 0.5
        scale = scale * update_norm(module, active_adapter)
        # The thin products of all E events are computed for each token, and then the events of its example are selected. A
        # matrix [out, in] of noise for each example would take the memory of the layer's weights N times.
        is_mine = F.one_hot(torch.tensor(events, device=x.device), len(seeds)).T.float()  # [N, E]
        is_mine = self.gate_state.per_token(is_mine, x)  # [B, 1 or S, E]
        low_rank = F.linear(x, g_in.flatten(0, 1).to(x.dtype))
        low_rank = low_rank.unflatten(-1, (len(events), noise_rank))  # [B, S, E, r_n]
        low_rank = (low_rank * (is_mine * scale).unsqueeze(-1)).to(x.dtype).flatten(-2)
        return updated + F.linear(low_rank, g_out.flatten(0, 1).T.to(x.dtype))

    def _draw_factors(
        self, seeds: torch.Tensor, module: LoraLayer, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return G_in [E, r_n, d_in] and G_out [E, r_n, d_out] of E events by their seeds [E].

        Seeds replace 460 million normals for 8 examples of Ouro-1.4B. Recomputation draws the same numbers again. CPUs and
        GPUs draw different numbers from a seed.
        """
        sizes = (module.in_features, module.out_features)
        noise = []
        for seed in seeds.tolist():
            generator = torch.Generator(device).manual_seed(seed)
            noise.append(torch.randn(self.rule.noise_rank, sum(sizes), generator=generator, device=device))
        g_in, g_out = torch.stack(noise).split(sizes, dim=-1)
        return g_in, g_out


@torch.no_grad()
def update_norm(module: LoraLayer, adapter: str) -> torch.Tensor:
    """Return the Frobenius norm of (alpha / r) B A, from its factors."""
    a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    if a.dim() != 2 or b.dim() != 2:
        raise UserError("Weight noise does not support ZeRO-3, which shards the factors.")
    with torch.autocast(a.device.type, enabled=False):
        a, b = (factor.to(torch.promote_types(factor.dtype, torch.float32)) for factor in (a, b))
        energy = ((b.T @ b) * (a @ a.T)).sum()  # trace(B'B AA'), from matrices [r, r] instead of B A [out, in]
    return energy.clamp(min=0).sqrt() * module.scaling[adapter]
