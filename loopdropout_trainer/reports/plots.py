"""Figures in the style of the paper, with plotnine (`pip install -e ".[reports]"` in a clone)."""

from __future__ import annotations

import functools
import textwrap
import zlib
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotnine as p9
from matplotlib import pyplot, rc_context
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from plotnine.composition import Compose

from loopdropout_trainer.terminal import format_fixed, join_numbers


COLORS = {
    "base model": "#7a7a7a",
    "LoRA": "#E69F00",
    "Loop Dropout": "#1a80c4",
    "LoRA+": "#009E73",
    "CoTo": "#CC79A7",
    "LoRA Dropout": "#D55E00",
    "rsLoRA": "#56B4E9",
}
"""Colors of Okabe and Ito, which color-blind readers can tell apart, with a lighter blue for dark pages."""
OTHER_COLORS = ["#9a6324", "#8c6d1f", "#7b3294", "#b2182b", "#66a61e", "#1b7837", "#4d4dff", "#c51b7d"]


SHAPES = {"LoRA": "o", "Loop Dropout": "s", "base model": "D"}
"""Markers of the methods that most figures have."""
GRAY = "#768390"
"""Color of texts, which is readable on white and on black."""
LINES = ("solid", "dashed", "dotted", "dashdot")
"""Lines of the settings of one method, which have one color."""
MOST_TICKS = 12
"""Number of values up to which the horizontal axis of lines has a tick and a marker for each."""
TITLE_SIZE, TEXT_SIZE, CAPTION_SIZE, LEGEND_SIZE = 12, 10, 9, 8
"""Sizes of texts in points."""
HEIGHT, USUAL_LINES, LINE_HEIGHT, PANEL_HEIGHT = 4.4, 4, 0.23, 2.4
"""Height of a figure with up to four lines of legend and caption, height of each further line, and of a panel, in inches."""
MARGINS, PANEL_MARGINS = 1.1, 0.72
"""Room next to the texts of a figure and of a panel in inches, for the vertical axis or the keys of the legend."""


@functools.cache
def measure_width(line: str, font: FontProperties) -> float:
    """Return the width of a line in points."""
    return text_to_path.get_text_width_height_descent(line, font, ismath=False)[0]


def fit_text(text: str, size: float, width: float) -> str:
    """Return a text in lines that are not wider than a width. A longer word is broken, as in a long name.

    Args:
        text: Text, whose lines stay apart.
        size: Size of the font in points.
        width: Width in inches.
    """
    font, lines = FontProperties(size=size), text.split("\n")
    for most in range(len(text), 0, -1):
        lines = [part for line in join_numbers(text).split("\n") for part in textwrap.wrap(line, most)]
        widest = max((measure_width(line, font) for line in lines), default=0)
        if widest <= 72 * width:
            break
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def choose_width(num_panels: int) -> float:
    """Return the width of a figure in inches."""
    return max(5.0, 3.4 * num_panels)


def fit_title(title: str, width: float) -> str:
    """Return the title of a figure, which is `width` inches wide, in lines that fit above its panels."""
    return fit_text(title, TITLE_SIZE, width - MARGINS)


def fit_caption(caption: str, num_panels: int) -> str:
    """Return a caption in lines that fit below the first panel. The legend is below another one."""
    return fit_text(caption, CAPTION_SIZE, choose_width(num_panels) / num_panels - MARGINS)


def fit_legend(labels: Sequence[str], num_panels: int) -> list[str]:
    """Return the labels of a legend in lines that fit below one panel."""
    return [fit_text(label, LEGEND_SIZE, choose_width(num_panels) / num_panels - MARGINS) for label in labels]


