"""LoopUS: a Qwen3 decoder cut into encoder, reasoning stack and decoder. The reasoning stack is looped.

    x_0 = encoder(embed[ids]),   for t = 1..K:  y = reasoning(x_{t-1}),  x_t = a * y + (1 - a) * x_{t-1}
    readout of loop t = norm(decoder(x_t)),   logits = lm_head(readout)

The selective gate mixes the output of the reasoning stack with its input, elementwise: a = exp(-delta * exp(A_log)),
delta = softplus(W_2 W_1 (y - x_{t-1}) + b).
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.backbone import LoopedBackbone
from loopdropout_trainer.models.layers import DecoderLayer, ExactRotaryEmbedding, RMSNorm, StaysFloat32
from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin, LoopedForCausalLM, LoopedPreTrainedModel
from loopdropout_trainer.models.passes import LoopInputs


_COMMON_FIELDS = {field.name for field in fields(PreTrainedConfig)}
_QWEN3_FIELDS = [field.name for field in fields(Qwen3Config) if field.init and field.name not in _COMMON_FIELDS]


@strict
class LoopusConfig(LoopedConfigMixin, Qwen3Config):
    """Configuration of a LoopUS model. It has Qwen3's fields and the following.

    The published fields of early stopping, such as `q_threshold`, are stored and not used: every forward pass runs K loops.

    Args:
        base_config_dict: The Qwen3 fields in the published form. They are read, and written when the model is saved.
        encoder_layer_indices: Base layers of the encoder. Default: the first two.
        reasoning_layer_indices: Base layers of the reasoning stack. Default: all other layers.
        decoder_layer_indices: Base layers of the decoder. Default: the last.
        N: Recurrence depth K, also named `num_loops`. You can set it on a loaded model.
        lma_window: Only 0 is supported, no attention over the states of the last loops.
    """

    model_type = "lds"
    attribute_map = {"num_loops": "N"}
    base_model_tp_plan = {}

    base_config_dict: dict | None = None
    encoder_layer_indices: list[int] | None = None
    reasoning_layer_indices: list[int] | None = None
    decoder_layer_indices: list[int] | None = None
    N: int = 6
    lma_window: int = 0

    def __post_init__(self, **kwargs):
        if self.base_config_dict is not None:
            self._read_base()
        self.tie_word_embeddings = False  # embedding and head are two tensors
        layers = list(range(self.num_hidden_layers))
        stacks = (self.encoder_layer_indices, self.reasoning_layer_indices, self.decoder_layer_indices)
        if stacks == (None, None, None):
            first = min(2, max(len(layers) - 2, 0))
            stacks = (layers[:first], layers[first:-1], layers[-1:])
        self.encoder_layer_indices, self.reasoning_layer_indices, self.decoder_layer_indices = stacks
        super().__post_init__(**kwargs)
        shared = []
        for stack in stacks:
            shared += stack or []
        if sorted(shared) != layers or not self.reasoning_layer_indices:
            raise UserError(
                "`encoder_layer_indices`, `reasoning_layer_indices` and `decoder_layer_indices` must share the "
                f"{len(layers)} base layers, with at least one to loop, got {stacks}."
            )
        self.check_full_attention()
        if self.lma_window:
            raise UserError(f"`lma_window` must be 0, got {self.lma_window}.")

    def _read_base(self) -> None:
        """Set the fields of Qwen3 from `base_config_dict`."""
        nested = dict(self.base_config_dict)
        base_type = nested.pop("model_type", "qwen3")
        if base_type != "qwen3":
            raise UserError(
                f"`base_config_dict` must describe a 'qwen3' model, got {base_type!r}. LoopUS over other models is not "
                "supported."
            )
        base = Qwen3Config(**nested)
        for name in _QWEN3_FIELDS:
            if name in nested or name == "rope_parameters":
                setattr(self, name, getattr(base, name))

    @property
    def num_recurrent_layers(self) -> int:
        return len(self.reasoning_layer_indices)

    def nested(self) -> dict[str, Any]:
        """Return `base_config_dict` with the present values."""
        present = {name: getattr(self, name) for name in _QWEN3_FIELDS if name != "use_cache"}  # off in training
        if self.base_config_dict is None:
            return Qwen3Config(**present).to_dict()
        nested = dict(self.base_config_dict)
        for name in nested.keys() & present.keys():
            if "rope" not in name:  # which keeps its published form
                nested[name] = present[name]
        return nested

    def published_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        saved = {name: value for name, value in fields.items() if name not in _QWEN3_FIELDS}
        sizes = {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}
        return {**saved, "base_config_dict": self.nested(), "architectures": ["LDSForCausalLM"], **sizes}


class LoopusLayer(DecoderLayer):
    """Qwen3's layer, in any of the three stacks."""

    norms_heads = True


