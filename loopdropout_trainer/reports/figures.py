"""Figures: those that any runs have numbers for, and those of the paper that a file describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.reports.averaging import (
    PLACES,
    groups,
    is_protocol,
    known,
    select,
    settings_of,
    shown,
    telling,
)
from loopdropout_trainer.reports.plots import bar_plot, heat_plot, line_plot
from loopdropout_trainer.reports.reading import BASE, NONE, TRAINING, ReportError
from loopdropout_trainer.reports.specs import Spec, as_trained


if TYPE_CHECKING:
    import pandas as pd
    from plotnine import ggplot

MOST_LINES = 8
"""In one panel; where there are more, what tells runs of one method apart becomes panels."""

ACCURACY = "accuracy (%)"

# name, title, kind, x and its label, metrics (None: accuracy on benchmarks) and the label of y
AUTOMATIC: tuple[tuple[str, str, str, str, str, tuple[str, ...] | None, str], ...] = (
    ("depth_accuracy", "Accuracy by the loops that are run", "line", "depth", "loops K at inference", None, ACCURACY),
    ("single_loop", "Loss reduction, adapter in one loop only", "bar", "loop", "only active loop", ("loss_reduction",),
     "loss reduction (%)"),
    ("single_loop_accuracy", "Accuracy, adapter in one loop only", "line", "loop", "only active loop", None, ACCURACY),
    ("readouts", "Loss of each loop's readout", "line", "loop", "loop read out", ("readout_loss",), "loss (nats)"),
    ("readout_tokens", "Token accuracy of each loop's readout", "line", "loop", "loop read out", ("readout_token_accuracy",),
     ACCURACY),
    ("depth_loss", "Loss by the loops that are run", "line", "depth", "loops K at inference", ("depth_loss",), "loss (nats)"),
    ("depth_tokens", "Token accuracy by the loops that are run", "line", "depth", "loops K at inference",
     ("depth_token_accuracy",), ACCURACY),
    ("dose", "Loss by the gate of all loops", "line", "dose", "gate of every loop", ("dose_loss",), "loss (nats)"),
    ("prefixes", "Loss reduction, adapter in the first or last loops", "line", "loop", "number of loops with the adapter",
     ("prefix_loss_reduction", "suffix_loss_reduction"), "loss reduction (%)"),
    ("groups", "Accuracy by group of problems", "bar", "group", "", ("by_subject", "by_level"), ACCURACY),
    ("learning_rates", "Accuracy by learning rate", "line", "learning_rate", "learning rate", None, ACCURACY),
    ("ranks", "Accuracy by rank of the adapter", "line", "rank", "rank", None, ACCURACY),
    ("drop_probability", "Accuracy by drop probability", "line", "p", "p", None, ACCURACY),
    ("learning_curves", "Learning curves", "line", "step", "step", ("loss", "eval_loss", "reward"), "value"),
    ("live", "Single-loop loss reduction during training", "line", "step", "step", ("live/rho_loop_*",), "loss reduction (%)"),
)  # fmt: skip


def automatic_figures(table: pd.DataFrame) -> dict[str, ggplot]:
    """Return every figure that the runs have numbers for, by name.

    A line is one setting: where runs of one method differ in more than the seed, what they differ in stands in the legend, and
    where benchmarks were evaluated in different ways, these are panels of their own.
    """
    figures = {}
    for name, title, kind, x, x_label, metrics, y_label in AUTOMATIC:
        rows = _drawn(table, x, metrics)
        if len(rows):
            rows = labelled(rows, x)
            draw = bar_plot if kind == "bar" else line_plot
            figures[name] = draw(rows, x, y_label, by="label", panel="panel", x_label=x_label, title=title)
    if "early" in table and table["early"].notna().any():
        rows = labelled(table[table["early"].notna()], "early", "late")
        title = "Loss reduction (%), adapter in a set of loops"
        figures["patterns"] = heat_plot(rows, "late", "early", "", "label", "late loops", "early loops", title)
    return figures | _any_figures(table)


def _any_figures(table: pd.DataFrame) -> dict[str, ggplot]:
    """Return figures of what diagnostics measure that have none of their own: lists by loop, matrices and single numbers."""
    figures = {}
    found = table[
        table["metric"].str.contains(".", regex=False) & (table["benchmark"] != TRAINING) & table["total"].isna()
    ]
    for name, rows in found.groupby(found["metric"].str.split(".").str[0], sort=False):
        matrix = rows["other_loop"].notna() if "other_loop" in rows else rows["loop"].isna() & rows["loop"].notna()
        for metric, part in rows[matrix].groupby("metric", sort=False):
            part = labelled(part, "loop", "other_loop")
            figures[metric.replace(".", "_")] = heat_plot(
                part, "loop", "other_loop", "", "label", "loop", "loop", metric
            )
        part = labelled(rows[~matrix & rows["loop"].notna()], "loop")
        if len(part):
            figures[name] = line_plot(part, "loop", "", "label", "panel", "loop", name)
        part = labelled(rows[~matrix & rows["loop"].isna()])
        if len(part) and not any(each.split("_")[0] == name for each in figures):
            figures[name] = bar_plot(part, "metric", "", "label", None, "", name)
    return figures


def overview_figure(table: pd.DataFrame) -> ggplot:
    """Return one figure of a few runs: accuracy by depth, and loss reduction and accuracy with the adapter in one loop only.

    It holds what these runs measured themselves, for the first benchmark.
    """
    import pandas as pd

    table = table[table["source"].str.endswith("results.json")]
    titles = {
        "depth_accuracy": "accuracy (%), K loops",
        "single_loop_accuracy": "accuracy (%), only loop t",
        "single_loop": "loss reduction (%), only loop t",
    }
    parts = []
    for name, _, _, x, _, metrics, _ in AUTOMATIC:
        rows = _drawn(table, x, metrics) if name in titles else table.iloc[:0]
        rows = rows[rows["benchmark"] == rows["benchmark"].iloc[0]] if len(rows) else rows
        if len(rows):
            parts.append(labelled(rows, x).assign(panel=titles[name], position=rows[x]))
    if not parts:
        raise ReportError("These runs measured nothing by depth or by loop.")
    return line_plot(pd.concat(parts), "position", "", "label", "panel", "loops")


def _drawn(table: pd.DataFrame, x: str, metrics: Sequence[str] | None) -> pd.DataFrame:
    """Return the rows of a figure: of these metrics, or accuracies; at several values of x."""
    if x not in table:
        return table.iloc[:0]
    rows = table[table[x].notna()]
    if metrics is not None:
        patterns = tuple(metric.removesuffix("*") for metric in metrics if metric.endswith("*"))
        rows = rows[rows["metric"].isin(metrics) | (rows["metric"].str.startswith(patterns) if patterns else False)]
    else:  # a benchmark's accuracy
        rows = rows[rows["total"].notna() & (rows["metric"] != "missing") & ~rows["metric"].str.startswith("by_")]
    if x == "loop" and metrics in (None, ("loss_reduction",)):
        rows = rows[rows["gates"] != "all"]
    elif x not in ("step", "dose", "loop"):
        rows = select(rows, as_trained({"gates": ["all", NONE]}))
    if x not in ("depth", "loop", "dose", "step", "group"):  # a setting of the training
        rows = rows[(rows["depth"] == rows["num_loops"]) & (rows["method"] != BASE)]
        rows = rows[rows[x].map(lambda value: isinstance(value, (int, float)))]
    several = rows.groupby(["metric"])[x].transform(lambda values: values.astype(str).nunique()) if len(rows) else []
    rows = rows[several > 1] if len(rows) else rows
    if x in ("learning_rate", "rank", "p") and len(rows):  # only methods that were run at several values
        several = rows.groupby(["metric", "method"])[x].transform(lambda values: values.astype(str).nunique())
        rows = rows[several > 1]
    return rows


def labelled(rows: pd.DataFrame, *x: str) -> pd.DataFrame:
    """Return rows with `label`, the method and what tells its runs apart, and `panel`, what is measured and how."""
    settings = [
        name for name in settings_of(rows) if name not in (*x, "metric", "benchmark", "method", "gates", "readout")
    ]
    how = [name for name in settings if is_protocol(name)]
    settings = [name for name in settings if name not in how and name not in PLACES]
    telling_how = []
    for _, part in groups(rows, ["benchmark", "metric"]):
        telling_how += [name for name in telling(part, how) if name not in telling_how]
    same, named = [], {}
    for method, part in rows.groupby(rows["method"].astype(str), sort=False):
        beside = [name for name in ("benchmark", "metric", *telling_how, *x) if name in part]
        named[method] = telling(part, settings, beside)
        same += [name for name in named[method] if name not in same]
    crowded = (
        sum(len(list(groups(part, named[method]))) for method, part in rows.groupby(rows["method"].astype(str)))
        > MOST_LINES
    )
    texts = lambda names, row: ", ".join(
        f"{name.removeprefix('evaluation.').replace('total', 'n')} = {shown(row[name])}"
        for name in names
        if known(row[name]) is not None
    )
    several = rows["metric"].nunique() > 1, rows["benchmark"].nunique() > 1 or rows["metric"].nunique() == 1
    labels, panels = [], []
    for _, row in rows.iterrows():
        mine = [] if crowded else named[str(row["method"])]
        what = [
            row["benchmark"] if several[1] and row["benchmark"] != TRAINING else "",
            row["metric"].split(".")[-1] if several[0] else "",
        ]
        what = what[:1] if what[0] == what[1] else what
        what = [
            " ".join(filter(None, what)).replace("_", " "),
            texts(telling_how, row),
            texts(same, row) if crowded else "",
        ]
        labels.append(", ".join(filter(None, [str(row["method"]), texts(mine, row)])))
        panels.append("\n".join(filter(None, what)))
    return rows.assign(label=labels, panel=panels)


def paper_figure(spec: Spec, table: pd.DataFrame) -> ggplot | None:
    """Return the figure that a file describes, or None where the runs have nothing of it.

    Raises:
        ReportError: if a point would average different settings.
    """
    import pandas as pd

    if spec.figure == "gates":
        return _gates_plot(spec)
    ((x, x_label),) = spec.x.items() or (("depth", ""),)
    rows, parts, minus = select(table, spec.filter), [], []
    for title, wanted in (spec.panels or {"": {}}).items():
        for found, change in ((parts, {}), (minus, spec.minus)):
            part = select(rows, _defaults({**wanted, **change}, x, spec))
            part = part[part["gates"] != "all"] if x == "loop" and "gates" not in wanted else part
            found.append(part.assign(panel=title))
    rows = pd.concat(parts)
    if not len(rows) or x not in rows or not rows[x].notna().any():
        return None
    if spec.figure == "heat":
        ((y, y_label),) = spec.y.items()
        other = pd.concat(minus) if spec.minus else None
        return heat_plot(rows, x, y, "points" if spec.minus else "", "panel", x_label, y_label, spec.title, other)
    ((_, y_label),) = spec.y.items()
    draw = bar_plot if spec.figure == "bar" else line_plot
    return draw(rows, x, y_label, panel="panel", x_label=x_label)


def _defaults(wanted: Mapping[str, Any], x: str, spec: Spec) -> dict[str, Any]:
    mine = {**wanted, **({} if x != "loop" else {"loop": list(range(1, 65))})}
    filled = as_trained(mine)
    return {key: value for key, value in filled.items() if key in wanted or key not in spec.filter}


def _gates_plot(spec: Spec) -> ggplot:
    """Draw the gates of eight examples in training, as a run of these settings draws them, and those of inference."""
    import pandas as pd

    from loopdropout_trainer.gates import Draw, make_rule

    loops, p, seed = (spec.filter.get(name, default) for name, default in (("num_loops", 4), ("p", 0.5), ("seed", 0)))
    draw = Draw(seed=seed, step=0, example_ids=[(row, 0) for row in range(8)], num_loops=loops)
    gates = make_rule("loop_dropout", p=p).sample(draw)  # [K, 8]
    rows = [
        {"panel": panel, "loop": loop + 1, "example": row + 1, "value": value}
        for panel, values in (("training", gates.tolist()), ("inference", [[1.0] * 8] * loops))
        for loop, of_loop in enumerate(values)
        for row, value in enumerate(of_loop)
    ]
    return heat_plot(pd.DataFrame(rows), "loop", "example", "gate", "panel", "loop", "example", title=spec.title)
