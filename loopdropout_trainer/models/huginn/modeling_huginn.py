"""Huginn: prelude, a recurrent block that mixes the prelude's output into its state in every loop, and coda.

    e = prelude(sqrt(E) wte[ids]);   s_0 random;   for t = 1..K:  s_t = core(adapter([s_{t-1}, e]))
    readout of loop t = ln_f(coda(ln_f(s_t)));   logits = readout wte^T

A block normalises before each sublayer, and again after the residual sum:

    x = N2(x + Attn(N1 x));   x = N4(x + MLP(N3 x))

What the checkpoint calls `transformer.adapter` is the projection that mixes state and e, a part of the pretrained model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from loopdropout_trainer.looped import LoopState, project
from loopdropout_trainer.models.attention import attend
from loopdropout_trainer.models.huginn.configuration_huginn import HuginnConfig
from loopdropout_trainer.models.initial_state import stream_key, truncated_normals
from loopdropout_trainer.models.layers import RMSNorm
from loopdropout_trainer.models.loop_inputs import LoopInputs
from loopdropout_trainer.models.looped_modeling import (
    LoopedBackbone,
    LoopedForCausalLM,
    LoopedPreTrainedModel,
    RecurrentLayer,
)
from loopdropout_trainer.models.operations import swiglu
from loopdropout_trainer.models.recomputation import recomputable


_PROJECTIONS = ("attn.Wqkv", "attn.proj", "mlp.fc", "mlp.proj")


def rotary_angles(config: HuginnConfig, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the rotation angles [..., d / 2] of positions [...], float32: p * base^(-2i / d)."""
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_ids.device)
    return position_ids[..., None].float() * config.rope_base ** (-channels / config.head_dim)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channels (2i, 2i + 1) of x [B, heads, S, d] by the angles of cos, sin [B or 1, S, d / 2], in float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).type_as(x)