def choose_height(num_panels: int, title: str | None, caption: str | None, labels: Sequence[str] = ()) -> float:
    """Return the height of a figure in inches, which has room for all lines of its title, caption and legend."""
    of_caption = fit_caption(caption, num_panels).count("\n") + 1 if caption else 0
    of_legend = sum(label.count("\n") + 1 for label in fit_legend(labels, num_panels))
    below = of_caption + of_legend if num_panels == 1 else max(of_caption, of_legend)
    num_lines = below + fit_title(title or "", choose_width(num_panels)).count("\n")
    return HEIGHT + LINE_HEIGHT * max(0, num_lines - USUAL_LINES)


def decorate(
    plot: p9.ggplot,
    title: str | None,
    x_label: str,
    y_label: str,
    num_panels: int = 1,
    panel: str | None = None,
    caption: str | None = None,
    height: float | None = None,
    width: float | None = None,
) -> p9.ggplot:
    """Add the texts around a figure, in lines that fit it, and the theme that all figures share.

    Args:
        plot: Figure, or the panel of a figure.
        title: Title of the figure.
        x_label: Label of the horizontal axis.
        y_label: Label of the vertical axis.
        num_panels: Number of panels next to each other.
        panel: Title of the panel.
        caption: Sentences below the figure.
        height: Height of the figure in inches. Default: from `choose_height`.
        width: Width of the figure in inches. Default: from `choose_width`.
    """
    if width is None:
        width = choose_width(num_panels)
    of_panel = width / num_panels - PANEL_MARGINS
    plot += [  # `+` would copy the plot and its theme for each part
        p9.labs(
            title=title and fit_title(title, width),
            subtitle=panel and fit_text(panel, TEXT_SIZE, of_panel),
            x=fit_text(x_label, TEXT_SIZE, of_panel),
            y=fit_text(y_label, TEXT_SIZE, PANEL_HEIGHT),
            caption=caption and fit_caption(caption, num_panels),
        ),
        p9.theme_minimal(base_size=TEXT_SIZE),
        p9.theme(
            figure_size=(width, height or choose_height(num_panels, title, caption)),
            text=p9.element_text(color=GRAY),
            axis_text=p9.element_text(color=GRAY),
            strip_text=p9.element_text(color=GRAY),
            plot_title=p9.element_text(size=TITLE_SIZE, ha="left"),
            plot_background=p9.element_rect(fill="none", color="none"),  # the page's own, light or dark
            panel_grid_major=p9.element_line(color="#76839055"),
            plot_caption=p9.element_text(size=CAPTION_SIZE, ha="left"),
            legend_position="bottom",
            legend_direction="vertical",
            legend_title=p9.element_blank(),
            legend_text=p9.element_text(size=LEGEND_SIZE, ma="left"),
            legend_key_width=24,
            panel_grid_minor=p9.element_blank(),
            panel_spacing=0.03,
        ),
    ]
    return plot


def _choose_colors(methods: Iterable[str]) -> dict[str, str]:
    """Return a color for each method, the same one in every figure unless another method of the figure has it."""
    colors: dict[str, str] = {}
    for name in methods:
        if name in COLORS:
            colors[name] = COLORS[name]
        elif name not in colors:
            place = zlib.crc32(name.encode()) % len(OTHER_COLORS)
            by_preference = [*OTHER_COLORS[place:], *OTHER_COLORS[:place]]
            free = [color for color in by_preference if color not in colors.values()]
            colors[name] = (free or by_preference)[0]
    return colors


def _choose_lines(methods: Sequence[str]) -> list[str]:
    """Return a line for each label, which tells the settings of one method apart. `methods`: the method of each label."""
    lines = []
    for place, method in enumerate(methods):
        lines.append(LINES[methods[:place].count(method) % len(LINES)])
    return lines


def mark_training_depth(depth: float) -> p9.geom_vline:
    """Return a dotted line at the training depth, which is wider than the line of the grid behind it."""
    return p9.geom_vline(xintercept=depth, linetype="dotted", color=GRAY, size=1.1)


