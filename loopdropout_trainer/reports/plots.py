"""Figures of the long table, by plotnine: one theme, one look for each method, mean and SD over seeds by construction.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; line and marker do the same in print without colour.
Loop Dropout is the thick blue line and LoRA the orange dashed one, wherever they are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import pandas as pd
import plotnine as p9
import yaml
from matplotlib import pyplot

from loopdropout_trainer.gates import RULES, Draw, make_rule
from loopdropout_trainer.reports.averaging import average, difference, is_protocol, select, settings_of, shown, telling
from loopdropout_trainer.reports.reading import ALL, BASE, NONE, TRAINING, ReportError, check, check_column
from loopdropout_trainer.reports.specs import as_trained
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

AUTOMATIC = yaml.safe_load((files("loopdropout_trainer.reports") / "figures.yaml").read_text(encoding="utf-8"))
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
    check(data["x"].tolist(), ["a number"], x)
    data["x"] = data["x"].astype(float)
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
    means, top = data["mean"], data["mean"].abs().max() or 1.0
    dark = means.abs() > 0.6 * top if minus is not None else means < (means.min() + means.max()) / 2
    data["ink"] = dark.map({True: "white", False: "black"})
    data["text"] = means.map("{:.3g}".format if minus is None else "{:+.1f}".format)
    plot = p9.ggplot(data, p9.aes("x", "y")) + theme() + p9.labs(x=x_label, y=y_label, fill=label, title=title)
    plot = plot + p9.geom_tile(p9.aes(fill="mean")) + p9.geom_text(p9.aes(label="text", color="ink"), size=9)
    plot = plot + p9.scale_color_identity() + p9.scale_x_discrete(limits=across) + p9.scale_y_discrete(limits=down)
    if minus is None:
        plot += p9.scale_fill_cmap("cividis")
    else:
        plot += p9.scale_fill_gradient2(low="#b35806", mid="#f7f7f7", high="#2166ac", limits=(-top, top))
        matched = data[data["x"] == data["y"]]  # trained and evaluated alike
        plot += p9.geom_tile(data=matched, fill="none", color="black", size=0.9)
    return _with_panels(plot, "fixed") + p9.theme(legend_position="right", legend_title=p9.element_text(size=10))


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


# Figures: those that any runs have numbers for (figures.yaml), and those of the paper that a file describes.


def automatic_figures(table: pd.DataFrame) -> dict[str, p9.ggplot]:
    """Return every figure that the runs have numbers for, by name.

    A line is one setting: where runs of one method differ in more than the seed, what they differ in stands in the legend, and
    where benchmarks were evaluated in different ways, these are panels of their own. What cannot be drawn is left out.
    """
    figures: dict[str, p9.ggplot] = {}

    def add(name: str, draw: Callable[..., p9.ggplot], *args: Any, **options: Any) -> None:
        try:
            figures[re.sub(r"[^\w-]", "_", name)] = draw(*args, **options)  # a part of a file's name
        except ReportError as error:
            table.attrs["skipped"].append(f"the figure {name}: {error}")

    for name, of in AUTOMATIC.items():
        rows = drawn(table, of)
        if len(rows):
            texts = {key: of[key] for key in ("x_label", "y_label", "title")}
            add(name, line_plot, rows, of["x"], by="label", panel="panel", bars="bars" in of, **texts)
    # What diagnostics measure that have no figure of their own: matrices, lists by loop, named numbers, single numbers.
    rows = table[table["metric"].str.contains(".", regex=False) & (table["benchmark"] != TRAINING)]
    for metric, part in rows.dropna(subset=["other_loop"]).groupby("metric", sort=False):
        part = labelled(part, "loop", "other_loop")
        add(metric, heat_plot, part, "loop", "other_loop", "", "label", "loop", "loop", metric)
    rows = rows[rows["other_loop"].isna()]
    for title, part in rows.groupby(rows["metric"].str.split(".").str[0], sort=False):
        x = next((name for name in ("loop", "group") if part[name].notna().any()), "metric")
        if x != "metric" or not any(name.startswith(f"{title}_") for name in figures):
            part, panel = labelled(part.dropna(subset=[x]), x), None if x == "metric" else "panel"
            add(title, line_plot, part, x, "", "label", panel, x_label="", title=title, bars=x != "loop")
    return figures


def drawn(table: pd.DataFrame, of: dict[str, Any]) -> pd.DataFrame:
    """Return the labelled rows of a figure of figures.yaml: of its metrics, or accuracies; at several values of x."""
    x, of_training = of["x"], "of_training" in of
    if x not in table:
        return table.iloc[:0]
    rows = table[table[x].notna()]
    rows = rows[rows["metric"].str.fullmatch("|".join(of["metrics"]))] if "metrics" in of else accuracies(rows)
    if x not in ("step", "dose", "loop", "gates"):
        rows = select(rows, {"gates": [ALL, NONE], "readout": None})
    if of_training:
        rows = rows[(rows["depth"] == rows["num_loops"]) & (rows["method"] != BASE)]
        rows = rows[rows[x].map(lambda value: isinstance(value, (int, float))).astype(bool)]
    values = rows.groupby(["metric", "method"] if of_training else "metric")[x]
    rows = rows[values.transform("nunique") > 1] if len(rows) else rows
    return labelled(rows, x) if len(rows) else rows


def accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that are the accuracy on a whole benchmark."""
    return rows[rows["total"].notna() & (rows["metric"] != "missing") & ~rows["metric"].str.startswith("by_")]


