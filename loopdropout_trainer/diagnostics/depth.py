"""How an adapter does when the model runs fewer or more loops than it was trained with (Appendix "Depth")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from loopdropout_trainer.adapters import ADAPTER_KINDS
from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Report
from loopdropout_trainer.diagnostics.plots import draw_curves, draw_heat_map, new_figure, percent_axis, save_figure
from loopdropout_trainer.diagnostics.subjects import with_depth
from loopdropout_trainer.looped import find_looped_model


def relative_compute(model: nn.Module, depths: Sequence[int]) -> list[float]:
    """Return the work of a forward pass at each depth, 1 at the model's own.

    Counted are the linear layers, which a pass through the recurrent block repeats and the rest runs once; attention
    scores and the adapter are left out.
    """
    looped = find_looped_model(model)
    recurrent = set(looped.recurrent_linears())
    inside = outside = 0
    for name, module in looped.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            if name.removesuffix(".base_layer") in recurrent:
                inside += module.weight.numel()
            else:
                outside += module.weight.numel()
    own = looped.config.num_loops * inside + outside
    return [(depth * inside + outside) / own for depth in depths]


class _AtDepths(Diagnostic):
    """What both depth diagnostics share."""

    def why_not(self, context: Context) -> str | None:
        shapes = {name: tuple(p.shape) for name, p in context.model.named_parameters() if "lora_" in name}
        if any(kind.saved_num_loops(shapes) is not None for kind in ADAPTER_KINDS.values()):
            return "each of its loops has parameters of its own, for one depth only"
        return super().why_not(context)

    def settings(self, context: Context) -> dict[str, Any]:
        return {"depths": list(context.depths)}


class Depth(_AtDepths):
    """Teacher-forced, with every loop adapted."""

    name = "depth"
    title = "Cross entropy by the number of loops that are run"

    def passes(self, context: Context) -> int:
        return len(context.depths)

    def measure(self, context: Context) -> dict[str, Any]:
        scores = []
        compute = relative_compute(context.model, context.depths)
        for depth in context.depths:
            with context.at_depth(depth):
                scores.append(context.scores())
        return {
            "depths": list(context.depths),
            "relative_compute": compute,
            "losses": [each.loss for each in scores],
            "accuracies_percent": [each.accuracy_percent for each in scores],
        }

    def table(self, report: Report):
        return report.table(_by_depth(report, "losses") | _by_depth(report, "accuracies_percent", ", tokens right %"))

    def draw(self, report: Report, path):
        with new_figure(columns=2, height=2.5) as (figure, axes):
            for axis, key, label in (
                (axes[0], "losses", "Cross entropy (nats)"),
                (axes[1], "accuracies_percent", "Target tokens right (%)"),
            ):
                _draw_curves(axis, report, label, key)
            return save_figure(figure, path, legend_of=axes[0])


class DepthGeneration(_AtDepths):
    """Greedy answers at every depth, with every loop adapted (Table "Accuracy across training and evaluation depths")."""

    name = "depth_generation"
    title = "Correct answers by the number of loops that are run, %"
    needs = "problems"

    def passes(self, context: Context) -> int:
        return 0

    def measure(self, context: Context) -> dict[str, Any]:
        found = {}
        for problems in context.problems:
            results = [context.answer(problems, None, depth) for depth in context.depths]
            found[problems.benchmark.name] = {
                "total": results[0].total,
                "results": [counts(result) for result in results],
            }
        return {
            "depths": list(context.depths),
            "relative_compute": relative_compute(context.model, context.depths),
            "benchmarks": found,
        }

    def table(self, report: Report):
        rows = {}
        for name in _benchmarks(report):
            for place, depth in enumerate(report.runs[0]["measured"]["depths"]):
                rows[f"{name}, {depth} loops"] = ("benchmarks", name, "results", place, "score")
        return report.table(rows, ".1f")

    def draw(self, report: Report, path):
        names, depths = _benchmarks(report), report.runs[0]["measured"]["depths"]
        with new_figure(rows=len(names), height=2.6, squeeze=False) as (figure, axes):
            for axis, name in zip(axes.flat, names, strict=True):
                _draw_curves(axis, report, f"{name} (%)", "benchmarks", name, "results", key="score")
                percent_axis(axis, from_zero=False)
            files = save_figure(figure, path, legend_of=axes.flat[0])
        if len({run["train_num_loops"] for run in report.runs if run["kind"] == "adapter"}) > 1:
            files += self._matrix(report, names, depths, path)
        return files

    def _matrix(self, report: Report, names, depths, path):
        """Draw accuracy by training depth (and method) from top to bottom and by evaluation depth across."""
        methods = [method for method in report.methods if report.of(method)[0]["kind"] == "adapter"]
        labels = [with_depth(method, report.of(method)[0]["train_num_loops"]) for method in methods]
        height = 0.26 * len(methods) + 0.9
        with new_figure(rows=len(names), height=height, squeeze=False) as (figure, axes):
            for axis, name in zip(axes.flat, names, strict=True):
                values = [
                    [
                        report.values(method, "benchmarks", name, "results", i, "score").mean()
                        for i in range(len(depths))
                    ]
                    for method in methods
                ]
                image = draw_heat_map(axis, values, [str(depth) for depth in depths], labels)
                axis.set(xlabel="Loops at evaluation")
                figure.colorbar(image, ax=axis, label=f"{name} (%)").outline.set_visible(False)
            return save_figure(figure, f"{path}_matrix")


def counts(result: Any) -> dict[str, Any]:
    """Return right and missing answers of a benchmark result, and its score in percent."""
    return {"correct": result.correct, "missing": result.missing, "score": result.score}


def _benchmarks(report: Report) -> list[str]:
    return list(report.runs[0]["measured"]["benchmarks"])


def _by_depth(report: Report, key: str, what: str = "") -> dict[str, tuple[str, int]]:
    depths = report.runs[0]["measured"]["depths"]
    return {f"{depth} loops{what}": (key, place) for place, depth in enumerate(depths)}


def _draw_curves(axis, report: Report, label: str, *path: str, key: str | None = None) -> None:
    """Draw what lies at `path` (of each entry, its `key`) over the depth, with the relative work on the upper axis."""
    measured = report.runs[0]["measured"]
    depths, compute = measured["depths"], measured["relative_compute"]
    if key is None:
        series = report.series(*path)
    else:
        points = [report.series(*path, place, key) for place in range(len(depths))]
        series = {
            method: tuple(
                None if points[0][method][part] is None else np.array([point[method][part] for point in points])
                for part in (0, 1)
            )
            for method in report.methods
        }
    draw_curves(axis, depths, series)
    axis.set(xlabel="Loops at evaluation", ylabel=label)
    shown = range(0, len(depths), -(-len(depths) // 8))
    axis.set_xticks([depths[place] for place in shown])
    axis.axvline(report.num_loops, color="black", linewidth=0.5, linestyle=":")
    if len(depths) > 1:
        upper = axis.secondary_xaxis("top")
        shown = shown[:: -(-len(shown) // 5)]
        upper.set_xticks([depths[place] for place in shown], [f"{compute[place]:.2f}" for place in shown])
        upper.set_xlabel("Relative work")
