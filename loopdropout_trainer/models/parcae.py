"""Parcae: prelude, a recurrent block that damps its state and adds the prelude's output in each loop, and coda.

    e = norm(prelude(wte[ids])),   s_0 random,   for t = 1..K:  s_t = core(a * s_{t-1} + delta * B e)
    delta = softplus(dt_bias),   a = exp(-delta * exp(A_log))
    readout of loop t = norm(coda(C s_t)),   logits = readout wte^T

A block is x = x + Attn(N1 x), x = x + MLP(N2 x). Every second block adds a learned embedding of the token to the attention's
values, scaled for each head by 2 sigmoid(ve_gate y) of the first 32 channels of its normalized input y.

The published config.json has `_class_name` and no `model_type` (Prairie et al. 2026, arXiv 2604.12946).
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.backbone import LoopedBackbone
from loopdropout_trainer.models.huginn import (
    HuginnForCausalLM,
    HuginnPreTrainedModel,
    rotary_angles,
    rotate_pairs,
    token_normals,
    weight_names,
)
from loopdropout_trainer.models.layers import Attention, RecurrentLayer, RMSNorm
from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin, LoopedPreTrainedModel
from loopdropout_trainer.models.passes import LoopInputs


# Supported values of fields that change the architecture, and of fields of `rope_settings`.
_SUPPORTED = {
    "injection_type": ("diagonal",),
    "block_class_name": ("TransformerPreNormBlock",),
    "norm_class_name": ("RMSNorm",),
    "mlp_class_name": ("BaseMLP",),
    "nonlin_name": ("ReLU2",),
    "init_strategy": ("scaled-zero",),
    "state_init": ("like-init", "zero", "normal", "embed", "unit"),
    "mup_model_scaling_factor": (1,),
    "rope_condense_ratio": (1,),
    "use_rope": (True,),
    **dict.fromkeys(["clip_qkv", "logit_softcap"], (None,)),
    **dict.fromkeys(["bias", "qk_bias"], (False,)),
}
_GATE_CHANNELS = 32


@strict
class ParcaeConfig(LoopedConfigMixin, PreTrainedConfig):
    """Configuration of a Parcae model. The defaults are parcae-140m's.

    Published fields that describe the pretraining, such as `sampling_scheme`, are stored and not used.

    Args:
        mean_recurrence: Recurrence depth K, also named `num_loops`. You can set it on a loaded model.
        state_init: State before the first loop: "like-init", "normal", "embed" or "unit" (random), or "zero".
        state_seed: Seed of the random initial states.
        value_gates: Blocks with a `ve_gate`, counted over prelude, core and coda. None: by the rule of the published code.
            `from_pretrained` finds them from the names of the weights, because the rule depends on the depth of pretraining.
    """

    model_type = "parcae"
    attribute_map = {
        "num_loops": "mean_recurrence",
        "hidden_size": "n_embd",
        "max_position_embeddings": "block_size",
        "tie_word_embeddings": "tie_embeddings",
    }
    keys_to_ignore_at_inference = ["past_key_values"]
    attention_dropout = 0.0
    block_layout = "huginn"  # of the head and of the rotations

    n_embd: int = 768
    num_attention_heads: int = 6
    num_key_value_heads: int | None = None
    block_size: int = 2048
    vocab_size: int = 32768
    padded_vocab_size: int | None = None
    tie_embeddings: bool = True
    intermediate_size: int | None = None
    recurrent_embedding_dimension: int | None = None
    recurrent_intermediation_embedding_dimension: int | None = None
    recurrent_num_attention_heads: int | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = True
    prelude_norm: bool = True
    rope_settings: dict | None = None
    state_init: str = "like-init"
    n_layers_in_prelude: int = 2
    n_layers_in_recurrent_block: int = 2
    n_layers_in_coda: int = 2
    mean_recurrence: int = 8
    mean_backprop_depth: int = 4
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    state_seed: int = 0
    value_gates: list[int] | None = None
    num_hidden_layers: int | None = None

    def __post_init__(self, **kwargs):
        self.architectures = self.architectures or ["ParcaeForCausalLM"]  # TRL reads it
        rope = {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50_000}
        self.rope_settings = {**rope, **(self.rope_settings or {})}
        width = self.intermediate_size or 4 * self.n_embd
        defaults = {
            "num_key_value_heads": self.num_attention_heads,
            "padded_vocab_size": self.vocab_size,
            "intermediate_size": width,
            "recurrent_embedding_dimension": self.n_embd,
            "recurrent_intermediation_embedding_dimension": width,
            "num_hidden_layers": len(self.blocks),
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        super().__post_init__(**kwargs)
        supported = {
            **_SUPPORTED,
            "num_key_value_heads": (self.num_attention_heads,),
            "recurrent_embedding_dimension": (self.n_embd,),
            "recurrent_num_attention_heads": (None, self.num_attention_heads),
        }
        values = {**vars(self), **self.rope_settings}
        for name, choices in supported.items():
            if (value := values.get(name, choices[0])) not in choices:
                raise UserError(f"`{name}` must be {' or '.join(map(repr, choices))} for Parcae, got {value!r}.")

    head_dim = property(lambda self: self.n_embd // self.num_attention_heads)
    num_recurrent_layers = property(lambda self: self.n_layers_in_recurrent_block)
    rope_base = property(lambda self: self.rope_settings["rope_base"])
    initializer_range = property(lambda self: math.sqrt(2 / (5 * self.n_embd)))

    @property
    def blocks(self) -> list[str]:
        """Names of all blocks, in the order in which they first run."""
        stacks = {
            "prelude": self.n_layers_in_prelude,
            "core_block": self.num_recurrent_layers,
            "coda": self.n_layers_in_coda,
        }
        return [f"{stack}.{index}" for stack, size in stacks.items() for index in range(size)]

    @property
    def value_tables(self) -> list[int]:
        """Numbers of the blocks with an embedding for their values."""
        return [*range((self.num_hidden_layers - 1) % 2, self.num_hidden_layers, 2)]

    @property
    def gated_blocks(self) -> list[int]:
        """Numbers of the blocks with a `ve_gate`. The published rule counts all runs of the core before the coda."""
        if self.value_gates is not None:
            return self.value_gates
        core = self.num_recurrent_layers
        runs = [n + core * (self.num_loops - 1) * block.startswith("coda") for n, block in enumerate(self.blocks)]
        return [n for n, run in enumerate(runs) if (core * self.mean_backprop_depth - 1 - run) % 2 == 0]

    def published_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the published code, which does not accept others."""
        dropped = ("model_type", "architectures", "dtype", "value_gates", "num_hidden_layers")
        published = {name: value for name, value in fields.items() if name not in dropped}
        return {**published, "_class_name": "ParcaeConfig"}


