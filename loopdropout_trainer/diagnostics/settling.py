"""How fast the recurrence settles: how far each loop's state and readout are from the last one's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Report
from loopdropout_trainer.diagnostics.plots import draw_curves, new_figure, save_figure
from loopdropout_trainer.diagnostics.scores import Batch
from loopdropout_trainer.diagnostics.states import carries_states, target_states
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
        states, readouts = target_states(context.model, batch)
        states = states.float()
        distances = (states - states[-1]).norm(dim=-1) / states[-1].norm(dim=-1)
        head = find_looped_model(context.model).get_output_embeddings()
        last = F.log_softmax(head(readouts[-1]).float(), dim=-1)  # [n, V]
        divergences, agreements = [], []
        for readout in readouts:
            own = F.log_softmax(head(readout).float(), dim=-1)
            divergences.append((last.exp() * (last - own)).sum(dim=-1))
            agreements.append(own.argmax(dim=-1) == last.argmax(dim=-1))
        found = (distances, torch.stack(divergences), torch.stack(agreements))
        return np.stack([each.double().cpu().numpy() for each in found])

    def table(self, report: Report):
        rows = {f"state, loop {loop}": ("state_distances", loop - 1) for loop in report.loops}
        rows |= {f"readout KL, loop {loop}": ("readout_divergences", loop - 1) for loop in report.loops}
        rows |= {f"same token %, loop {loop}": ("agreements_percent", loop - 1) for loop in report.loops}
        return report.table(rows)

    def draw(self, report: Report, path):
        with new_figure(columns=2) as (figure, axes):
            draw_curves(axes[0], report.loops, report.series("state_distances"))
            draw_curves(axes[1], report.loops, report.series("readout_divergences"))
            axes[0].set(xlabel="Loop", ylabel="State: distance to last", xticks=report.loops)
            axes[1].set(xlabel="Loop", ylabel="Readout: KL to last (nats)", xticks=report.loops)
            return save_figure(figure, path, legend_of=axes[0])
