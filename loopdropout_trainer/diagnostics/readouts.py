"""Loss and accuracy of every loop's readout along the fully adapted recurrence (Table "MATH-500 readouts")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import nn

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic
from loopdropout_trainer.diagnostics.scores import Batch, Scores, evaluating, score_readouts, total
from loopdropout_trainer.looped import find_looped_model


def readout_losses(model: nn.Module, batches: Iterable[Batch], over_processes: bool = False) -> list[float]:
    """Return the cross entropy per target token, in nats, of the readout after each loop t = 1..K.

    Args:
        model: looped causal language model, with or without an adapter; under the gates in force.
        batches: model inputs with `labels` [B, S], -100 where no target is.
        over_processes: whether every process calls this with batches of its own; the means are over all of them.

    Raises:
        ValueError: if the batches hold no target token.
    """
    with evaluating(model):
        sums = total((score_readouts(model, batch) for batch in batches), over_processes)
    num_loops = find_looped_model(model).config.num_loops
    return [Scores.of(of_loop).loss for of_loop in np.broadcast_to(sums, (num_loops, 3))]


class Readouts(Diagnostic):
    """All K readouts come from one forward pass with every loop adapted."""

    name = "readouts"
    title = "Cross entropy of each loop's readout"

    def measure(self, context: Context) -> dict[str, Any]:
        sums = total(context.over_batches(lambda batch: score_readouts(context.model, batch)))
        scores = [Scores.of(of_loop) for of_loop in sums]
        return {
            "losses": [each.loss for each in scores],
            "accuracies_percent": [each.accuracy_percent for each in scores],
        }
