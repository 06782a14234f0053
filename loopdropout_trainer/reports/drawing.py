"""Figures for print: PNG and PDF, in the common style of all figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from loopdropout_trainer.diagnostics.plots import draw_bars
from loopdropout_trainer.diagnostics.style import (
    COLUMN_WIDTH,
    DIVERGING_MAP,
    PAGE_WIDTH,
    SEQUENTIAL_MAP,
    legend_above,
    method_styles,
    new_figure,
    save_figure,
)
from loopdropout_trainer.reports.figures import Figure, Panel, Series


def draw_figure(figure: Figure, folder: Path) -> list[Path]:
    """Save a figure as PNG and PDF in a folder; return the files."""
    columns = min(len(figure.panels), 3)
    rows = -(-len(figure.panels) // columns)
    styles = method_styles(
        sorted({each.name for panel in figure.panels for each in panel.series}, key=lambda name: name != "LoRA")
    )
    width = COLUMN_WIDTH if columns == 1 else PAGE_WIDTH
    with new_figure(rows, columns, width=width, height=2.1 if columns < 3 else 1.8, squeeze=False) as (page, axes):
        for place, panel in enumerate(figure.panels):
            _draw(panel, axes[place // columns][place % columns], styles, page)
        for place in range(len(figure.panels), rows * columns):
            axes[place // columns][place % columns].axis("off")
        with_legend = max(range(len(figure.panels)), key=lambda place: len(figure.panels[place].series), default=0)
        legend_above(page, axes[with_legend // columns][with_legend % columns])
        return save_figure(page, folder / figure.name)


def _draw(panel: Panel, axes: Any, styles: dict[str, Any], page: Any) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.kind == "heat":
        _heat(panel, axes)
    elif panel.kind == "bars":
        _bars(panel, axes, styles)
    else:
        _lines(panel, axes, styles)


def _lines(panel: Panel, axes: Any, styles: dict[str, Any]) -> None:
    for each in panel.series:
        axes.errorbar(each.x, each.y, yerr=_errors(each), label=each.name, **styles[each.name].line)
    xs = sorted({x for each in panel.series for x in each.x})
    if (
        xs
        and xs[0] > 0
        and xs[-1] / xs[0] >= 8
        and len(xs) < 10
        and not all(isinstance(x, int) and x < 33 for x in xs)
    ):
        axes.set_xscale("log")
        axes.minorticks_off()
    if len(xs) <= 10:
        axes.set_xticks(xs, [f"{x:g}" for x in xs])


def _errors(series: Series) -> list[float] | None:
    return [sd or 0.0 for sd in series.sd] if any(series.sd) else None


def _bars(panel: Panel, axes: Any, styles: dict[str, Any]) -> None:
    series = {each.name: (each.y, _errors(each)) for each in panel.series}
    draw_bars(axes, series, panel.series[0].x, styles=styles)


def _heat(panel: Panel, axes: Any) -> None:
    values = np.array([[np.nan if value is None else value for value in row] for row in panel.values], dtype=float)
    limit = np.nanmax(np.abs(values)) or 1.0
    limits = {"vmin": -limit, "vmax": limit} if panel.signed else {"vmin": min(0.0, np.nanmin(values)), "vmax": limit}
    image = axes.imshow(values, aspect="auto", cmap=DIVERGING_MAP if panel.signed else SEQUENTIAL_MAP, **limits)
    axes.set_xticks(range(len(panel.columns)), panel.columns)
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    for row, entries in enumerate(values):
        for column, value in enumerate(entries):
            if not np.isnan(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
                text = f"{value:+.1f}" if panel.signed else f"{value:.2g}"
                axes.text(
                    column, row, text, ha="center", va="center", fontsize=6.5, color="black" if light else "white"
                )