class ParcaeAttention(Attention):
    """Attention that adds an embedding of the token to its values, and rotates channels (2i, 2i + 1).

    Args:
        config: Configuration.
        number: Number of the block.
    """

    output = "c_proj"

    def __init__(self, config: ParcaeConfig, number: int) -> None:
        cached = sorted(
            range(config.num_hidden_layers), key=lambda n: config.blocks[n].startswith("core")
        )  # core last
        super().__init__(config, layer_idx=cached.index(number))
        for name in ("c_q", "c_k", "c_v", "c_proj"):
            self.add_module(name, nn.Linear(config.n_embd, config.n_embd, bias=False))
        self.ve_gate = None
        if number in config.gated_blocks:
            self.ve_gate = nn.Linear(_GATE_CHANNELS, config.num_attention_heads, bias=False)
        tables = config.value_tables
        self.table = tables.index(number) if number in tables and self.ve_gate is not None else None

    def project(self, hidden_states, position_embeddings):
        cos, sin, *tables = position_embeddings
        projections = (self.c_q, self.c_k, self.c_v)
        query, key, value = (linear(hidden_states).unflatten(-1, (-1, self.head_dim)) for linear in projections)
        if self.table is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(hidden_states[..., :_GATE_CHANNELS]))  # [B, S, heads]
            value = value + gate.unsqueeze(-1) * tables[self.table].unflatten(-1, (-1, self.head_dim))
        query, key = (rotate_pairs(x.transpose(1, 2), cos, sin) for x in (query, key))
        if self.config.qk_norm:
            eps = torch.finfo(torch.float32).eps
            query, key = (F.rms_norm(x, x.shape[-1:], eps=eps) for x in (query, key))
        return query, key, value.transpose(1, 2)


