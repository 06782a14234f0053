"""Huginn: prelude, a recurrent block that mixes the prelude's output into its state in each loop, and coda.

    e = prelude(sqrt(E) wte[ids]),   s_0 random,   for t = 1..K:  s_t = core(adapter([s_{t-1}, e]))
    readout of loop t = ln_f(coda(ln_f(s_t))),   logits = readout wte^T

Converted models (McLeish et al. 2025, arXiv 2511.07384) have this frame around the blocks of a Llama or an OLMo-2, and the
readout ln_f(coda(s_t)). By `block_layout`, a block is

    huginn    x = N2(x + Attn(N1 x)),   x = N4(x + MLP(N3 x))      norms before each sublayer, and after the residual sum
    llama     x = x + Attn(N1 x),       x = x + MLP(N2 x)          norms before
    olmo      x = x + N1(Attn x),       x = x + N2(MLP x)          norms after, inside the residual, and also of q and k

The checkpoint's `transformer.adapter` is the projection that mixes state and e. It is part of the pretrained model.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.layers import (
    Attention,
    ExactRotaryEmbedding,
    RecurrentLayer,
    RMSNorm,
    rotate_halves,
    swiglu,
)
from loopdropout_trainer.models.looped_modeling import published_rope
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


# Supported values of fields that change the architecture. The default of a field that is not set is the first.
_SUPPORTED = {
    "block_class_name": ("SandwichBlock",),
    "norm_class_name": ("RMSNorm_llama",),
    "mlp_class_name": ("GatedMLP",),
    "nonlin_name": ("SiLU",),
    "injection_type": ("linear",),
    "state_init": ("like-init", "zero"),
    "bias": (False,),
    "block_layout": ("huginn", "llama", "olmo", None),
    "initial_state_mode": ("random",),
}
# Special tokens of Huginn's tokenizer. Converted models still have them in their files, although they have other tokenizers.
_HUGINN_IDS = {"bos_token_id": 65504, "eos_token_id": 65505, "pad_token_id": 65509}


def _drop_huginn_ids(config: PreTrainedConfig | GenerationConfig) -> None:
    for name, token_id in _HUGINN_IDS.items():
        if getattr(config, name, None) == token_id:
            setattr(config, name, None)


@strict
class HuginnConfig(PreludeCodaConfig):
    """Configuration of a Huginn model, or of a Llama or OLMo-2 converted to its frame. The defaults are huginn-0125's.

    Published fields that describe the pretraining, such as `mean_backprop_depth`, are stored and not used.

    Args:
        mean_recurrence: Recurrence depth K, also named `num_loops`. You can set it on a loaded model.
        block_layout: "huginn", "llama" or "olmo". None: `from_pretrained` finds it from the names of the weights.
        state_init: State before the first loop, "like-init" (random) or "zero".
        state_seed: Seed of the random initial states.
    """

    model_type = "huginn_raven"
    attribute_map = {**PreludeCodaConfig.attribute_map, "num_hidden_layers": "n_layers"}

    n_embd: int = 5280
    n_heads: int = 55
    n_layers: int | None = None
    vocab_size: int = 65536
    intermediate_size: int = 17920
    norm_eps: float = 1e-6
    n_layers_in_recurrent_block: int = 4
    mean_recurrence: int = 32
    qk_bias: bool = True
    rope_base: int | float = 50_000
    head_dim: int | None = None
    num_attention_heads: int | None = None
    init_values: dict | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: int | None = None
    rope_parameters: dict | None = None
    block_layout: str | None = None

    def __post_init__(self, **kwargs):
        self.set_missing(
            n_layers=self.num_blocks,
            padded_vocab_size=self.vocab_size,
            head_dim=self.n_embd // self.n_heads,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_heads,
            init_values={"std": math.sqrt(2 / (5 * self.n_embd)), "embed_scale": math.sqrt(self.n_embd)},
            tie_word_embeddings=self.tie_embeddings,
            max_position_embeddings=self.block_size,
        )
        if self.vocab_size == 65536:  # the published tokenizer, whose ids are not in config.json
            self.set_missing(**_HUGINN_IDS)
        is_converted = "rope_theta" in kwargs or kwargs.get("rope_scaling") or self.rope_parameters
        if kwargs.get("rope_scaling"):
            kwargs["rope_scaling"] = dict(kwargs["rope_scaling"])  # transformers writes to it
        super().__post_init__(**kwargs)
        if not is_converted:
            self.rope_parameters = None  # Huginn has `rope_base`
            self.block_layout = self.block_layout or "huginn"
        self.check_choices(_SUPPORTED, vars(self))
        self.check_head_dim("n_heads")
        self.set_layout(self.block_layout)

    def set_layout(self, layout: str | None) -> None:
        """Set the layout of the blocks. Huginn's special tokens are removed from a converted model."""
        self.block_layout = layout
        if layout in ("llama", "olmo"):
            _drop_huginn_ids(self)

    @property
    def rotates_pairs(self) -> bool:
        return self.block_layout == "huginn"

    @property
    def initializer_range(self) -> float:
        """Standard deviation of new weights."""
        return self.init_values["std"]

    @property
    def state_std(self) -> float:
        """Standard deviation of the initial states before their truncation."""
        return self.init_values["std"] * self.init_values["embed_scale"]

    def published_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the published code under its names, and the layout of the blocks."""
        fields["architectures"] = ["RavenForCausalLM"]
        # The published class derives it from `tie_embeddings`, and does not accept both.
        fields.pop("tie_word_embeddings", None)
        fields["tie_embeddings"] = self.tie_word_embeddings
        rope = fields.pop("rope_parameters", None)
        if rope:
            return {**fields, **published_rope(rope)}
        fields.pop("max_position_embeddings", None)
        return fields


class RavenAttention(Attention):
    """Attention with one projection `Wqkv` for queries, keys and values.

    Huginn has a bias on queries and keys, and rotates channels (2i, 2i + 1). Converted models rotate (i, i + d / 2), and
    OLMo-2 normalizes queries and keys over all heads together.
    """

    output = "proj"

    def __init__(self, config: HuginnConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_heads = (config.n_heads, config.num_key_value_heads, config.num_key_value_heads)
        width = config.n_heads * config.head_dim
        self.Wqkv = nn.Linear(config.n_embd, sum(self.num_heads) * self.head_dim, bias=False)
        self.proj = nn.Linear(width, config.n_embd, bias=False)
        if config.block_layout == "huginn" and config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, config.n_heads, config.head_dim))
        if config.block_layout == "olmo":
            self.q_norm = RMSNorm(width, eps=config.norm_eps)
            self.k_norm = RMSNorm(config.num_key_value_heads * config.head_dim, eps=config.norm_eps)

    def project(self, hidden_states, position_embeddings):
        heads = self.Wqkv(hidden_states).unflatten(-1, (-1, self.head_dim))  # [B, S, all heads, d]
        query, key, value = heads.split(self.num_heads, dim=2)
        if hasattr(self, "qk_bias"):
            query = query + self.qk_bias[0]
            key = key + self.qk_bias[1]
        if hasattr(self, "q_norm"):
            query = self.q_norm(query.flatten(-2)).view_as(query)
            key = self.k_norm(key.flatten(-2)).view_as(key)
        rotate = rotate_pairs if self.config.rotates_pairs else rotate_halves
        query, key = (rotate(x.transpose(1, 2), *position_embeddings) for x in (query, key))
        return query, key, value.transpose(1, 2)


class RavenMLP(nn.Module):
    """Return proj(silu(a) * b), [a, b] = fc(x)."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(swiglu(*self.fc(x).chunk(2, dim=-1)))


