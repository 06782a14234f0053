"""Losses on the rows: with the update in some loops, at other strengths, of each loop's readout, at other depths."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Row
from loopdropout_trainer.evaluation.subject import run_as
from loopdropout_trainer.record.measurement import NONE, gates_text
from loopdropout_trainer.training.scores import (
    Scores,
    SingleLoopActivation,
    reduction,
    score_readouts,
    single_loop_activation,
)


class SingleLoop(Diagnostic):
    """K + 2 passes: frozen, each loop alone, all loops."""

    name = "single_loop"
    needs_adapter = True

    def measure(self, context: Context) -> list[Row]:
        return single_loop_rows(single_loop_activation(context.model, context.batches))


def single_loop_rows(losses: SingleLoopActivation) -> list[Row]:
    """Return the rows of an activation: losses and their reductions, with the adapter in one loop only and in all."""
    rows = [{"metric": "frozen_loss", "value": losses.frozen, "unit": "nats", "gates": NONE}]
    num_loops = len(losses.only)
    for loop, loss in enumerate(losses.only, start=1):
        gates = gates_text([float(other == loop) for other in range(1, num_loops + 1)])
        rows += _loss_and_reduction(losses.frozen, loss, loop=loop, gates=gates)
    return rows + _loss_and_reduction(losses.frozen, losses.all_on)


def _loss_and_reduction(frozen: float, loss: float, name: str = "loss", **place: Any) -> list[Row]:
    return [
        {"metric": name, "value": loss, "unit": "nats", **place},
        {"metric": f"{name}_reduction", "value": reduction(frozen, loss), "unit": "%", **place},
    ]


class Dose(Diagnostic):
    """One gate c for all loops. Inference uses c = 1; Loop Dropout at p = 0.5 trains every active application at 2."""

    name = "dose"
    needs_adapter = True

    def measure(self, context: Context) -> list[Row]:
        doses = [step / 4 for step in range(9)]  # 0, 0.25, ..., 2
        losses = [context.scores([dose] * context.num_loops).loss for dose in doses]
        pairs = zip(doses, losses, strict=True)
        return [row for dose, loss in pairs for row in _loss_and_reduction(losses[0], loss, "dose_loss", dose=dose)]


class Patterns(Diagnostic):
    """The update at unit strength in a set of loops: all 2^K sets up to K = 6, else the prefixes and suffixes."""

    name = "patterns"
    needs_adapter = True

    def measure(self, context: Context) -> list[Row]:
        num_loops = context.num_loops
        every = tuple(range(1, num_loops + 1))
        prefixes = [every[:length] for length in range(num_loops + 1)]
        suffixes = [every[start:] for start in range(num_loops + 1)]
        sets = dict.fromkeys(prefixes + suffixes)
        if num_loops <= 6:
            sets = [loops for length in range(num_loops + 1) for loops in combinations(every, length)]
        frozen = context.scores([0.0] * num_loops).loss
        rows = []
        for loops in sets:
            gates = [float(loop in loops) for loop in every]
            loss = context.scores(gates).loss if loops else frozen
            of_pattern = _loss_and_reduction(frozen, loss, "pattern_loss", gates=gates_text(gates))
            rows += of_pattern
            for kind, ends in (("prefix", prefixes), ("suffix", suffixes)):
                if loops in ends:
                    rows.append({**of_pattern[1], "metric": f"{kind}_loss_reduction", "loop": len(loops)})
        return rows


class Readouts(Diagnostic):
    """Every loop's readout along the fully adapted recurrence (Table "MATH-500 readouts")."""

    name = "readouts"

    def measure(self, context: Context) -> list[Row]:
        return readout_rows(score_readouts(context.model, context.batches))


def readout_rows(scores: list[Scores]) -> list[Row]:
    """Return the rows of each loop's readout."""
    rows = []
    for loop, of_loop in enumerate(scores, start=1):
        rows += _loss_and_accuracy("readout", of_loop, loop=loop, readout=loop)
    return rows


def _loss_and_accuracy(name: str, scores: Scores, **place: int) -> list[Row]:
    return [
        {"metric": f"{name}_loss", "value": scores.loss, "unit": "nats", **place},
        {"metric": f"{name}_token_accuracy", "value": scores.accuracy_percent, "unit": "%", **place},
    ]


class Depth(Diagnostic):
    """Teacher-forced at fewer or more loops than in training, with every loop adapted (Appendix "Depth"): one deepest pass."""

    name = "depth"
    runs_at_depths = True

    def measure(self, context: Context) -> list[Row]:
        with run_as(context.model, readout=max(context.depths)):  # whose readouts are those of the shorter runs
            scores = score_readouts(context.model, context.batches)
        return [row for depth in context.depths for row in _loss_and_accuracy("depth", scores[depth - 1], depth=depth)]
