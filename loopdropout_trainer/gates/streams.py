"""Stateless random numbers: a function of (seed, purpose, optimizer step, example in the global batch).

A draw does not depend on previous draws. Resumed runs, other numbers of processes and other splits into micro-batches draw
the same numbers for the same examples. The global random state stays unchanged, so that initial weights and data order are
the same with and without gates.

The generator is numpy's Philox-4x64 (Salmon et al. 2011), which fixes the raw output. The 128-bit key is (seed, hash of the
purpose) and the 256-bit counter is (draw, segment, row, step).
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
    """Random numbers of N examples in one optimizer step, in an independent stream for each purpose.

    Args:
        seed: Seed of the run, any integer.
        step: Optimizer step, from 0.
        example_ids: (row, segment) of the N examples in the global batch of the step.
    """

    seed: int
    step: int
    example_ids: Sequence[ExampleId]

    def uniforms(self, purpose: str, num_draws: int) -> Tensor:
        """Return [N, num_draws] float64 in [0, 1), where fewer draws are a prefix of more draws."""
        # Philox computes its numbers from key and counter alone. So one generator serves all examples, with the counter of
        # each, and the numbers of an example depend on no other. A new generator for each takes five times as long.
        philox = np.random.Philox(key=_words(self.seed & _MASK64, _purpose_key(purpose)))
        state = philox.state
        raw = np.empty((len(self.example_ids), num_draws), np.uint64)
        for place, (row, segment) in enumerate(self.example_ids):
            state["state"]["counter"] = _words(0, segment, row, self.step)
            philox.state = state
            raw[place] = philox.random_raw(num_draws)
        highest = (raw >> np.uint64(11)).astype(np.float64)  # the 53 bits that float64 can hold
        return torch.from_numpy(highest * 2.0**-53)

    def normals(self, purpose: str, num_draws: int) -> Tensor:
        """Return [N, num_draws] float64 standard normals."""
        middles = self.uniforms(purpose, num_draws) + 2.0**-54  # never 0 or 1
        return torch.special.ndtri(middles)

    def step_uniforms(self, purpose: str, num_draws: int) -> Tensor:
        """Return [num_draws] uniforms that are the same for all examples of the optimizer step, on every process."""
        return Streams(self.seed, self.step, [(0, 0)]).uniforms(purpose, num_draws)[0]
