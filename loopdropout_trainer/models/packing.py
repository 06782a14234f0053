"""Examples packed in one row without padding: the places of their tokens, and attention within each example."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import logging

from loopdropout_trainer.gate_state import example_starts


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # builds of torch without it
    varlen_attn = None

logger = logging.get_logger(__name__)


# Choose between two exact implementations by the cost of their launches and of their arithmetic.
#
# Small tensors leave a device waiting for the next operation, and large tensors do not. Both are counted in floating-point
# operations (FLOP). The rates are nominal, and a CPU's rate is the rate of one core, so that neither a busy machine nor the
# number of cores changes the choice. On a CPU a launch is worth 5e-6 s * 50e9 FLOP/s = 250,000 FLOP.

LAUNCH_SECONDS = 5e-6
"""Seconds of one operation with its share of Python and autograd."""

CORE_FLOPS = 50e9
"""FLOP/s of one CPU core in products of matrices, float32."""

MULTIPROCESSOR_FLOPS = {torch.float16: 3e12, torch.bfloat16: 3e12, torch.float32: 0.3e12, torch.float64: 0.15e12}
"""FLOP/s of one multiprocessor of a GPU in products of matrices, by dtype."""


def launch_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP that a device could do while one operation is launched."""
    if device.type == "cuda":
        # A slice of a GPU (MIG) has fewer multiprocessors.
        rate = MULTIPROCESSOR_FLOPS[dtype] * torch.cuda.get_device_properties(device).multi_processor_count
    else:
        rate = CORE_FLOPS
    return LAUNCH_SECONDS * rate


# The packed row.


@dataclass(frozen=True)
class Packing:
    """Places of the tokens of a batch [B, S] when its examples are packed in one row [1, T].

    For B = 3, S = 4 and padding at the dots, the T = 9 tokens are those with the indices `kept` among the B * S = 12:

        a b c .
        d e f g    ->    a b c d e f g h i      kept 0 1 2 4 5 6 7 8 9,   lengths 3 4 2,   token_examples 0 0 0 1 1 1 1 2 2
        h i . .

    Attributes:
        shape: (B, S).
        kept: [T] indices of the packed tokens among the B * S tokens. None: all tokens, in order.
        lengths: Number of tokens of each example.
        examples: Index of each example's gates, which is its row or its segment.
        token_examples: [T] index of each token's gates.
    """

    shape: tuple[int, int]
    kept: Tensor | None
    lengths: list[int]
    examples: list[int]
    token_examples: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """Return [1, T, ...] for [B, S, ...], or for [1, S, ...] that all rows share."""
        tokens = x.expand(self.shape[0], *x.shape[1:]).flatten(0, 1)  # [B * S, ...]
        if self.kept is not None:
            tokens = tokens[self.kept]  # [T, ...]
        return tokens.unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """Return [B, S, ...] for [1, T, ...], with zeros on padding."""
        tokens = x[0]  # [T, ...]
        if self.kept is not None:
            zeros = tokens.new_zeros(math.prod(self.shape), *tokens.shape[1:])
            tokens = zeros.index_copy(0, self.kept, tokens)  # [B * S, ...]
        return tokens.unflatten(0, self.shape)


def find_packing(
    shape: tuple[int, int], attention_mask: Tensor | None, position_ids: Tensor, token_examples: Tensor | None = None
) -> Packing:
    """Find the examples of a batch.

    Args:
        shape: (B, S).
        attention_mask: [B, S], 0 on padding. Then each row is one example.
        position_ids: [B or 1, S]. Without a mask, they mark the beginnings of examples (`example_starts`).
        token_examples: [B, S] index of each token's gates. Default: its row.
    """
    # All counting happens on the CPU. The lengths become Python numbers, and on a GPU each count and each selection by a mask
    # would make Python wait for the device. Only the indices of the T tokens go back.
    device = position_ids.device
    if attention_mask is None:
        mask = torch.ones(shape, dtype=torch.bool)
        starts = example_starts(position_ids).cpu().expand(shape)  # [B, S]
    else:
        mask = attention_mask.bool().cpu()
        starts = (torch.arange(shape[1]) == 0).expand(shape)  # column 0 begins each row, also if it is padding
    if token_examples is None:
        token_examples = torch.arange(shape[0]).unsqueeze(1).expand(shape)  # row b is example b
    # For the batch of `Packing`, examples are 0 1 2, numbers 0 0 0 0 1 1 1 1 2 2 2 2, and lengths 3 4 2.
    examples = token_examples.cpu()[starts]  # [N], the gates' index of each example
    numbers = starts.flatten().cumsum(0) - 1  # [B * S], the number of each token's example among the N examples
    lengths = numbers[mask.flatten()].bincount(minlength=len(examples))  # [N] tokens without padding
    has_tokens = lengths > 0  # False for rows that are all padding
    examples, lengths = examples[has_tokens], lengths[has_tokens]
    kept = None
    if not mask.all():
        kept = mask.flatten().nonzero().squeeze(1).to(device, non_blocking=True)  # [T]
    packed = examples.repeat_interleave(lengths).to(device, non_blocking=True)
    return Packing(shape, kept, lengths.tolist(), examples.tolist(), packed)


