"""Parcae: prelude, a recurrent block that damps its state and adds the prelude's output in each loop, and coda.

    e = norm(prelude(wte[ids])),   s_0 random,   for t = 1..K:  s_t = core(a * s_{t-1} + delta * B e)
    delta = softplus(dt_bias),   a = exp(-delta * exp(A_log))
    readout of loop t = norm(coda(C s_t)),   logits = readout wte^T

A block is x = x + Attn(N1 x), x = x + MLP(N2 x). Blocks 2, 4, 6, ... add a learned embedding of the token to the attention's
values, scaled for each head by 2 sigmoid(ve_gate y) of the first 32 channels of its normalized input y.

The published config.json has `_class_name` and no `model_type` (Prairie et al. 2026, arXiv 2604.12946).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.huginn import RavenBlock
from loopdropout_trainer.models.layers import Attention, RMSNorm
from loopdropout_trainer.models.passes import LoopInputs
from loopdropout_trainer.models.prelude_coda import (
    PreludeCodaConfig,
    PreludeCodaForCausalLM,
    PreludeCodaModel,
    PreludeCodaPreTrainedModel,
    download_options,
    rotate_pairs,
    weight_names,
)


# Supported values of fields that change the architecture, and of fields of `rope_settings`.
_SUPPORTED = {
    "injection_type": ("diagonal",),
    "block_class_name": ("TransformerPreNormBlock",),
    "norm_class_name": ("RMSNorm",),
    "mlp_class_name": ("BaseMLP",),
    "nonlin_name": ("ReLU2",),
    "init_strategy": ("scaled-zero",),
    "state_init": ("like-init", "zero"),
    "mup_model_scaling_factor": (1,),
    "rope_condense_ratio": (1,),
    **dict.fromkeys(["use_rope", "qk_norm", "prelude_norm"], (True,)),
    **dict.fromkeys(["clip_qkv", "logit_softcap"], (None,)),
    **dict.fromkeys(["bias", "qk_bias"], (False,)),
}
_GATE_CHANNELS = 32


@strict
class ParcaeConfig(PreludeCodaConfig):
    """Configuration of a Parcae model. The defaults are parcae-140m's.

    Published fields that describe the pretraining, such as `sampling_scheme`, are stored and not used.

    Args:
        mean_recurrence: Recurrence depth K, also named `num_loops`. You can set it on a loaded model.
        state_init: State before the first loop, "like-init" (random) or "zero".
        state_seed: Seed of the random initial states.
    """

    model_type = "parcae"
    attribute_map = {
        **PreludeCodaConfig.attribute_map,
        "max_position_embeddings": "block_size",
        "tie_word_embeddings": "tie_embeddings",
    }
    block_layout = "llama"

    n_embd: int = 768
    num_attention_heads: int = 6
    block_size: int = 2048
    vocab_size: int = 32768
    intermediate_size: int | None = None
    recurrent_embedding_dimension: int | None = None
    recurrent_intermediation_embedding_dimension: int | None = None
    norm_eps: float = 1e-5
    rope_settings: dict | None = None
    mean_recurrence: int = 8
    num_hidden_layers: int | None = None

    def __post_init__(self, **kwargs):
        self.architectures = self.architectures or ["ParcaeForCausalLM"]  # TRL reads it
        rope = {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50_000}
        self.rope_settings = {**rope, **(self.rope_settings or {})}
        self.set_missing(
            num_key_value_heads=self.num_attention_heads,
            padded_vocab_size=self.vocab_size,
            intermediate_size=4 * self.n_embd,
            recurrent_embedding_dimension=self.n_embd,
            num_hidden_layers=self.num_blocks,
        )
        self.set_missing(recurrent_intermediation_embedding_dimension=self.intermediate_size)
        super().__post_init__(**kwargs)
        sizes = {
            "num_key_value_heads": (self.num_attention_heads,),
            "recurrent_num_attention_heads": (None, self.num_attention_heads),
            "recurrent_embedding_dimension": (self.n_embd,),
            "recurrent_intermediation_embedding_dimension": (self.intermediate_size,),
        }
        self.check_choices({**_SUPPORTED, **sizes}, {**vars(self), **self.rope_settings})
        self.check_head_dim("num_attention_heads")
        if self.num_recurrent_layers % 2 or self.num_blocks % 2:
            # In other models, the depth of the pretraining decides which blocks have a `ve_gate`.
            raise UserError(
                "`n_layers_in_recurrent_block` and the number of all blocks must be even for Parcae, got "
                f"{self.num_recurrent_layers} of {self.num_blocks} blocks."
            )

    head_dim = property(lambda self: self.n_embd // self.num_attention_heads)
    rope_base = property(lambda self: self.rope_settings["rope_base"])
    initializer_range = state_std = property(lambda self: math.sqrt(2 / (5 * self.n_embd)))

    @property
    def block_numbers(self) -> list[int]:
        """Numbers of the blocks, counted from prelude to coda, in the order of the cache, which has the core last."""
        first, core = self.n_layers_in_prelude, self.num_recurrent_layers
        return [*range(first), *range(first + core, self.num_blocks), *range(first, first + core)]

    def published_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the published code, which does not accept others."""
        dropped = ("model_type", "architectures", "dtype", "num_hidden_layers")
        published = {name: value for name, value in fields.items() if name not in dropped}
        return {**published, "_class_name": "ParcaeConfig"}


