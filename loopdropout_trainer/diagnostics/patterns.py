"""Which sets of loops the update works in: prefixes, suffixes, and for few loops every set."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Report
from loopdropout_trainer.diagnostics.plots import draw_curves, draw_heat_map, new_figure, save_figure
from loopdropout_trainer.evaluation.statistics import mean_and_sd


MOST_LOOPS = 6
"""Most loops of which all 2^K sets are measured."""


class Patterns(Diagnostic):
    """The update is applied at unit strength in a set of loops; the backbone runs all K."""

    name = "patterns"
    title = "Loss reduction with the adapter in some loops, %"
    needs_adapter = True

    def passes(self, context: Context) -> int:
        return len(loop_sets(context.num_loops))

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

    def table(self, report: Report):
        places = {tuple(each["loops"]): index for index, each in enumerate(report.runs[0]["measured"]["patterns"])}
        named = {_name(loops): ("patterns", place, "reduction_percent") for loops, place in places.items() if loops}
        return report.table(named, ".1f")

    def draw(self, report: Report, path):
        patterns = report.runs[0]["measured"]["patterns"]
        with new_figure(columns=2, sharey=True) as (figure, axes):
            for axis, kind in zip(axes, ("prefix", "suffix"), strict=True):
                places = sorted(
                    (len(each["loops"]), index) for index, each in enumerate(patterns) if kind in each["kinds"]
                )
                lengths = [length for length, _ in places]
                series = {
                    method: tuple(None if part is None else part[[i for _, i in places]] for part in _reductions(each))
                    for method in report.methods
                    for each in [report.of(method)]
                }
                draw_curves(axis, lengths, series)
                which = "First" if kind == "prefix" else "Last"
                axis.set(xlabel=f"{which} loops that are adapted", xticks=lengths)
            axes[0].set_ylabel("Loss reduction (%)")
            files = save_figure(figure, f"{path}_prefixes", legend_of=axes[0])
        if report.num_loops <= MOST_LOOPS:
            files += self._heat_map(report, path)
        return files

    def _heat_map(self, report: Report, path):
        """Draw all sets: what is adapted of the first half of the loops from top to bottom, of the second across."""
        half = (report.num_loops + 1) // 2
        early, late = (_sets(loops) for loops in (report.loops[:half], report.loops[half:]))
        place = {tuple(each["loops"]): i for i, each in enumerate(report.runs[0]["measured"]["patterns"])}
        means = {method: _reductions(report.of(method))[0] for method in report.methods}
        low, high = (f(mean.min() if f is min else mean.max() for mean in means.values()) for f in (min, max))
        columns = min(2, len(means))
        rows = -(-len(means) // columns)
        height = max(1.7, 0.24 * len(early) + 0.6)
        width = None if columns == 1 else max(5.5, 0.36 * len(late) * columns + 1.6)
        with new_figure(rows, columns, width=width, height=height, squeeze=False) as (figure, axes):
            for axis in axes.flat[len(means) :]:
                axis.remove()
            for axis, (method, mean) in zip(axes.flat, means.items(), strict=False):
                values = [[mean[place[first + last]] for last in late] for first in early]
                image = draw_heat_map(axis, values, [_name(x) for x in late], [_name(x) for x in early], low, high)
                axis.set(title=method, xlabel="Adapted late loops", ylabel="Adapted early loops")
            drawn = list(axes.flat[: len(means)])
            figure.colorbar(image, ax=drawn, label="Loss reduction (%)").outline.set_visible(False)
            return save_figure(figure, path)


def loop_sets(num_loops: int) -> list[tuple[int, ...]]:
    """Return the sets of loops (from 1) that are measured, the empty one first: all, or the prefixes and suffixes."""
    every = tuple(range(1, num_loops + 1))
    if num_loops <= MOST_LOOPS:
        return _sets(every)
    ends = [every[:length] for length in range(num_loops + 1)]
    return ends + [every[start:] for start in range(num_loops - 1, 0, -1)]


def _sets(loops) -> list[tuple[int, ...]]:
    return [chosen for length in range(len(loops) + 1) for chosen in combinations(loops, length)]


def kinds(loops: tuple[int, ...], num_loops: int) -> list[str]:
    """Return which of `prefix` and `suffix` a set is; the empty and the full one are both."""
    every = tuple(range(1, num_loops + 1))
    found = {"prefix": every[: len(loops)], "suffix": every[num_loops - len(loops) :]}
    return [kind for kind, same in found.items() if loops == same]


def _name(loops: tuple[int, ...]) -> str:
    return ("+" if loops and max(loops) > 9 else "").join(map(str, loops)) or "none"


def _reductions(runs: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return mean and sample standard deviation over seeds for each set."""
    values = np.array([[each["reduction_percent"] for each in run["measured"]["patterns"]] for run in runs])
    return mean_and_sd(values)
