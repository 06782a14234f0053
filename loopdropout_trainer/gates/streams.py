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
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


ExampleId = tuple[int, int]
"""(row, segment): the example's row in the step's global batch, and its position among the examples packed in that row."""

_MASK64 = 2**64 - 1


def _purpose_key(purpose: str) -> int:
    digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _words(*words: int) -> np.ndarray:
    return np.array(words, np.uint64)


@dataclass(frozen=True)
class Streams:
    """The random numbers of some examples in one optimizer step; streams of different purpose are independent.

    Attributes:
        seed: of all streams of the run, any integer.
        step: optimizer step, from 0.
        example_ids: of the N examples in the step's global batch.
    """

    seed: int
    step: int
    example_ids: Sequence[ExampleId]

    def uniforms(self, purpose: str, num_draws: int) -> Tensor:
        """Return [N, num_draws] float64 in [0, 1); a longer request starts with the shorter one's numbers."""
        key = _words(self.seed & _MASK64, _purpose_key(purpose))
        raw = np.empty((len(self.example_ids), num_draws), np.uint64)
        for place, (row, segment) in enumerate(self.example_ids):
            counter = _words(0, segment, row, self.step)
            raw[place] = np.random.Philox(key=key, counter=counter).random_raw(num_draws)
        highest = (raw >> np.uint64(11)).astype(np.float64)  # 53 bits
        return torch.from_numpy(highest * 2.0**-53)

    def normals(self, purpose: str, num_draws: int) -> Tensor:
        """Return [N, num_draws] standard normals, float64; as in `uniforms`."""
        middles = self.uniforms(purpose, num_draws) + 2.0**-54  # of the 2^53 cells, never 0 or 1
        return torch.special.ndtri(middles)

    def step_uniforms(self, purpose: str, num_draws: int) -> Tensor:
        """Return [num_draws] uniforms that are the same for all examples of the optimizer step, on every process."""
        return Streams(self.seed, self.step, [(0, 0)]).uniforms(purpose, num_draws)[0]
