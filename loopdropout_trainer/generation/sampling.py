"""Sampling of tokens by stateless random numbers: what a row draws depends on its key alone, never on the rows beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from loopdropout_trainer.gates.streams import uniforms


class Sampler:
    """Draws tokens from softmax(logits / temperature), cut by top-k, top-p and min-p in this order, as transformers does.

    The token at position n of row i is the one at which the cumulated probability, in the order of the vocabulary, passes
    a uniform number that is a function of (seed, step, row i, n). So a row has the same completion in any batch, process
    and order, and again after a resume, up to the rounding of its logits.

    Args:
        seed, purpose, step: key of the stream.
        rows: number of each prompt under that key.
        length: most tokens of a completion.
        temperature: above 0. top_k: number of tokens that may be drawn, 0 for all. top_p: their least joint probability.
        min_p: least probability relative to the most probable token, or None.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        step: int,
        rows: Sequence[int],
        length: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float | None = None,
    ) -> None:
        self.uniforms = uniforms(seed, purpose, step, [(row, 0) for row in rows], length)  # [N, length]
        self.warpers = LogitsProcessorList()
        if temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self.warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))
        if min_p:
            self.warpers.append(MinPLogitsWarper(min_p))

    def __call__(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Return the tokens [B] that rows, counted as in `rows` of the constructor, draw at positions from logits [B, V]."""
        probabilities = self.warpers(None, logits).softmax(dim=-1)
        cumulated = probabilities.double().cumsum(dim=-1)
        u = self.uniforms[list(rows), list(positions)].to(logits.device)  # [B]
        # The first token whose cumulated probability is above u: never one of probability 0.
        return torch.searchsorted(cumulated, (u * cumulated[:, -1]).unsqueeze(1), right=True).squeeze(1)