class RavenBlock(RecurrentLayer):
    """Layer of prelude, recurrent block or coda, in the layout of the configuration."""

    attention_class: type[Attention] = RavenAttention
    mlp_class: type[nn.Module] = RavenMLP

    def __init__(self, config: PreludeCodaConfig, layer_idx: int) -> None:
        super().__init__()
        self.layout = config.block_layout
        self.attn = self.attention_class(config, layer_idx)
        self.mlp = self.mlp_class(config)
        num_norms = 4 if self.layout == "huginn" else 2
        for number in range(1, num_norms + 1):
            self.add_module(f"norm_{number}", RMSNorm(config.n_embd, eps=config.norm_eps))

    def layer_forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        if self.layout == "olmo":
            attention, _ = self.attn(hidden_states, **kwargs)
            hidden_states = hidden_states + self.norm_1(attention)
            return hidden_states + self.norm_2(self.mlp(hidden_states))
        attention, _ = self.attn(self.norm_1(hidden_states), **kwargs)
        hidden_states = hidden_states + attention
        if self.layout == "llama":
            return hidden_states + self.mlp(self.norm_2(hidden_states))
        hidden_states = self.norm_2(hidden_states)
        return self.norm_4(hidden_states + self.mlp(self.norm_3(hidden_states)))


class HuginnPreTrainedModel(PreludeCodaPreTrainedModel):
    config_class = HuginnConfig
    _no_split_modules = ["RavenBlock"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """Load a model, and find the layout of a converted model's blocks. It takes the arguments of transformers."""
        name, download = pretrained_model_name_or_path, download_options(kwargs)
        if not isinstance(config, PreTrainedConfig):
            config, kwargs = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
        config = copy.deepcopy(config)
        if config.block_layout is None:
            names, _ = weight_names(name, **download)
            norms_queries = any(name.endswith("q_norm.weight") for name in names)
            config.set_layout("olmo" if norms_queries else "llama")
        loaded = super().from_pretrained(name, *args, config=config, **{**kwargs, **download})
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if config.block_layout != "huginn" and model.can_generate():
            _drop_huginn_ids(model.generation_config)
        return loaded


class HuginnModel(HuginnPreTrainedModel, PreludeCodaModel):
    """Backbone of Huginn."""

    block_class = RavenBlock

    def __init__(self, config: HuginnConfig) -> None:
        if config.block_layout is None:
            raise UserError("`block_layout` must be 'llama' or 'olmo' for a converted model that is not loaded.")
        super().__init__(config, nn.Linear(2 * config.n_embd, config.n_embd, bias=False))
        if not config.rotates_pairs:
            self.rotary_emb = ExactRotaryEmbedding(config)
        self.post_init()

    def attention_inputs(self, embeddings, position_ids, input_ids):
        if self.config.rotates_pairs:
            return super().attention_inputs(embeddings, position_ids, input_ids)
        return self.rotary_emb(embeddings, position_ids)

    def run_prelude(self, inputs: LoopInputs) -> LoopInputs:
        return super().run_prelude(replace(inputs, state=inputs.state * self.config.init_values["embed_scale"]))

    def recurrent_step(self, inputs: LoopInputs) -> Tensor:
        mixed = self.adapter(torch.cat([inputs.state, inputs.injected], dim=-1))
        return replace(inputs, state=mixed).run(self.core_block)

    def readout(self, inputs: LoopInputs) -> Tensor:
        if self.config.block_layout == "huginn":
            inputs = replace(inputs, state=self.ln_f(inputs.state))
        return self.ln_f(inputs.run(self.coda))


class HuginnForCausalLM(HuginnPreTrainedModel, PreludeCodaForCausalLM):
    """Huginn with its head, which is the embedding except in converted models. Logits are float32."""

    backbone_class = HuginnModel
