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
import hashlib
import json
import math
import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, cached_file

from loopdropout_trainer.errors import UserError, first_line
from loopdropout_trainer.models.backbone import LoopedBackbone
from loopdropout_trainer.models.layers import (
    Attention,
    ExactRotaryEmbedding,
    RecurrentLayer,
    RMSNorm,
    rotate_halves,
    swiglu,
)
from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin, LoopedForCausalLM, LoopedPreTrainedModel
from loopdropout_trainer.models.passes import LoopInputs


# Supported values of fields that change the architecture. The default is the first.
_SUPPORTED = {
    "block_class_name": ("SandwichBlock",),
    "norm_class_name": ("RMSNorm_llama",),
    "mlp_class_name": ("GatedMLP",),
    "nonlin_name": ("SiLU",),
    "injection_type": ("linear",),
    "state_init": ("like-init", "zero"),
    "bias": (False,),
    "block_layout": (None, "huginn", "llama", "olmo"),
    "initial_state_mode": ("random",),
}
# Special tokens of Huginn's tokenizer. Converted models still have them in their files, although they have other tokenizers.
_HUGINN_IDS = {"bos_token_id": 65504, "eos_token_id": 65505, "pad_token_id": 65509}


def _drop_huginn_ids(config: PreTrainedConfig | GenerationConfig) -> None:
    for name, token_id in _HUGINN_IDS.items():
        if getattr(config, name, None) == token_id:
            setattr(config, name, None)


