"""Whether the update answers problems from one loop alone (Table "GSM8K generation with one adapter application")."""

from __future__ import annotations

from typing import Any

import numpy as np

from loopdropout_trainer.diagnostics.depth import counts
from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Report
from loopdropout_trainer.diagnostics.plots import draw_curves, new_figure, percent_axis, save_figure


class SingleLoopGeneration(Diagnostic):
    """Greedy answers with the adapter at unit strength in one loop; the backbone runs all K loops."""

    name = "single_loop_generation"
    title = "Correct answers with the adapter in one loop only, %"
    needs = "problems"
    needs_adapter = True

    def passes(self, context: Context) -> int:
        return 0

    def measure(self, context: Context) -> dict[str, Any]:
        found = {}
        for problems in context.problems:
            one_hot = np.eye(context.num_loops).tolist()
            only = [context.answer(problems, gates, None) for gates in one_hot]
            all_on = context.answer(problems, None, None)
            found[problems.benchmark.name] = {
                "total": all_on.total,
                "only": [counts(result) for result in only],
                "all_on": counts(all_on),
            }
        return found

    def table(self, report: Report):
        rows = {}
        for name in report.runs[0]["measured"]:
            rows |= {f"{name}, only loop {loop}": (name, "only", loop - 1, "score") for loop in report.loops}
            rows[f"{name}, all loops"] = (name, "all_on", "score")
        return report.table(rows, ".2f")

    def draw(self, report: Report, path):
        names = list(report.runs[0]["measured"])
        with new_figure(rows=len(names), squeeze=False) as (figure, axes):
            for axis, name in zip(axes.flat, names, strict=True):
                points = [report.series(name, "only", loop - 1, "score") for loop in report.loops]
                series = {}
                for method in report.methods:
                    mean, sd = zip(*(point[method] for point in points), strict=True)
                    series[method] = (mean, None if sd[0] is None else sd)
                draw_curves(axis, report.loops, series)
                axis.set(xlabel="Only active adapter loop", ylabel=f"{name} (%)", xticks=report.loops)
                percent_axis(axis)
            return save_figure(figure, path, legend_of=axes.flat[0])
