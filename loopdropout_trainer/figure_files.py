"""Figures of YAML files, the paper's and a user's own (docs/reports.md).

`plots.py` is imported in the functions, because tables do not need plotnine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.figures import describe_points, points
from loopdropout_trainer.frames import name_methods
from loopdropout_trainer.gates import Draw, make_rule
from loopdropout_trainer.table_files import check_fields, find


def draw_gates(num_loops: int, p: float, seed: int) -> pd.DataFrame:
    """Return the gates of eight examples, as a training draws them, and the gates of inference."""
    draw = Draw(seed=seed, step=0, example_ids=[(row, 0) for row in range(8)], num_loops=num_loops)
    gates = pd.DataFrame(make_rule("loop_dropout", p=p).sample(draw).tolist())  # [K, 8]
    data = gates.melt(var_name="example", value_name="mean", ignore_index=False).reset_index(names="loop")
    data[["loop", "example"]] += 1  # both count from 1 in the figure
    return pd.concat([data.assign(panel="during training"), data.assign(panel="inference", mean=1.0)])


def build_figure(spec: dict, results: pd.DataFrame) -> Any:
    """Return the figure of a YAML file. Raise `Missing` if there are no results for one of its panels."""
    from loopdropout_trainer.plots import heat_plot, line_plot

    fields = {"title": str, "x_label": object, "y_label": object, "filter": dict}
    if spec["figure"] != "gates":
        fields |= {"x": str, "panels": dict}
    check_fields(spec, fields, "figure")
    labels = {name: spec[name] for name in ("x_label", "y_label")}
    if spec["figure"] == "gates":
        return heat_plot(draw_gates(**spec["filter"]), "loop", "example", spec["title"], **labels)
    x = spec["x"]
    if spec["figure"] == "heat":
        ours = panel_points(spec, results, [spec["y"], x])
        other = panel_points(spec, results, [spec["y"], x], spec["minus"])
        both = ours.merge(other, on=["panel", spec["y"], x], suffixes=("_ours", ""))
        gains = both.assign(mean=both["mean_ours"] - both["mean"])
        return heat_plot(gains, x, spec["y"], spec["title"], **labels, shows_gains=True)
    axes = pd.DataFrame(labels, [*spec["panels"]])
    data, gain_over = panel_points(spec, results, ["label", x]), spec.get("gain_over") or {}
    unknown = {*gain_over, *gain_over.values()} - {*data["label"]}
    if unknown:
        lines = ", ".join(data["label"].unique())
        raise UserError(f"`gain_over` must name lines of the figure ({lines}), got {', '.join(sorted(unknown))}.")
    return line_plot(data, x, axes, spec["title"], gain_over, describe_points(data))


def panel_points(spec: dict, results: pd.DataFrame, by: Sequence[str], change: dict | None = None) -> pd.DataFrame:
    """Return the points of all panels of a figure.

    Args:
        spec: Content of a YAML file of a figure.
        results: From `load_results`.
        by: Columns that tell the points of a panel apart. `label` is the method.
        change: Columns of the results to select instead of the values of the file.
    """
    x = spec["x"]
    wanted = {x: results.reindex(columns=[x])[x].dropna(), **spec["filter"], **(change or {})}
    panels = [find(results, {**panel, **wanted}).assign(panel=title) for title, panel in spec["panels"].items()]
    rows = pd.concat(panels)
    return points(rows.assign(label=name_lines(rows, ["panel", x])), ["panel", *by])


def name_lines(rows: pd.DataFrame, place: list[str]) -> pd.Series:
    """Return the name of the line of each result: the method, or the sweep's names if it has several methods of one rule.

    Args:
        rows: Results of a figure.
        place: Columns of a place in the figure, where a line has one point.
    """
    names = name_methods(rows)
    num_names = rows.assign(name=names).groupby([*place, "method"])["name"].transform("nunique")
    has_several = rows["method"].isin(rows.loc[num_names > 1, "method"])
    return names.where(has_several, rows["method"])
