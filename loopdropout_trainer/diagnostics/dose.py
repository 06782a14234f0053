"""What the update does at another strength: one gate c for all loops, from none (c = 0) to twice the update."""

from __future__ import annotations

from typing import Any

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Measurements


DOSES = tuple(step / 4 for step in range(9))
"""0, 0.25, ..., 2."""


class Dose(Diagnostic):
    """Inference uses c = 1. Loop Dropout at p = 0.5 trains every active application at strength 2."""

    name = "dose"
    title = "Loss reduction with the gate c in every loop, %"
    form = ".1f"
    needs_adapter = True

    def settings(self, context: Context) -> dict[str, Any]:
        return {"doses": list(DOSES)}

    def measure(self, context: Context) -> dict[str, Any]:
        losses = [context.scores([dose] * context.num_loops).loss for dose in DOSES]
        frozen = losses[DOSES.index(0)]
        return {
            "doses": list(DOSES),
            "losses": losses,
            "reductions_percent": [100 * (frozen - loss) / frozen for loss in losses],
        }

    def rows(self, found: Measurements):
        return {f"c = {dose:g}": ("reductions_percent", place) for place, dose in enumerate(DOSES)}
