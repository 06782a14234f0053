"""Nanbeige: all decoder layers form the recurrent block, and the final norm ends each loop.

    x = embed(ids),   for t = 1..K:  x = norm(layers(x)),   readout of loop t = x_t,   logits = lm_head(x_K)

A layer is Llama's, with fewer key and value heads, and with heads that together are wider than the hidden state. With
`skip_loop_final_norm` the norm is part of the readout alone: x = layers(x), readout of loop t = norm(x_t).
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import LlamaConfig

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.backbone import DecoderBackbone
from loopdropout_trainer.models.layers import DecoderLayer
from loopdropout_trainer.models.looped_modeling import DecoderConfigMixin, DecoderForCausalLM
from loopdropout_trainer.models.passes import LoopInputs


# Fields of the published code that switch on another architecture. So does every field `enable_...`.
_SWITCHES = {
    *("attention_bias", "mlp_bias", "qk_layernorm", "emb_neighbor_num", "emb_split_num", "insert_ngram_layer_idx"),
    *("ngram_vocab_size_ratio", "loop_middle_layers", "loop_share_kv", "rope_scaling"),
}


@strict
class NanbeigeConfig(DecoderConfigMixin, LlamaConfig):
    """Configuration of a Nanbeige model. It has Llama's fields, with the published defaults, and the following.

    Args:
        num_loops: Recurrence depth K. You can set it on a loaded model.
        loop_loss_weights: Weights of the loops' losses in pretraining. A list sets K to its length + 1. It is not used
            otherwise, and not saved if K was changed.
        skip_loop_final_norm: Whether the state before the final norm is carried from loop to loop.
    """

    model_type = "nanbeige"

    kv_channels: int | None = None
    num_loops: int = 1
    loop_loss_weights: list[float] | None = None
    skip_loop_final_norm: bool = False

    def __post_init__(self, **kwargs):
        self.head_dim = self.head_dim or self.kv_channels
        if self.loop_loss_weights:
            self.num_loops = len(self.loop_loss_weights) + 1
        super().__post_init__(**kwargs)
        scales_rope = self.rope_parameters["rope_type"] != "default"
        for name, value in {**vars(self), "rope_scaling": scales_rope}.items():
            if value and (name in _SWITCHES or name.startswith("enable_")):
                raise UserError(f"`{name}` must be off for Nanbeige, because its architecture is not supported.")
        if self.kv_channels not in (None, self.head_dim):
            raise UserError(f"`kv_channels` must equal `head_dim` = {self.head_dim}, got {self.kv_channels}.")

    def validate_architecture(self) -> None:
        """Accept heads of any width. Llama's check requires a hidden size that is a multiple of their number."""

    def published_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        fields = super().published_fields(fields)
        if self.loop_loss_weights and self.num_loops != len(self.loop_loss_weights) + 1:
            fields["loop_loss_weights"] = []
        return fields


class NanbeigeDecoderLayer(DecoderLayer):
    """Layer of the recurrent block."""


class NanbeigeModel(DecoderBackbone):
    """Backbone of Nanbeige."""

    config_class = NanbeigeConfig
    layer_class = NanbeigeDecoderLayer
    _no_split_modules = ["NanbeigeDecoderLayer"]

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__(config)
        self.post_init()

    def recurrent_step(self, inputs: LoopInputs) -> Tensor:
        hidden_states = inputs.run(self.layers)
        if self.config.skip_loop_final_norm:
            return hidden_states
        return self.norm(hidden_states)

    def readout(self, inputs: LoopInputs) -> Tensor:
        if self.config.skip_loop_final_norm:
            return self.norm(inputs.state)
        return inputs.state


class NanbeigeForCausalLM(DecoderForCausalLM):
    """Nanbeige with its head. Logits are float32."""

    config_class = NanbeigeConfig
    backbone_class = NanbeigeModel
    float32_logits = True
