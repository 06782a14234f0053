"""The forms that diagnostics are drawn in: bars and curves by method with their spread over seeds, and heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loopdropout_trainer.diagnostics.style import (
    COLUMN_WIDTH,
    PAGE_WIDTH,
    SEQUENTIAL_MAP,
    MethodStyle,
    method_styles,
    new_figure,
    save_figure,
)


__all__ = [
    "draw_bars",
    "draw_curves",
    "draw_heat_map",
    "new_figure",
    "percent_axis",
    "plot_single_loop",
    "save_figure",
]

Series = Mapping[str, tuple[Sequence[float], Sequence[float] | None]]
"""Method -> mean, and sample standard deviation over seeds (None for one seed), at each position."""


def draw_bars(
    axes: Any,
    series: Series,
    positions: Sequence[float],
    values: bool = False,
    styles: Mapping[str, MethodStyle] | None = None,
) -> None:
    """Draw a group of bars at each position, one bar for each method.

    Args:
        axes: of matplotlib.
        series: by method, one number for each position.
        positions: on the x axis, one apart.
        values: write each bar's number above it.
        styles: of the methods; default: those that these methods have by themselves.
    """
    styles, width = styles or method_styles(series), 0.8 / len(series)
    for index, (method, (mean, sd)) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * width
        at = np.asarray(positions) + offset
        bars = axes.bar(at, mean, width, yerr=sd, label=method, ecolor="black", **styles[method].bar)
        if values:
            axes.bar_label(bars, fmt="%.1f", fontsize=6, padding=1)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(positions)


def draw_curves(axes: Any, positions: Sequence[float], series: Series) -> None:
    """Draw one curve for each method, with error bars where there are several seeds."""
    styles = method_styles(series)
    for method, (mean, sd) in series.items():
        axes.errorbar(positions, mean, yerr=sd, label=method, **styles[method].line)


def percent_axis(axes: Any, from_zero: bool = True) -> None:
    """Let an axis of answers in percent span at least ten points, so that small differences look small.

    Args:
        axes: with everything drawn.
        from_zero: start at 0 (a little below it, where points are drawn there).
    """
    low, high = axes.get_ylim()
    if from_zero:
        high = max(high, 10)
        low = 0 if axes.patches else -0.03 * high
    elif high - low < 10:
        low, high = (low + high) / 2 - 5, (low + high) / 2 + 5
    axes.set_ylim(low, high)


def draw_heat_map(
    axes: Any,
    values: Sequence[Sequence[float]],
    columns: Sequence[str],
    rows: Sequence[str],
    low: float | None = None,
    high: float | None = None,
    form: str = ".1f",
) -> Any:
    """Draw a matrix with its numbers, row 1 on top, and return matplotlib's image.

    Args:
        axes: of matplotlib.
        values: [rows, columns].
        columns, rows: names at the sides.
        low, high: ends of the colour scale; default: those of the values.
        form: of the numbers, which are left out of more than 100 cells.
    """
    values = np.asarray(values, dtype=float)
    image = axes.imshow(values, cmap=SEQUENTIAL_MAP, vmin=low, vmax=high, aspect="auto")
    for set_ticks, names in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        step = -(-len(names) // 10)  # at most ten names, which do not run into one another
        set_ticks(range(0, len(names), step), names[::step])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if values.size <= 100:
        for row, column in np.ndindex(values.shape):
            dark = image.norm(values[row, column]) < 0.55
            text = f"{values[row, column]:{form}}"
            axes.text(column, row, text, ha="center", va="center", fontsize=6, color="white" if dark else "black")
    return image


def plot_single_loop(
    reductions: Mapping[str, Sequence[float]],
    path: str | Path,
    sds: Mapping[str, Sequence[float] | None] | None = None,
) -> list[Path]:
    """Save a bar chart of rho_t by loop, one group of bars for each loop and one colour for each method.

    Args:
        reductions: method -> rho_t in percent for t = 1..K.
        path: of the pictures, without their endings.
        sds: sample standard deviation over seeds, in the same form.

    Returns:
        The paths of the PNG and the PDF.
    """
    num_loops = len(next(iter(reductions.values())))
    series = {method: (mean, (sds or {}).get(method)) for method, mean in reductions.items()}
    with new_figure(width=COLUMN_WIDTH if num_loops * len(series) <= 20 else PAGE_WIDTH) as (figure, axes):
        draw_bars(axes, series, range(1, num_loops + 1), values=num_loops * len(series) <= 16)
        axes.set(xlabel="Only active adapter loop", ylabel="Loss reduction (%)")
        return save_figure(figure, path, legend_of=axes)
