"""Huginn: prelude, a recurrent block that mixes the prelude's output into its state in every loop, and coda.

    e = prelude(sqrt(E) wte[ids]);   s_0 random;   for t = 1..K:  s_t = core(adapter([s_{t-1}, e]))
    readout of loop t = ln_f(coda(ln_f(s_t)));   logits = readout wte^T

Converted models (McLeish et al. 2025, arXiv 2511.07384) have this frame around the blocks of the model that they were made of,
with one difference: readout of loop t = ln_f(coda(s_t)). By `block_layout` a block is

    huginn    x = N2(x + Attn(N1 x));   x = N4(x + MLP(N3 x))      norms before each sublayer, and after the residual sum
    llama     x = x + Attn(N1 x);       x = x + MLP(N2 x)          norms before
    olmo      x = x + N1(Attn x);       x = x + N2(MLP x)          norms after, inside the residual; also of q and k

What the checkpoint calls `transformer.adapter` is the projection that mixes state and e, a part of the pretrained model.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.backbone import LoopedBackbone, LoopInputs
from loopdropout_trainer.models.huginn_config import HuginnConfig, drop_huginn_ids
from loopdropout_trainer.models.keywords import CACHE
from loopdropout_trainer.models.layers import (
    Attention,
    ExactRotaryEmbedding,
    RecurrentLayer,
    RMSNorm,
    project,
    rotate_halves,
    swiglu,
)
from loopdropout_trainer.models.looped_modeling import (
    DOWNLOAD_FIELDS,
    LoopedForCausalLM,
    LoopedPreTrainedModel,
    checkpoint_names,
)


def rotary_angles(config: HuginnConfig, position_ids: Tensor) -> Tensor:
    """Return the rotation angles [..., d / 2] of positions [...], float32: p * base^(-2i / d)."""
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_ids.device)
    frequencies = config.rope_base ** (-channels / config.head_dim)
    return position_ids[..., None].float() * frequencies


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels (2i, 2i + 1) of x [B, heads, S, d] by the angles of cos, sin [B or 1, S, d / 2]; in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    first = even * cos - odd * sin
    second = odd * cos + even * sin
    rotated = torch.stack((first, second), dim=-1)
    return rotated.flatten(-2).type_as(x)


# Random start states without a random state: a pure function of (key, position, channel), on any device. The source is
# Philox-4x32-10 (Salmon et al. 2011): 64-bit key, counter (channel // 4, position, 0, 0). A token's state depends on nothing
# but its key and its position, so that decoding with a cache, another batch size, padding, another number of processes or a
# resumed run start from the same states; and the global random stream is never touched.

_WORD = 0xFFFFFFFF


@torch.compiler.assume_constant_result
def stream_key(*parts: str | int) -> int:
    """Return the 64-bit key, as a signed number, of the stream that `parts` name: a purpose, a seed, an optimizer step."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four 32-bit words of Philox-4x32-10, as int64 tensors, for broadcastable counter and key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + 0x9E3779B9) & _WORD
        k1 = (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a 32 x 32 bit product."""
    product = word * factor  # of 64 bits, the highest of which int64 takes for a sign
    return (product >> 32) & _WORD, product & _WORD


def truncated_normals(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """Return standard normals, truncated at 3 sigma, [..., width] float32; a longer request starts with the shorter one's.

    Args:
        keys: int64 of 64-bit stream keys, of any shape that broadcasts with positions [...] int64.
    """
    blocks = torch.arange(math.ceil(width / 4), device=positions.device)
    positions = positions.unsqueeze(-1)
    keys = keys.unsqueeze(-1)
    zero = torch.zeros_like(positions)
    counter = (blocks, positions, zero, zero)
    key = (keys & _WORD, (keys >> 32) & _WORD)
    words = philox(counter, key)
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1)  # [..., width / 4, 4]
    words = words.flatten(-2)[..., :width]
    cells = (words >> 8).to(torch.float32)  # 24 bits
    uniforms = (cells + 0.5) * 2.0**-24
    inside = math.erf(3 / math.sqrt(2))  # probability of |z| < 3
    quantiles = torch.erfinv(inside * (2 * uniforms - 1))
    return math.sqrt(2) * quantiles


class RavenAttention(Attention):
    """Attention with one projection `Wqkv` for queries, keys and values, in that order; there may be fewer keys and values.

    Huginn has a bias on queries and keys, and rotates channels (2i, 2i + 1); conversions rotate (i, i + d / 2), and OLMo-2
    norms queries and keys, each over all heads together.
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

    def heads(self, hidden_states, position_embeddings):
        projected = project(hidden_states, self.Wqkv)[0]
        qkv = projected.unflatten(-1, (-1, self.head_dim))  # [B, S, all heads, d]
        query, key, value = qkv.split(self.num_heads, dim=2)
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
    """proj(silu(a) * b), [a, b] = fc(x)."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated, linear = project(x, self.fc)[0].chunk(2, dim=-1)
        return project(swiglu(activated, linear), self.proj)[0]


class RavenBlock(RecurrentLayer):
    """One layer of prelude, recurrent block or coda, in the layout of the configuration."""

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
        if self.layout == "llama":
            hidden_states = hidden_states + attention
            return hidden_states + self.mlp(self.norm_2(hidden_states))
        hidden_states = self.norm_2(hidden_states + attention)
        return self.norm_4(hidden_states + self.mlp(self.norm_3(hidden_states)))


class HuginnPreTrainedModel(LoopedPreTrainedModel):
    config_class = HuginnConfig
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    _no_split_modules = ["RavenBlock"]
    _keys_to_ignore_on_load_unexpected = [r"^freqs_cis$", r"rotary_emb\.inv_freq$"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """Load a model, and find out whose blocks it has; arguments as in transformers."""
        name = pretrained_model_name_or_path
        download = {key: kwargs[key] for key in DOWNLOAD_FIELDS if key in kwargs}
        if not isinstance(config, PreTrainedConfig):
            config, kwargs = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
        config = copy.deepcopy(config)
        weight_names = lambda: kwargs.get("state_dict") or checkpoint_names(name, **download)
        config.complete(weight_names)
        loaded = super().from_pretrained(name, *args, config=config, **{**kwargs, **download})
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if config.block_layout != "huginn" and getattr(model, "generation_config", None) is not None:
            drop_huginn_ids(model.generation_config)
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RavenAttention) and hasattr(module, "qk_bias"):
            init.zeros_(module.qk_bias)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, std=self.config.init_values["std"])
        else:
            super()._init_weights(module)


class HuginnModel(HuginnPreTrainedModel, LoopedBackbone):
    """The looped backbone. Prelude and coda run once; the coda makes a loop's readout of its state."""

    readout_attends = True

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__(config)
        config.set_layout()
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

    def run_prelude(self, inputs: LoopInputs, initial_state: Tensor | None, **layer_kwargs) -> LoopInputs:
        inputs = replace(inputs, state=inputs.state * self.config.init_values["embed_scale"])
        injected = inputs.run(self.prelude, **layer_kwargs)
        state = self.initial_state(inputs) if initial_state is None else initial_state
        return replace(inputs, injected=injected, state=state.to(injected))

    def recurrent_step(self, inputs: LoopInputs, **layer_kwargs) -> Tensor:
        both = torch.cat([inputs.state, inputs.injected], dim=-1)
        mixed = project(both, self.adapter)[0]
        return replace(inputs, state=mixed).run(self.core_block, **layer_kwargs)

    def readout(self, inputs: LoopInputs, **layer_kwargs) -> Tensor:
        if self.config.block_layout == "huginn":
            inputs = replace(inputs, state=self.ln_f(inputs.state))
        return self.ln_f(inputs.run(self.coda, **layer_kwargs))

    @torch.no_grad()
    def initial_state(self, inputs: LoopInputs) -> Tensor:
        """Return the states [B, S, E] that the tokens start from: N(0, std^2) truncated at 3 std, times `embed_scale`.

        Both are in `config.init_values`; Huginn's are sqrt(2 / (5 E)) and sqrt(E).

        Outside of a training step a token's state depends on `config.state_seed` and its position. In one it also
        depends on the step and on the example's place in the global batch, unless `config.redraw_state` is False.
        """
        state = inputs.state
        config = self.config
        if config.state_init == "zero":
            return torch.zeros_like(state)
        positions = inputs.position_ids.expand(len(state), -1)
        draw = self.loop_state.batch.draw
        examples = [()]
        if draw is not None and self.training and config.redraw_state:
            examples = [(draw.seed, draw.step, *example) for example in draw.example_ids]
        keys = [stream_key("initial state", config.state_seed, *example) for example in examples]
        keys = torch.tensor(keys, device=state.device)
        keys = self.loop_state.per_token(keys, state).squeeze(-1)  # [B or 1, S or 1]
        values = config.init_values
        scale = values["std"] * values["embed_scale"]
        normals = truncated_normals(keys, positions, config.n_embd)
        return scale * normals


class HuginnForCausalLM(HuginnPreTrainedModel, LoopedForCausalLM):
    """Huginn with its head, which is the embedding; converted models have one of their own. Logits are float32."""

    backbone_class = HuginnModel
    float32_logits = True
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Change the size of the vocabulary; arguments as in transformers."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.padded_vocab_size = len(embeddings.weight)
        return embeddings

    def prepare_inputs_for_generation(
        self, input_ids, *args, inputs_embeds=None, initial_state=None, past_key_values=None, **kwargs
    ):
        """Also cut this call's tokens out of `initial_state` [B, at least the final length - 1, E], indexed by column."""
        # transformers reads this signature to decide which keywords `generate` accepts.
        if past_key_values is not None:
            kwargs[CACHE] = past_key_values
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if initial_state is None:
            return inputs
        tokens = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        total = input_ids.shape[1]
        if inputs_embeds is not None:
            total += inputs_embeds.shape[1]
        if initial_state.shape[1] < total:
            raise UserError(
                f"`initial_state` has {initial_state.shape[1]} columns, but generation has reached {total} tokens: give one "
                "for each token of the prompt and of the answer."
            )
        columns = slice(total - tokens.shape[1], total)
        return {**inputs, "initial_state": initial_state[:, columns]}

    # The checkpoint holds a table of rotations. It is recomputed in float32, never read: a model cast to bfloat16 would
    # cast its table as well, and every position would be off. The published file holds the tied head twice, and readers
    # other than transformers want it there; it may be left out all the same.

    def hub_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.config.tie_word_embeddings:
            head = weights["transformer.wte.weight"].clone()  # safetensors refuses tensors that share memory
            weights = {**weights, "lm_head.weight": head}
        if self.config.block_layout != "huginn":
            return weights
        angles = rotary_angles(self.config, torch.arange(self.config.block_size))
        table = torch.stack((angles.cos(), angles.sin()), dim=-1)
        return {**weights, "freqs_cis": table[None, :, None]}

    def accept_hub_weights(self, weights: dict[str, Tensor], prefix: str, *_: Any) -> None:
        weights.pop(f"{prefix}freqs_cis", None)
        embeddings = weights.get(f"{prefix}transformer.wte.weight")
        if self.config.tie_word_embeddings and embeddings is not None:
            weights.setdefault(f"{prefix}lm_head.weight", embeddings)
