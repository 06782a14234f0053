"""Figures of the long table, by plotnine: one theme, one look for each method, mean and SD over seeds by construction.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; line and marker do the same in print without colour.
Loop Dropout is the thick blue line and LoRA the orange dashed one, wherever they are drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import plotnine as p9
from matplotlib import pyplot

from loopdropout_trainer.gates import RULES, Draw, make_rule
from loopdropout_trainer.record.measurement import ALL, BASE, NONE, TRAINING
from loopdropout_trainer.reports.averaging import (
    OF_THE_RUN,
    PLACES_OF_IDENTITIES,
    average,
    check_column,
    difference,
    is_at_trained_depth,
    numbers_in,
    select,
    select_as_trained,
    settings_of,
    shown,
    telling,
)
from loopdropout_trainer.reports.reading import ReportError
from loopdropout_trainer.reports.specs import FigureSpec, GatesSpec
from loopdropout_trainer.settings.recipe import method_title


ORANGE = "#E69F00"
BLUE = "#0072B2"
GREY = "#7a7a7a"
LOOKS = {  # method: colour, line, marker, width of the line
    BASE: (GREY, "dotted", "x", 0.9),
    "LoRA": (ORANGE, "dashed", "o", 1.3),
    "Loop Dropout": (BLUE, "solid", "s", 1.6),
}
"""How the methods look; the others have the same look in every figure, too."""

_MARKERS = {
    "#009E73": "^",
    "#CC79A7": "D",
    "#D55E00": "v",
    "#56B4E9": "*",
    "#000000": "X",
    GREY: "P",
    "#8c6d1f": "p",
}
_LINES = ("solid", "dashed", "dashdot", "dotted")
_MORE = [(color, line, marker, 0.9) for line in _LINES for color, marker in _MARKERS.items()]
_KNOWN = ("LoRA+", "rsLoRA", "Input dropout", *(method_title({"rule": rule}) for rule in RULES))
LOOKS |= zip((title for title in _KNOWN if title not in LOOKS), _MORE, strict=False)

MOST_LINES = 8
"""In one panel; where there are more, what tells runs of one method apart becomes panels."""


def looks(names: Iterable[str]) -> dict[str, tuple[str, str, str, float]]:
    """Return colour, line, marker and width of each method, the known ones first."""
    drawn = set(names)
    free = cycle(_MORE[len(LOOKS) - 3 :])
    others = sorted(drawn - LOOKS.keys())
    named = {name: look for name, look in LOOKS.items() if name in drawn}
    return named | dict(zip(others, free, strict=False))


def theme() -> Any:
    """Return the theme of all figures: letters that can be read in a page of 800 pixels, and one legend above."""
    axis = p9.element_line(color="#555555", size=0.5)
    nothing = p9.element_blank()
    return p9.theme_minimal(base_size=11) + p9.theme(
        plot_title=p9.element_text(size=13, ha="left", weight="bold"),
        plot_background=p9.element_rect(fill="white", color="white"),
        legend_position="top",
        legend_title=nothing,
        legend_text=p9.element_text(size=11),
        legend_key_width=34,
        panel_grid_minor=nothing,
        panel_grid_major_x=nothing,
        panel_grid_major_y=p9.element_line(color="#e4e4e4", size=0.5),
        axis_line_x=axis,
        axis_ticks_major_x=axis,
        axis_text=p9.element_text(color="#222222", size=10),
        strip_text=p9.element_text(size=11, weight="bold", ha="left", linespacing=1.3),
        strip_background=nothing,
    )


def points(rows: pd.DataFrame, minus: pd.DataFrame | None = None, **by: str | None) -> pd.DataFrame:
    """Return mean and SD over seeds of rows, less those of `minus`, by groups: name there = column of theirs, or None.

    Raises:
        ReportError: if a point would average runs that differ in another setting than the seed; it names the settings.
    """
    columns = {name: column for name, column in by.items() if column is not None}
    names = list(columns.values())
    data = []
    for key, part in rows.dropna(subset=names).groupby(names, sort=False):
        place = dict(zip(names, key, strict=True))
        what = _said(place, [name for name in names if place[name] != ""])
        if minus is None:
            values = average(part, what)
        else:
            less = select(minus, place)
            values = difference(part, less, what).mean(axis=1)
        data.append([*key, values.mean(skipna=False), values.std(), len(values)])
    if not data:
        raise ReportError(f"There is nothing to draw by {', '.join(names)}.")
    means = pd.DataFrame(data, columns=[*columns, "mean", "sd", "seeds"])
    means = means.fillna({"sd": 0.0})  # of a single seed
    panels = means.get("panel", pd.Series("", means.index))
    return means.assign(panel=pd.Categorical(panels, panels.unique()))


def _in_order(values: pd.Series) -> pd.Categorical:
    """Return the names of positions: numbers ascend, names stay as they come."""
    positions = values.unique()
    if not any(isinstance(position, str) for position in positions):
        positions = sorted(positions)
    return pd.Categorical(values.map(shown), list(map(shown, positions)))


def _with_panels(plot: p9.ggplot, scales: str = "free") -> p9.ggplot:
    panels = len(plot.data["panel"].cat.categories)
    if panels == 1:
        return plot
    return plot + p9.facet_wrap("panel", scales=scales, ncol=min(3, panels))


def line_plot(
    rows: pd.DataFrame,
    x: str,
    y_label: str,
    by: str = "method",
    panel: str | None = None,
    x_label: str | None = None,
    title: str | None = None,
    bars: bool = False,
) -> p9.ggplot:
    """Return lines of the mean over seeds, with a band of one SD where there are several seeds; or groups of bars.

    Args:
        rows: of the long table, `value` by `seed`; every point must be runs that are equal in all other settings.
        x: column on the horizontal axis; numbers that span a factor of 16 or more are drawn on a logarithmic one.
        y_label, x_label, title: texts.
        by: column that the lines are told apart by.
        panel: column of the panels, or None for one.
        bars: whether to draw bars.
    """
    data = points(rows, panel=panel, by=by, x=x)
    look = looks(data["by"])
    data["by"] = pd.Categorical(data["by"], list(look))
    if bars:
        data["x"] = _in_order(data["x"])
        layers = _bars(data, look)
    else:
        data["x"] = numbers_in(data["x"], x)
        layers = _lines(data, look)
    texts = p9.labs(x=x if x_label is None else x_label, y=y_label, title=title)
    return _with_panels(p9.ggplot(data) + theme() + texts + layers)


def _bars(data: pd.DataFrame, look: dict[str, tuple]) -> list[Any]:
    colours = [colour for colour, *_ in look.values()]
    side = p9.position_dodge(width=0.8)
    layers = [
        p9.aes("x", "mean", fill="by", group="by"),
        p9.scale_fill_manual(values=colours, limits=list(look)),
        p9.geom_col(position=side, width=0.74),
        p9.geom_hline(yintercept=0, color="#555555", size=0.4),
    ]
    if data["sd"].any():
        spread = p9.aes(ymin="mean - sd", ymax="mean + sd")
        layers.append(p9.geom_errorbar(spread, position=side, width=0.25, size=0.5))
    if max(map(len, data["x"].cat.categories)) > 8:  # names, which would run into one another
        layers.append(p9.theme(axis_text_x=p9.element_text(rotation=30, ha="right")))
    return layers


def _lines(data: pd.DataFrame, look: dict[str, tuple]) -> list[Any]:
    colours, lines, markers, widths = map(list, zip(*look.values(), strict=True))
    limits = list(look)
    layers = [
        p9.aes("x", "mean", color="by", linetype="by", size="by", shape="by", group="by"),
        p9.scale_color_manual(colours, limits=limits),
        p9.scale_fill_manual(colours, limits=limits),
        p9.scale_linetype_manual(lines, limits=limits),
        p9.scale_shape_manual(markers, limits=limits),
        p9.scale_size_manual(widths, limits=limits),
        p9.geom_ribbon(
            p9.aes(ymin="mean - sd", ymax="mean + sd", fill="by"),
            alpha=0.18,
            color="none",
            show_legend=False,
        ),
        p9.geom_line(),
    ]
    values = sorted(data["x"].unique())
    if len(values) > 20:  # a learning curve
        return layers
    least = values[0]
    is_wide = least > 0 and values[-1] >= 16 * least
    scale = p9.scale_x_log10 if is_wide else p9.scale_x_continuous
    names = lambda breaks: [shown(float(value)) for value in breaks]
    return [*layers, p9.geom_point(size=2.4), scale(breaks=values, labels=names)]


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
) -> p9.ggplot:
    """Return a matrix of means over seeds with its numbers, the first row on top; `label` is that of the colours.

    x and y are the columns across and down; the rows of `minus` are subtracted, paired by seed, and x = y gets a frame.
    """
    data = points(rows, minus, panel=panel, y=y, x=x)
    data = data.assign(x=_in_order(data["x"]), y=_in_order(data["y"]))
    mean = data["mean"]
    if minus is None:
        texts = mean.map("{:.3g}".format)
        is_dark = mean < (mean.min() + mean.max()) / 2
        colours = [p9.scale_fill_cmap("cividis")]
    else:
        top = mean.abs().max() or 1.0
        texts = mean.map("{:+.1f}".format)
        is_dark = mean.abs() > 0.6 * top
        white_is_zero = p9.scale_fill_gradient2(low="#b35806", mid="#f7f7f7", high="#2166ac", limits=(-top, top))
        same = data[data["x"].astype(str) == data["y"].astype(str)]
        frame = p9.geom_tile(data=same, fill="none", color="black", size=0.9)
        colours = [white_is_zero, frame]
    data = data.assign(text=texts, ink=is_dark.map({True: "white", False: "black"}))
    layers = [
        p9.labs(x=x_label, y=y_label, fill=label, title=title),
        p9.geom_tile(p9.aes(fill="mean")),
        p9.geom_text(p9.aes(label="text", color="ink"), size=9),
        p9.scale_color_identity(),
        *colours,
        p9.scale_y_discrete(limits=list(data["y"].cat.categories[::-1])),
    ]
    plot = p9.ggplot(data, p9.aes("x", "y")) + theme() + layers
    legend = p9.theme(legend_position="right", legend_title=p9.element_text(size=10))
    return _with_panels(plot, "fixed") + legend


_WIDTHS = {1: 5.2, 2: 8.0, 3: 9.6}
"""Of figures with so many panels beside one another, in inches."""


def save_figure(
    plot: p9.ggplot, path: str | Path, width: float | None = None, height: float | None = None
) -> list[Path]:
    """Save a figure of plotnine as PNG, PDF and SVG, and return the three paths; `path` has no ending, sizes are in inches."""
    panels = plot.data["panel"].nunique() if "panel" in plot.data else 1
    width = width or _WIDTHS[min(panels, 3)]
    height = height or 0.9 + 2.6 * math.ceil(panels / 3)
    dates = {
        "png": None,
        "pdf": {"CreationDate": None},
        "svg": {"Date": None},
    }
    settings = {  # the same numbers give the same file; letters stay letters
        "backend": "agg",
        "svg.hashsalt": "loopdropout",
        "pdf.fonttype": 42,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(settings):
        figure = (plot + p9.theme(figure_size=(width, height))).draw()
        for ending, date in dates.items():
            figure.savefig(f"{path}.{ending}", dpi=200, metadata=date)
        pyplot.close(figure)
    return [Path(f"{path}.{ending}") for ending in dates]


# Figures: of everything that runs have numbers for, and those of the paper that a file describes.

AXES = {
    "step": "training step",
    "group": "",
    "other_loop": "loop",
    "dose": "gate of every loop",
    "loop": "loop",
    "readout": "loop read out",
    "gates": "gates",
    "depth": "loops K at inference",
}
"""What a number is drawn over: the first of these columns in which it says where it was measured."""

OF_TRAINING = {"learning_rate": "learning rate", "rank": "rank of the adapter", "p": "drop probability"}
"""Settings over which accuracies are drawn for methods that were trained at several values."""


def axis_of(rows: pd.DataFrame) -> pd.Series:
    """Return the column of `AXES` that each row is drawn over."""
    says = rows[list(AXES)].notna()
    says["gates"] = ~rows["gates"].isin([ALL, NONE])
    says["depth"] = True
    return says.idxmax(axis=1)


def automatic_figures(table: pd.DataFrame) -> dict[str, p9.ggplot]:
    """Return a figure of each family of numbers over each axis that it was measured over, by name.

    A line is one setting: where runs of one method differ in more than the seed, what they differ in stands in the legend.
    Each metric, and each way in which a benchmark was evaluated, is a panel. What cannot be drawn is left out, and said.
    """
    figures = {}
    drawn = set()
    for family, x, rows in _what_to_draw(table):
        name = f"{family}_{x}"
        if x == "metric":
            if family in drawn:
                continue
            name = family
        try:
            figures[re.sub(r"[^\w-]", "_", name)] = _figure(family, x, rows)  # a part of a file's name
            drawn.add(family)
        except ReportError as error:
            table.attrs["skipped"].append(f"the figure {name}: {error}")
    return figures


def _what_to_draw(table: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield families of numbers, what to draw them over, and their rows: those that stand at several places of it.

    `metric` is for families that nothing else has been drawn of.
    """
    rows = table[table["family"] != "cost"].assign(axis=axis_of)
    rows = rows[(rows["axis"] == "depth") | _is_at_own_depth(rows)]
    for (family, axis), part in rows.groupby(["family", "axis"], sort=False):
        yield from _at_several_places(family, axis, part, ["metric"])
    rows = rows[_is_at_own_depth(rows)]
    for family, part in rows[rows["step"].isna()].groupby("family", sort=False):
        yield from _at_several_places(family, "metric", part, ["family"])
    accuracies = select(rows, {"family": "accuracy", "gates": ALL, "readout": None})
    for setting in OF_TRAINING:
        if setting in table:
            part = accuracies[pd.to_numeric(accuracies[setting], errors="coerce").notna()]
            yield from _at_several_places("accuracy", setting, part, ["metric", "method"])


