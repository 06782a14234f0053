"""Figures of YAML files, the paper's and a user's own (docs/reports.md).

`plots.py` is imported in the functions, because tables do not need plotnine.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from loopdropout_trainer.errors import UserError, closest_match, short_repr
from loopdropout_trainer.gates import Draw, make_rule
from loopdropout_trainer.reports.comparing import PAIRED_SEEDS
from loopdropout_trainer.reports.figures import describe_fewer_seeds, describe_points, points
from loopdropout_trainer.reports.frames import average, has_method
from loopdropout_trainer.reports.hidden_lines import describe_hidden_lines
from loopdropout_trainer.reports.labels import name_methods, order_labels
from loopdropout_trainer.reports.missing_numbers import Missing
from loopdropout_trainer.reports.other_problems import are_on_other_problems
from loopdropout_trainer.reports.table_files import check_fields, check_mappings, find
from loopdropout_trainer.reports.tables import find_unpaired, name_seeds, paired_gains


def draw_gates(num_loops: int, p: float, seed: int) -> pd.DataFrame:
    """Return the gates of eight examples, as a training draws them, and the gates of inference."""
    draw = Draw(seed=seed, step=0, example_ids=[(row, 0) for row in range(8)], num_loops=num_loops)
    gates = pd.DataFrame(make_rule("loop_dropout", p=p).sample(draw).tolist())  # [K, 8]
    data = gates.melt(var_name="example", value_name="mean", ignore_index=False).reset_index(names="loop")
    data[["loop", "example"]] += 1  # both count from 1 in the figure
    return pd.concat([data.assign(panel="during training"), data.assign(panel="inference", mean=1.0)])


EXAMPLES = {"line": "figure_teaser", "heat": "figure_depth_gains", "gates": "figure_overview"}
"""Values of `figure`, with the name of a file in recipes/tables that has it."""


def check_figure(spec: dict) -> None:
    """Raise UserError if the content of a YAML file has an unknown `figure`, or not the fields that this kind needs."""
    kind = spec["figure"]
    if kind not in [*EXAMPLES]:  # a list, too, which cannot be a key of a dict
        hint = closest_match(str(kind), EXAMPLES)
        raise UserError(f"`figure` must be one of {', '.join(EXAMPLES)}, got {short_repr(kind)}.{hint}")
    fields = {"title": str, "x_label": object, "y_label": object, "filter": dict}
    if kind in ("line", "heat"):
        fields |= {"x": str, "panels": dict}
    if kind == "heat":
        fields |= {"y": str, "minus": dict}
    check_fields(spec, fields, "figure", EXAMPLES[kind])
    if kind == "gates":
        check_fields(spec["filter"], {"num_loops": int, "p": object, "seed": int}, "figure's `filter`", EXAMPLES[kind])
    else:
        check_mappings(spec["panels"], "figure")


def build_figure(spec: dict, results: pd.DataFrame) -> Any:
    """Return the figure of a YAML file. Raise `Missing` if there are no results for one of its panels."""
    from loopdropout_trainer.reports.plots import heat_plot, line_plot

    check_figure(spec)
    labels = {name: spec[name] for name in ("x_label", "y_label")}
    if spec["figure"] == "gates":
        return heat_plot(draw_gates(**spec["filter"]), "loop", "example", spec["title"], **labels)
    x = spec["x"]
    if spec["figure"] == "heat":
        ours, other = panel_rows(spec, results), panel_rows(spec, results, spec["minus"])
        gains = pair_places(ours, other, ["panel", spec["y"], x])
        if gains.empty:
            raise Missing("no seed has both results of any difference.")
        caption = " ".join(describe_pairs(gains))
        return heat_plot(gains, x, spec["y"], spec["title"], **labels, shows_gains=True, caption=caption or None)
    axes = pd.DataFrame(labels, [*spec["panels"]])
    rows, gain_over = panel_rows(spec, results), spec.get("gain_over") or {}
    data = points(rows, ["panel", "label", x])
    gain_over = {find_line(rows, ours): find_line(rows, other) for ours, other in gain_over.items()}
    unknown = {*gain_over, *gain_over.values()} - {*data["label"]}
    if unknown:
        lines = ", ".join(data["label"].unique())
        raise UserError(f"`gain_over` must name lines of the figure ({lines}), got {', '.join(sorted(unknown))}.")
    by_pair = []  # with the differences of each pair of lines
    for ours, other in gain_over.items():
        sides = [rows[rows["label"] == label] for label in (ours, other)]
        by_pair.append(pair_places(*sides, ["panel", x]))
    gains = pd.concat(by_pair) if by_pair else None
    sentences = [describe_points(data), describe_fewer_seeds(data, x, dict.fromkeys(spec["panels"], x))]
    if gains is not None:
        sentences += describe_pairs(gains)
    sentences.append(describe_hidden_lines(data, x))
    return line_plot(data, x, axes, spec["title"], gains, "\n".join(filter(None, sentences)))


def find_line(rows: pd.DataFrame, name: str) -> str:
    """Return the line of a figure that has a name, or is the only one of a method with it, as `has_method` knows it."""
    lines = rows["label"].unique()
    of_method = rows.loc[has_method(rows, name), "label"].unique()
    if name not in lines and len(of_method) == 1:
        return of_method[0]
    return name


def pair_places(ours: pd.DataFrame, other: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return the mean difference of two sets of results at each place of a figure that has a common seed, paired by seed.

    There is none between accuracies on other problems.

    Args:
        ours: From `panel_rows`.
        other: Results to subtract.
        by: Columns of a place.

    Returns:
        The columns `by`, `mean`, `middle` between both means, and `unpaired`, the seeds that it leaves out.
    """
    others = dict(iter(other.groupby(by, sort=False)))
    lines = []
    for place, own in ours.groupby(by, sort=False):
        if place not in others:
            continue
        gains = paired_gains(own, others[place])
        if len(gains) and not are_on_other_problems(pd.concat([own, others[place]])):
            middle = (average(own).mean() + average(others[place]).mean()) / 2
            lines.append([*place, gains.mean(), middle, find_unpaired(own, others[place])])
    return pd.DataFrame(lines, columns=[*by, "mean", "middle", "unpaired"])