def line_plot(
    data: pd.DataFrame,
    x: str,
    axes: pd.DataFrame,
    title: str,
    gains: pd.DataFrame | None = None,
    caption: str | None = None,
) -> p9.ggplot | Compose:
    """Return lines of the mean by `label`, with a band of one SD, and one panel for each value of `panel`.

    A label with one point in a panel has a vertical bar of one SD instead.

    The vertical axis of a panel begins at zero, unless all values would be in its upper half. Then its label says so.

    Lines of one method have its color, and their kind tells its settings apart.

    Args:
        data: columns `panel`, `label`, which begins with the method or its name, `mean`, the column named `x`, and the limits
            `low` and `high` of the band. Without these two columns, the band is one SD (column `sd`) around the mean.
        axes: columns `x_label` and `y_label`. The index has the panels.
        title: Title of the figure.
        caption: Sentences below the figure, for example what the bands are.
        gains: Differences that are printed between two points. Columns `panel`, the column named `x`, `mean` and `middle`.
    """
    if "low" not in data:
        data = data.assign(low=data["mean"] - data["sd"], high=data["mean"] + data["sd"])
    panels = [*data.groupby("panel", observed=True, sort=False)]
    labels = [*data["label"].unique()]
    scales = _make_label_scales(labels, len(panels))
    height = choose_height(len(panels), title, caption, labels)
    figure = None
    for place, (panel, own) in enumerate(panels):
        axis = axes.loc[panel]
        plot = _draw_lines(own, x)
        plot += scales
        if gains is not None and panel in {*gains["panel"]}:
            plot += _print_gains(gains[gains["panel"] == panel], x, own[x])
        y_label = axis["y_label"]
        if _begin_axis(own):
            y_label += "\n(axis does not begin at 0)"
        figure_title, figure_caption = None, None
        if place == 0:  # the first panel has the texts of the figure
            figure_title, figure_caption = title, caption
        plot = decorate(plot, figure_title, axis["x_label"], y_label, len(panels), panel, figure_caption, height)
        if place != len(panels) // 2:  # one legend for all panels
            plot += p9.theme(legend_position="none")
        figure = plot if figure is None else figure | plot  # next to each other
    return figure


def _make_label_scales(labels: Sequence[str], num_panels: int) -> list[Any]:
    """Return the color, the marker and the line of each label. Labels of one method have its color."""
    methods = [label.split(", ")[0] for label in labels]
    by_method = _choose_colors(methods)
    colors = [by_method[method] for method in methods]
    other_shapes = cycle("^v<>P*X")
    shapes = []
    for label in labels:
        shapes.append(SHAPES[label] if label in SHAPES else next(other_shapes))
    texts = {"limits": labels, "labels": fit_legend(labels, num_panels)}
    scales = [
        p9.scale_color_manual(colors, **texts),
        p9.scale_fill_manual(colors, **texts),
        p9.scale_shape_manual(shapes, **texts),
    ]
    lines = _choose_lines(methods)
    if {*lines} != {"solid"}:
        scales += [p9.aes(linetype="label"), p9.scale_linetype_manual(lines, **texts)]
    return scales


def _begin_axis(data: pd.DataFrame) -> float:
    """Return the beginning of the vertical axis of a panel: zero, unless all values would be in its upper half."""
    low, high = data["low"].min(), data["high"].max()
    return low if 0 < high / 2 < low < high else 0


def _draw_lines(data: pd.DataFrame, x: str) -> p9.ggplot:
    """Return the lines of a panel with their bands. Few values on the horizontal axis have ticks and markers."""
    plot = p9.ggplot(data, p9.aes(x, "mean", color="label", fill="label", shape="label"))
    plot += [
        p9.geom_ribbon(p9.aes(ymin="low", ymax="high"), alpha=0.2, color="none", show_legend=False),
        p9.geom_line(size=1.1),
        p9.expand_limits(y=[_begin_axis(data), data["high"].max() or 1]),
    ]
    num_points = data.groupby("label", observed=True)["mean"].transform("size")
    alone = data[(num_points == 1) & (data["high"] > data["low"])]
    if len(alone):  # a band of one point has no width
        plot += p9.geom_linerange(p9.aes(ymin="low", ymax="high"), alone, size=1.1, show_legend=False)
    ticks = sorted(data[x].unique())
    if len(ticks) <= MOST_TICKS:
        plot += p9.geom_point(size=2)
        is_log = ticks[-1] >= 16 * ticks[0] > 0
        breaks = space_ticks(ticks, is_log)
        make_scale = p9.scale_x_log10 if is_log else p9.scale_x_continuous
        plot += make_scale(breaks=breaks, labels=[f"{tick:g}" for tick in breaks])
    return plot


