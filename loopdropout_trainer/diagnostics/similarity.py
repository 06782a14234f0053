"""How alike the states of the loops are: linear CKA of every pair of loops.

    CKA(X, Y) = HSIC(X X', Y Y') / sqrt(HSIC(X X', X X') HSIC(Y Y', Y Y'))

with the unbiased estimator of HSIC (Song et al. 2012, eq. 5): the biased one tends to 1 for states that are wider than
there are tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Measurements
from loopdropout_trainer.diagnostics.scores import Batch, carries_states, target_states


MOST_TOKENS = 500
"""Most target tokens that are compared, spread over all batches of rows."""


def linear_cka(states: np.ndarray) -> np.ndarray:
    """Return the linear CKA [K, K] of K sets of states of the same n tokens, [K, n, H]; n must be at least 4."""
    kernels = states.astype(np.float64) @ states.astype(np.float64).transpose(0, 2, 1)  # [K, n, n]
    n = kernels.shape[1]
    kernels[:, np.arange(n), np.arange(n)] = 0
    products = np.einsum("sij,tij->st", kernels, kernels)
    sums, columns = kernels.sum(axis=(1, 2)), kernels.sum(axis=2)  # [K], [K, n]
    hsic = products + np.outer(sums, sums) / ((n - 1) * (n - 2)) - 2 / (n - 2) * columns @ columns.T
    sizes = np.sqrt(np.diag(hsic))
    return hsic / np.outer(sizes, sizes)


class Similarity(Diagnostic):
    """One pass with every loop adapted."""

    name = "similarity"
    title = "Linear CKA of the loops' states"

    def settings(self, context: Context) -> dict[str, Any]:
        return {"most_tokens": MOST_TOKENS}

    def measure(self, context: Context) -> dict[str, Any]:
        per_batch = max(1, MOST_TOKENS // len(context.rows.batches))
        parts = context.over_batches(lambda batch: self._of_batch(context, batch, per_batch))
        states = np.concatenate(parts, axis=1)[:, :MOST_TOKENS]
        return {
            "states": "carried" if carries_states(context.model) else "readout",
            "num_tokens": states.shape[1],
            "cka": linear_cka(states).tolist(),
        }

    def _of_batch(self, context: Context, batch: Batch, most: int) -> np.ndarray:
        """Return the states [K, n, H] of at most `most` target tokens, evenly spaced."""
        states, _ = target_states(context.model, batch)
        n = states.shape[1]
        chosen = torch.linspace(0, n - 1, min(most, n)).round().long()
        return states[:, chosen].float().cpu().numpy()

    def rows(self, found: Measurements):
        last = found.num_loops
        rows = {f"loops {loop} and {loop + 1}": ("cka", loop - 1, loop) for loop in range(1, last)}
        rows |= {f"loops {loop} and {last}": ("cka", loop - 1, last - 1) for loop in range(1, last - 1)}
        return rows