def _is_at_own_depth(rows: pd.DataFrame) -> pd.Series:
    """Say which rows are at the depth that their models were trained at; of groups of problems those at unit gates."""
    is_plain = rows["gates"].isin([ALL, NONE]) & rows["readout"].isna()
    is_whole = rows["group"].isna()
    return is_at_trained_depth(rows) & (is_plain | is_whole)


def _at_several_places(
    family: str, x: str, rows: pd.DataFrame, within: list[str]
) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield the rows whose groups have several values in the column x, if there are any."""
    rows = rows[rows.groupby(within)[x].transform("nunique") > 1]
    if len(rows):
        yield family, x, rows


def _figure(family: str, x: str, rows: pd.DataFrame) -> p9.ggplot:
    """Return the figure of a family's rows over the column x."""
    title = f"{family} by {x}".replace("_", " ").capitalize()
    x_label = {**AXES, **OF_TRAINING}.get(x, "")
    rows = labelled(rows, x, "other_loop")
    if x == "other_loop":
        rows = rows.assign(panel=rows["label"] + "\n" + rows["panel"])
        return heat_plot(rows, "loop", x, "", "panel", x_label, x_label, title)
    panel = None if x == "metric" else "panel"
    bars = x in ("group", "gates", "metric")
    return line_plot(rows, x, "", "label", panel, x_label, title, bars)


