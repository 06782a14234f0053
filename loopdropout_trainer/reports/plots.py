"""Figures of the long table, by plotnine: one theme, one look for each method, mean and SD over seeds by construction.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; line and marker do the same in print without colour.
Loop Dropout is the thick blue line and LoRA the orange dashed one, wherever they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.reports.averaging import average, difference, groups, known, shown
from loopdropout_trainer.reports.reading import BASE, ReportError, check_extra


if TYPE_CHECKING:
    import pandas as pd
    from plotnine import ggplot

GREY, BLACK, ORANGE, BLUE = "#7a7a7a", "#000000", "#E69F00", "#0072B2"
GREEN, PURPLE, RED, SKY = "#009E73", "#CC79A7", "#D55E00", "#56B4E9"

LOOKS = {  # method: colour, line, marker, width of the line
    BASE: (GREY, "dotted", "x", 0.9),
    "LoRA": (ORANGE, "dashed", "o", 1.3),
    "Loop Dropout": (BLUE, "solid", "s", 1.6),
}
"""How the methods look that every figure is about."""

OTHERS = [
    (color, line, marker, 0.9)
    for line, markers in (("solid", "^Dv*XPp"), ("dashed", "DvX*P^p"), ("dashdot", "vXP^*Dp"), ("dotted", "XP^Dv*p"))
    for color, marker in zip((GREEN, PURPLE, RED, SKY, BLACK, GREY, "#8c6d1f"), markers, strict=True)
]
"""Looks of the others, in the order of their names."""

TITLES = ("CoTo", "Dose control", "Independent", "Input dropout", "LoRA Dropout", "LoRA+", "Low-rank weight noise")
_RC = {"svg.hashsalt": "loopdropout", "pdf.fonttype": 42}  # the same numbers give the same file; letters stay letters


def looks(names: Sequence[str]) -> dict[str, tuple[str, str, str, float]]:
    """Return colour, line, marker and width of each method; a known one looks the same in every figure."""
    fixed = LOOKS | dict(zip(TITLES, OTHERS, strict=False))
    free = iter(OTHERS[len(TITLES) :] * (1 + len(names)))
    return {name: fixed.get(name) or next(free) for name in sorted(set(names), key=_order)}


def _order(name: str) -> tuple[int, str]:
    first = (BASE, "LoRA", "Loop Dropout")
    return next((place for place, each in enumerate(first) if name == each), len(first)), name


def theme() -> Any:
    """Return the theme of all figures: letters that can be read in a page of 800 pixels, and one legend above."""
    import plotnine as p9

    axis = p9.element_line(color="#555555", size=0.5)
    return p9.theme_minimal(base_size=11) + p9.theme(
        plot_title=p9.element_text(size=13, ha="left", weight="bold"),
        plot_background=p9.element_rect(fill="white", color="white"),
        legend_position="top",
        legend_title=p9.element_blank(),
        legend_text=p9.element_text(size=11),
        legend_key_width=34,
        panel_grid_minor=p9.element_blank(),
        panel_grid_major_x=p9.element_blank(),
        panel_grid_major_y=p9.element_line(color="#e4e4e4", size=0.5),
        axis_line_x=axis,
        axis_ticks_major_x=axis,
        axis_text=p9.element_text(color="#222222", size=10),
        strip_text=p9.element_text(size=11, weight="bold", ha="left", linespacing=1.3),
        strip_background=p9.element_blank(),
    )


def points(rows: pd.DataFrame, x: str, by: str, panel: str | None) -> pd.DataFrame:
    """Return mean, low and high (one SD over seeds) at every x of every method in every panel.

    Raises:
        ReportError: if a point would average runs that differ in another setting than the seed; it names the settings.
    """
    import pandas as pd

    rows = rows[rows[x].notna()].assign(panel="" if panel is None else rows[panel], by=rows[by])
    if not len(rows):
        raise ReportError(f"There is nothing to draw by `{x}`.")
    found = []
    for key, part in groups(rows, ["panel", "by", x]):
        mean = average(part, f"{key['by']} at {x} = {shown(key[x])}")
        spread = 0.0 if mean.sd != mean.sd else mean.sd
        low, high = mean.mean - spread, mean.mean + spread
        if "total" in part and known(part["total"].iloc[0]) is not None:  # an accuracy
            low, high = max(low, 0.0), min(high, 100.0)
        found.append({**key, "x": key[x], "mean": mean.mean, "low": low, "high": high, "seeds": len(mean.values)})
    table = pd.DataFrame(found)
    table["panel"] = pd.Categorical(table["panel"], list(dict.fromkeys(rows["panel"])))
    table["by"] = pd.Categorical(table["by"], list(looks(list(table["by"]))))
    return table


def _in_order(values: Iterable[Any]) -> list[str]:
    """Return the names of positions: numbers ascend, names stay as they come."""
    once = list(dict.fromkeys(values))
    return [shown(each) for each in (once if any(isinstance(each, str) for each in once) else sorted(once))]


def _plot(data: pd.DataFrame, x_label: str | None, y_label: str, title: str | None) -> ggplot:
    import plotnine as p9

    look, panels = looks(list(data["by"].cat.categories)), len(data["panel"].cat.categories)
    plot = p9.ggplot(data) + theme() + p9.labs(x=x_label, y=y_label, title=title)
    plot += p9.scale_fill_manual(values=[each[0] for each in look.values()], limits=list(look))
    return plot + p9.facet_wrap("panel", scales="free", ncol=min(3, panels)) if panels > 1 else plot


def line_plot(
    rows: pd.DataFrame,
    x: str,
    y_label: str,
    by: str = "method",
    panel: str | None = None,
    x_label: str | None = None,
    title: str | None = None,
) -> ggplot:
    """Return lines of the mean over seeds, with a band of one SD where there are several seeds.

    Args:
        rows: of the long table, `value` by `seed`; every point must be runs that are equal in all other settings.
        x: column on the horizontal axis; numbers that span a factor of 16 or more are drawn on a logarithmic one.
        y_label, x_label, title: texts.
        by: column that the lines are told apart by.
        panel: column of the panels, or None for one.
    """
    import plotnine as p9

    data = points(rows, x, by, panel)
    data["x"] = data["x"].astype(float)
    plot = _plot(data, x if x_label is None else x_label, y_label, title)
    plot += p9.geom_ribbon(p9.aes("x", ymin="low", ymax="high", fill="by", group="by"), alpha=0.18, show_legend=False)
    look = looks(list(data["by"].cat.categories))
    scales = (p9.scale_color_manual, p9.scale_linetype_manual, p9.scale_shape_manual, p9.scale_size_manual)
    for place, scale in enumerate(scales):
        plot += scale(values=[each[place] for each in look.values()], limits=list(look))
    plot += p9.geom_line(p9.aes("x", "mean", color="by", linetype="by", size="by", group="by"))
    values = sorted(set(data["x"]))
    if len(values) > 20:  # a learning curve
        return plot
    plot += p9.geom_point(p9.aes("x", "mean", color="by", shape="by"), size=2.4)
    is_wide = values[0] > 0 and values[-1] / values[0] >= 16
    scale = p9.scale_x_log10 if is_wide else p9.scale_x_continuous
    return plot + scale(breaks=values, labels=lambda found: [shown(float(each)) for each in found])


def bar_plot(
    rows: pd.DataFrame,
    x: str,
    y_label: str,
    by: str = "method",
    panel: str | None = None,
    x_label: str | None = None,
    title: str | None = None,
) -> ggplot:
    """Return groups of bars of the mean over seeds, with a line of one SD; the arguments are those of `line_plot`."""
    import plotnine as p9

    data = points(rows, x, by, panel)
    order = _in_order(data["x"])
    data["x"], side = data["x"].map(shown), p9.position_dodge(width=0.8)
    plot = _plot(data, x if x_label is None else x_label, y_label, title) + p9.scale_x_discrete(limits=order)
    plot += p9.geom_col(p9.aes("x", "mean", fill="by"), position=side, width=0.74)
    plot += p9.geom_hline(yintercept=0, color="#555555", size=0.4)
    if max(map(len, order)) > 8:  # names, which would run into one another
        plot += p9.theme(axis_text_x=p9.element_text(rotation=30, ha="right"))
    if (data["high"] > data["low"]).any():
        spread = p9.aes("x", ymin="low", ymax="high", group="by")
        plot += p9.geom_errorbar(spread, position=side, width=0.25, size=0.5)
    return plot


def heat_plot(
    rows: pd.DataFrame,
    x: str,
    y: str,
    label: str,
    panel: str | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
    title: str | None = None,
    minus: pd.DataFrame | None = None,
) -> ggplot:
    """Return a matrix of means over seeds with its numbers, the first row on top.

    Args:
        rows: as for `line_plot`.
        x, y: columns across and down.
        label: of the colours.
        panel, x_label, y_label, title: as for `line_plot`.
        minus: rows to subtract, paired by seed; the colours are then around zero.
    """
    import pandas as pd
    import plotnine as p9

    rows = rows[rows[x].notna() & rows[y].notna()].assign(panel="" if panel is None else rows[panel])
    if not len(rows):
        raise ReportError(f"There is nothing to draw by `{x}` and `{y}`.")
    found = []
    for key, part in groups(rows, ["panel", y, x]):
        what, other = f"{x} = {shown(key[x])}, {y} = {shown(key[y])}", minus
        if minus is not None:
            other = minus[(minus[x] == key[x]) & (minus[y] == key[y])]
        mean = (average(part, what) if other is None else difference(part, other, what)).mean
        found.append({"panel": key["panel"], "x": key[x], "y": key[y], "mean": mean})
    data = pd.DataFrame(found)
    panels = sorted(dict.fromkeys(data["panel"]), key=lambda name: _order(name)[0])
    data["panel"] = pd.Categorical(data["panel"], panels)
    top = data["mean"].abs().max() or 1.0
    spread = (data["mean"] - data["mean"].min()) / ((data["mean"].max() - data["mean"].min()) or 1.0)
    dark = spread < 0.5 if minus is None else data["mean"].abs() > 0.6 * top
    data["ink"] = dark.map({True: "white", False: "black"})
    data["text"] = data["mean"].map("{:.3g}".format if minus is None else "{:+.1f}".format)
    across, down = _in_order(data["x"]), _in_order(data["y"])
    data["x"], data["y"] = data["x"].map(shown), data["y"].map(shown)
    plot = (
        p9.ggplot(data, p9.aes("x", "y")) + theme() + p9.labs(x=x_label or x, y=y_label or y, fill=label, title=title)
    )
    plot += p9.geom_tile(p9.aes(fill="mean"))
    plot += p9.geom_text(p9.aes(label="text", color="ink"), size=9)
    plot += p9.scale_color_identity()
    plot = plot + p9.scale_x_discrete(limits=across) + p9.scale_y_discrete(limits=down[::-1])
    if minus is None:
        plot += p9.scale_fill_cmap("cividis")
    else:
        plot += p9.scale_fill_gradient2(low="#b35806", mid="#f7f7f7", high="#2166ac", limits=(-top, top))
        if len(matched := data[data["x"] == data["y"]]):  # trained and evaluated alike
            plot += p9.geom_tile(data=matched, fill="none", color="black", size=0.9)
    if len(panels) > 1:
        plot += p9.facet_wrap("panel", ncol=min(3, len(panels)))
    return plot + p9.theme(legend_position="right", legend_title=p9.element_text(size=10))


def save_figure(plot: ggplot, path: str | Path, width: float | None = None, height: float | None = None) -> list[Path]:
    """Save a figure as PNG, PDF and SVG.

    Args:
        plot: of plotnine.
        path: without its ending.
        width, height: in inches; default: by the number of panels, at most 9 across.

    Returns:
        The three paths.
    """
    check_extra()
    import matplotlib as mpl
    from matplotlib import pyplot
    from plotnine import theme

    number = plot.data["panel"].nunique() if "panel" in plot.data else 1
    columns, lines = min(3, number), -(-number // 3)
    width, height = width or (5.2, 8.0, 9.6)[columns - 1], height or 0.9 + 2.6 * lines
    paths = [Path(f"{path}.{ending}") for ending in ("png", "pdf", "svg")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"backend": "agg", **_RC}):
        figure = (plot + theme(figure_size=(width, height))).draw()
        dates = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
        for each in paths:
            figure.savefig(each, dpi=200, metadata=dates[each.suffix[1:]])
        pyplot.close(figure)
    return paths
