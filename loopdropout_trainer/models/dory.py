"""Dory of transformers 5.24 and newer: input layers, K loops of the recurrent layers, and output layers.

    h = input_layers(embed(ids));  e = n(h);   for t = 1..K:  h = recurrent_layers(n(h) + e)
    logits = logit_scale / s_0 * (W n(output_layers(h))),   n(x) = x / |x|,   with one scale for each token of the vocabulary

The readout of loop t is that of a run with t loops. Queries are scaled for each channel after RoPE, so that absolute positions
matter. Published checkpoints list the attention and the MLP of a layer as two blocks, in weights and in configurations.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DoryForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import LayerPairCollapse, WeightRenaming
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.models.dory.modeling_dory import DoryLMHead

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.backbone import count_positions
from loopdropout_trainer.models.external import LoopDescription, register_looped
from loopdropout_trainer.models.looped_modeling import accept_cache_names


class DoryLoops(LoopDescription):
    """Loops of Dory."""

    depth_field = "n_recurrent_loops"

    def add_hooks(self) -> None:
        super().add_hooks()
        self.add_hook(self.base_model, accept_cache_names, prepend=True)
        self.add_hook(self.base_model, _complete_inputs)

    def recurrent_layers(self) -> list[nn.Module]:
        first = self.config.n_input_layers
        return list(self.base_model.layers[first : first + self.config.n_recurrent_layers])

    def running_loop(self, cache_offset: int = 0, **kwargs: Any) -> int:
        config = self.config
        if config.recurrent_kv_cache_mode != "per_loop":
            raise UserError(
                f"`recurrent_kv_cache_mode` must be 'per_loop', got {config.recurrent_kv_cache_mode!r}, in which loops cannot "
                "be told apart. Without a cache both modes give the same output."
            )
        return max(0, (cache_offset - config.n_output_layers) // config.n_recurrent_layers)

    def prepare_fused_loss(self) -> None:
        if is_deepspeed_zero3_enabled():
            raise UserError(
                "ZeRO-3 does not support Dory, whose head computes with two parameters. Use ZeRO-2 or FSDP2."
            )
        self.get_output_embeddings().__class__ = ScaledHead

    def detach(self) -> None:
        super().detach()
        self.get_output_embeddings().__class__ = DoryLMHead


_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache")  # of the backbone


def _complete_inputs(backbone: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of the backbone: count positions from the first token that is not padding, and check the cache."""
    inputs = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    mask, positions, cache = (inputs.get(name) for name in ("attention_mask", "position_ids", "cache"))
    config = backbone.config
    num_layers = config.num_hidden_layers + (config.n_recurrent_loops - 1) * config.n_recurrent_layers
    if cache is not None and len(cache.layers) not in (0, num_layers) and cache.get_seq_length() > 0:
        raise UserError(
            f"`cache` must have {num_layers} layers, got {len(cache.layers)}. After a change of the depth, start with a new "
            "cache."
        )
    if positions is None and torch.is_tensor(mask) and mask.dim() == 2:
        tokens = inputs.get("input_ids")  # [B, S]
        if tokens is None:
            tokens = inputs["inputs_embeds"]  # [B, S, H]
        inputs["position_ids"] = count_positions(mask, tokens.shape[1])
    elif positions is not None and mask is None and cache is None and inputs.get("use_cache") is None:
        inputs["use_cache"] = False  # transformers separates packed examples only without a cache
    return (), inputs


class ScaledHead(DoryLMHead):
    """Dory's head with the scale of each token as a part of `weight`. Its parameters and its output stay the same.

    Fused losses, such as TRL's, multiply by `weight` and ignore `logit_scale`.
    """

    @property
    def scale(self) -> Tensor:
        """Factor of each token's logit, [V]."""
        return self.logit_scale.float() * self.logit_scale_factor

    @property
    def unscaled(self) -> Tensor:
        """The parameter `weight`, [V, H]."""
        return dict(self.named_parameters())["weight"]

    @property
    def weight(self) -> Tensor:
        return (self.unscaled * self.scale.unsqueeze(1)).to(self.unscaled.dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, self.unscaled).float() * self.scale


class LayerPairs(LayerPairCollapse):
    """transformers' renaming of published weights, which joins the two blocks of a layer, with its reverse."""

    __slots__ = ()

    def reverse_transform(self) -> WeightRenaming:
        return LayerBlocks()


class LayerBlocks(WeightRenaming):
    """Renaming of a layer's weights to its two blocks, such as `layers.3.mlp.up_proj` to `layers.7.mixer.up_proj`."""

    __slots__ = ()
    pattern = re.compile(r"layers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)(?=\.|$)")

    def __init__(self) -> None:
        super().__init__(source_patterns=r"layers\.(\d+)", target_patterns=r"layers.\1")

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.pattern.sub(self._block, source_key), None

    @staticmethod
    def _block(match: re.Match[str]) -> str:
        layer, part = int(match[1]), match[2]
        block = 2 * layer
        if part in ("mlp", "lambda_2"):  # the second block of the layer
            block += 1
        published = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}.get(part, "mixer")
        return f"layers.{block}.{published}"


# transformers 5.24 would save weights under names that are neither the published ones nor its own.
_STEPS = get_checkpoint_conversion_mapping("dory")
_STEPS = [LayerPairs() if isinstance(step, LayerPairCollapse) else step for step in _STEPS]
register_checkpoint_conversion_mapping("dory", _STEPS, overwrite=True)
register_looped(DoryForCausalLM, DoryLoops)
