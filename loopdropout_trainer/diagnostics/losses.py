"""Losses on the rows: with the update in some loops, at other strengths, of each loop's readout, at other depths."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations
from typing import Any

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic
from loopdropout_trainer.evaluation.subject import run_as
from loopdropout_trainer.training.scores import Scores, reduction, score_readouts, single_loop_activation


class SingleLoop(Diagnostic):
    """K + 2 passes: frozen, each loop alone, all loops."""

    name = "single_loop"
    title = "Loss reduction with the adapter in one loop only, %"
    needs_adapter = True

    def measure(self, context: Context) -> dict[str, Any]:
        found = single_loop_activation(context.model, context.batches)
        all_on = reduction(found.frozen, found.all_on)
        return {**asdict(found), "reductions_percent": found.reductions, "all_on_reduction_percent": all_on}


class Dose(Diagnostic):
    """One gate c for all loops. Inference uses c = 1; Loop Dropout at p = 0.5 trains every active application at 2."""

    name = "dose"
    title = "Loss reduction with the gate c in every loop, %"
    needs_adapter = True

    def measure(self, context: Context) -> dict[str, Any]:
        doses = [step / 4 for step in range(9)]  # 0, 0.25, ..., 2
        losses = [context.scores([dose] * context.num_loops).loss for dose in doses]
        reductions = [reduction(losses[0], loss) for loss in losses]
        return {"doses": doses, "losses": losses, "reductions_percent": reductions}


class Patterns(Diagnostic):
    """The update at unit strength in a set of loops: all 2^K sets up to K = 6, else the prefixes and suffixes."""

    name = "patterns"
    title = "Loss reduction with the adapter in some loops, %"
    needs_adapter = True

    def measure(self, context: Context) -> dict[str, Any]:
        num_loops = context.num_loops
        every = tuple(range(1, num_loops + 1))
        prefixes = [every[:length] for length in range(num_loops + 1)]
        suffixes = [every[start:] for start in range(num_loops + 1)]
        sets = dict.fromkeys(prefixes + suffixes)  # the empty one first
        if num_loops <= 6:
            sets = [loops for length in range(num_loops + 1) for loops in combinations(every, length)]
        patterns = []
        for loops in sets:
            loss = context.scores([float(loop in loops) for loop in every]).loss
            frozen = patterns[0]["loss"] if patterns else loss
            kinds = ["prefix"] * (loops in prefixes) + ["suffix"] * (loops in suffixes)
            percent = reduction(frozen, loss)
            patterns.append({"loops": list(loops), "kinds": kinds, "loss": loss, "reduction_percent": percent})
        return {"frozen": frozen, "patterns": patterns}


class Readouts(Diagnostic):
    """Every loop's readout along the fully adapted recurrence (Table "MATH-500 readouts")."""

    name = "readouts"
    title = "Cross entropy of each loop's readout"

    def measure(self, context: Context) -> dict[str, Any]:
        return means(score_readouts(context.model, context.batches))


def means(scores: list[Scores]) -> dict[str, list[float]]:
    return {"losses": [each.loss for each in scores], "accuracies_percent": [each.accuracy_percent for each in scores]}


class Depth(Diagnostic):
    """Teacher-forced at fewer or more loops than in training, with every loop adapted (Appendix "Depth"): one deepest pass."""

    name = "depth"
    title = "Cross entropy by the number of loops that are run"
    runs_at_depths = True

    def measure(self, context: Context) -> dict[str, Any]:
        with run_as(context.model, readout=max(context.depths)):  # whose readouts are those of the shorter runs
            scores = score_readouts(context.model, context.batches)
        return {"depths": list(context.depths), **means([scores[depth - 1] for depth in context.depths])}
