"""The two kinds of figures that diagnostics have: panels of curves or bars by method, and heat maps by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loopdropout_trainer.diagnostics.plots import (
    Series,
    draw_bars,
    draw_curves,
    draw_heat_map,
    new_figure,
    percent_axis,
    save_figure,
)


@dataclass
class Panel:
    """One pair of axes with a curve, or a bar at each position, for each method.

    Attributes:
        series: method -> mean and sample standard deviation (None for one seed), [positions] each.
        positions: on the x axis.
        xlabel, ylabel: of the axes.
        bars: draw bars; else curves.
        names: of the positions; default: the positions themselves.
        mark: position of a dotted vertical line.
        percent: whether the y axis is an accuracy and spans at least ten points: `from 0`, or `around` the numbers.
        above: label and names of the positions on an upper x axis.
    """

    series: Series
    positions: Sequence[float]
    xlabel: str
    ylabel: str
    bars: bool = False
    names: Sequence[str] | None = None
    mark: float | None = None
    percent: str | None = None
    above: tuple[str, Sequence[str]] | None = None

    def draw(self, axes: Any) -> None:
        """Draw onto matplotlib's axes."""
        if self.bars:
            draw_bars(axes, self.series, self.positions, values=len(self.positions) * len(self.series) <= 16)
        else:
            draw_curves(axes, self.positions, self.series)
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel)
        shown = range(0, len(self.positions), -(-len(self.positions) // 8))  # at most 8, which do not run together
        names = self.names or [f"{position:g}" for position in self.positions]
        axes.set_xticks([self.positions[i] for i in shown], [names[i] for i in shown])
        if self.mark is not None:
            axes.axvline(self.mark, color="black", linewidth=0.5, linestyle=":")
        if self.percent:
            percent_axis(axes, from_zero=self.percent == "from 0")
        if self.above and len(self.positions) > 1:
            label, names = self.above
            shown = shown[:: -(-len(shown) // 5)]
            upper = axes.secondary_xaxis("top")
            upper.set_xticks([self.positions[i] for i in shown], [names[i] for i in shown])
            upper.set_xlabel(label)


@dataclass
class HeatMaps:
    """One matrix for each title, on one colour scale.

    Attributes:
        matrices: title -> [rows, columns].
        rows, columns: names at the sides.
        xlabel, ylabel: of the axes.
        label: of the colour scale.
        low, high: its ends; default: those of the numbers.
        form: of the numbers in the cells.
    """

    matrices: Mapping[str, np.ndarray]
    rows: Sequence[str]
    columns: Sequence[str]
    xlabel: str
    ylabel: str
    label: str
    low: float | None = None
    high: float | None = None
    form: str = ".1f"


def draw_figure(content: Sequence[Panel] | HeatMaps, path: str | Path) -> list[Path]:
    """Save a figure as PNG and PDF, and return both paths.

    Args:
        content: panels, at most two side by side, under one legend; or heat maps.
        path: without its ending.
    """
    if isinstance(content, HeatMaps):
        return _draw_heat_maps(content, path)
    columns = min(2, len(content))
    rows = -(-len(content) // columns)
    wide = any(len(panel.positions) * len(panel.series) > 20 for panel in content if panel.bars)
    with new_figure(rows, columns, 5.5 if wide else None, 2.5, squeeze=False) as (figure, axes):
        for axis, panel in zip(_as_many(axes, len(content)), content, strict=True):
            panel.draw(axis)
        return save_figure(figure, path, legend_of=axes.flat[0])


def _draw_heat_maps(maps: HeatMaps, path: str | Path) -> list[Path]:
    each_width, height = 0.36 * len(maps.columns) + 0.8, max(1.7, 0.24 * len(maps.rows) + 0.6)
    columns = max(1, min(3, len(maps.matrices), int(7.5 / each_width)))  # of a page's width
    rows = -(-len(maps.matrices) // columns)
    low = min(np.min(values) for values in maps.matrices.values()) if maps.low is None else maps.low
    high = max(np.max(values) for values in maps.matrices.values()) if maps.high is None else maps.high
    with new_figure(rows, columns, columns * each_width + 0.8, height, squeeze=False) as (figure, axes):
        used = _as_many(axes, len(maps.matrices))
        for axis, (title, values) in zip(used, maps.matrices.items(), strict=True):
            image = draw_heat_map(axis, values, maps.columns, maps.rows, low, high, maps.form)
            axis.set(title=title, xlabel=maps.xlabel, ylabel=maps.ylabel)
        figure.colorbar(image, ax=used, label=maps.label).outline.set_visible(False)
        return save_figure(figure, path)


def _as_many(axes: np.ndarray, number: int) -> list[Any]:
    """Return the first axes of a grid, and take the others away."""
    for axis in axes.flat[number:]:
        axis.remove()
    return list(axes.flat[:number])
