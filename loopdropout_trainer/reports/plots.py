"""Figures of the long table, by plotnine: one theme, one look for each method, mean and SD over seeds by construction.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; line and marker do the same in print without colour.
Loop Dropout is the thick blue line and LoRA the orange dashed one, wherever they are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    numbers_in,
    select,
    settings_of,
    shown,
    telling,
)
from loopdropout_trainer.reports.reading import ReportError
from loopdropout_trainer.reports.specs import FigureSpec, as_trained
from loopdropout_trainer.settings.recipe import method_title


ORANGE, BLUE, GREY = "#E69F00", "#0072B2", "#7a7a7a"
LOOKS = {  # method: colour, line, marker, width of the line
    BASE: (GREY, "dotted", "x", 0.9),
    "LoRA": (ORANGE, "dashed", "o", 1.3),
    "Loop Dropout": (BLUE, "solid", "s", 1.6),
}
"""How the methods look; the others have the same look in every figure, too."""

_COLORS = ("#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", GREY, "#8c6d1f")
_LINES = ("solid", "dashed", "dashdot", "dotted")
_MORE = [(color, line, marker, 0.9) for line in _LINES for color, marker in zip(_COLORS, "^Dv*XPp", strict=True)]
_KNOWN = ("LoRA+", "rsLoRA", "Input dropout", *(method_title({"rule": rule}) for rule in RULES))
LOOKS |= zip((title for title in _KNOWN if title not in LOOKS), _MORE, strict=False)

MOST_LINES = 8
"""In one panel; where there are more, what tells runs of one method apart becomes panels."""


def looks(names: Sequence[str]) -> dict[str, tuple[str, str, str, float]]:
    """Return colour, line, marker and width of each method, the known ones first."""
    known, free = [name for name in LOOKS if name in set(names)], cycle(_MORE[len(LOOKS) - 3 :])
    return {name: LOOKS.get(name) or next(free) for name in [*known, *sorted(set(names) - set(known))]}


def theme() -> Any:
    """Return the theme of all figures: letters that can be read in a page of 800 pixels, and one legend above."""
    axis, nothing = p9.element_line(color="#555555", size=0.5), p9.element_blank()
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


def points(rows: pd.DataFrame, minus: pd.DataFrame | None = None, **by: str) -> pd.DataFrame:
    """Return mean, low and high (one SD over seeds) of rows, less those of `minus`, by groups: name there = column of theirs.

    Raises:
        ReportError: if a point would average runs that differ in another setting than the seed; it names the settings.
    """
    columns, found = list(by.values()), []
    for key, part in rows.dropna(subset=columns).groupby(columns, sort=False):
        what = ", ".join(f"{name} = {shown(value)}" for name, value in zip(columns, key, strict=True) if value != "")
        if minus is None:
            values = average(part, what)
        else:
            values = difference(part, minus[(minus[columns] == list(key)).all(axis=1)], what)
        mean, spread = values.mean(skipna=False), values.std() if len(values) > 1 else 0.0
        of_group = {"mean": mean, "low": mean - spread, "high": mean + spread, "seeds": len(values)}
        found.append({**dict(zip(by, key, strict=True)), **of_group})
    if not found:
        raise ReportError(f"There is nothing to draw by {', '.join(columns)}.")
    data = pd.DataFrame(found)
    return data.assign(panel=pd.Categorical(data["panel"], data["panel"].unique()))


def _in_order(values: pd.Series) -> list[str]:
    """Return the names of positions: numbers ascend, names stay as they come."""
    once = list(values.unique())
    return [shown(each) for each in (once if any(isinstance(each, str) for each in once) else sorted(once))]


def _with_panels(plot: p9.ggplot, scales: str = "free") -> p9.ggplot:
    panels = len(plot.data["panel"].cat.categories)
    return plot + p9.facet_wrap("panel", scales=scales, ncol=min(3, panels)) if panels > 1 else plot


def line_plot(
    rows: pd.DataFrame, x: str, y_label: str, by: str = "method", panel: str | None = None,
    x_label: str | None = None, title: str | None = None, bars: bool = False,
) -> p9.ggplot:  # fmt: skip
    """Return lines of the mean over seeds, with a band of one SD where there are several seeds; or groups of bars.

    Args:
        rows: of the long table, `value` by `seed`; every point must be runs that are equal in all other settings.
        x: column on the horizontal axis; numbers that span a factor of 16 or more are drawn on a logarithmic one.
        y_label, x_label, title: texts.
        by: column that the lines are told apart by.
        panel: column of the panels, or None for one.
        bars: whether to draw bars.
    """
    data = points(rows.assign(panel=rows[panel] if panel else ""), panel="panel", by=by, x=x)
    names = list(looks(data["by"]))
    color, line, marker, width = (
        {"values": list(each), "limits": names} for each in zip(*looks(names).values(), strict=True)
    )
    data["by"] = pd.Categorical(data["by"], names)
    texts = p9.labs(x=x if x_label is None else x_label, y=y_label, title=title)
    base = [theme(), texts, p9.scale_fill_manual(**color)]
    if bars:
        order, side = _in_order(data["x"]), p9.position_dodge(width=0.8)
        plot = p9.ggplot(data.assign(x=data["x"].map(shown)), p9.aes("x", "mean", fill="by", group="by")) + base
        plot = plot + p9.geom_col(position=side, width=0.74) + p9.geom_hline(yintercept=0, color="#555555", size=0.4)
        if (data["high"] > data["low"]).any():
            plot += p9.geom_errorbar(p9.aes(ymin="low", ymax="high"), position=side, width=0.25, size=0.5)
        if max(map(len, order)) > 8:  # names, which would run into one another
            plot += p9.theme(axis_text_x=p9.element_text(rotation=30, ha="right"))
        return _with_panels(plot + p9.scale_x_discrete(limits=order))
    data["x"] = numbers_in(data["x"], x)
    plot = p9.ggplot(data, p9.aes("x", "mean", color="by", linetype="by", size="by", shape="by", group="by")) + base
    plot = plot + p9.scale_color_manual(**color) + p9.scale_linetype_manual(**line)
    plot = plot + p9.scale_shape_manual(**marker) + p9.scale_size_manual(**width)
    plot += p9.geom_ribbon(p9.aes(ymin="low", ymax="high", fill="by"), alpha=0.18, color="none", show_legend=False)
    plot += p9.geom_line()
    values = sorted(data["x"].unique())
    if len(values) <= 20:  # else a learning curve
        scale = p9.scale_x_log10 if values[0] > 0 and values[-1] >= 16 * values[0] else p9.scale_x_continuous
        plot += p9.geom_point(size=2.4)
        plot += scale(breaks=values, labels=lambda found: [shown(float(each)) for each in found])
    return _with_panels(plot)


def heat_plot(
    rows: pd.DataFrame, x: str, y: str, label: str, panel: str | None = None, x_label: str | None = None,
    y_label: str | None = None, title: str | None = None, minus: pd.DataFrame | None = None,
) -> p9.ggplot:  # fmt: skip
    """Return a matrix of means over seeds with its numbers, the first row on top; `label` is that of the colours.

    x and y are the columns across and down; the rows of `minus` are subtracted, paired by seed.
    """
    data = points(rows.assign(panel=rows[panel] if panel else ""), minus, panel="panel", y=y, x=x)
    across, down = _in_order(data["x"]), _in_order(data["y"])[::-1]
    data = data.assign(x=data["x"].map(shown), y=data["y"].map(shown))
    colours = _of_levels(data) if minus is None else _of_gains(data)
    numbers = p9.geom_text(p9.aes(label="text", color="ink"), size=9)
    plot = p9.ggplot(data, p9.aes("x", "y")) + theme() + p9.labs(x=x_label, y=y_label, fill=label, title=title)
    plot = plot + p9.geom_tile(p9.aes(fill="mean")) + numbers + p9.scale_color_identity() + colours
    plot = plot + p9.scale_x_discrete(limits=across) + p9.scale_y_discrete(limits=down)
    return _with_panels(plot, "fixed") + p9.theme(legend_position="right", legend_title=p9.element_text(size=10))


def _of_levels(data: pd.DataFrame) -> list[Any]:
    """Give the cells of a matrix of levels their texts and inks, and return its scale of colours."""
    middle = (data["mean"].min() + data["mean"].max()) / 2
    data["ink"] = (data["mean"] < middle).map({True: "white", False: "black"})
    data["text"] = data["mean"].map("{:.3g}".format)
    return [p9.scale_fill_cmap("cividis")]


def _of_gains(data: pd.DataFrame) -> list[Any]:
    """Give the cells of a matrix of gains their texts and inks, zero in white, and a frame where x = y."""
    top = data["mean"].abs().max() or 1.0
    data["ink"] = (data["mean"].abs() > 0.6 * top).map({True: "white", False: "black"})
    data["text"] = data["mean"].map("{:+.1f}".format)
    scale = p9.scale_fill_gradient2(low="#b35806", mid="#f7f7f7", high="#2166ac", limits=(-top, top))
    return [scale, p9.geom_tile(data=data[data["x"] == data["y"]], fill="none", color="black", size=0.9)]


def save_figure(
    plot: p9.ggplot, path: str | Path, width: float | None = None, height: float | None = None
) -> list[Path]:
    """Save a figure of plotnine as PNG, PDF and SVG, and return the three paths; `path` has no ending, sizes are in inches."""
    number = plot.data["panel"].nunique() if "panel" in plot.data else 1
    size = width or (5.2, 8.0, 9.6)[min(number, 3) - 1], height or 0.9 + 2.6 * -(-number // 3)
    dates = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # The same numbers give the same file; letters stay letters.
    with mpl.rc_context({"backend": "agg", "svg.hashsalt": "loopdropout", "pdf.fonttype": 42}):
        figure = (plot + p9.theme(figure_size=size)).draw()
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
    axis = pd.Series("depth", rows.index)
    for name in reversed([name for name in AXES if name != "depth"]):
        says = ~rows["gates"].isin([ALL, NONE]) if name == "gates" else rows[name].notna()
        axis[says] = name
    return axis


def automatic_figures(table: pd.DataFrame) -> dict[str, p9.ggplot]:
    """Return a figure of each family of numbers over each axis that it was measured over, by name.

    A line is one setting: where runs of one method differ in more than the seed, what they differ in stands in the legend.
    Each metric, and each way in which a benchmark was evaluated, is a panel. What cannot be drawn is left out, and said.
    """
    figures: dict[str, p9.ggplot] = {}
    rows = table[table["family"] != "cost"]
    for (family, axis), part in rows.groupby(["family", axis_of(rows)], sort=False):
        _add(figures, table, f"{family}_{axis}", part if axis == "depth" else at_own_depth(part), axis)
    for family, part in rows[rows["step"].isna()].groupby("family", sort=False):  # single numbers
        if not any(name.startswith(f"{family}_") for name in figures):
            _add(figures, table, family, at_own_depth(part), "metric")
    trained = at_own_depth(table[(table["family"] == "accuracy") & (table["gates"] == ALL) & table["readout"].isna()])
    for name in (name for name in OF_TRAINING if name in trained):
        numbers = trained[trained[name].map(lambda value: isinstance(value, (int, float))).astype(bool)]
        _add(figures, table, f"accuracy_{name}", numbers, name)
    return figures


def at_own_depth(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows at the depth that their models were trained at; of groups of problems those at unit gates."""
    if "num_loops" in rows:
        rows = rows[(rows["depth"] == rows["num_loops"]) | rows["num_loops"].isna()]
    return rows[rows["group"].isna() | (rows["gates"].isin([ALL, NONE]) & rows["readout"].isna())]


