"""A plain decoder, all of whose layers form the recurrent block: what Ouro and Nanbeige share."""

from __future__ import annotations

from typing import Any

from torch import nn

from loopdropout_trainer.models.layers import ExactRotaryEmbedding, GatedMLP, RMSNorm, SelfAttention
from loopdropout_trainer.models.looped_modeling import (
    LoopedBackbone,
    LoopedConfigMixin,
    LoopedForCausalLM,
    RecurrentLayer,
)


class DecoderConfigMixin(LoopedConfigMixin):
    """Saves RoPE under the names that the published files have, and all readers know."""

    def hub_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        rope = dict(fields.pop("rope_parameters"))
        theta = rope.pop("rope_theta")
        return {**fields, "rope_theta": theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}


class DecoderLayer(RecurrentLayer):
    """Llama's layer: x = x + Attn(N1 x);  x = x + MLP(N2 x).

    Args:
        config: with the fields of transformers' Llama.
        layer_idx: layer of the cache that holds its keys.

    Class attributes:
        norms_heads: see `SelfAttention`.
    """

    norms_heads = False

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer_idx, self.norms_heads)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def layer_forward(self, hidden_states, **kwargs):
        attention, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attention
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DecoderBackbone(LoopedBackbone):
    """Embeddings, the recurrent layers, and a norm. A subclass names its layers, and calls `post_init`."""

    layer_class: type[DecoderLayer]

    def __init__(self, config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = (self.layer_class(config, index) for index in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = ExactRotaryEmbedding(config)

    def recurrent_layers(self) -> nn.ModuleList:
        return self.layers


class DecoderForCausalLM(LoopedForCausalLM):
    """The decoder with its head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
