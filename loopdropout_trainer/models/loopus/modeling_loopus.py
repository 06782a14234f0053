"""LoopUS: a Qwen3 decoder cut into encoder, reasoning stack and decoder; the reasoning stack is looped.

    x_0 = encoder(embed[ids]);   for t = 1..K:  y = reasoning(x_{t-1}),  x_t = a * y + (1 - a) * x_{t-1}
    readout of loop t = norm(decoder(x_t));   logits = lm_head(readout)

The selective gate gives a = exp(-delta * exp(A_log)), delta = softplus(W_2 W_1 (y - x_{t-1}) + b), elementwise: it mixes the
reasoning stack's answer with the state that went in.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from loopdropout_trainer.looped import LoopState
from loopdropout_trainer.models.layers import PROJECTIONS, GatedMLP, RMSNorm, SelfAttention, StaysFloat32
from loopdropout_trainer.models.looped_modeling import (
    LoopedBackbone,
    LoopedForCausalLM,
    LoopedPreTrainedModel,
    LoopInputs,
    RecurrentLayer,
    every_run,
)
from loopdropout_trainer.models.loopus.configuration_loopus import LoopusConfig
from loopdropout_trainer.models.rotary import ExactRotaryEmbedding


class LoopusLayer(RecurrentLayer):
    """A Qwen3 layer of any of the three stacks."""

    def __init__(self, config: LoopusConfig, layer_idx: int, loop_state: LoopState) -> None:
        super().__init__()
        self.loop_state = loop_state
        self.self_attn = SelfAttention(config, layer_idx, functools.partial(RMSNorm, eps=config.rms_norm_eps))
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def layer_forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attention
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class HaltingHead(StaysFloat32, nn.Sequential):
    """A norm and a projection to one logit."""


class SelectiveGate(StaysFloat32, GradientCheckpointingLayer):
    """The learned mixer of the reasoning stack's answer and the state before it. Always computed in its own float32."""

    def __init__(self, config: LoopusConfig) -> None:
        super().__init__()
        rank = math.ceil(config.hidden_size / 16)
        self.A_log = nn.Parameter(torch.zeros(config.hidden_size, dtype=torch.float32))
        self.dt_input_proj = nn.Linear(config.hidden_size, rank, bias=False, dtype=torch.float32)
        self.delta_proj = nn.Linear(rank, config.hidden_size, dtype=torch.float32)

    def forward(self, answer: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return x_t [B, S, H] for the stack's answer y and the state x_{t-1} before it."""
        dtype = self.A_log.dtype
        with torch.autocast(state.device.type, enabled=False):
            y, x = answer.to(dtype), state.to(dtype)
            delta = F.softplus(self.delta_proj(self.dt_input_proj(y - x)))
            a = torch.exp(-delta * torch.exp(self.A_log))
            return (a * y + (1 - a) * x).to(answer.dtype)


class LoopusStack(nn.Module):
    """Consecutive layers of the base model; numbered from 0 in each stack."""

    def __init__(self, config: LoopusConfig, cache_layers: range, loop_state: LoopState) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoopusLayer(config, index, loop_state) for index in cache_layers)

    def run(self, hidden_states: torch.Tensor, inputs: LoopInputs, **layer_kwargs) -> torch.Tensor:
        """Return the hidden states [B, S, H] after all layers."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, **inputs.layer_arguments(), **layer_kwargs)
        return hidden_states


class LoopusPreTrainedModel(LoopedPreTrainedModel):
    config: LoopusConfig
    config_class = LoopusConfig
    base_model_prefix = "model"
    _no_split_modules = ["LoopusLayer"]
    _can_record_outputs = {"hidden_states": every_run(LoopusLayer), "attentions": SelfAttention}
    _keep_in_fp32_modules_strict = ["reasoning.gate", "q_head", "model.reasoning.gate", "model.q_head"]
    _keep_in_fp32_modules = _keep_in_fp32_modules_strict  # what quantisers leave alone, by names from the root

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SelectiveGate):
            init.zeros_(module.A_log)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load a model; arguments as in transformers."""
        # Old files say `plateau` for `reasoning`, and `.module` may be left over from a wrapper.
        old_names = {r"^(model\.)?plateau\.": "reasoning.", r"\.module\.": "."}
        loaded = super().from_pretrained(*args, **{"key_mapping": old_names, **kwargs})
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._weight_conversions = None  # else saving would bring the old names back
        return loaded

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base_model.encoder.embed_tokens = value


