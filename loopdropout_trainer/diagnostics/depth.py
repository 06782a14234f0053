"""How an adapter does when the model runs fewer or more loops than it was trained with (Appendix "Depth")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from loopdropout_trainer.adapters import ADAPTER_KINDS
from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic
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


def counts(result: Any) -> dict[str, Any]:
    """Return correct and missing answers of a benchmark result, and its score in percent."""
    return {"correct": result.correct, "missing": result.missing, "score": result.score}


class _AtDepths(Diagnostic):
    """What both depth diagnostics share."""

    def skip_reason(self, context: Context) -> str | None:
        shapes = {name: tuple(p.shape) for name, p in context.model.named_parameters() if "lora_" in name}
        if any(kind.saved_num_loops(shapes) is not None for kind in ADAPTER_KINDS.values()):
            return "each of its loops has parameters of its own, for one depth only"
        return super().skip_reason(context)

    def settings(self, context: Context) -> dict[str, Any]:
        return {"depths": list(context.depths)}


class Depth(_AtDepths):
    """Teacher-forced, with every loop adapted."""

    name = "depth"
    title = "Cross entropy by the number of loops that are run"

    def measure(self, context: Context) -> dict[str, Any]:
        scores = []
        for depth in context.depths:
            with context.at_depth(depth):
                scores.append(context.scores())
        return {
            "depths": list(context.depths),
            "relative_compute": relative_compute(context.model, context.depths),
            "losses": [each.loss for each in scores],
            "accuracies_percent": [each.accuracy_percent for each in scores],
        }


class DepthGeneration(_AtDepths):
    """Greedy generation at every depth, with every loop adapted (Table "Accuracy across training and evaluation depths")."""

    name = "depth_generation"
    title = "Accuracy by the number of loops that are run, %"
    needs = "benchmarks"

    def measure(self, context: Context) -> dict[str, Any]:
        found = {}
        for grouped in context.benchmarks:
            results = [context.evaluate(grouped, None, depth) for depth in context.depths]
            found[grouped.benchmark.name] = {
                "total": results[0].total,
                "results": [counts(result) for result in results],
            }
        return {
            "depths": list(context.depths),
            "relative_compute": relative_compute(context.model, context.depths),
            "benchmarks": found,
        }
