"""How often the readout after each loop says what the last one says: how far loops can be saved, or drafted."""

from __future__ import annotations

import numpy as np
import torch

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Row, by_loop
from loopdropout_trainer.training.scores import Batch, over_batches, split_batch


class Agreement(Diagnostic):
    """Agreement of every loop's readout with the last one's: one pass with every loop adapted.

    With the distributions p_t and p_K of the next token, loop t keeps the most probable token of loop K, and it overlaps with
    it by 1 - TV(p_t, p_K), the sum over tokens of min(p_t, p_K). The two are the shares of drafted tokens that speculative
    decoding accepts, greedy and sampled (Leviathan et al. 2023), where loop t drafts what loop K checks.
    """

    name = "agreement"

    def measure(self, context: Context) -> list[Row]:
        def sums_of(batch: Batch) -> np.ndarray:  # [K, 3]: same most probable tokens, overlaps, tokens
            looped, inputs, labels = split_batch(context.model, batch)
            head = looped.get_output_embeddings()
            of_targets = [readout[:, :-1][labels != -100] for readout in looped.loop_readouts(**inputs)]
            last = head(of_targets[-1]).float().softmax(dim=-1)  # [n, V]
            sums = []
            for readout in of_targets:  # one loop's probabilities at a time
                own = head(readout).float().softmax(dim=-1)
                same = (own.argmax(dim=-1) == last.argmax(dim=-1)).sum()
                sums.append([same.item(), torch.minimum(own, last).sum().item(), len(readout)])
            return np.array(sums)

        same, overlaps, tokens = sum(over_batches(context.model, context.batches, sums_of)).T
        return by_loop("same_tokens", 100 * same / tokens, "%") + by_loop("overlap", 100 * overlaps / tokens, "%")
