"""Losses under other gates of the update: sets of loops, and one strength for all loops; the backbone runs all K."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic


DOSES = tuple(step / 4 for step in range(9))
"""0, 0.25, ..., 2."""

MOST_LOOPS = 6
"""Most loops of which all 2^K sets are measured."""


class Dose(Diagnostic):
    """One gate c for all loops. Inference uses c = 1; Loop Dropout at p = 0.5 trains every active application at 2."""

    name = "dose"
    title = "Loss reduction with the gate c in every loop, %"
    needs_adapter = True

    def settings(self, context: Context) -> dict[str, Any]:
        return {"doses": list(DOSES)}

    def measure(self, context: Context) -> dict[str, Any]:
        losses = [context.scores([dose] * context.num_loops).loss for dose in DOSES]
        frozen = losses[DOSES.index(0)]
        reductions = [100 * (frozen - loss) / frozen for loss in losses]
        return {"doses": list(DOSES), "losses": losses, "reductions_percent": reductions}


class Patterns(Diagnostic):
    """The update at unit strength in a set of loops: prefixes, suffixes, and for few loops every set."""

    name = "patterns"
    title = "Loss reduction with the adapter in some loops, %"
    needs_adapter = True

    def measure(self, context: Context) -> dict[str, Any]:
        num_loops = context.num_loops
        sets = loop_sets(num_loops)
        losses = [context.scores([float(loop in loops) for loop in range(1, num_loops + 1)]).loss for loops in sets]
        frozen = losses[0]
        patterns = [
            {"loops": list(loops), "kinds": kinds(loops, num_loops), "loss": loss,
             "reduction_percent": 100 * (frozen - loss) / frozen}
            for loops, loss in zip(sets, losses, strict=True)
        ]  # fmt: skip
        return {"frozen": frozen, "patterns": patterns}


def loop_sets(num_loops: int) -> list[tuple[int, ...]]:
    """Return the sets of loops (from 1) that are measured, the empty one first: all, or the prefixes and suffixes."""
    every = tuple(range(1, num_loops + 1))
    if num_loops <= MOST_LOOPS:
        return [chosen for length in range(num_loops + 1) for chosen in combinations(every, length)]
    prefixes = [every[:length] for length in range(num_loops + 1)]
    return prefixes + [every[start:] for start in range(num_loops - 1, 0, -1)]


def kinds(loops: tuple[int, ...], num_loops: int) -> list[str]:
    """Return which of `prefix` and `suffix` a set is; the empty and the full one are both."""
    every = tuple(range(1, num_loops + 1))
    found = {"prefix": every[: len(loops)], "suffix": every[num_loops - len(loops) :]}
    return [kind for kind, same in found.items() if loops == same]
