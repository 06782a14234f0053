"""Padding costs nothing: the examples of a micro-batch run packed in one row, and come back in the rows they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loopdropout_trainer.looped import LoopState, Part


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a batch [B, S] lie when its examples are packed in one row [1, T].

    Attributes:
        shape: (B, S).
        kept: [T] indices of the tokens among the B * S; None: all of them, in order.
        lengths: of the examples, in tokens.
        examples: index of each one's gates: its row, or where gates have segments, its segment.
        device: of the batch.
    """

    shape: tuple[int, int]
    kept: torch.Tensor | None
    lengths: list[int]
    examples: list[int]
    device: torch.device

    def part(
        self, loop_state: LoopState, loop: int, order: Sequence[int] | None = None, active: int | None = None
    ) -> Part:
        """Return the tokens of examples in this order, of which only the first `active` may have a gate; default: all."""
        order = range(len(self.lengths)) if order is None else order
        lengths = [self.lengths[index] for index in order]
        examples = torch.tensor([self.examples[index] for index in order]).repeat_interleave(torch.tensor(lengths))
        examples = examples.to(self.device, non_blocking=True)
        return loop_state.part_of(loop, examples, sum(lengths[:active]))

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, T, ...] of [B, S, ...], or of what all rows share, [1, S, ...]."""
        x = x.expand(self.shape[0], *x.shape[1:]).flatten(0, 1)
        return (x if self.kept is None else x[self.kept]).unsqueeze(0)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, S, ...] of [1, T, ...]; zeros on padding."""
        if self.kept is not None:
            rows = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
            x = rows.index_copy(0, self.kept, x[0])
        return x.reshape(*self.shape, *x.shape[1 if self.kept is not None else 2 :])


def find_packing(
    shape: tuple[int, int],
    token_mask: torch.Tensor | None,
    position_ids: torch.Tensor,
    segments: torch.Tensor | None = None,
) -> Packing:
    """Find the examples of a batch.

    Args:
        shape: (B, S).
        token_mask: [B, S], 0 on padding; each row is one example then.
        position_ids: [B or 1, S]; without a mask, an example ends where they do not count on.
        segments: [B, S] index of each token's gates; default: its row.
    """
    rows, columns = shape
    if token_mask is not None:
        mask = token_mask.bool().cpu()
        lengths = mask.sum(dim=1).tolist()
        firsts = [row * columns for row in range(rows)]
        kept = (
            None if bool(mask.all()) else mask.flatten().nonzero().squeeze(1).to(token_mask.device, non_blocking=True)
        )
    else:
        kept = None
        starts = torch.ones(shape, dtype=torch.bool)
        starts[:, 1:] = (position_ids.diff(dim=1) != 1).cpu()
        first_tokens = starts.flatten().nonzero().squeeze(1)
        lengths = first_tokens.diff(append=torch.tensor([rows * columns])).tolist()
        firsts = first_tokens.tolist()
    owners = torch.arange(rows).repeat_interleave(columns) if segments is None else segments.flatten().cpu()
    examples = owners[firsts].tolist()
    present = [index for index, length in enumerate(lengths) if length]
    lengths, examples = ([values[index] for index in present] for values in (lengths, examples))
    return Packing(shape, kept, lengths, examples, position_ids.device)