class HaltingHead(StaysFloat32, nn.Sequential):
    """Norm and projection to one logit."""


class SelectiveGate(StaysFloat32, GradientCheckpointingLayer):
    """Learned mixer of the reasoning stack's output and input. It always computes in the type of its own weights."""

    def __init__(self, config: LoopusConfig) -> None:
        super().__init__()
        rank = math.ceil(config.hidden_size / 16)
        self.A_log = nn.Parameter(torch.zeros(config.hidden_size, dtype=torch.float32))
        self.dt_input_proj = nn.Linear(config.hidden_size, rank, bias=False, dtype=torch.float32)
        self.delta_proj = nn.Linear(rank, config.hidden_size, dtype=torch.float32)

    def forward(self, output: Tensor, state: Tensor) -> Tensor:
        """Return x_t [B, S, H] for the stack's output y and the state x_{t-1} before it."""
        dtype = self.A_log.dtype
        with torch.autocast(state.device.type, enabled=False):
            y, x = output.to(dtype), state.to(dtype)
            delta = F.softplus(self.delta_proj(self.dt_input_proj(y - x)))
            a = torch.exp(-delta * torch.exp(self.A_log))
            return (a * y + (1 - a) * x).to(output.dtype)


class LoopusStack(nn.Module):
    """Consecutive layers of the base model, numbered from 0 in each stack."""

    def __init__(self, config: LoopusConfig, cache_layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoopusLayer(config, index) for index in cache_layers)


class LoopusPreTrainedModel(LoopedPreTrainedModel):
    config_class = LoopusConfig
    _no_split_modules = ["LoopusLayer"]
    _keep_in_fp32_modules_strict = ["reasoning.gate", "q_head", "model.reasoning.gate", "model.q_head"]
    _keep_in_fp32_modules = _keep_in_fp32_modules_strict  # not quantized

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a model. It takes the arguments of transformers."""
        # Old checkpoints have `plateau` for `reasoning`, and `.module` of a wrapper.
        old_names = {r"^(model\.)?plateau\.": "reasoning.", r"\.module\.": "."}
        return super().from_pretrained(pretrained_model_name_or_path, *args, **{"key_mapping": old_names, **kwargs})

    def save_pretrained(self, save_directory, *args, **kwargs) -> None:
        """Save the model under its own names, also if the loaded file had the old ones."""
        super().save_pretrained(save_directory, *args, **{"save_original_format": False, **kwargs})

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base_model.encoder.embed_tokens = value


class LoopusModel(LoopusPreTrainedModel, LoopedBackbone):
    """Backbone of LoopUS, under the names of the published checkpoint. The decoder stack makes a loop's readout."""

    def __init__(self, config: LoopusConfig) -> None:
        super().__init__(config)
        encoder = len(config.encoder_layer_indices or ())
        decoder = len(config.decoder_layer_indices or ())
        cache_layers = range(config.num_hidden_layers)  # the loop's last
        self.encoder = LoopusStack(config, cache_layers[:encoder])
        self.reasoning = LoopusStack(config, cache_layers[encoder + decoder :])
        self.decoder = LoopusStack(config, cache_layers[encoder : encoder + decoder])
        self.encoder.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.reasoning.gate = SelectiveGate(config)
        self.decoder.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.decoder.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.q_head = HaltingHead(  # part of the checkpoint, not used
            nn.LayerNorm(config.hidden_size, eps=1e-5, dtype=torch.float32),
            nn.Linear(config.hidden_size, 1, dtype=torch.float32),
        )
        self.rotary_emb = ExactRotaryEmbedding(config)
        self.post_init()

    def get_decoder(self) -> LoopusModel:
        """Return the model that maps tokens to hidden states. Its `decoder` is only the last stack."""
        return self

    def recurrent_layers(self) -> nn.ModuleList:
        return self.reasoning.layers

    def run_prelude(self, inputs: LoopInputs) -> LoopInputs:
        return replace(inputs, state=inputs.run(self.encoder.layers))

    def recurrent_step(self, inputs: LoopInputs) -> Tensor:
        return self.reasoning.gate(inputs.run(self.reasoning.layers), inputs.state)

    def readout(self, inputs: LoopInputs) -> Tensor:
        return self.decoder.norm(inputs.run(self.decoder.layers))


class LoopusForCausalLM(LoopusPreTrainedModel, LoopedForCausalLM):
    """LoopUS with its head."""

    backbone_class = LoopusModel
    _tied_weights_keys = {}

    def get_output_embeddings(self) -> nn.Module:
        return self.model.decoder.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.decoder.lm_head = value

    # Published checkpoints hold the keys of the backbone.

    def published_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("model."): tensor for name, tensor in weights.items()}