class LoopusModel(LoopusPreTrainedModel, LoopedBackbone):
    """The looped backbone; its keys are the hub's. The decoder stack, which runs once, makes a loop's readout of its state."""

    readout_attends = True

    def __init__(self, config: LoopusConfig) -> None:
        super().__init__(config)
        encoder, decoder = len(config.encoder_layer_indices or ()), len(config.decoder_layer_indices or ())
        cache_layers = range(config.num_hidden_layers)  # those outside of the loop come first
        self.encoder = LoopusStack(config, cache_layers[:encoder], self.loop_state)
        self.reasoning = LoopusStack(config, cache_layers[encoder + decoder :], self.loop_state)
        self.decoder = LoopusStack(config, cache_layers[encoder : encoder + decoder], self.loop_state)
        self.encoder.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.reasoning.gate = SelectiveGate(config)
        self.decoder.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.decoder.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.q_head = HaltingHead(  # kept for the checkpoint; see halting_probabilities
            nn.LayerNorm(config.hidden_size, eps=1e-5, dtype=torch.float32),
            nn.Linear(config.hidden_size, 1, dtype=torch.float32),
        )
        self.rotary_emb = ExactRotaryEmbedding(config)
        self.post_init()

    def recurrent_names(self) -> list[str]:
        layers = range(len(self.reasoning.layers))
        return [f"reasoning.layers.{layer}.{name}" for layer in layers for name in PROJECTIONS]

    def layer_counts(self) -> tuple[int, int]:
        return len(self.encoder.layers) + len(self.decoder.layers), len(self.reasoning.layers)

    def run_prelude(self, inputs: LoopInputs, initial_state: torch.Tensor | None, **layer_kwargs) -> LoopInputs:
        encoded = self.encoder.run(inputs.state, inputs, **layer_kwargs)
        return super().run_prelude(replace(inputs, state=encoded), initial_state)

    def recurrent_step(self, inputs: LoopInputs, loop: int, **layer_kwargs) -> torch.Tensor:
        answer = self.reasoning.run(inputs.state, inputs, **layer_kwargs)
        return self.reasoning.gate(answer, inputs.state)

    def readout(self, inputs: LoopInputs, **layer_kwargs) -> torch.Tensor:
        return self.decoder.norm(self.decoder.run(inputs.state, inputs, **layer_kwargs))

    def halting_probabilities(
        self, loop_states: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the halting head's probability of stopping after each loop, [K, B], read at each row's last token.

        Nothing in this package stops by it.

        Args:
            loop_states: K states [B, S, H], from `output_readouts=True`.
            attention_mask: [B, S], 0 on padding.
        """
        states = torch.stack(loop_states).to(self.q_head[1].weight.dtype)  # [K, B, S, H]
        last = torch.full(states.shape[1:2], states.shape[2] - 1, device=states.device)
        if attention_mask is not None:
            last = (attention_mask * torch.arange(states.shape[2], device=states.device)).argmax(-1)
        return torch.sigmoid(self.q_head(states[:, torch.arange(len(last)), last]).squeeze(-1))


class LoopusForCausalLM(LoopusPreTrainedModel, LoopedForCausalLM):
    """LoopUS with its head."""

    _tied_weights_keys = {}

    def __init__(self, config: LoopusConfig) -> None:
        super().__init__(config)
        self.model = LoopusModel(config)
        self.vocab_size = config.vocab_size
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.model.decoder.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.decoder.lm_head = value

    # The hub's checkpoints hold the backbone's keys.

    def hub_weights(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.removeprefix("model."): tensor for name, tensor in weights.items()}

    def accept_hub_weights(self, weights: dict[str, torch.Tensor], prefix: str) -> None:
        for name in list(weights):
            key = name.removeprefix(prefix).replace(".module.", ".")
            if name.startswith(prefix) and not key.startswith("model."):
                key = key.replace("plateau.", "reasoning.", 1) if key.startswith("plateau.") else key
                weights[f"{prefix}model.{key}"] = weights.pop(name)
