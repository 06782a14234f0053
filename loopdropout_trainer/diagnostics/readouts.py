"""Loss and accuracy of every loop's readout along the fully adapted recurrence (Table "MATH-500 readouts")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Report
from loopdropout_trainer.diagnostics.plots import draw_curves, new_figure, save_figure
from loopdropout_trainer.diagnostics.scores import Batch, Scores, measuring, score_readouts


def readout_losses(model: nn.Module, batches: Iterable[Batch]) -> list[float]:
    """Return the cross entropy per target token, in nats, of the readout after each loop t = 1..K.

    Args:
        model: looped causal language model, with or without an adapter; under the gates in force.
        batches: model inputs with `labels` [B, S], -100 where no target is.

    Raises:
        ValueError: if the batches hold no target token.
    """
    with measuring(model):
        found = [score_readouts(model, batch) for batch in batches]
    num_loops = len(found[0]) if found else 0
    return [Scores.join([part[loop] for part in found]).loss for loop in range(num_loops)]


class Readouts(Diagnostic):
    """All K readouts come from one forward pass with every loop adapted."""

    name = "readouts"
    title = "Cross entropy of each loop's readout"

    def measure(self, context: Context) -> dict[str, Any]:
        found = context.over_batches(lambda batch: score_readouts(context.model, batch))
        scores = [Scores.join([part[loop] for part in found]) for loop in range(context.num_loops)]
        return {
            "losses": [each.loss for each in scores],
            "accuracies_percent": [each.accuracy_percent for each in scores],
        }

    def table(self, report: Report):
        rows = {f"loop {loop}": ("losses", loop - 1) for loop in report.loops}
        rows |= {f"loop {loop}, tokens right %": ("accuracies_percent", loop - 1) for loop in report.loops}
        return report.table(rows)

    def draw(self, report: Report, path):
        with new_figure(columns=2) as (figure, axes):
            draw_curves(axes[0], report.loops, report.series("losses"))
            draw_curves(axes[1], report.loops, report.series("accuracies_percent"))
            axes[0].set(xlabel="Readout loop", ylabel="Cross entropy (nats)", xticks=report.loops)
            axes[1].set(xlabel="Readout loop", ylabel="Target tokens right (%)", xticks=report.loops)
            return save_figure(figure, path, legend_of=axes[0])
