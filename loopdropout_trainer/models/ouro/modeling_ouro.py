"""Ouro: all decoder layers form the recurrent block, applied K times; the normed state is what the next loop starts from.

    x = embed(ids);   for t = 1..K:  x = norm(layers(x));   readout of loop t = x_t;   logits = lm_head(x_K)

A layer normalises before and after each sublayer, inside the residual branch:

    x = x + N2(Attn(N1 x));   x = x + N4(MLP(N3 x))
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
from loopdropout_trainer.models.operations import recomputable
from loopdropout_trainer.models.ouro.configuration_ouro import OuroConfig
from loopdropout_trainer.models.rotary import ExactRotaryEmbedding


class OuroDecoderLayer(RecurrentLayer):
    """One layer of the recurrent block."""

    def __init__(self, config: OuroConfig, layer_idx: int, loop_state: LoopState) -> None:
        super().__init__()
        self.loop_state = loop_state
        self.self_attn = SelfAttention(config, layer_idx)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm_2 = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm_2 = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def layer_forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = recomputable(torch.add, hidden_states, self.input_layernorm_2(attention))
        feed_forward = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.post_attention_layernorm_2(feed_forward)


class OuroPreTrainedModel(LoopedPreTrainedModel):
    config: OuroConfig
    config_class = OuroConfig
    base_model_prefix = "model"
    _no_split_modules = ["OuroDecoderLayer"]
    _can_record_outputs = {"hidden_states": every_run(OuroDecoderLayer), "attentions": SelfAttention}


class OuroModel(OuroPreTrainedModel, LoopedBackbone):
    """The looped backbone. The normed state is carried on, and it is the readout."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            OuroDecoderLayer(config, layer_idx, self.loop_state) for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = ExactRotaryEmbedding(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)  # kept for the checkpoint; see exit_distribution
        self.post_init()

    def recurrent_names(self) -> list[str]:
        return [f"layers.{layer}.{name}" for layer in range(len(self.layers)) for name in PROJECTIONS]

    def layer_counts(self) -> tuple[int, int]:
        return 0, len(self.layers)

    def recurrent_step(self, inputs: LoopInputs, loop: int, **layer_kwargs) -> torch.Tensor:
        hidden_states = inputs.state
        for layer in self.layers:
            hidden_states = layer(hidden_states, **inputs.layer_arguments(), **layer_kwargs)
        return self.norm(hidden_states)

    def exit_distribution(self, readouts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the exit gate's distribution over loops, [B, S, K], for K readouts [B, S, H].

        Nothing in this package exits by it. The published code mixes the loops' losses with it when it is given labels.
        """
        stop = torch.sigmoid(torch.stack([self.early_exit_gate(readout).squeeze(-1) for readout in readouts], dim=-1))
        survived = torch.cumprod(1 - stop, dim=-1)  # probability of not having stopped after loop t
        reached = torch.cat([torch.ones_like(survived[..., :1]), survived[..., :-1]], dim=-1)
        return torch.cat([(reached * stop)[..., :-1], reached[..., -1:]], dim=-1)


class OuroForCausalLM(OuroPreTrainedModel, LoopedForCausalLM):
    """Ouro with its head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.model = OuroModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