def _print_gains(gains: pd.DataFrame, x: str, values: pd.Series) -> list[Any]:
    """Return the texts of the gains of a panel, with room for the last one next to the values of its horizontal axis."""
    texts = gains.assign(
        text=gains["mean"].map(functools.partial(format_fixed, decimals=2, sign=True)), mean=gains["middle"]
    )
    room = 0.35 * (values.max() - values.min())
    text = p9.geom_text(
        p9.aes(x, "mean", label="text"), texts, inherit_aes=False, color=GRAY, size=8, ha="left", nudge_x=0.1
    )
    return [p9.expand_limits(x=values.max() + room), text]


def space_ticks(ticks: Sequence[float], is_log: bool = False) -> list[float]:
    """Return the ticks of a horizontal axis whose labels do not overlap: each is 8% of the axis or more behind the last one.

    Args:
        ticks: Values in ascending order.
        is_log: Whether the axis is logarithmic.
    """
    places = np.log(ticks) if is_log else np.array(ticks, dtype=float)
    least = 0.08 * (places[-1] - places[0])
    kept = [0]
    for number in range(1, len(ticks)):
        if places[number] - places[kept[-1]] >= least:
            kept.append(number)
    return [ticks[number] for number in kept]


def heat_plot(
    data: pd.DataFrame,
    x: str,
    y: str,
    title: str,
    x_label: str,
    y_label: str,
    shows_gains: bool = False,
    caption: str | None = None,
) -> p9.ggplot:
    """Return a matrix of the means with their numbers, the first row on top.

    Gains have a sign, and an outline marks the cells whose `x` and `y` are equal, such as training and evaluation depth.
    """
    step = data[x].drop_duplicates().sort_values().diff().min()
    format_cell = functools.partial(format_fixed, decimals=2 if shows_gains else 1, sign=shows_gains)
    data = data.assign(text=data["mean"].map(format_cell))
    plot = p9.ggplot(data, p9.aes(x, y))
    plot += [
        p9.geom_tile(p9.aes(fill="mean"), width=0.95 * step, height=0.95 * step),
        p9.geom_text(p9.aes(label="text"), color="#000000", size=9),
        p9.scale_fill_gradient2(COLORS["LoRA"], "#f7f7f7", COLORS["Loop Dropout"], guide=None),
        p9.scale_x_continuous(breaks=data[x].unique()),
        p9.scale_y_reverse(breaks=data[y].unique()),
        p9.facet_wrap("panel"),
    ]
    if shows_gains:
        diagonal = data[data[x] == data[y]]
        plot += p9.geom_tile(data=diagonal, fill=None, color=GRAY, size=1.2, width=step, height=step)
    return decorate(plot, title, x_label, y_label, data["panel"].nunique(), caption=caption)


def save_figure(plot: p9.ggplot | Compose, path: str | Path) -> None:
    """Save a figure as PNG, PDF and SVG. The same numbers give the same files. `path` has no ending."""
    dates = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with rc_context(
        {"backend": "agg", "savefig.transparent": True, "svg.hashsalt": "loopdropout", "pdf.fonttype": 42}
    ):
        figure = plot.draw()
        for ending, date in dates.items():
            figure.savefig(f"{path}.{ending}", dpi=200, metadata=date)
        pyplot.close(figure)
