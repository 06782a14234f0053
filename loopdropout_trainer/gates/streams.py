"""Stateless random numbers: a pure function of (seed, purpose, optimizer step, example of that step's global batch).

A draw depends on nothing that came before it. So a resumed run, another number of processes or another split into
micro-batches draws the same numbers for the same examples, and the global random stream is never touched: initial
weights and data order are the same with and without gates.

The source is Philox-4x64 (Salmon et al. 2011), whose raw output is fixed by its definition: the 128-bit key is
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
_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def _purpose_key(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")


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
    rows, segments = np.array(example_ids, dtype=np.uint64).reshape(-1, 2).T
    num_blocks = -(-num_draws // 4)
    shape = (len(example_ids), num_blocks)
    counter = [
        np.broadcast_to(np.arange(1, num_blocks + 1, dtype=np.uint64), shape),  # the first block has number 1
        np.broadcast_to(segments[:, None], shape),
        np.broadcast_to(rows[:, None], shape),
        np.full(shape, step, dtype=np.uint64),
    ]
    raw = np.stack(_philox(counter, (seed & _MASK64, _purpose_key(purpose))), axis=-1)  # [N, blocks, 4]
    raw = raw.reshape(len(example_ids), -1)[:, :num_draws]
    return torch.from_numpy((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Return Philox-4x64-10 of many 256-bit counters (four words each) under one key (two words)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = ((k + step) & _MASK64 for k, step in zip((k0, k1), _KEY_STEPS, strict=True))
    return [c0, c1, c2, c3]


def _multiply(a: np.uint64, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and the low 64 bits of a * b, by schoolbook multiplication of 32-bit halves."""
    half, low_mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = a & low_mask, a >> half, b & low_mask, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    middle2 = a0 * b1 + (middle & low_mask)
    return a1 * b1 + (middle >> half) + (middle2 >> half), a * b  # the low product wraps


def normals(seed: int, purpose: str, step: int, example_ids: Sequence[ExampleId], num_draws: int) -> torch.Tensor:
    """Draw standard normal numbers for each example; arguments and result as in `uniforms`."""
    u = uniforms(seed, purpose, step, example_ids, num_draws)
    return torch.special.ndtri(u + 2.0**-54)  # the middle of each of the 2^53 cells, never 0 or 1
