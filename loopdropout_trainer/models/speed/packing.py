"""Padding costs nothing: the examples of a micro-batch run packed in one row, and come back in the rows they came from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loopdropout_trainer.looped import example_starts


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a batch [B, S] lie when its examples are packed in one row [1, T].

    Attributes:
        shape: (B, S).
        kept: [T] indices of the tokens among the B * S; None: all of them, in order.
        lengths: of the examples, in tokens.
        examples: index of each one's gates: its row, or where gates have segments, its segment.
        tokens: [T] index of each token's gates.
    """

    shape: tuple[int, int]
    kept: Tensor | None
    lengths: list[int]
    examples: list[int]
    tokens: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """Return [1, T, ...] of [B, S, ...], or of what all rows share, [1, S, ...]."""
        x = x.expand(self.shape[0], *x.shape[1:]).flatten(0, 1)
        return (x if self.kept is None else x[self.kept]).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """Return [B, S, ...] of [1, T, ...]; zeros on padding."""
        x = x[0]
        if self.kept is not None:
            x = x.new_zeros(math.prod(self.shape), *x.shape[1:]).index_copy(0, self.kept, x)
        return x.unflatten(0, self.shape)


def find_packing(
    shape: tuple[int, int],
    token_mask: Tensor | None,
    position_ids: Tensor,
    segments: Tensor | None = None,
) -> Packing:
    """Find the examples of a batch.

    Args:
        shape: (B, S).
        token_mask: [B, S], 0 on padding; each row is one example then.
        position_ids: [B or 1, S]; without a mask, they say where examples begin (`example_starts`).
        segments: [B, S] index of each token's gates; default: its row.
    """
    device = position_ids.device
    mask = torch.ones(shape, dtype=torch.bool)
    starts = example_starts(position_ids).cpu().expand(shape)  # [B, S]
    if token_mask is not None:
        # A row is an example: its real tokens, wherever its padding stands, keep their order when they are packed.
        mask = token_mask.bool().cpu()
        starts = (torch.arange(shape[1]) == 0).expand(shape)
    owners = torch.arange(shape[0]).unsqueeze(1).expand(shape) if segments is None else segments.cpu()
    examples = owners[starts]  # by the first token; any of a row will do, padding too: all have the row's gates
    lengths = (starts.flatten().cumsum(0) - 1)[mask.flatten()].bincount(minlength=len(examples))
    examples = examples[lengths > 0]  # without rows of padding only
    lengths = lengths[lengths > 0]
    kept = None if mask.all() else mask.flatten().nonzero().squeeze(1).to(device, non_blocking=True)
    tokens = examples.repeat_interleave(lengths).to(device, non_blocking=True)
    return Packing(shape, kept, lengths.tolist(), examples.tolist(), tokens)
