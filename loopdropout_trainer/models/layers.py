"""Parts of a layer, under transformers' parameter names: its attention, its norm and its gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward

from loopdropout_trainer.models.operations import rms_norm, rotate_halves, swiglu


PROJECTIONS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)
"""Names, in a decoder layer of Llama's kind, of its linear projections: where adapters go by default."""


def project(x: Tensor, *linears: nn.Module) -> Sequence[Tensor]:
    """Return the linear maps of one input [..., in], each [..., out].

    What adapts them may compute them together: a callable `project_together(x, linears)` on the first, which returns their
    outputs, or None to leave them alone.
    """
    together = getattr(linears[0], "project_together", None)
    outputs = None if together is None else together(x, linears)
    return [linear(x) for linear in linears] if outputs is None else outputs


class Attention(nn.Module):
    """Attention of any family. A subclass makes its projections and, by `heads`, queries, keys and values of them.

    Args:
        config: with `head_dim`, `num_attention_heads` and `num_key_value_heads`.
        layer_idx: layer of the cache that holds its keys.

    Class attributes:
        output: name of its last projection.
    """

    output = "o_proj"

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True

    def heads(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of states [B, S, H], rotated, each [B, heads, S, d]."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | Any | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention's output [B, S, H], and its weights if the kernel gives them.

        The mask has the form of the kernel that the configuration names, or attends by itself, as packed examples do.
        """
        query, key, value = self.heads(hidden_states, position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        dropout, weights = self.config.attention_dropout if self.training else 0.0, None
        if hasattr(attention_mask, "attend"):
            output = attention_mask.attend(query, key, value, self.scaling, dropout)  # [B, S, heads, d]
        else:
            if torch.is_tensor(attention_mask) and attention_mask.is_floating_point():
                attention_mask = attention_mask.to(query.dtype)
            kernel = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            options = {"dropout": dropout, "scaling": self.scaling, **kwargs}
            output, weights = kernel(self, query, key, value, attention_mask, **options)
        return project(output.flatten(-2), getattr(self, self.output))[0], weights


class SelfAttention(Attention):
    """Attention with rotary positions and separate projections, as in Llama; with `norms_heads` as in Qwen3.

    Args:
        config: with the fields of transformers' Llama.
        norms_heads: whether queries and keys are normalised, head by head.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int, norms_heads: bool = False) -> None:
        super().__init__(config, layer_idx)
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        if norms_heads:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def heads(self, hidden_states, position_embeddings):
        projected = project(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)  # [B, S, heads, d]
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (rotate_halves(x.transpose(1, 2), *position_embeddings) for x in (query, key))
        return query, key, value.transpose(1, 2)


class RMSNorm(nn.Module):
    """x [..., size] over its root mean square, times a weight; `variance_epsilon` is added to the mean square."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.variance_epsilon)


class GatedMLP(nn.Module):
    """down(act(gate x) * up x) without biases; sizes and activation are the config's."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = None if config.hidden_act in ("silu", "swish") else ACT2FN[config.hidden_act]  # None: SwiGLU

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        return project(self.activation(gate, up), self.down_proj)[0]

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return act(gate) * up."""
        return swiglu(gate, up) if self.act_fn is None else self.act_fn(gate) * up


class StaysFloat32(nn.Module):
    """A module whose float32 weights and buffers a cast of the model, such as `model.bfloat16()`, does not round."""

    def _apply(self, fn, recurse: bool = True):
        def moved_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.dtype != torch.float32 or moved.dtype.itemsize >= tensor.dtype.itemsize:
                return moved
            return moved.float() if tensor.is_meta else tensor.to(moved.device)

        return super()._apply(moved_only, recurse)


class ExactRotaryEmbedding(StaysFloat32, LlamaRotaryEmbedding):
    """transformers' rotary embedding, all its kinds, with frequencies that a cast of the model does not round."""