def describe_pairs(gains: pd.DataFrame) -> list[str]:
    """Return a sentence about the differences of `pair_places` if one leaves out a seed, or nothing."""
    seeds = set().union(*gains["unpaired"])
    if not seeds:
        return []
    return [f"{PAIRED_SEEDS}. Some leave out seed {name_seeds([*seeds], ', ')}."]


def panel_rows(spec: dict, results: pd.DataFrame, change: dict | None = None) -> pd.DataFrame:
    """Return the results in all panels of a figure, with the columns `panel`, and `label` for their line.

    Args:
        spec: Content of a YAML file of a figure.
        results: From `load_results`.
        change: Columns of the results to select instead of the values of the file.
    """
    x = spec["x"]
    wanted = {x: results.reindex(columns=[x])[x].dropna(), **spec["filter"], **(change or {})}
    panels = [find(results, {**panel, **wanted}).assign(panel=title) for title, panel in spec["panels"].items()]
    rows = pd.concat(panels)
    rows = rows.assign(label=name_lines(rows, ["panel", x]))
    places, panels = order_labels(rows), [*spec["panels"]]  # lines have the order of tables, in each panel
    order = [(panels.index(panel), places[label]) for panel, label in zip(rows["panel"], rows["label"], strict=True)]
    in_order = sorted(range(len(rows)), key=order.__getitem__)
    return rows.iloc[in_order]


def name_lines(rows: pd.DataFrame, place: list[str]) -> pd.Series:
    """Return the name of the line of each result: that of the method in its sweep, as in tables.

    A line over settings whose methods have names of their own has the title of their rule.

    Args:
        rows: Results of a figure.
        place: Columns of a place in the figure, where a line has one point.
    """
    names = name_methods(rows)
    num_names = rows.assign(name=names).groupby([*place, "method"])["name"].transform("nunique")
    has_several = rows["method"].isin(rows.loc[num_names > 1, "method"])
    has_one_name = names.groupby(rows["method"]).transform("nunique") == 1
    return names.where(has_several | has_one_name, rows["method"])
