"""LoopUS: a Qwen3 decoder cut into encoder, reasoning stack and decoder; the reasoning stack is looped.

    x_0 = encoder(embed[ids]);   for t = 1..K:  y = reasoning(x_{t-1}),  x_t = a * y + (1 - a) * x_{t-1}
    readout of loop t = norm(decoder(x_t));   logits = lm_head(readout)

The selective gate gives a = exp(-delta * exp(A_log)), delta = softplus(W_2 W_1 (y - x_{t-1}) + b), elementwise: it mixes the
reasoning stack's answer with the state that went in.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, Qwen3Config
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.backbone import LoopedBackbone, LoopInputs
from loopdropout_trainer.models.layers import DecoderLayer, ExactRotaryEmbedding, RMSNorm, StaysFloat32
from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin, LoopedForCausalLM, LoopedPreTrainedModel


_COMMON_FIELDS = {field.name for field in fields(PreTrainedConfig)}
_QWEN3_FIELDS = [field.name for field in fields(Qwen3Config) if field.init and field.name not in _COMMON_FIELDS]


@strict
class LoopusConfig(LoopedConfigMixin, Qwen3Config):
    """Configuration of a LoopUS model: the fields of `Qwen3Config`, and those below.

    The hub nests the Qwen3 fields in `base_config_dict`. Here they are the configuration's own fields; `base_config_dict`
    is read if given, and written when the configuration is saved.

    `N` is the recurrence depth K, also readable and settable as `num_loops`, on a loaded model too: every forward runs
    exactly K loops. The hub's `q_threshold`, `q_eval_interval`, `halting_strategy` and `convergence_epsilon` say when the
    published code stops early; they are stored and never acted upon.

    Args:
        encoder_layer_indices, reasoning_layer_indices, decoder_layer_indices: base layers of each stack, a partition of
            0 .. `num_hidden_layers` - 1. Default: the first two, all others, the last.
        backprop_depth: number of last loops that gradients flow through; None: all of them.
        lma_window: only 0, no attention over the states of the last loops, is implemented.
    """

    model_type = "lds"
    attribute_map = {"num_loops": "N"}
    base_model_tp_plan = {}

    base_config_dict: dict | None = None
    base_model_name_or_path: str | None = None
    encoder_layer_indices: list[int] | None = None
    reasoning_layer_indices: list[int] | None = None
    decoder_layer_indices: list[int] | None = None
    N: int = 6
    q_threshold: float = 0.9
    q_eval_interval: int = 1
    halting_strategy: str = "threshold"
    convergence_epsilon: float = 1e-2
    backprop_depth: int | None = None
    lma_window: int = 0

    def __post_init__(self, **kwargs):
        if self.base_config_dict is not None:
            nested = dict(self.base_config_dict)
            if (base_type := nested.pop("model_type", "qwen3")) != "qwen3":
                raise UserError(f"LoopUS is implemented over Qwen3; `base_config_dict` is of a {base_type!r} model.")
            base = Qwen3Config(**nested)
            for name in _QWEN3_FIELDS:
                if name in nested or name == "rope_parameters":
                    setattr(self, name, getattr(base, name))
        self.tie_word_embeddings = False  # embedding and head are two tensors, whatever the base model had
        layers = list(range(self.num_hidden_layers))
        if (self.encoder_layer_indices, self.reasoning_layer_indices, self.decoder_layer_indices) == (
            None,
            None,
            None,
        ):
            first = min(2, max(len(layers) - 2, 0))
            self.encoder_layer_indices = layers[:first]
            self.decoder_layer_indices = layers[-1:]
            self.reasoning_layer_indices = layers[first:-1]
        super().__post_init__(**kwargs)
        encoder = self.encoder_layer_indices or []
        looped = self.reasoning_layer_indices or []
        decoder = self.decoder_layer_indices or []
        if sorted(encoder + looped + decoder) != layers or not looped:
            raise UserError(
                "`encoder_layer_indices`, `reasoning_layer_indices`, `decoder_layer_indices` must share the "
                f"{len(layers)} base layers among them, with at least one to loop; got {encoder}, {looped}, {decoder}."
            )
        if self.use_sliding_window or set(self.layer_types) != {"full_attention"}:
            raise UserError("Only full attention is implemented for LoopUS; set `use_sliding_window` to false.")
        if self.lma_window:
            raise UserError(
                f"`lma_window` {self.lma_window}, attention over the last loops' states, is not implemented."
            )

    @property
    def num_recurrent_layers(self) -> int:
        return len(self.reasoning_layer_indices)

    def nested(self) -> dict[str, Any]:
        """Return `base_config_dict` with the present values."""
        present = {name: getattr(self, name) for name in _QWEN3_FIELDS if name != "use_cache"}  # off in training
        stored = self.base_config_dict
        if stored is None:
            return Qwen3Config(**present).to_dict()
        return {name: value if "rope" in name else present.get(name, value) for name, value in stored.items()}

    def hub_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        saved = {name: value for name, value in fields.items() if name not in _QWEN3_FIELDS}
        sizes = {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}
        return {**saved, "base_config_dict": self.nested(), "architectures": ["LDSForCausalLM"], **sizes}


class LoopusLayer(DecoderLayer):
    """A Qwen3 layer of any of the three stacks: Llama's, with normed heads."""

    norms_heads = True


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

    def forward(self, answer: Tensor, state: Tensor) -> Tensor:
        """Return x_t [B, S, H] for the stack's answer y and the state x_{t-1} before it."""
        dtype = self.A_log.dtype
        with torch.autocast(state.device.type, enabled=False):
            y = answer.to(dtype)
            x = state.to(dtype)
            delta = F.softplus(self.delta_proj(self.dt_input_proj(y - x)))
            a = torch.exp(-delta * torch.exp(self.A_log))
            return (a * y + (1 - a) * x).to(answer.dtype)


