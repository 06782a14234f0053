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
    from plotnine import element_blank, element_line, element_rect, element_text, theme, theme_minimal

    return theme_minimal(base_size=11) + theme(
        plot_title=element_text(size=13, ha="left", weight="bold"),
        legend_position="top",
        legend_title=element_blank(),
        legend_text=element_text(size=11),
        legend_key_width=34,
        panel_grid_minor=element_blank(),
        panel_grid_major_x=element_blank(),
        panel_grid_major_y=element_line(color="#e4e4e4", size=0.5),
        axis_line_x=element_line(color="#555555", size=0.5),
        axis_ticks_major_x=element_line(color="#555555", size=0.5),
        axis_text=element_text(color="#222222", size=10),
        strip_text=element_text(size=11, weight="bold", ha="left", linespacing=1.3),
        strip_background=element_blank(),
        plot_background=element_rect(fill="white", color="white"),
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


def _plot(data: pd.DataFrame, x_label: str | None, y_label: str, title: str | None, free: bool) -> ggplot:
    from plotnine import facet_wrap, ggplot, labs, scale_fill_manual

    names = list(data["by"].cat.categories)
    plot = ggplot(data) + theme() + labs(x=x_label, y=y_label, title=title)
    plot += scale_fill_manual(values=[look[0] for look in looks(names).values()], limits=names)
    if len(data["panel"].cat.categories) > 1:
        plot += facet_wrap(
            "panel", scales="free" if free else "free_x", ncol=min(3, len(data["panel"].cat.categories))
        )
    return plot


def line_plot(
    rows: pd.DataFrame,
    x: str,
    y_label: str,
    by: str = "method",
    panel: str | None = None,
    x_label: str | None = None,
    title: str | None = None,
    mark: float | None = None,
    free: bool = True,
) -> ggplot:
    """Return lines of the mean over seeds, with a band of one SD where there are several seeds.

    Args:
        rows: of the long table, `value` by `seed`; every point must be runs that are equal in all other settings.
        x: column on the horizontal axis; numbers that span a factor of 16 or more are drawn on a logarithmic one.
        y_label, x_label, title: texts.
        by: column that the lines are told apart by.
        panel: column of the panels, or None for one.
        mark: where a vertical line is drawn, such as at the depth of training.
        free: whether each panel has a vertical axis of its own.
    """
    from plotnine import (
        aes,
        geom_line,
        geom_point,
        geom_ribbon,
        geom_vline,
        scale_color_manual,
        scale_linetype_manual,
        scale_shape_manual,
        scale_size_manual,
        scale_x_continuous,
        scale_x_log10,
    )

    data = points(rows, x, by, panel)
    data["x"] = data["x"].astype(float)
    plot = _plot(data, x if x_label is None else x_label, y_label, title, free)
    look = looks(list(data["by"].cat.categories))
    for place, scale in enumerate((scale_color_manual, scale_linetype_manual, scale_shape_manual, scale_size_manual)):
        plot += scale(values=[each[place] for each in look.values()], limits=list(look))
    if mark is not None:
        plot += geom_vline(xintercept=mark, color=GREY, linetype="dotted", size=0.6)
    plot += geom_ribbon(aes("x", ymin="low", ymax="high", fill="by", group="by"), alpha=0.18, show_legend=False)
    plot += geom_line(aes("x", "mean", color="by", linetype="by", size="by", group="by"))
    values = sorted(set(data["x"]))
    if len(values) > 20:  # a learning curve
        return plot
    plot += geom_point(aes("x", "mean", color="by", shape="by"), size=2.4)
    if values[0] > 0 and values[-1] / values[0] >= 16:
        return plot + scale_x_log10(breaks=values, labels=lambda found: [shown(float(each)) for each in found])
    return plot + scale_x_continuous(breaks=values, labels=lambda found: [f"{each:g}" for each in found])


def bar_plot(
    rows: pd.DataFrame,
    x: str,
    y_label: str,
    by: str = "method",
    panel: str | None = None,
    x_label: str | None = None,
    title: str | None = None,
    free: bool = True,
) -> ggplot:
    """Return groups of bars of the mean over seeds, with a line of one SD; the arguments are those of `line_plot`."""
    from plotnine import aes, element_text, geom_col, geom_errorbar, geom_hline, position_dodge, scale_x_discrete
    from plotnine import theme as more

    data = points(rows, x, by, panel)
    order = _in_order(data["x"])
    data["x"] = data["x"].map(shown)
    side = position_dodge(width=0.8)
    plot = _plot(data, x if x_label is None else x_label, y_label, title, free) + scale_x_discrete(limits=order)
    plot += geom_col(aes("x", "mean", fill="by"), position=side, width=0.74)
    plot += geom_hline(yintercept=0, color="#555555", size=0.4)
    if max(map(len, order)) > 8:  # names, which would run into one another
        plot += more(axis_text_x=element_text(rotation=30, ha="right"))
    if (data["high"] > data["low"]).any():
        plot += geom_errorbar(aes("x", ymin="low", ymax="high", group="by"), position=side, width=0.25, size=0.5)
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
    from plotnine import (
        aes,
        element_text,
        facet_wrap,
        geom_text,
        geom_tile,
        ggplot,
        labs,
        scale_color_identity,
        scale_fill_cmap,
        scale_fill_gradient2,
        scale_x_discrete,
        scale_y_discrete,
    )
    from plotnine import theme as more

    rows = rows[rows[x].notna() & rows[y].notna()].assign(panel="" if panel is None else rows[panel])
    if not len(rows):
        raise ReportError(f"There is nothing to draw by `{x}` and `{y}`.")
    found = []
    for key, part in groups(rows, ["panel", y, x]):
        what = f"{x} = {shown(key[x])}, {y} = {shown(key[y])}"
        if minus is None:
            mean = average(part, what).mean
        else:
            mean = difference(part, minus[(minus[x] == key[x]) & (minus[y] == key[y])], what).mean
        found.append({"panel": key["panel"], "x": key[x], "y": key[y], "mean": mean})
    data = pd.DataFrame(found)
    data["panel"] = pd.Categorical(
        data["panel"], sorted(dict.fromkeys(data["panel"]), key=lambda name: _order(name)[0])
    )
    top = data["mean"].abs().max() or 1.0
    spread = (data["mean"] - data["mean"].min()) / ((data["mean"].max() - data["mean"].min()) or 1.0)
    dark = spread < 0.5 if minus is None else data["mean"].abs() > 0.6 * top
    data["ink"] = dark.map({True: "white", False: "black"})
    data["text"] = data["mean"].map(lambda each: f"{each:+.1f}" if minus is not None else f"{each:.3g}")
    across, down = _in_order(data["x"]), _in_order(data["y"])
    data["x"], data["y"] = data["x"].map(shown), data["y"].map(shown)
    plot = ggplot(data, aes("x", "y")) + theme() + labs(x=x_label or x, y=y_label or y, fill=label, title=title)
    plot = (
        plot + geom_tile(aes(fill="mean")) + geom_text(aes(label="text", color="ink"), size=9) + scale_color_identity()
    )
    plot = plot + scale_x_discrete(limits=across) + scale_y_discrete(limits=down[::-1])
    if minus is not None and len(matched := data[data["x"] == data["y"]]):  # trained and evaluated alike
        plot = plot + geom_tile(data=matched, fill="none", color="black", size=0.9)
    if minus is None:
        plot += scale_fill_cmap("cividis")
    else:
        plot += scale_fill_gradient2(low="#b35806", mid="#f7f7f7", high="#2166ac", limits=(-top, top))
    if len(set(data["panel"])) > 1:
        plot += facet_wrap("panel", ncol=min(3, len(set(data["panel"]))))
    return plot + more(legend_position="right", legend_title=element_text(size=10))


def panels_of(plot: ggplot) -> int:
    """Return how many panels a figure has."""
    return plot.data["panel"].nunique() if "panel" in plot.data else 1


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

    number = panels_of(plot)
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
