"""Causal self-attention: of the rows of a batch by transformers' kernels, or of examples packed in one row.

A packed row has no padding and no mask: its examples attend to themselves, one after the other, or all at once where torch
has a kernel for variable lengths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils import logging

from loopdropout_trainer.looped import launches_pay, project
from loopdropout_trainer.models.operations import rotate_halves
from loopdropout_trainer.models.recomputation import recomputable


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # builds of torch without it
    varlen_attn = None

logger = logging.get_logger(__name__)


class Lengths:
    """Lengths of the examples that are packed in a row: what packed attention is given in the place of a mask.

    Args:
        lengths: in tokens, in order.
        device: of the row.
        chunks: lengths of the neighbours that attend in one launch, where no kernel takes all at once; default: each alone.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device, chunks: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.lengths = list(lengths)
        self.device = device
        self.chunks = [[length] for length in lengths] if chunks is None else chunks
        self._masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    @functools.cached_property
    def offsets(self) -> torch.Tensor:
        """Where each example begins and where the last one ends, int32 [N + 1] on the device."""
        ends = torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32)
        return ends.to(self.device, non_blocking=True)

    @functools.cached_property
    def tokens(self) -> list[int]:
        """Tokens of each chunk."""
        return [sum(chunk) for chunk in self.chunks]

    def mask(self, chunk: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what the tokens of a chunk add to their scores, [n, n]: -inf but for their own example's past."""
        lengths = self.chunks[chunk]
        if len(lengths) == 1:
            return None  # the kernel's own causal mask
        if (chunk, dtype) not in self._masks:
            owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            seen = (owners.unsqueeze(1) == owners).tril()
            added = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)
            self._masks[chunk, dtype] = added.to(self.device)
        return self._masks[chunk, dtype]


def lengths_in_chunks(lengths: Sequence[int], like: torch.Tensor, num_heads: int, head_dim: int) -> Lengths:
    """Return the lengths of examples for attention by few launches.

    Args:
        lengths: in tokens, in order.
        like: the states, for their device and dtype.
        num_heads, head_dim: of the queries.
    """
    autocast = torch.is_autocast_enabled(like.device.type)
    dtype = torch.get_autocast_dtype(like.device.type) if autocast else like.dtype
    if _takes_all_at_once(like.device, dtype, head_dim):
        return Lengths(lengths, like.device)
    chunks: list[list[int]] = []
    for length in lengths:
        # A pair of tokens takes 4 FLOP a channel forward, and 10 backward.
        pairs = 2 * sum(chunks[-1]) * length if chunks else 0  # of tokens that must not see each other
        if chunks and launches_pay(12, 14 * pairs * num_heads * head_dim, like):
            chunks[-1].append(length)
        else:
            chunks.append([length])
    return Lengths(lengths, like.device, chunks)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | Lengths | Any | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend by the kernel that the configuration names.

    Args:
        module: attention module, with `config`, `scaling` and what else transformers' kernels read from it.
        query, key, value: [B, heads, S, d]; keys and values may have fewer heads.
        mask: in the kernel's own form, or the `Lengths` of a packed row.

    Returns:
        [B, S, heads, d], and the attention weights if the kernel gives them.
    """
    if isinstance(mask, Lengths):
        return packed_attention(query, key, value, mask, module.scaling, dropout), None
    if torch.is_tensor(mask) and mask.is_floating_point():
        mask = mask.to(query.dtype)
    kernel = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager_attention_forward)
    return kernel(module, query, key, value, mask, dropout=dropout, scaling=module.scaling, **kwargs)


@torch.compiler.disable(recursive=True)  # it would compile anew for all lengths
def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Lengths, scaling: float, dropout: float = 0.0
) -> torch.Tensor:
    """Attend within each of the examples that lie in one row [1, heads, T, d]; return [1, T, heads, d]."""
    if not dropout and _takes_all_at_once(query.device, query.dtype, query.shape[-1]):
        return _at_once(query, key, value, lengths, scaling)
    return _one_by_one(query, key, value, lengths, scaling, dropout)


def _one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Lengths, scaling: float, dropout: float = 0.0
) -> torch.Tensor:
    options = {"scale": scaling, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    several = len(lengths.chunks) > 1
    pieces = [(query, key, value)]
    if several:
        pieces = zip(*(x.split(lengths.tokens, dim=2) for x in (query, key, value)), strict=True)
    outputs = []
    for chunk, inputs in enumerate(pieces):
        mask = lengths.mask(chunk, query.dtype)
        output = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None, **options)
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1) if several else outputs[0]


def _at_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Lengths, scaling: float
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
    ends, longest = lengths.offsets, max(lengths.lengths)
    causal = (-1, 0)
    return varlen_attn(query, key, value, ends, ends, longest, longest, scale=scaling, window_size=causal).unsqueeze(0)


def _takes_all_at_once(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch has a kernel for variable lengths here, which computes what it should."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and _at_once_agrees(device, dtype, head_dim)


@functools.cache
def _at_once_agrees(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch's kernel for variable lengths computes here what examples give one by one, gradients included.

    Tried once on random numbers, since the kernel is young and runs on some GPUs only; otherwise a line in the log says so.
    """
    results = []
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            lengths = Lengths([37, 5, 64], device)
            generator = torch.Generator(device).manual_seed(0)
            drawn = torch.randn(4, 1, 2, sum(lengths.lengths), head_dim, generator=generator, device=device)
            for attention in (_at_once, _one_by_one):
                inputs = [x.to(dtype).requires_grad_() for x in drawn[:3]]
                output = attention(*inputs, lengths, head_dim**-0.5)
                results.append((output, *torch.autograd.grad(output, inputs, drawn[3].transpose(1, 2).to(dtype))))
        agrees = all(torch.allclose(got, want, atol=5e-2, rtol=5e-2) for got, want in zip(*results, strict=True))
        reason = "it computes something else"
    except Exception as error:  # whatever a kernel raises that is not there
        agrees, reason = False, str(error).strip() or type(error).__name__
    if not agrees:
        logger.warning(f"torch's attention for variable lengths is not used on {device}: {reason.splitlines()[0]}.")
    return agrees


class SelfAttention(nn.Module):
    """Attention with rotary positions and separate projections, as in Llama; with `norm`, also of each head as in Qwen3.

    Args:
        config: with the fields of transformers' Llama.
        layer_idx: layer of the cache that holds its keys.
        norm: makes the normalisation of queries' and keys' heads from their size; None: there is none.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int, norm: Any = None) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        width, kv_width = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        if norm is not None:
            self.q_norm, self.k_norm = norm(self.head_dim), norm(self.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | Lengths | Any | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention's output [B, S, H], and its weights if the kernel gives them."""
        projected = project(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)  # [B, S, heads, d]
        if hasattr(self, "q_norm"):  # it keeps its input, so that nothing else need be kept
            query = recomputable(_normed_and_rotated, query, self.q_norm, *position_embeddings)
            key = recomputable(_normed_and_rotated, key, self.k_norm, *position_embeddings)
        else:
            query, key = (rotate_halves(x.transpose(1, 2), *position_embeddings) for x in (query, key))
        value = value.transpose(1, 2)  # [B, heads, S, d], as the others
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, weights = attend(self, query, key, value, attention_mask, dropout, **kwargs)
        return project(output.flatten(-2), self.o_proj)[0], weights


def _normed_and_rotated(x: torch.Tensor, norm: nn.Module, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the heads [B, heads, S, d] of x [B, S, heads, d]."""
    return rotate_halves(norm(x).transpose(1, 2), cos, sin)
