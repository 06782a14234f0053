"""How fast the recurrence settles: how far each loop's state and readout are from the last one's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Measurements
from loopdropout_trainer.diagnostics.scores import Batch, carries_states, target_states
from loopdropout_trainer.looped import find_looped_model


class Settling(Diagnostic):
    """One pass with every loop adapted; means over target tokens."""

    name = "settling"
    title = "Distance of each loop to the last one"

    def measure(self, context: Context) -> dict[str, Any]:
        found = np.concatenate(context.over_batches(lambda batch: self._of_batch(context, batch)), axis=2)
        distances, divergences, agreements = found.mean(axis=2).tolist()
        return {
            "states": "carried" if carries_states(context.model) else "readout",
            "state_distances": distances,
            "readout_divergences": divergences,
            "agreements_percent": [100 * each for each in agreements],
        }

    def _of_batch(self, context: Context, batch: Batch) -> np.ndarray:
        """Return distance, divergence and agreement for each loop and target token, [3, K, n]."""
        states, readouts = target_states(context.model, batch)  # [K, n, H] each
        states = states.float()
        distances = (states - states[-1]).norm(dim=-1) / states[-1].norm(dim=-1)
        head = find_looped_model(context.model).get_output_embeddings()
        last = F.log_softmax(head(readouts[-1]).float(), dim=-1)  # [n, V]
        divergences, agreements = [], []
        for readout in readouts:  # one loop's logits at a time
            own = F.log_softmax(head(readout).float(), dim=-1)
            divergences.append((last.exp() * (last - own)).sum(dim=-1))
            agreements.append(own.argmax(dim=-1) == last.argmax(dim=-1))
        found = (distances, torch.stack(divergences), torch.stack(agreements))
        return np.stack([each.double().cpu().numpy() for each in found])

    def rows(self, found: Measurements):
        rows = found.by_loop("state, loop {}", "state_distances")
        rows |= found.by_loop("readout KL, loop {}", "readout_divergences")
        return rows | found.by_loop("same token %, loop {}", "agreements_percent")