def labelled(rows: pd.DataFrame, *x: str, most: float = MOST_LINES) -> pd.DataFrame:
    """Return rows with `label`, the method and what tells its runs apart, and `panel`, what is measured and how.

    Where there are more than `most` labels, these are the methods, and what tells their runs apart is part of the panel.
    """
    settings = settings_of(rows)
    beside = [name for name in settings if name in x]  # what goes with a setting on the axis is told by it
    runs = rows.drop_duplicates(["method", "run", *OF_THE_RUN])
    apart = {method: telling(of_method, settings, beside) for method, of_method in runs.groupby("method")}
    protocol = [name for name in rows if name.startswith("evaluation.") and name not in PLACES_OF_IDENTITIES]
    numbers = rows.drop_duplicates(["metric", "identity"]).groupby(["benchmark", "metric"], sort=False)
    ways = dict.fromkeys(name for _, of_metric in numbers for name in telling(of_metric, protocol))
    several = [name for name in ("benchmark", "metric") if rows[name].nunique() > 1] or ["benchmark"]
    labels = []
    panels = []
    said = []
    for row in rows.to_dict("records"):
        method = row["method"]
        setting = _said(row, apart[method])
        protocol = _said(row, ways)
        said.append(setting)
        labels.append(_joined(", ", method, setting))
        panels.append(_joined("\n", _measured(row, several), protocol))
    if len(set(labels)) > most:
        labels = rows["method"]
        panels = [_joined("\n", *texts) for texts in zip(panels, said, strict=True)]
    return rows.assign(label=labels, panel=panels)


