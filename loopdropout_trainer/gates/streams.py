"""Stateless random numbers: a pure function of (seed, purpose, optimizer step, example of that step's global batch).

A draw depends on nothing that came before it. So a resumed run, another number of processes or another split into
micro-batches draws the same numbers for the same examples, and the global random stream is never touched: initial
weights and data order are the same with and without gates.

The source is numpy's Philox-4x64 (Salmon et al. 2011), whose raw output is fixed by its definition: the 128-bit key is
(seed, hash of the purpose), the 256-bit counter is (draw, segment, row, step).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch


ExampleId = tuple[int, int]
"""(row, segment): the example's row in the step's global batch, and its position among the examples packed in that row."""

_MASK64 = 2**64 - 1


def _purpose_key(purpose: str) -> int:
    digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _words(*words: int) -> np.ndarray:
    return np.array(words, np.uint64)


def uniforms(seed: int, purpose: str, step: int, example_ids: Sequence[ExampleId], num_draws: int) -> torch.Tensor:
    """Draw uniform numbers in [0, 1) for each example.

    Args:
        seed: any integer.
        purpose: name of the stream; streams of different purpose are independent.
        step: optimizer step, counted from 0.
        example_ids: of N examples in the step's global batch.
        num_draws: numbers for each example; a longer request starts with the shorter one's numbers.

    Returns:
        [N, num_draws] float64.
    """
    generator = np.random.Philox(key=_words(seed & _MASK64, _purpose_key(purpose)))
    state = generator.state  # setting its counter takes a quarter of the time that another generator takes
    raw = np.empty((len(example_ids), num_draws), np.uint64)
    for place, (row, segment) in enumerate(example_ids):
        state["state"]["counter"] = _words(0, segment, row, step)
        generator.state = state
        raw[place] = generator.random_raw(num_draws)
    highest = (raw >> np.uint64(11)).astype(np.float64)  # 53 bits
    return torch.from_numpy(highest * 2.0**-53)


def normals(seed: int, purpose: str, step: int, example_ids: Sequence[ExampleId], num_draws: int) -> torch.Tensor:
    """Draw standard normal numbers for each example; arguments and result as in `uniforms`."""
    u = uniforms(seed, purpose, step, example_ids, num_draws)
    return torch.special.ndtri(u + 2.0**-54)  # the middle of each of the 2^53 cells, never 0 or 1