@strict
class HuginnConfig(LoopedConfigMixin, PreTrainedConfig):
    """Configuration of a Huginn model, or of a Llama or OLMo-2 converted to its frame. The defaults are huginn-0125's.

    Published fields that describe the pretraining, such as `mean_backprop_depth`, are stored and not used.

    Args:
        mean_recurrence: Recurrence depth K, also named `num_loops`. You can set it on a loaded model.
        block_layout: "huginn", "llama" or "olmo". None: `from_pretrained` finds it from the names of the weights.
        state_init: State before the first loop, "like-init" (random) or "zero".
        state_seed: Seed of the random initial states.
    """

    model_type = "huginn_raven"
    attribute_map = {"num_loops": "mean_recurrence", "hidden_size": "n_embd", "num_hidden_layers": "n_layers"}
    keys_to_ignore_at_inference = ["past_key_values"]
    attention_dropout = 0.0

    n_embd: int = 5280
    n_heads: int = 55
    n_layers: int | None = None
    block_size: int = 4096
    vocab_size: int = 65536
    padded_vocab_size: int | None = None
    tie_embeddings: bool = True
    intermediate_size: int = 17920
    norm_eps: float = 1e-6
    state_init: str = "like-init"
    n_layers_in_prelude: int = 2
    n_layers_in_recurrent_block: int = 4
    n_layers_in_coda: int = 2
    mean_recurrence: int = 32
    qk_bias: bool = True
    rope_base: int | float = 50_000
    head_dim: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    effective_expected_depth: int | None = None
    init_values: dict | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: int | None = None
    rope_parameters: dict | None = None
    block_layout: str | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    state_seed: int = 0

    def __post_init__(self, **kwargs):
        outside = self.n_layers_in_prelude + self.n_layers_in_coda
        depth = outside + self.n_layers_in_recurrent_block * self.mean_recurrence
        std = math.sqrt(2 / (5 * self.n_embd))
        scales = {"std": std, "out_proj": std / math.sqrt(2 * depth), "embedding": std}
        defaults = {
            "n_layers": outside + self.n_layers_in_recurrent_block,
            "padded_vocab_size": self.vocab_size,
            "head_dim": self.n_embd // self.n_heads,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_heads,
            "effective_expected_depth": depth,
            "init_values": {**scales, "embed_scale": math.sqrt(self.n_embd)},
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.block_size,
        }
        if self.vocab_size == 65536:  # the published tokenizer, whose ids are not in config.json
            defaults.update(_HUGINN_IDS)
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        is_converted = "rope_theta" in kwargs or kwargs.get("rope_scaling") or self.rope_parameters
        if kwargs.get("rope_scaling"):
            kwargs["rope_scaling"] = dict(kwargs["rope_scaling"])  # transformers writes to it
        super().__post_init__(**kwargs)
        if not is_converted:
            self.rope_parameters = None  # Huginn has `rope_base`
            self.block_layout = self.block_layout or "huginn"
        for name, supported in _SUPPORTED.items():
            if (value := getattr(self, name, supported[0])) not in supported:
                valid = " or ".join(repr(value) for value in supported if value is not None)
                raise UserError(f"`{name}` must be {valid} for Huginn, got {value!r}.")
        self.set_layout(self.block_layout)

    def set_layout(self, layout: str | None) -> None:
        """Set the layout of the blocks. Huginn's special tokens are removed from a converted model."""
        self.block_layout = layout
        if layout in ("llama", "olmo"):
            _drop_huginn_ids(self)

    @property
    def initializer_range(self) -> float:
        """Standard deviation of new weights."""
        return self.init_values["std"]

    @property
    def num_recurrent_layers(self) -> int:
        return self.n_layers_in_recurrent_block

    def published_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the published code under its names, and the layout of the blocks."""
        fields["architectures"] = ["RavenForCausalLM"]
        # The published class derives it from `tie_embeddings`, and does not accept both.
        fields.pop("tie_word_embeddings", None)
        fields["tie_embeddings"] = self.tie_word_embeddings
        rope = dict(fields.pop("rope_parameters", None) or {})
        if rope:
            fields["rope_theta"] = rope.pop("rope_theta")
            if rope.get("rope_type", "default") != "default":
                fields["rope_scaling"] = rope
        else:
            fields.pop("max_position_embeddings", None)
        return fields


def rotary_angles(config: HuginnConfig, position_ids: Tensor) -> Tensor:
    """Return the rotation angles [..., d / 2] of positions [...], float32: p * base^(-2i / d)."""
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_ids.device)
    frequencies = config.rope_base ** (-channels / config.head_dim)
    return position_ids[..., None].float() * frequencies


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels (2i, 2i + 1) of x [B, heads, S, d] by the angles of cos and sin, [B or 1, S, d / 2].

    The computation is in float32 or float64.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return rotated.flatten(-2).type_as(x)


# Random initial states without a random state. The source is Philox-4x32-10 (Salmon et al. 2011): 64-bit key, counter
# (channel // 4, position, 0, 0). A token's state depends only on its key and its position. So it is the same with a cache,
# in another batch, with padding, with other processes and in a resumed run.

_WORD = 0xFFFFFFFF


@torch.compiler.assume_constant_result
def stream_key(*parts: str | int) -> int:
    """Return the signed 64-bit key of the stream for a purpose, a seed, an optimizer step, ..."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four 32-bit words of Philox-4x32-10, as int64 tensors, for broadcastable counter and key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first = c0 * 0xD2511F53  # 64 bits, of which int64 takes the highest as a sign
        second = c2 * 0xCD9E8D57
        c0, c1 = (second >> 32 & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = (first >> 32 & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


def truncated_normals(keys: Tensor, positions: Tensor, width: int, bound: float = 3) -> Tensor:
    """Return standard normal numbers [..., width], float32, truncated at `bound` sigma.

    Args:
        keys: int64 keys of streams, in a shape that broadcasts with `positions`.
        positions: [...] int64.
        width: Number of channels.
        bound: Largest size of a number.
    """
    blocks = torch.arange(math.ceil(width / 4), device=positions.device)
    positions = positions.unsqueeze(-1)
    keys = keys.unsqueeze(-1)
    zero = torch.zeros_like(positions)
    words = philox((blocks, positions, zero, zero), (keys & _WORD, (keys >> 32) & _WORD))
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., :width]
    uniforms = ((words >> 8).to(torch.float32) + 0.5) * 2.0**-24
    inside = math.erf(bound / math.sqrt(2))  # probability of |z| < bound
    return math.sqrt(2) * torch.erfinv(inside * (2 * uniforms - 1))


def token_normals(backbone: LoopedBackbone, inputs: LoopInputs, bound: float = 3) -> Tensor:
    """Return standard normal numbers for the tokens' initial states [B, S, E], truncated at `bound` sigma.

    In training, a token's numbers depend on the step, the example's place in the global batch, `config.state_seed` and the
    position. Otherwise they depend only on the last two.
    """
    config, gate_state = backbone.config, backbone.gate_state
    draw = gate_state.batch.draw
    examples = [()]
    if draw is not None and backbone.training:
        examples = [(draw.seed, draw.step, *example) for example in draw.example_ids]
    keys = [stream_key("initial state", config.state_seed, *example) for example in examples]
    keys = torch.tensor(keys, device=inputs.state.device)
    keys = gate_state.per_token(keys, inputs.state).squeeze(-1)  # [B or 1, S or 1]
    return truncated_normals(keys, inputs.position_ids.expand(len(inputs.state), -1), config.n_embd, bound)


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
        rotate = rotate_pairs if self.config.block_layout == "huginn" else rotate_halves
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

    def __init__(self, config: HuginnConfig, layer_idx: int) -> None:
        super().__init__()
        self.layout = config.block_layout
        self.attn = RavenAttention(config, layer_idx)
        self.mlp = RavenMLP(config)
        for number in range(1, 5 if self.layout == "huginn" else 3):
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


def weight_names(name_or_path: str, **download: Any) -> tuple[list[str], bool]:
    """Return the names of the weights in a checkpoint, without loading them, and whether it is in safetensors."""
    with suppress(OSError):
        index = cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, **download)
        return list(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]), True
    with suppress(OSError):
        file = cached_file(name_or_path, SAFE_WEIGHTS_NAME, **download)
        return list(safe_open(file, framework="pt").keys()), True
    file = cached_file(name_or_path, WEIGHTS_NAME, **download)
    try:
        return list(torch.load(file, map_location="meta", weights_only=True)), False
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise UserError(f"{file} must hold tensors only: {first_line(error)}") from error


