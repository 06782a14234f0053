"""Causal self-attention of examples that are packed in one row: there is no padding, and no mask of the row as one text.

The examples attend to themselves, one after the other, or all at once where torch has a kernel for variable lengths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import logging

from loopdropout_trainer.looped import launches_pay


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
        self.chunk_tokens = [sum(chunk) for chunk in self.chunks]
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Where each example begins and where the last one ends, int32 [N + 1] on the device."""
        lengths = torch.tensor([0, *self.lengths])
        ends = lengths.cumsum(0, dtype=torch.int32)
        return ends.to(self.device, non_blocking=True)

    def mask(self, chunk: int, dtype: torch.dtype) -> Tensor:
        """Return what the tokens of a chunk add to their scores, [n, n]: -inf but for their own example's past."""
        if (chunk, dtype) not in self._masks:
            examples = [torch.ones(length, length) for length in self.chunks[chunk]]
            seen = torch.block_diag(*examples).tril()
            added = torch.zeros_like(seen, dtype=dtype).masked_fill(seen == 0, -math.inf)
            self._masks[chunk, dtype] = added.to(self.device)
        return self._masks[chunk, dtype]

    @torch.compiler.disable(recursive=True)  # it would compile anew for all lengths
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float) -> Tensor:
        """Attend within each example of a row [1, heads, T, d]; return [1, T, heads, d]."""
        if not dropout and _takes_all_at_once(query.device, query.dtype, query.shape[-1]):
            return _at_once(query, key, value, self, scaling)
        return _one_by_one(query, key, value, self, scaling, dropout)


def lengths_in_chunks(lengths: Sequence[int], like: Tensor, num_heads: int, head_dim: int) -> Lengths:
    """Return the lengths of examples for attention by few launches; `like` are the states, for their device and dtype."""
    dtype = like.dtype
    if torch.is_autocast_enabled(like.device.type):
        dtype = torch.get_autocast_dtype(like.device.type)
    if _takes_all_at_once(like.device, dtype, head_dim):
        return Lengths(lengths, like.device)
    chunks = [[lengths[0]]]
    for length in lengths[1:]:
        # One more example in a chunk of n tokens saves 12 launches of its own, forward and backward, and adds 2 n `length`
        # pairs behind the mask. A pair takes 4 FLOP a channel forward (q k, and the sum of v), and 10 backward.
        pairs = 2 * sum(chunks[-1]) * length  # of tokens that must not see each other
        if launches_pay(12, 14 * pairs * num_heads * head_dim, like):
            chunks[-1].append(length)
        else:
            chunks.append([length])
    return Lengths(lengths, like.device, chunks)


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scaling: float, dropout: float = 0.0
) -> Tensor:
    options = {"scale": scaling, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    pieces = [x.split(lengths.chunk_tokens, dim=2) for x in (query, key, value)]
    outputs = []
    for chunk, inputs in enumerate(zip(*pieces, strict=True)):
        is_alone = len(lengths.chunks[chunk]) == 1  # for which the kernel has a mask of its own
        mask = None if is_alone else lengths.mask(chunk, query.dtype)
        output = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=is_alone, **options)
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1)


def _at_once(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scaling: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    inputs = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, heads, d]
    ends = lengths.offsets
    longest = max(lengths.lengths)
    causal = (-1, 0)
    output = varlen_attn(*inputs, ends, ends, longest, longest, scale=scaling, window_size=causal)
    return output.unsqueeze(0)


def _takes_all_at_once(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch has a kernel for variable lengths here, which computes what it should."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return _at_once_agrees(device, dtype, head_dim)


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
            shape = (4, 1, 2, sum(lengths.lengths), head_dim)
            drawn = torch.randn(shape, generator=generator, device=device).to(dtype)
            for attention in (_at_once, _one_by_one):
                inputs = [x.detach().requires_grad_() for x in drawn[:3]]
                output = attention(*inputs, lengths, head_dim**-0.5)
                gradients = torch.autograd.grad(output, inputs, drawn[3].transpose(1, 2))
                results.append((output, *gradients))
        torch.testing.assert_close(*results, atol=5e-2, rtol=5e-2)
    except Exception as error:  # whatever a kernel raises that is not there; or it computes something else
        reason = str(error).strip() or type(error).__name__
        logger.warning(f"torch's attention for variable lengths is not used on {device}: {reason.splitlines()[0]}.")
        return False
    return True