class LoopusStack(nn.Module):
    """Consecutive layers of the base model; numbered from 0 in each stack."""

    def __init__(self, config: LoopusConfig, cache_layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoopusLayer(config, index) for index in cache_layers)


class LoopusPreTrainedModel(LoopedPreTrainedModel):
    config_class = LoopusConfig
    _no_split_modules = ["LoopusLayer"]
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
        encoder = len(config.encoder_layer_indices or ())
        decoder = len(config.decoder_layer_indices or ())
        cache_layers = range(config.num_hidden_layers)  # those outside of the loop come first
        self.encoder = LoopusStack(config, cache_layers[:encoder])
        self.reasoning = LoopusStack(config, cache_layers[encoder + decoder :])
        self.decoder = LoopusStack(config, cache_layers[encoder : encoder + decoder])
        self.encoder.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.reasoning.gate = SelectiveGate(config)
        self.decoder.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.decoder.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.q_head = HaltingHead(  # kept for the checkpoint; nothing reads it
            nn.LayerNorm(config.hidden_size, eps=1e-5, dtype=torch.float32),
            nn.Linear(config.hidden_size, 1, dtype=torch.float32),
        )
        self.rotary_emb = ExactRotaryEmbedding(config)
        self.post_init()

    def recurrent_layers(self) -> nn.ModuleList:
        return self.reasoning.layers

    def run_prelude(self, inputs: LoopInputs, initial_state: Tensor | None, **layer_kwargs) -> LoopInputs:
        encoded = inputs.run(self.encoder.layers, **layer_kwargs)
        return super().run_prelude(replace(inputs, state=encoded), initial_state)

    def recurrent_step(self, inputs: LoopInputs, **layer_kwargs) -> Tensor:
        return self.reasoning.gate(inputs.run(self.reasoning.layers, **layer_kwargs), inputs.state)

    def readout(self, inputs: LoopInputs, **layer_kwargs) -> Tensor:
        return self.decoder.norm(inputs.run(self.decoder.layers, **layer_kwargs))


class LoopusForCausalLM(LoopusPreTrainedModel, LoopedForCausalLM):
    """LoopUS with its head."""

    backbone_class = LoopusModel
    _tied_weights_keys = {}

    def get_output_embeddings(self) -> nn.Module:
        return self.model.decoder.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.decoder.lm_head = value

    # The hub's checkpoints hold the backbone's keys.

    def hub_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("model."): tensor for name, tensor in weights.items()}

    def accept_hub_weights(self, weights: dict[str, Tensor], prefix: str, *_: Any) -> None:
        for name in [name for name in weights if name.startswith(prefix)]:
            key = re.sub(r"^plateau\.", "reasoning.", name.removeprefix(prefix).replace(".module.", "."))
            if not key.startswith("model."):
                weights[f"{prefix}model.{key}"] = weights.pop(name)