def _add(figures: dict[str, p9.ggplot], table: pd.DataFrame, name: str, rows: pd.DataFrame, x: str) -> None:
    """Add the figure of some rows over the column x, if they stand at several places of it."""
    within = ["metric", "method"] if x in OF_TRAINING else ["family" if x == "metric" else "metric"]
    rows = rows[rows.groupby(within)[x].transform("nunique") > 1] if len(rows) else rows
    if not len(rows):
        return
    title = f"{name.removesuffix(f'_{x}').replace('_', ' ').capitalize()} by {x.replace('_', ' ')}"
    x_label = OF_TRAINING.get(x, AXES.get(x, ""))
    rows = labelled(rows, x, "other_loop")
    try:
        if x == "other_loop":
            rows = rows.assign(panel=rows["label"] + "\n" + rows["panel"])
            figure = heat_plot(rows, "loop", x, "", "panel", x_label, x_label, title)
        else:
            bars = x in ("group", "gates", "metric")
            figure = line_plot(rows, x, "", "label", "panel" if x != "metric" else None, x_label, title, bars)
        figures[re.sub(r"[^\w-]", "_", name)] = figure  # a part of a file's name
    except ReportError as error:
        table.attrs["skipped"].append(f"the figure {name}: {error}")


def labelled(rows: pd.DataFrame, *x: str, most: float = MOST_LINES) -> pd.DataFrame:
    """Return rows with `label`, the method and what tells its runs apart, and `panel`, what is measured and how.

    Where there are more than `most` labels, these are the methods, and what tells their runs apart is part of the panel.
    """
    runs, numbers = rows.drop_duplicates(["method", "run", *OF_THE_RUN]), rows.drop_duplicates(["metric", "identity"])
    settings = [name for name in settings_of(rows) if name not in x]
    beside = [name for name in settings_of(rows) if name in x]  # what goes with a setting on the axis is told by it
    apart = {method: telling(part, settings, beside) for method, part in runs.groupby("method")}
    evaluation = [name for name in rows if name.startswith("evaluation.") and name not in PLACES_OF_IDENTITIES]
    how: dict[str, None] = {}
    for _, part in numbers.groupby(["benchmark", "metric"], sort=False):
        how |= dict.fromkeys(telling(part, evaluation))
    several = [name for name in ("benchmark", "metric") if rows[name].nunique() > 1] or ["benchmark"]
    known = lambda row, names: ", ".join(
        f"{name.removeprefix('evaluation.')} = {shown(row[name])}" for name in names if not pd.isna(row[name])
    )
    settings_text, panels = [], []
    for row in rows.to_dict("records"):
        named = " ".join(dict.fromkeys(str(row[name]) for name in several if row[name] != TRAINING)).replace("_", " ")
        settings_text.append(known(row, apart[row["method"]]))
        panels.append("\n".join(filter(None, [f"{named} ({row['unit']})" if row["unit"] else named, known(row, how)])))
    labels = [", ".join(filter(None, pair)) for pair in zip(rows["method"], settings_text, strict=True)]
    if len(set(labels)) > most:
        panels = ["\n".join(filter(None, pair)) for pair in zip(panels, settings_text, strict=True)]
        labels = rows["method"].tolist()
    return rows.assign(label=labels, panel=panels)