class ParcaeAttention(Attention):
    """Attention that rotates channels (2i, 2i + 1), and in every second block adds embeddings of the tokens to the values."""

    output = "c_proj"

    def __init__(self, config: ParcaeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        for name in ("c_q", "c_k", "c_v", "c_proj"):
            self.add_module(name, nn.Linear(config.n_embd, config.n_embd, bias=False))
        self.table, adds_values = divmod(config.block_numbers[layer_idx], 2)
        if adds_values:
            self.ve_gate = nn.Linear(_GATE_CHANNELS, config.num_attention_heads, bias=False)

    def project(self, hidden_states, position_embeddings):
        cos, sin, *tables = position_embeddings
        projections = (self.c_q, self.c_k, self.c_v)
        query, key, value = (linear(hidden_states).unflatten(-1, (-1, self.head_dim)) for linear in projections)
        if hasattr(self, "ve_gate"):
            gate = 2 * torch.sigmoid(self.ve_gate(hidden_states[..., :_GATE_CHANNELS]))  # [B, S, heads]
            value = value + gate.unsqueeze(-1) * tables[self.table].unflatten(-1, (-1, self.head_dim))
        eps = torch.finfo(torch.float32).eps
        query, key = (rotate_pairs(x.transpose(1, 2), cos, sin) for x in (query, key))
        query, key = (F.rms_norm(x, x.shape[-1:], eps=eps) for x in (query, key))
        return query, key, value.transpose(1, 2)


class ParcaeMLP(nn.Module):
    """Return proj(relu(fc x)^2 / 2)."""

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(0.5 * F.relu(self.fc(x)).square())


class ParcaeBlock(RavenBlock):
    """Layer of prelude, recurrent block or coda."""

    attention_class = ParcaeAttention
    mlp_class = ParcaeMLP


class DiagonalInjection(nn.Module):
    """Return a * s + delta * B e for the state s and the prelude's output e."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(size))
        self.dt_bias = nn.Parameter(torch.zeros(size))
        self.B = nn.Parameter(torch.eye(size))

    def forward(self, state: Tensor, injected: Tensor) -> Tensor:
        delta = F.softplus(self.dt_bias)
        return state * torch.exp(-delta * self.A_log.exp()) + delta * F.linear(injected, self.B)


class ParcaePreTrainedModel(PreludeCodaPreTrainedModel):
    config_class = ParcaeConfig
    _no_split_modules = ["ParcaeBlock"]
    optional_linears = (".ve_gate",)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a model. It takes the arguments of transformers.

        The published weights are in `pytorch_model.bin`. They are read without running code, also with
        `use_safetensors=True`, if there is no file in safetensors.
        """
        if kwargs.get("state_dict") is None:
            _, is_safe = weight_names(pretrained_model_name_or_path, **download_options(kwargs))
            if not is_safe:
                kwargs |= {"use_safetensors": False, "weights_only": True}
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


class ParcaeModel(ParcaePreTrainedModel, PreludeCodaModel):
    """Backbone of Parcae."""

    block_class = ParcaeBlock

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__(config, DiagonalInjection(config.n_embd))
        self.C = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.ln_prelude = RMSNorm(config.n_embd, eps=config.norm_eps)
        self.post_init()

    def add_embeddings(self, config: ParcaeConfig) -> None:
        self.value_embeds = nn.ModuleDict()
        for number in range(1, config.num_blocks, 2):
            self.value_embeds[str(number)] = nn.Embedding(config.padded_vocab_size, config.n_embd)

    def attention_inputs(self, embeddings, position_ids, input_ids):
        if input_ids is None:
            raise UserError("`input_ids` must be set instead of `inputs_embeds`, because value embeddings read them.")
        tables = [table(input_ids) for table in self.value_embeds.values()]
        return (*super().attention_inputs(embeddings, position_ids, input_ids), *tables)

    def run_prelude(self, inputs: LoopInputs) -> LoopInputs:
        inputs = super().run_prelude(inputs)
        return replace(inputs, injected=self.ln_prelude(inputs.injected))

    def recurrent_step(self, inputs: LoopInputs) -> Tensor:
        return replace(inputs, state=self.adapter(inputs.state, inputs.injected)).run(self.core_block)

    def readout(self, inputs: LoopInputs) -> Tensor:
        return self.ln_f(replace(inputs, state=self.C(inputs.state)).run(self.coda))


class ParcaeForCausalLM(ParcaePreTrainedModel, PreludeCodaForCausalLM):
    """Parcae with its head, which is the embedding. Logits are float32."""

    backbone_class = ParcaeModel

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Change the size of the vocabulary. It takes the arguments of transformers. New tokens have value embeddings of 0."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        for table in self.transformer.value_embeds.values():
            more = embeddings.num_embeddings - table.num_embeddings
            table.weight = nn.Parameter(F.pad(table.weight.data, (0, 0, 0, more)), False)
            table.num_embeddings = embeddings.num_embeddings
        return embeddings

    def published_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = super().published_weights(weights)
        return {name.replace("transformer.value_embeds.", "value_embeds."): x for name, x in weights.items()}
