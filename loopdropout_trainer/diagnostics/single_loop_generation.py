"""Accuracy with the update in one loop alone (Table "GSM8K generation with one adapter application")."""

from __future__ import annotations

from typing import Any

import torch

from loopdropout_trainer.diagnostics.depth import counts
from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Measurements


class SingleLoopGeneration(Diagnostic):
    """Greedy generation with the adapter at unit strength in one loop; the backbone runs all K loops."""

    name = "single_loop_generation"
    title = "Accuracy with the adapter in one loop only, %"
    form = ".2f"
    needs = "benchmarks"
    needs_adapter = True

    def measure(self, context: Context) -> dict[str, Any]:
        found = {}
        for grouped in context.benchmarks:
            only = [context.evaluate(grouped, one_hot, None) for one_hot in torch.eye(context.num_loops).tolist()]
            all_on = context.evaluate(grouped, None, None)
            found[grouped.benchmark.name] = {
                "total": all_on.total,
                "only": [counts(result) for result in only],
                "all_on": counts(all_on),
            }
        return found

    def rows(self, found: Measurements):
        rows = {}
        for name in found.first:
            rows |= {f"{name}, only loop {loop}": (name, "only", loop - 1, "score") for loop in found.loops}
            rows[f"{name}, all loops"] = (name, "all_on", "score")
        return rows
