"""The blocks that models of type `huginn_raven` are made of: Huginn's own, and those of converted Llama and OLMo-2 models.

huginn    x = N2(x + Attn(N1 x));   x = N4(x + MLP(N3 x))      norms before each sublayer, and after the residual sum
llama     x = x + Attn(N1 x);       x = x + MLP(N2 x)          norms before
olmo      x = x + N1(Attn x);       x = x + N2(MLP x)          norms after, inside the residual; also of q and k
"""

from __future__ import annotations

import torch
from torch import nn

from loopdropout_trainer.looped import LoopState
from loopdropout_trainer.models.huginn.configuration_huginn import HuginnConfig
from loopdropout_trainer.models.layers import Attention, RMSNorm, project
from loopdropout_trainer.models.looped_modeling import RecurrentLayer
from loopdropout_trainer.models.operations import rotate_halves, swiglu


def shift_and_rotate(x: torch.Tensor, bias: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [B, S, heads, d] plus its bias [1, heads, d], rotated: [B, heads, S, d].

    That is channels (2i, 2i + 1), by the angles of cos, sin [B or 1, S, d / 2], in float32 at least.
    """
    x = (x if bias is None else x + bias).transpose(1, 2)
    even, odd = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).type_as(x)


def norm_and_rotate(x: torch.Tensor, norm: nn.Module | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [B, S, heads, d], normed over all its heads together, rotated: [B, heads, S, d]."""
    if norm is not None:
        x = norm(x.flatten(-2)).view_as(x)
    return rotate_halves(x.transpose(1, 2), cos, sin)


class RavenAttention(Attention):
    """Attention with one projection `Wqkv` for queries, keys and values, in that order; there may be fewer keys and values.

    Huginn has a bias on queries and keys, and rotates channels (2i, 2i + 1); conversions rotate (i, i + d / 2), and OLMo-2
    norms queries and keys, each over all heads together.
    """

    output = "proj"

    def __init__(self, config: HuginnConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_heads = (config.n_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.Wqkv = nn.Linear(config.n_embd, sum(self.num_heads) * self.head_dim, bias=False)
        self.proj = nn.Linear(config.n_heads * self.head_dim, config.n_embd, bias=False)
        if config.block_layout == "huginn" and config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, config.n_heads, config.head_dim))
        if config.block_layout == "olmo":
            self.q_norm = RMSNorm(config.n_heads * config.head_dim, eps=config.norm_eps)
            self.k_norm = RMSNorm(config.num_key_value_heads * config.head_dim, eps=config.norm_eps)

    def heads(self, hidden_states, position_embeddings):
        qkv = project(hidden_states, self.Wqkv)[0].unflatten(-1, (-1, self.head_dim))  # [B, S, all heads, d]
        query, key, value = qkv.split(self.num_heads, dim=2)
        if self.config.block_layout == "huginn":
            rotated, own = shift_and_rotate, self.qk_bias if self.config.qk_bias else (None, None)
        else:
            rotated, own = norm_and_rotate, (getattr(self, "q_norm", None), getattr(self, "k_norm", None))
        query = rotated(query, own[0], *position_embeddings)
        key = rotated(key, own[1], *position_embeddings)
        return query, key, value.transpose(1, 2)


class RavenMLP(nn.Module):
    """proj(silu(a) * b), [a, b] = fc(x)."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated, linear = project(x, self.fc)[0].chunk(2, dim=-1)
        return project(swiglu(activated, linear), self.proj)[0]


class RavenBlock(RecurrentLayer):
    """One layer of prelude, recurrent block or coda, in the layout of the configuration."""

    def __init__(self, config: HuginnConfig, layer_idx: int, loop_state: LoopState) -> None:
        super().__init__()
        self.loop_state = loop_state
        self.layout = config.block_layout
        self.attn = RavenAttention(config, layer_idx)
        self.mlp = RavenMLP(config)
        for number in range(1, 5 if self.layout == "huginn" else 3):
            self.add_module(f"norm_{number}", RMSNorm(config.n_embd, eps=config.norm_eps))

    def layer_forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        if self.layout == "olmo":
            hidden_states = hidden_states + self.norm_1(self.attn(hidden_states, **kwargs)[0])
            return hidden_states + self.norm_2(self.mlp(hidden_states))
        attention, _ = self.attn(self.norm_1(hidden_states), **kwargs)
        if self.layout == "llama":
            hidden_states = hidden_states + attention
            return hidden_states + self.mlp(self.norm_2(hidden_states))
        hidden_states = self.norm_2(hidden_states + attention)
        return self.norm_4(hidden_states + self.mlp(self.norm_3(hidden_states)))
