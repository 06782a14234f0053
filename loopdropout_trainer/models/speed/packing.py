"""Padding costs nothing: the examples of a micro-batch run packed in one row, and come back in the rows they came from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    kept: torch.Tensor | None
    lengths: list[int]
    examples: list[int]
    tokens: torch.Tensor

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
        position_ids: [B or 1, S]; without a mask, they say where examples begin (`example_starts`).
        segments: [B, S] index of each token's gates; default: its row.
    """
    rows, columns = shape
    if token_mask is not None:
        # A row is an example: its real tokens, wherever its padding stands, keep their order when they are packed.
        mask = token_mask.bool().cpu()
        lengths = mask.sum(dim=1).tolist()  # [B]; 0 for a row of padding only
        firsts = [row * columns for row in range(rows)]  # any token of the row will do: all have the row's gates
        kept = mask.flatten().nonzero().squeeze(1)  # [T], row by row
        kept = None if len(kept) == rows * columns else kept.to(token_mask.device, non_blocking=True)
    else:
        # Rows of several examples: each begins a run [first, next first) of the B * S tokens, and every row begins one.
        kept = None
        starts = example_starts(position_ids).cpu().expand(shape)  # [B, S]
        first_tokens = starts.flatten().nonzero().squeeze(1)  # [number of examples]
        lengths = first_tokens.diff(append=torch.tensor([rows * columns])).tolist()
        firsts = first_tokens.tolist()
    owners = torch.arange(rows).repeat_interleave(columns) if segments is None else segments.flatten().cpu()  # [B * S]
    examples = owners[firsts].tolist()
    present = [index for index, length in enumerate(lengths) if length]
    lengths, examples = ([values[index] for index in present] for values in (lengths, examples))
    tokens = torch.tensor(examples).repeat_interleave(torch.tensor(lengths))
    return Packing(shape, kept, lengths, examples, tokens.to(position_ids.device, non_blocking=True))