def _measured(row: dict[str, Any], several: list[str]) -> str:
    """Return what a row is a number of: benchmark, metric and unit."""
    names = dict.fromkeys(row[name] for name in several if row[name] != TRAINING)
    text = " ".join(names).replace("_", " ")
    return f"{text} ({row['unit']})" if row["unit"] else text


def _said(row: dict[str, Any], names: Iterable[str]) -> str:
    """Return what a row says in these columns."""
    texts = []
    for name in names:
        if not pd.isna(row[name]):
            texts.append(f"{name.removeprefix('evaluation.')} = {shown(row[name])}")
    return ", ".join(texts)


def _joined(between: str, *texts: str) -> str:
    return between.join(filter(None, texts))


_OVERVIEW = {
    ("accuracy", "depth"): "accuracy (%), K loops",
    ("single_loop", "loop"): "loss reduction (%), only loop t",
    ("accuracy", "loop"): "accuracy (%), only loop t",
}


def overview_figure(table: pd.DataFrame) -> p9.ggplot | None:
    """Return one figure of what runs measured of their first benchmark: by depth, and in one loop only; None: of nothing."""
    panels = {}
    for family, x, rows in _what_to_draw(select(table, {"writer": TRAINING, "unit": "%"})):
        if title := _OVERVIEW.get((family, x)):
            first = rows[rows["metric"] == rows["metric"].iloc[0]]
            panels[title] = labelled(first, x).assign(panel=title, position=first[x])
    parts = [panels[title] for title in _OVERVIEW.values() if title in panels]
    return line_plot(pd.concat(parts), "position", "", "label", "panel", "loops") if parts else None


