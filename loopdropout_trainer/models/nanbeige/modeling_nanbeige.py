"""Nanbeige: all decoder layers form the recurrent block; the final norm ends every loop.

    x = embed(ids);   for t = 1..K:  x = norm(layers(x));   readout of loop t = x_t;   logits = lm_head(x_K)

A layer is Llama's, with fewer key and value heads, and heads that together are wider than the hidden state:

    x = x + Attn(N1 x);   x = x + MLP(N2 x)

With `skip_loop_final_norm` the norm belongs to the readout only: x = layers(x), readout of loop t = norm(x_t).
"""

from __future__ import annotations

import torch
from torch import nn

from loopdropout_trainer.looped import LoopState
from loopdropout_trainer.models.layers import PROJECTIONS, GatedMLP, RMSNorm, SelfAttention
from loopdropout_trainer.models.looped_modeling import (
    LoopedBackbone,
    LoopedForCausalLM,
    LoopedPreTrainedModel,
    LoopInputs,
    RecurrentLayer,
    every_run,
)
from loopdropout_trainer.models.nanbeige.configuration_nanbeige import NanbeigeConfig
from loopdropout_trainer.models.rotary import rotations


class NanbeigeDecoderLayer(RecurrentLayer):
    """One layer of the recurrent block."""

    def __init__(self, config: NanbeigeConfig, layer_idx: int, loop_state: LoopState) -> None:
        super().__init__()
        self.loop_state = loop_state
        self.self_attn = SelfAttention(config, layer_idx)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def layer_forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attention
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class NanbeigePreTrainedModel(LoopedPreTrainedModel):
    config: NanbeigeConfig
    config_class = NanbeigeConfig
    base_model_prefix = "model"
    _no_split_modules = ["NanbeigeDecoderLayer"]
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq$"]
    _can_record_outputs = {"hidden_states": every_run(NanbeigeDecoderLayer), "attentions": SelfAttention}


class NanbeigeModel(NanbeigePreTrainedModel, LoopedBackbone):
    """The looped backbone."""

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            NanbeigeDecoderLayer(config, layer_idx, self.loop_state) for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def recurrent_names(self) -> list[str]:
        return [f"layers.{layer}.{name}" for layer in range(len(self.layers)) for name in PROJECTIONS]

    def layer_counts(self) -> tuple[int, int]:
        return 0, len(self.layers)

    def rotate(self, embeddings: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotations(self.config, position_ids, embeddings.dtype)

    def recurrent_step(self, inputs: LoopInputs, loop: int, **layer_kwargs) -> torch.Tensor:
        hidden_states = inputs.state
        for layer in self.layers:
            hidden_states = layer(hidden_states, **inputs.layer_arguments(), **layer_kwargs)
        return hidden_states if self.config.skip_loop_final_norm else self.norm(hidden_states)

    def readout(self, inputs: LoopInputs, **layer_kwargs) -> torch.Tensor:
        return self.norm(inputs.state) if self.config.skip_loop_final_norm else inputs.state


class NanbeigeForCausalLM(NanbeigePreTrainedModel, LoopedForCausalLM):
    """Nanbeige with its head. Logits are float32."""

    float32_logits = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__(config)
        self.model = NanbeigeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