class PackedAttention:
    """Causal self-attention within each example of a packed row. Attention layers get it as their mask.

    All examples attend in one launch if torch's kernel for variable lengths supports the device and dtype, and without
    dropout. Otherwise they attend in chunks, one after another. A chunk is one example, or short neighbors behind a mask.

    Args:
        lengths: Number of tokens of each example, in order.
        state: [1, T, H] hidden states.
        num_heads: Number of attention heads.
        head_dim: Number of channels of a head.
    """

    def __init__(self, lengths: Sequence[int], state: Tensor, num_heads: int, head_dim: int) -> None:
        device = state.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else state.dtype
        self.lengths = list(lengths)
        self.device = state.device
        self.has_varlen_kernel = _has_varlen_kernel(state.device, dtype, head_dim)
        self.chunks = [[lengths[0]]]
        for length in lengths[1:]:
            # One more example in a chunk of n tokens saves 12 launches, forward and backward, and adds 2 n `length` pairs of
            # tokens behind the mask. A pair takes 4 FLOP for each channel forward (q k, and the sum of v), and 10 backward.
            pairs = 2 * sum(self.chunks[-1]) * length
            if 12 * launch_flops(state.device, state.dtype) > 14 * pairs * num_heads * head_dim:
                self.chunks[-1].append(length)
            else:
                self.chunks.append([length])
        self._masks: dict[torch.dtype, list[Tensor | None]] = {}

    @functools.cached_property
    def ends(self) -> Tensor:
        """The [N + 1] number of tokens before each example and in all of them, int32."""
        return torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32).to(self.device, non_blocking=True)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float) -> Tensor:
        """Return the output [1, T, heads, d] for queries, keys and values [1, heads, T, d]."""
        groups = query.shape[1] // key.shape[1]  # query heads that share a key head
        if groups > 1:  # both kernels are called with one key head for each query head
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        if self.has_varlen_kernel and not dropout:
            return _attend_by_varlen(query, key, value, self.ends.to(query.device), max(self.lengths), scaling)
        # All layers and loops share the masks, which have the dtype and the device of the queries.
        place = (query.dtype, query.device)
        if place not in self._masks:
            self._masks[place] = [chunk_mask(chunk, query) for chunk in self.chunks]
        sizes = [sum(chunk) for chunk in self.chunks]
        queries, keys, values = (x.split(sizes, dim=2) for x in (query, key, value))  # chunks [1, heads, n, d]
        outputs = []
        for q, k, v, mask in zip(queries, keys, values, self._masks[place], strict=True):
            output = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scaling, dropout_p=dropout
            )
            outputs.append(output.transpose(1, 2))  # [1, n, heads, d]
        return torch.cat(outputs, dim=1)


def chunk_mask(lengths: Sequence[int], query: Tensor) -> Tensor | None:
    """Return the mask [1, 1, n, n] of neighbors that attend in one launch, -inf except for their own example's past."""
    if len(lengths) == 1:
        return None  # the kernel is causal itself
    seen = torch.block_diag(*(torch.ones(length, length) for length in lengths)).tril()
    mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill(seen == 0, -math.inf)
    return mask[None, None].to(query.device)


def _attend_by_varlen(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float) -> Tensor:
    # The kernel has no batch dimension. `ends` separates the examples, and a window of all keys before a query and none after
    # it makes the attention causal.
    inputs = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, heads, d]
    return varlen_attn(*inputs, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0)).unsqueeze(0)


@functools.cache
def _has_varlen_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch's attention for variable lengths runs on a device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    x = torch.zeros(1, 1, 8, head_dim, device=device, dtype=dtype)
    ends = torch.tensor([0, 8], device=device, dtype=torch.int32)
    try:
        _attend_by_varlen(x, x, x, ends, 8, 1.0)
    except (RuntimeError, TypeError, ValueError) as error:  # not available on this GPU or in this torch
        logger.warning(f"torch's attention for variable lengths is not used on {device}: {error}")
        return False
    return True
