"""Independent adapters: y = W x + g[t, b] * (alpha / r) * B_t A_t x, a pair of factors for each loop.

The K pairs are one parameter [K, out, in] for each factor under PEFT's names. PEFT alone raises an error for their shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.lora.gated import GatedLora, adapted_layers


class LoopFactors(nn.Module):
    """Factors A or B of all loops, with `weight` [K, out, in]."""

    def __init__(self, factors: Sequence[Tensor], requires_grad: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack(factors), requires_grad)

    def forward(self, x: Tensor, loop: int | None = None) -> Tensor:
        """Apply the factor of a loop to `x` [..., in] in its dtype."""
        if loop is None:
            raise UserError("Factors for each loop need a gated model. Load the adapter with `load_adapter`.")
        if loop >= len(self.weight):
            raise UserError(
                f"The adapter has factors for {len(self.weight)} loops, but loop {loop + 1} runs. Restore `config.num_loops`."
            )
        return F.linear(x, self.weight[loop].to(x.dtype))


class PerLoopLora(GatedLora, kind="per_loop"):
    """A gated layer with separate factors for each loop."""

    description = "a pair of factors for each loop"
    one_depth = True

    @classmethod
    def is_on(cls, model: PeftModel, adapter: str) -> bool:
        factors = (layer.lora_A[adapter] for layer in adapted_layers(model) if adapter in layer.lora_A)
        return any(isinstance(factor, LoopFactors) for factor in factors)

    @classmethod
    def saved_num_loops(cls, weights: Mapping[str, Tensor]) -> int | None:
        return next((len(factors) for factors in weights.values() if factors.dim() == 3), None)

    @classmethod
    def prepare(cls, model: PeftModel, adapter: str, num_loops: int, seed: int) -> None:
        init = model.peft_config[adapter].init_lora_weights
        if init not in (True, "gaussian"):
            raise UserError(
                f"`init_lora_weights` must be True or 'gaussian' with a pair of factors for each loop, got {init!r}."
            )
        # A seed of its own, so that all processes draw the same factors. The global random state stays as it was, so that the
        # order of the data does not depend on the kind of adapter.
        digest = hashlib.blake2b(f"independent adapters {seed}".encode(), digest_size=7).digest()
        with torch.random.fork_rng():
            torch.manual_seed(int.from_bytes(digest, "little"))
            for layer in adapted_layers(model):
                if adapter not in layer.lora_A or isinstance(layer.lora_A[adapter], LoopFactors):
                    continue
                factors_a, factors_b = [], []
                for loop in range(num_loops):
                    if loop > 0:  # loop 1 has the factors that PEFT has drawn
                        layer.reset_lora_parameters(adapter, init)
                    factors_a.append(layer.lora_A[adapter].weight.detach().clone())
                    factors_b.append(layer.lora_B[adapter].weight.detach().clone())
                # Their weights are [K, r, in] and [K, out, r].
                layer.lora_A[adapter] = LoopFactors(factors_a, layer.lora_A[adapter].weight.requires_grad)
                layer.lora_B[adapter] = LoopFactors(factors_b, layer.lora_B[adapter].weight.requires_grad)

    def down(self, module: LoraLayer, adapter: str, x: Tensor) -> Tensor:
        return module.lora_A[adapter](x, self.gate_state.loop)

    def up(self, module: LoraLayer, adapter: str, low_rank: Tensor) -> Tensor:
        return module.lora_B[adapter](low_rank, self.gate_state.loop)

    @classmethod
    def check_mergeable(cls, weights: Mapping[str, Tensor]) -> None:
        raise UserError(
            "Independent adapters cannot be merged, since each loop has a different update. Keep the adapter, or train a "
            "shared adapter."
        )

    def merged_update(self, module: LoraLayer, adapter: str) -> Tensor:
        self.check_mergeable({})  # which always raises an error
