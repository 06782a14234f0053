"""Which sets of loops the update works in: prefixes, suffixes, and for few loops every set."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Measurements


MOST_LOOPS = 6
"""Most loops of which all 2^K sets are measured."""


class Patterns(Diagnostic):
    """The update is applied at unit strength in a set of loops; the backbone runs all K."""

    name = "patterns"
    title = "Loss reduction with the adapter in some loops, %"
    form = ".1f"
    needs_adapter = True

    def measure(self, context: Context) -> dict[str, Any]:
        num_loops = context.num_loops
        losses = {
            loops: context.scores([float(loop in loops) for loop in range(1, num_loops + 1)]).loss
            for loops in loop_sets(num_loops)
        }
        frozen = losses[()]
        return {
            "frozen": frozen,
            "patterns": [
                {
                    "loops": list(loops),
                    "kinds": kinds(loops, num_loops),
                    "loss": loss,
                    "reduction_percent": 100 * (frozen - loss) / frozen,
                }
                for loops, loss in losses.items()
            ],
        }

    def rows(self, found: Measurements):
        between = "+" if found.num_loops > 9 else ""
        return {
            between.join(map(str, each["loops"])): ("patterns", place, "reduction_percent")
            for place, each in enumerate(found.first["patterns"])
            if each["loops"]
        }


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
