"""Which sets of loops the update works in: prefixes, suffixes, and for few loops every set."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Measurements
from loopdropout_trainer.diagnostics.figures import HeatMaps, Panel


MOST_LOOPS = 6
"""Most loops of which all 2^K sets are measured."""

Loops = tuple[int, ...]


class Patterns(Diagnostic):
    """The update is applied at unit strength in a set of loops; the backbone runs all K."""

    name = "patterns"
    title = "Loss reduction with the adapter in some loops, %"
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

    def table(self, found: Measurements):
        rows = {
            _name(each["loops"]): ("patterns", place, "reduction_percent")
            for place, each in enumerate(found.first["patterns"])
            if each["loops"]
        }
        return found.table(rows, ".1f")

    def figures(self, found: Measurements):
        series = found.series("patterns", ..., "reduction_percent")
        panels = []
        for kind, which in (("prefix", "First"), ("suffix", "Last")):
            of_kind = [
                (len(each["loops"]), i) for i, each in enumerate(found.first["patterns"]) if kind in each["kinds"]
            ]
            lengths, places = (list(column) for column in zip(*sorted(of_kind), strict=True))
            some = {m: tuple(part if part is None else part[places] for part in each) for m, each in series.items()}
            panels.append(Panel(some, lengths, f"{which} loops that are adapted", "Loss reduction (%)"))
        drawn: dict[str, list[Panel] | HeatMaps] = {"_prefixes": panels}
        if found.num_loops <= MOST_LOOPS:
            drawn[""] = self._all_sets(found, {method: mean for method, (mean, _) in series.items()})
        return drawn

    def _all_sets(self, found: Measurements, means: dict[str, np.ndarray]) -> HeatMaps:
        """Return all sets: what is adapted of the first half of the loops from top to bottom, of the second across."""
        half = (found.num_loops + 1) // 2
        early, late = _sets(found.loops[:half]), _sets(found.loops[half:])
        place = {tuple(each["loops"]): i for i, each in enumerate(found.first["patterns"])}
        places = np.array([[place[first + last] for last in late] for first in early])
        return HeatMaps(
            {method: mean[places] for method, mean in means.items()},
            rows=[_name(loops) for loops in early],
            columns=[_name(loops) for loops in late],
            xlabel="Adapted late loops",
            ylabel="Adapted early loops",
            label="Loss reduction (%)",
        )


def loop_sets(num_loops: int) -> list[Loops]:
    """Return the sets of loops (from 1) that are measured, the empty one first: all, or the prefixes and suffixes."""
    every = tuple(range(1, num_loops + 1))
    if num_loops <= MOST_LOOPS:
        return _sets(every)
    prefixes = [every[:length] for length in range(num_loops + 1)]
    return prefixes + [every[start:] for start in range(num_loops - 1, 0, -1)]


def _sets(loops: Sequence[int]) -> list[Loops]:
    return [chosen for length in range(len(loops) + 1) for chosen in combinations(loops, length)]


def kinds(loops: Loops, num_loops: int) -> list[str]:
    """Return which of `prefix` and `suffix` a set is; the empty and the full one are both."""
    every = tuple(range(1, num_loops + 1))
    found = {"prefix": every[: len(loops)], "suffix": every[num_loops - len(loops) :]}
    return [kind for kind, same in found.items() if loops == same]


def _name(loops: Sequence[int]) -> str:
    return ("+" if loops and max(loops) > 9 else "").join(map(str, loops)) or "none"