def labelled(rows: pd.DataFrame, *x: str, most: float = MOST_LINES) -> pd.DataFrame:
    """Return rows with `label`, the method and what tells its runs apart, and `panel`, what is measured and how.

    Where there are more than `most` labels, these are the methods, and what tells their runs apart is part of the panel.
    """
    known = lambda row, names: ", ".join(
        f"{name.removeprefix('evaluation.').replace('total', 'n')} = {shown(row[name])}"
        for name in names if not pd.isna(row[name])
    )  # fmt: skip
    how: dict[str, None] = {}
    for _, part in rows.groupby(["benchmark", "metric"], sort=False):
        how |= dict.fromkeys(telling(part, filter(is_protocol, rows)))
    settings = [name for name in settings_of(rows) if name not in x]
    beside = [name for name in settings_of(rows) if name in x]  # what goes with a setting on the axis is told by it
    apart = {method: telling(part, settings, beside) for method, part in rows.groupby("method")}
    benchmarks, metrics = rows["benchmark"].nunique() > 1, rows["metric"].nunique() > 1
    found = []
    for row in rows.to_dict("records"):
        named = (benchmarks or not metrics) and row["benchmark"] != TRAINING
        words = [row["benchmark"] if named else "", row["metric"].split(".")[-1] if metrics else ""]
        what = " ".join(filter(None, dict.fromkeys(words))).replace("_", " ")
        found.append((row["method"], known(row, apart[row["method"]]), what, known(row, how)))
    join = lambda between, *names: [between.join(filter(None, (each[name] for name in names))) for each in found]
    if len(set(labels := join(", ", 0, 1))) > most:
        return rows.assign(label=rows["method"], panel=join("\n", 2, 3, 1))
    return rows.assign(label=labels, panel=join("\n", 2, 3))


def overview_figure(table: pd.DataFrame) -> p9.ggplot:
    """Return one figure of what a few runs measured themselves of their first benchmark: by depth, and in one loop only."""
    table, parts = table[table["source"].str.endswith("results.json")], []
    for name, panel in (("depth_accuracy", "accuracy (%), K loops"), ("single_loop", "loss reduction (%), only loop t"),
                        ("single_loop_accuracy", "accuracy (%), only loop t")):  # fmt: skip
        rows = drawn(table, AUTOMATIC[name])
        rows = rows[rows["benchmark"] == rows["benchmark"].iloc[0]] if len(rows) else rows
        parts.append(rows.assign(panel=panel, position=rows[AUTOMATIC[name]["x"]]))
    return line_plot(pd.concat(parts), "position", "", "label", "panel", "loops")


def paper_figure(spec: SimpleNamespace, table: pd.DataFrame) -> p9.ggplot | None:
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
        rows = rows[rows[name].notna()] if name in rows else rows.iloc[:0]
    if not len(rows):
        return None
    if spec.figure == "heat":
        minus, label = (rows_with(spec.minus), "points") if spec.minus else (None, "")
        return heat_plot(rows, x, y, label, "panel", x_label, y_label, spec.title, minus)
    check(rows[y].tolist(), ["a number"], y)
    rows = rows.assign(value=rows[y].astype(float))
    return line_plot(rows, x, y_label, panel="panel", x_label=x_label, bars=spec.figure == "bar")


def gates_plot(spec: SimpleNamespace) -> p9.ggplot:
    """Draw the gates of eight examples in training, as a run of these settings draws them, and those of inference."""
    of = {"num_loops": 4, "p": 0.5, "seed": 0, **spec.filter}
    draw = Draw(seed=of["seed"], step=0, example_ids=[(row, 0) for row in range(8)], num_loops=of["num_loops"])
    gates = make_rule("loop_dropout", p=of["p"]).sample(draw).tolist()  # [K, 8]
    rows = [
        {"panel": panel, "loop": loop, "example": example, "value": gate if panel == "training" else 1.0}
        for panel in ("training", "inference")
        for loop, of_loop in enumerate(gates, 1)
        for example, gate in enumerate(of_loop, 1)
    ]
    return heat_plot(pd.DataFrame(rows), "loop", "example", "gate", "panel", "loop", "example", spec.title)