class HuginnPreTrainedModel(LoopedPreTrainedModel):
    config_class = HuginnConfig
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    _no_split_modules = ["RavenBlock"]
    _keys_to_ignore_on_load_unexpected = [r"^freqs_cis$", r"rotary_emb\.inv_freq$"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """Load a model, and find the layout of a converted model's blocks. It takes the arguments of transformers."""
        name = pretrained_model_name_or_path
        fields = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
        download = {key: kwargs[key] for key in fields if key in kwargs}
        if not isinstance(config, PreTrainedConfig):
            config, kwargs = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
        config = copy.deepcopy(config)
        if config.block_layout is None:
            names, _ = weight_names(name, **download)
            config.set_layout("olmo" if any(name.endswith("q_norm.weight") for name in names) else "llama")
        loaded = super().from_pretrained(name, *args, config=config, **{**kwargs, **download})
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if config.block_layout != "huginn" and model.can_generate():
            _drop_huginn_ids(model.generation_config)
        return loaded


class HuginnModel(HuginnPreTrainedModel, LoopedBackbone):
    """Backbone of Huginn. Prelude and coda run once. The coda makes a loop's readout of its state."""

    def __init__(self, config: HuginnConfig) -> None:
        if config.block_layout is None:
            raise UserError("`block_layout` must be 'llama' or 'olmo' for a converted model that is not loaded.")
        super().__init__(config)
        blocks = [
            RavenBlock(config, index) for index in range(config.n_layers)
        ]  # in the cache's order: the loop's last
        prelude = config.n_layers_in_prelude
        outside = prelude + config.n_layers_in_coda
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.prelude = nn.ModuleList(blocks[:prelude])
        self.adapter = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.core_block = nn.ModuleList(blocks[outside:])
        self.coda = nn.ModuleList(blocks[prelude:outside])
        self.ln_f = RMSNorm(config.n_embd, eps=config.norm_eps)
        if config.block_layout != "huginn":
            self.rotary_emb = ExactRotaryEmbedding(config)
        self.post_init()

    def recurrent_layers(self) -> list[nn.Module]:
        return [self.adapter, *self.core_block]

    def rotate(self, embeddings: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.block_layout != "huginn":
            return self.rotary_emb(embeddings, position_ids)
        angles = rotary_angles(self.config, position_ids)
        return angles.cos(), angles.sin()

    def run_prelude(self, inputs: LoopInputs) -> LoopInputs:
        inputs = replace(inputs, state=inputs.state * self.config.init_values["embed_scale"])
        injected = inputs.run(self.prelude)
        return replace(inputs, injected=injected, state=self.initial_state(inputs).to(injected))

    def recurrent_step(self, inputs: LoopInputs) -> Tensor:
        mixed = self.adapter(torch.cat([inputs.state, inputs.injected], dim=-1))
        return replace(inputs, state=mixed).run(self.core_block)

    def readout(self, inputs: LoopInputs) -> Tensor:
        if self.config.block_layout == "huginn":
            inputs = replace(inputs, state=self.ln_f(inputs.state))
        return self.ln_f(inputs.run(self.coda))

    @torch.no_grad()
    def initial_state(self, inputs: LoopInputs) -> Tensor:
        """Return the tokens' initial states [B, S, E]: N(0, std^2) truncated at 3 std, times `embed_scale`.

        Both are in `config.init_values`; Huginn's are sqrt(2 / (5 E)) and sqrt(E).
        """
        if self.config.state_init == "zero":
            return torch.zeros_like(inputs.state)
        scales = self.config.init_values
        return scales["std"] * scales["embed_scale"] * token_normals(self, inputs)


class HuginnForCausalLM(HuginnPreTrainedModel, LoopedForCausalLM):
    """Huginn with its head, which is the embedding except in converted models. Logits are float32."""

    backbone_class = HuginnModel
    float32_logits = True
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Change the size of the vocabulary. It takes the arguments of transformers."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.padded_vocab_size = len(embeddings.weight)
        return embeddings

    # The published checkpoint holds the head twice, and a table of rotations. The table is computed in float32 and never
    # read, because a model that is cast to bfloat16 would cast it too.

    def published_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.config.tie_word_embeddings:
            head = weights["transformer.wte.weight"].clone()  # safetensors does not save tensors that share memory
            weights = {**weights, "lm_head.weight": head}
        if self.config.block_layout != "huginn":
            return weights
        angles = rotary_angles(self.config, torch.arange(self.config.block_size))
        table = torch.stack((angles.cos(), angles.sin()), dim=-1)
        return {**weights, "freqs_cis": table[None, :, None]}