def overview_figure(table: pd.DataFrame) -> p9.ggplot | None:
    """Return one figure of what runs measured of their first benchmark: by depth, and in one loop only; None: of nothing."""
    table, parts = table[table["writer"] == TRAINING], []
    for family, axis, title in (
        ("accuracy", "depth", "accuracy (%), K loops"),
        ("single_loop", "loop", "loss reduction (%), only loop t"),
        ("accuracy", "loop", "accuracy (%), only loop t"),
    ):
        rows = table[(table["family"] == family) & (axis_of(table) == axis) & (table["unit"] == "%")]
        rows = rows[rows["metric"] == rows["metric"].iloc[0]] if len(rows) else rows
        if rows[axis].nunique() > 1:
            parts.append(labelled(rows, axis).assign(panel=title, position=rows[axis]))
    return line_plot(pd.concat(parts), "position", "", "label", "panel", "loops") if parts else None


def paper_figure(spec: FigureSpec, table: pd.DataFrame) -> p9.ggplot | None:
    """Return the figure that a file describes, or None where the runs have nothing of it; ReportError as of `points`."""
    if spec.figure == "gates":
        return gates_plot(spec)
    ((x, x_label),), ((y, y_label),) = spec.x.items(), spec.y.items()

    def rows_with(change: dict) -> pd.DataFrame:
        panels = (spec.panels or {"": {}}).items()
        wanted = {title: as_trained({**spec.filter, **panel, **change}, x) for title, panel in panels}
        return pd.concat([select(table, each).assign(panel=title) for title, each in wanted.items()])

    rows = rows_with({})
    for name in (x, y):
        check_column(table, name)
        rows = rows[rows[name].notna()]
    if not len(rows):
        return None
    if spec.figure == "heat":
        minus, label = (rows_with(spec.minus), "points") if spec.minus else (None, "")
        return heat_plot(rows, x, y, label, "panel", x_label, y_label, spec.title, minus)
    rows = rows.assign(value=numbers_in(rows[y], y))
    return line_plot(rows, x, y_label, panel="panel", x_label=x_label, bars=spec.figure == "bar")


def gates_plot(spec: FigureSpec) -> p9.ggplot:
    """Draw the gates of eight examples in training, as a run of these settings draws them, and those of inference."""
    of = {"num_loops": 4, "p": 0.5, "seed": 0, **spec.filter}
    draw = Draw(seed=of["seed"], step=0, example_ids=[(row, 0) for row in range(8)], num_loops=of["num_loops"])
    gates = make_rule("loop_dropout", p=of["p"]).sample(draw).tolist()  # [K, 8]
    rows = [
        {"panel": panel, "loop": loop, "example": example, "value": gate if panel == "training" else 1.0, "seed": 0}
        for panel in ("training", "inference")
        for loop, of_loop in enumerate(gates, 1)
        for example, gate in enumerate(of_loop, 1)
    ]
    return heat_plot(pd.DataFrame(rows), "loop", "example", "gate", "panel", "loop", "example", spec.title)
