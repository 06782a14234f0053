"""Causal self-attention of examples that are packed in one row: there is no padding, and no mask of the row as one text.

The examples attend to themselves, one after the other, or all at once where torch has a kernel for variable lengths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from loopdropout_trainer.looped import launches_pay


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # builds of torch without it
    varlen_attn = None


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

    @torch.compiler.disable(recursive=True)  # it would compile anew for all lengths
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, dropout: float
    ) -> torch.Tensor:
        """Attend within each example of a row [1, heads, T, d]; return [1, T, heads, d]."""
        if not dropout and _takes_all_at_once(query.device, query.dtype, query.shape[-1]):
            return _at_once(query, key, value, self, scaling)
        return _one_by_one(query, key, value, self, scaling, dropout)


def lengths_in_chunks(lengths: Sequence[int], like: torch.Tensor, num_heads: int, head_dim: int) -> Lengths:
    """Return the lengths of examples for attention by few launches; `like` are the states, for their device and dtype."""
    autocast = torch.is_autocast_enabled(like.device.type)
    dtype = torch.get_autocast_dtype(like.device.type) if autocast else like.dtype
    if _takes_all_at_once(like.device, dtype, head_dim):
        return Lengths(lengths, like.device)
    chunks: list[list[int]] = []
    for length in lengths:
        # One more example in a chunk of n tokens saves 12 launches of its own, forward and backward, and adds 2 n `length`
        # pairs behind the mask. A pair takes 4 FLOP a channel forward (q k, and the sum of v), and 10 backward.
        pairs = 2 * sum(chunks[-1]) * length if chunks else 0  # of tokens that must not see each other
        if chunks and launches_pay(12, 14 * pairs * num_heads * head_dim, like):
            chunks[-1].append(length)
        else:
            chunks.append([length])
    return Lengths(lengths, like.device, chunks)


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
    """Return whether torch's kernel for variable lengths computes this; `benchmarks/gpu.py` compares it with one by one."""
    if (
        varlen_attn is None
        or device.type != "cuda"
        or torch.version.hip
        or dtype not in (torch.bfloat16, torch.float16)
    ):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_dim % 8 == 0 and head_dim <= 256