def shift_and_rotate(x: torch.Tensor, bias: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [B, heads, S, d] plus its bias [heads, 1, d], rotated."""
    return rotate_pairs(x if bias is None else x + bias, cos, sin)


class HuginnAttention(nn.Module):
    """Multi-head attention with one projection for queries, keys and values, and a bias on queries and keys."""

    def __init__(self, config: HuginnConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = 1
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.Wqkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        if config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, config.n_heads, config.head_dim))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention's output [B, S, E], and its weights if the kernel gives them."""
        qkv = project(hidden_states, self.Wqkv)[0].unflatten(-1, (3, -1, self.head_dim))  # [B, S, 3, heads, d]
        query, key, value = (x.transpose(1, 2) for x in qkv.unbind(2))  # [B, heads, S, d]
        q_bias, k_bias = self.qk_bias.transpose(1, 2) if self.config.qk_bias else (None, None)  # [heads, 1, d]
        # The values are kept, and with them the memory of all three.
        query = recomputable(shift_and_rotate, query, q_bias, *position_embeddings)
        key = recomputable(shift_and_rotate, key, k_bias, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, weights = attend(self, query, key, value, attention_mask, **kwargs)
        return project(output.flatten(-2), self.proj)[0], weights


class HuginnMLP(nn.Module):
    """proj(silu(a) * b), [a, b] = fc(x)."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated, linear = project(x, self.fc)[0].chunk(2, dim=-1)
        return project(recomputable(swiglu, activated, linear), self.proj)[0]


class HuginnBlock(RecurrentLayer):
    """One layer of prelude, recurrent block or coda."""

    def __init__(self, config: HuginnConfig, layer_idx: int, loop_state: LoopState) -> None:
        super().__init__()
        self.loop_state = loop_state
        self.attn = HuginnAttention(config, layer_idx)
        self.mlp = HuginnMLP(config)
        self.norm_1 = RMSNorm(config.n_embd, eps=config.norm_eps)
        self.norm_2 = RMSNorm(config.n_embd, eps=config.norm_eps)
        self.norm_3 = RMSNorm(config.n_embd, eps=config.norm_eps)
        self.norm_4 = RMSNorm(config.n_embd, eps=config.norm_eps)

    def layer_forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention, _ = self.attn(self.norm_1(hidden_states), **kwargs)
        hidden_states = self.norm_2(hidden_states + attention)
        return self.norm_4(hidden_states + self.mlp(self.norm_3(hidden_states)))


class HuginnPreTrainedModel(LoopedPreTrainedModel):
    config: HuginnConfig
    config_class = HuginnConfig
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    _no_split_modules = ["HuginnBlock"]
    _can_record_outputs = {"hidden_states": HuginnBlock, "attentions": HuginnAttention}
    _keys_to_ignore_on_load_unexpected = [r"^freqs_cis$"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, HuginnAttention) and self.config.qk_bias:
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
        sizes = (config.n_layers_in_prelude, config.n_layers_in_coda, config.n_layers_in_recurrent_block)
        layers = iter(range(sum(sizes)))  # their cache slots: those outside of the loop come first
        prelude, coda, core_block = (
            nn.ModuleList(HuginnBlock(config, next(layers), self.loop_state) for _ in range(size)) for size in sizes
        )
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.prelude = prelude
        self.adapter = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.core_block = core_block
        self.coda = coda
        self.ln_f = RMSNorm(config.n_embd, eps=config.norm_eps)
        self.post_init()

    def recurrent_names(self) -> list[str]:
        blocks = range(len(self.core_block))
        return ["adapter", *(f"core_block.{block}.{name}" for block in blocks for name in _PROJECTIONS)]

    def layer_counts(self) -> tuple[int, int]:
        return len(self.prelude) + len(self.coda), len(self.core_block)

    def rotate(self, embeddings: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = rotary_angles(self.config, position_ids)
        return angles.cos(), angles.sin()

    def run_prelude(self, inputs: LoopInputs, initial_state: torch.Tensor | None, **layer_kwargs) -> LoopInputs:
        injected = inputs.state * self.config.init_values["embed_scale"]
        for block in self.prelude:
            injected = block(injected, **inputs.of_layer(), **layer_kwargs)
        state = self.initial_state(inputs) if initial_state is None else initial_state
        return replace(inputs, injected=injected, state=state.to(injected))

    def recurrent_step(self, inputs: LoopInputs, loop: int, **layer_kwargs) -> torch.Tensor:
        hidden_states = project(torch.cat([inputs.state, inputs.injected], dim=-1), self.adapter)[0]
        for block in self.core_block:
            hidden_states = block(hidden_states, loop=loop, **inputs.of_layer(), **layer_kwargs)
        return hidden_states

    def readout(self, inputs: LoopInputs, **layer_kwargs) -> torch.Tensor:
        hidden_states = self.ln_f(inputs.state)
        for block in self.coda:
            hidden_states = block(hidden_states, **inputs.of_layer(), **layer_kwargs)
        return self.ln_f(hidden_states)

    @torch.no_grad()
    def initial_state(self, inputs: LoopInputs) -> torch.Tensor:
        """Return the states [B, S, E] that the tokens start from: N(0, 2 / (5 E)) truncated at 3 sigma, times sqrt(E).

        Outside of a training step a token's state depends on `config.state_seed` and its position. In one it also
        depends on the step and on the example's place in the global batch, unless `config.redraw_state` is False.
        """
        state, config = inputs.state, self.config
        if config.state_init == "zero":
            return torch.zeros_like(state)
        positions = inputs.position_ids.expand(len(state), -1)
        draw = self.loop_state.draw if self.training and config.redraw_state else None
        if draw is None:
            keys = [stream_key("initial state", config.state_seed)]
        else:
            keys = [
                stream_key("initial state", config.state_seed, draw.seed, draw.step, row, segment)
                for row, segment in draw.places
            ]
        keys = torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys], device=state.device)  # as int64
        if len(keys) > 1 and self.loop_state.part is not None:
            keys = keys[self.loop_state.part.examples].unsqueeze(0)  # [1, T]
        elif len(keys) in (1, len(state)):
            keys = keys.unsqueeze(-1)  # [B or 1, 1]
        else:  # several examples in a row: positions start again at 0 with each of them
            segments = (positions == 0).flatten().cumsum(0) - 1
            keys = keys[segments.clamp(max=len(keys) - 1)].view_as(positions)
        scale = config.init_values["std"] * config.init_values["embed_scale"]
        return scale * truncated_normals(keys, positions, config.n_embd)


class HuginnForCausalLM(HuginnPreTrainedModel, LoopedForCausalLM):
    """Huginn with its head, which is the embedding. Logits are float32."""

    float32_logits = True
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__(config)
        self.transformer = HuginnModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids, *args, initial_state=None, **kwargs):
        """Also cut this call's tokens out of `initial_state` [B, at least the final length - 1, E], indexed by column."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if initial_state is not None:
            tokens = inputs.get("input_ids")
            length = (inputs["inputs_embeds"] if tokens is None else tokens).shape[1]
            total = input_ids.shape[1]
            if initial_state.shape[1] < total:
                raise ValueError(
                    f"`initial_state` has {initial_state.shape[1]} columns, but generation has reached {total} tokens: give "
                    "one for each token of the prompt and of the answer."
                )
            inputs["initial_state"] = initial_state[:, total - length : total]
        return inputs

    # The checkpoint holds a table of rotations. It is recomputed in float32, never read: a model cast to bfloat16 would
    # cast its table as well, and every position would be off. The tied head may be stored or left out.

    def hub_weights(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        angles = rotary_angles(self.config, torch.arange(self.config.block_size))
        return {**weights, "freqs_cis": torch.stack((angles.cos(), angles.sin()), dim=-1)[None, :, None]}

    def accept_hub_weights(self, weights: dict[str, torch.Tensor], prefix: str) -> None:
        weights.pop(f"{prefix}freqs_cis", None)
        embeddings = weights.get(f"{prefix}transformer.wte.weight")
        if self.config.tie_word_embeddings and embeddings is not None:
            weights.setdefault(f"{prefix}lm_head.weight", embeddings)