def paper_figure(spec: FigureSpec | GatesSpec, table: pd.DataFrame) -> p9.ggplot | None:
    """Return the figure that a file describes, or None where the runs have nothing of it; ReportError as of `points`."""
    if isinstance(spec, GatesSpec):
        return gates_plot(spec)
    ((x, x_label),) = spec.x.items()
    ((y, y_label),) = spec.y.items()
    rows = _in_panels(spec, table, {})
    for name in (x, y):
        check_column(table, name)
    rows = rows.dropna(subset=[x, y])
    if not len(rows):
        return None
    if spec.figure == "heat":
        minus = _in_panels(spec, table, spec.minus) if spec.minus else None
        label = "points" if spec.minus else ""
        return heat_plot(rows, x, y, label, "panel", x_label, y_label, spec.title, minus)
    rows = rows.assign(value=numbers_in(rows[y], y))
    return line_plot(rows, x, y_label, panel="panel", x_label=x_label, bars=spec.figure == "bar")


def _in_panels(spec: FigureSpec, table: pd.DataFrame, change: dict[str, Any]) -> pd.DataFrame:
    """Return the rows of a figure's panels, or of what is subtracted from them."""
    panels = []
    for title, selection in spec.panels.items():
        rows = select_as_trained(table, {**spec.filter, **selection, **change}, *spec.x)
        panels.append(rows.assign(panel=title))
    return pd.concat(panels)


def gates_plot(spec: GatesSpec) -> p9.ggplot:
    """Draw the gates of eight examples in training, as a run of these settings draws them, and those of inference."""
    given = spec.filter
    examples = [(row, 0) for row in range(8)]
    draw = Draw(seed=given.seed, step=0, example_ids=examples, num_loops=given.num_loops)
    gates = make_rule("loop_dropout", p=given.p).sample(draw).tolist()  # [K, 8]
    gates = pd.DataFrame(gates, range(1, given.num_loops + 1), range(1, 9))
    training = gates.stack().rename_axis(["loop", "example"]).reset_index(name="value")
    rows = pd.concat([training.assign(panel="training"), training.assign(panel="inference", value=1.0)])
    return heat_plot(rows.assign(seed=0), "loop", "example", "gate", "panel", "loop", "example", spec.title)