class ParcaeMLP(nn.Module):
    """Return proj(relu(fc x)^2 / 2)."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(size, width, bias=False)
        self.proj = nn.Linear(width, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(0.5 * F.relu(self.fc(x)).square())


class ParcaeBlock(RecurrentLayer):
    """Layer of prelude, recurrent block or coda."""

    def __init__(self, config: ParcaeConfig, number: int) -> None:
        super().__init__()
        in_core = config.blocks[number].startswith("core")
        width = config.recurrent_intermediation_embedding_dimension if in_core else config.intermediate_size
        self.norm_1 = RMSNorm(config.n_embd, eps=config.norm_eps)
        self.attn = ParcaeAttention(config, number)
        self.norm_2 = RMSNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = ParcaeMLP(config.n_embd, width)

    def layer_forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        attention, _ = self.attn(self.norm_1(hidden_states), **kwargs)
        hidden_states = hidden_states + attention
        return hidden_states + self.mlp(self.norm_2(hidden_states))


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


class ParcaePreTrainedModel(LoopedPreTrainedModel):
    config_class = ParcaeConfig
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    _no_split_modules = ["ParcaeBlock"]
    _keys_to_ignore_on_load_unexpected = HuginnPreTrainedModel._keys_to_ignore_on_load_unexpected
    optional_linears = (".ve_gate",)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """Load a model, and find the gates of its value embeddings. It takes the arguments of transformers.

        The published weights are in `pytorch_model.bin`. They are read without running code, also with
        `use_safetensors=True`, if there is no file in safetensors.
        """
        name = pretrained_model_name_or_path
        if not isinstance(config, PreTrainedConfig):
            config, kwargs = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
        names = kwargs.get("state_dict")
        if names is None:
            fields = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
            names, is_safe = weight_names(name, **{key: kwargs[key] for key in fields if key in kwargs})
            kwargs |= {} if is_safe else {"use_safetensors": False, "weights_only": True}
        config = copy.deepcopy(config)
        gates = [f"{block}.attn.ve_gate.weight" for block in config.blocks]
        config.value_gates = [n for n, gate in enumerate(gates) if any(name.endswith(gate) for name in names)]
        return super().from_pretrained(name, *args, config=config, **kwargs)

    def recurrent_linears(self) -> list[str]:
        unused = {
            module.ve_gate for module in self.modules() if isinstance(module, ParcaeAttention) and module.table is None
        }
        return [name for name in super().recurrent_linears() if self.get_submodule(name) not in unused]


class ParcaeModel(ParcaePreTrainedModel, LoopedBackbone):
    """Backbone of Parcae. Prelude and coda run once. The coda makes a loop's readout of its state."""

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__(config)
        size = config.n_embd
        self.wte = nn.Embedding(config.padded_vocab_size, size)
        tables = {str(number): nn.Embedding(config.padded_vocab_size, size) for number in config.value_tables}
        self.value_embeds = nn.ModuleDict(tables)
        self.prelude, self.core_block, self.coda = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for number, name in enumerate(config.blocks):
            self.get_submodule(name.partition(".")[0]).append(ParcaeBlock(config, number))
        self.adapter = DiagonalInjection(size)
        self.C = nn.Linear(size, size, bias=False)
        self.ln_prelude = RMSNorm(size, eps=config.norm_eps) if config.prelude_norm else None
        self.ln_f = RMSNorm(size, eps=config.norm_eps)
        self.post_init()

    def recurrent_layers(self) -> nn.ModuleList:
        return self.core_block

    def rotate(self, embeddings: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = rotary_angles(self.config, position_ids)
        return angles.cos(), angles.sin()

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Return the embeddings [B, S, E], followed by the value embeddings, as one tensor that a pass can pack."""
        if input_ids is None:
            raise UserError("`input_ids` must be set instead of `inputs_embeds`, because value embeddings read them.")
        tables = [table(input_ids) for table in self.value_embeds.values()]
        tensors = [super()._embed(input_ids, inputs_embeds), *tables]
        with torch.autocast(input_ids.device.type, enabled=False):  # which cannot join tensors of float16
            return torch.cat(tensors, dim=-1)

    def run_prelude(self, inputs: LoopInputs) -> LoopInputs:
        embeddings, *tables = inputs.state.split(self.config.n_embd, dim=-1)
        # The attention layers get the value embeddings of the tokens after cosines and sines.
        inputs = replace(inputs, state=embeddings, position_embeddings=(*inputs.position_embeddings, *tables))
        injected = inputs.run(self.prelude)
        if self.ln_prelude is not None:
            injected = self.ln_prelude(injected)
        return replace(inputs, injected=injected, state=self.initial_state(inputs).to(injected))

    def recurrent_step(self, inputs: LoopInputs) -> Tensor:
        return replace(inputs, state=self.adapter(inputs.state, inputs.injected)).run(self.core_block)

    def readout(self, inputs: LoopInputs) -> Tensor:
        return self.ln_f(replace(inputs, state=self.C(inputs.state)).run(self.coda))

    @torch.no_grad()
    def initial_state(self, inputs: LoopInputs) -> Tensor:
        """Return the tokens' initial states [B, S, E], which depend on the token's example and position as in Huginn.

        They are N(0, s^2) with s^2 = 2 / (5 E), truncated at 3 s, for "like-init", s = 1 for "normal" and 1 / sqrt(E) for
        "embed". "unit" standardizes the channels of "normal".
        """
        config = self.config
        if config.state_init == "zero":
            return torch.zeros_like(inputs.state)
        if config.state_init == "like-init":
            return config.initializer_range * token_normals(self, inputs)
        normals = token_normals(self, inputs, bound=math.inf)
        if config.state_init == "unit":
            std, mean = torch.std_mean(normals, dim=-1, keepdim=True)
            return (normals - mean) / (std + 1e-8)
        return normals if config.state_init == "normal" else normals / math.sqrt(config.n_embd)


class ParcaeForCausalLM(ParcaePreTrainedModel, HuginnForCausalLM):
    """Parcae with its head, which is the embedding. Logits are float32."""

    backbone_class = ParcaeModel

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Change the size of the vocabulary. It takes the arguments of transformers. New tokens have value embeddings of 0."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        for table in self.transformer.value_embeds.values():
            more = max(0, len(embeddings.weight) - len(table.weight))
            table.weight = nn.Parameter(F.pad(table.weight.data, (0, 0, 0, more))[: len(embeddings.weight)], False)
            table.num_embeddings = len(embeddings.weight)
        return embeddings

    def published_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = super().published_weights(weights)
        return {name.replace("transformer.value_embeds.", "value_embeds."): x for name, x in weights.items()}
