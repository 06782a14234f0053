"""Stateless random numbers: a pure function of (seed, purpose, optimizer step, place in that step's global batch).

A draw depends on nothing that came before it. So a resumed run, another number of processes or another split into
micro-batches draws the same numbers for the same examples, and the global random stream is never touched: initial
weights and data order are the same with and without gates.

The source is Philox-4x64 (Salmon et al. 2011), whose raw output is fixed by its definition: the 128-bit key is
(seed, hash of the purpose), the 256-bit counter is (draw, segment, place, step).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch


Place = tuple[int, int]
"""(row, segment): the example's row in the step's global batch, and its position among the examples packed in that row."""

_MASK64 = 2**64 - 1


def _purpose_key(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")


def uniforms(seed: int, purpose: str, step: int, places: Sequence[Place], num_draws: int) -> torch.Tensor:
    """Draw uniform numbers in [0, 1) for each place.

    Args:
        seed: any integer.
        purpose: name of the stream; streams of different purpose are independent.
        step: optimizer step, counted from 0.
        places: N places in the step's global batch.
        num_draws: numbers for each place; a longer request starts with the shorter one's numbers.

    Returns:
        [N, num_draws] float64.
    """
    key = (_purpose_key(purpose) << 64) | (seed & _MASK64)
    raw = np.empty((len(places), num_draws), dtype=np.uint64)
    for index, (row, segment) in enumerate(places):
        counter = (step << 192) | (row << 128) | (segment << 64)
        raw[index] = np.random.Philox(key=key, counter=counter).random_raw(num_draws)
    return torch.from_numpy((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def normals(seed: int, purpose: str, step: int, places: Sequence[Place], num_draws: int) -> torch.Tensor:
    """Draw standard normal numbers for each place; arguments and result as in `uniforms`."""
    u = uniforms(seed, purpose, step, places, num_draws)
    return torch.special.ndtri(u + 2.0**-54)  # the middle of each of the 2^53 cells, never 0 or 1
