"""The blocks that models of type `huginn_raven` are made of: Huginn's own, and those of converted Llama and OLMo-2 models.

Huginn    x = N2(x + Attn(N1 x));   x = N4(x + MLP(N3 x))      norms before each sublayer, and after the residual sum
Llama     x = x + Attn(N1 x);       x = x + MLP(N2 x)          norms before
OLMo-2    x = x + N1(Attn x);       x = x + N2(MLP x)          norms after, inside the residual; also of q and k
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.cache_utils import Cache

from loopdropout_trainer.looped import LoopState
from loopdropout_trainer.models.huginn.configuration_huginn import HuginnConfig
from loopdropout_trainer.models.layers import RMSNorm, attend, project
from loopdropout_trainer.models.looped_modeling import RecurrentLayer
from loopdropout_trainer.models.operations import recomputable, rotate_halves, swiglu


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channels (2i, 2i + 1) of x [B, heads, S, d] by the angles of cos, sin [B or 1, S, d / 2], in float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).type_as(x)


def shift_and_rotate(x: torch.Tensor, bias: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [B, S, heads, d] plus its bias [1, heads, d], rotated: [B, heads, S, d]."""
    return rotate_pairs((x if bias is None else x + bias).transpose(1, 2), cos, sin)


def norm_and_rotate(x: torch.Tensor, norm: nn.Module | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [B, S, heads, d], normed over all its heads together, rotated: [B, heads, S, d]."""
    if norm is not None:
        x = norm(x.flatten(-2)).view_as(x)
    return rotate_halves(x.transpose(1, 2), cos, sin)


class RavenAttention(nn.Module):
    """Attention with one projection `Wqkv` for queries, keys and values, in that order; there may be fewer keys and values.

    A subclass says how queries and keys are made of their parts of the projection.
    """

    def __init__(self, config: HuginnConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = (config.n_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.num_key_value_groups = config.n_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.Wqkv = nn.Linear(config.n_embd, sum(self.num_heads) * self.head_dim, bias=False)
        self.proj = nn.Linear(config.n_heads * self.head_dim, config.n_embd, bias=False)

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys [B, heads, S, d] for their parts [B, S, heads, d] of the projection."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention's output [B, S, E], and its weights if the kernel gives them."""
        qkv = project(hidden_states, self.Wqkv)[0].unflatten(-1, (-1, self.head_dim))  # [B, S, all heads, d]
        query, key, value = qkv.split(self.num_heads, dim=2)
        # The values are kept, and with them the memory of all of the projection: what is made of it is recomputable.
        query, key = self.rotated(query, key, position_embeddings)
        value = value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, weights = attend(self, query, key, value, attention_mask, **kwargs)
        return project(output.flatten(-2), self.proj)[0], weights


class HuginnAttention(RavenAttention):
    """As many keys and values as queries, with a bias on queries and keys."""

    def __init__(self, config: HuginnConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, config.n_heads, config.head_dim))

    def rotated(self, query, key, position_embeddings):
        biases = self.qk_bias if self.config.qk_bias else (None, None)
        return tuple(
            recomputable(shift_and_rotate, x, bias, *position_embeddings)
            for x, bias in zip((query, key), biases, strict=True)
        )


class LlamaAttention(RavenAttention):
    """Llama's, with rotations of the channels (i, i + d / 2)."""

    def norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the norms of queries and keys."""
        return None, None

    def rotated(self, query, key, position_embeddings):
        return tuple(
            recomputable(norm_and_rotate, x, norm, *position_embeddings)
            for x, norm in zip((query, key), self.norms(), strict=True)
        )


class OlmoAttention(LlamaAttention):
    """OLMo-2's: queries and keys are normed, each over all heads together."""

    def __init__(self, config: HuginnConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = RMSNorm(config.n_heads * config.head_dim, eps=config.norm_eps)
        self.k_norm = RMSNorm(config.num_key_value_heads * config.head_dim, eps=config.norm_eps)

    def norms(self):
        return self.q_norm, self.k_norm


class RavenMLP(nn.Module):
    """proj(silu(a) * b), [a, b] = fc(x)."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated, linear = project(x, self.fc)[0].chunk(2, dim=-1)
        return project(recomputable(swiglu, activated, linear), self.proj)[0]


class RavenBlock(RecurrentLayer):
    """One layer of prelude, recurrent block or coda.

    Class attributes:
        attention_class: of its attention.
        num_norms: how many norms it has, named from `norm_1`.
    """

    attention_class: type[RavenAttention]
    num_norms = 2

    def __init__(self, config: HuginnConfig, layer_idx: int, loop_state: LoopState) -> None:
        super().__init__()
        self.loop_state = loop_state
        self.attn = self.attention_class(config, layer_idx)
        self.mlp = RavenMLP(config)
        for number in range(1, self.num_norms + 1):
            self.add_module(f"norm_{number}", RMSNorm(config.n_embd, eps=config.norm_eps))


class HuginnBlock(RavenBlock):
    attention_class = HuginnAttention
    num_norms = 4

    def layer_forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention, _ = self.attn(self.norm_1(hidden_states), **kwargs)
        hidden_states = self.norm_2(hidden_states + attention)
        return self.norm_4(hidden_states + self.mlp(self.norm_3(hidden_states)))


class LlamaBlock(RavenBlock):
    attention_class = LlamaAttention

    def layer_forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention, _ = self.attn(self.norm_1(hidden_states), **kwargs)
        hidden_states = hidden_states + attention
        return hidden_states + self.mlp(self.norm_2(hidden_states))


class OlmoBlock(RavenBlock):
    attention_class = OlmoAttention

    def layer_forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention, _ = self.attn(hidden_states, **kwargs)
        hidden_states = hidden_states + self.norm_1(attention)
        return hidden_states + self.norm_2(self.mlp(hidden_states))


BLOCKS = {"huginn": HuginnBlock, "llama": LlamaBlock, "olmo": OlmoBlock}
