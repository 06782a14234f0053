"""Results as figures: the summary of all runs, and the curves of their losses.

`plots.py` is imported in the functions, because sweeps do not need plotnine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from loopdropout_trainer.errors import count
from loopdropout_trainer.reports.frames import average, tasks_of
from loopdropout_trainer.reports.hidden_lines import describe_hidden_lines
from loopdropout_trainer.reports.labels import has_seeds, labelled
from loopdropout_trainer.reports.recipe_columns import name_value
from loopdropout_trainer.reports.tables import split_reductions
from loopdropout_trainer.results.run_files import BASE_MODEL, is_of_base
from loopdropout_trainer.results.sweep_scores import PER_TOKEN, name_loss_unit
from loopdropout_trainer.saving.checkpoints import read_history
from loopdropout_trainer.terminal import format_fixed


AT_DEPTHS = "K loops at inference"
"""Panel of the overview with the accuracies by depth."""

BOUNDS = {"accuracy": (0, 100), "last_number": (0, 100), "loss": (0, math.inf), "eval_loss": (0, math.inf)}
"""Smallest and largest values of metrics, in which the band of one SD of a figure ends."""


def points(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return `mean`, `sd`, `num_seeds` and the band from `low` to `high` over seeds for each value of the columns `by`.

    `chose` says whether the problems chose the learning rates.
    Panels and labels are in their order.
    """
    lines = []
    for key, part in rows.groupby(by, sort=False):
        values = average(part)
        bounds = BOUNDS.get(part["metric"].iloc[0], (-math.inf, math.inf))
        lines.append([*key, values.mean(), values.std(), len(values), part["chose"].any(), *bounds])
    data = pd.DataFrame(lines, columns=[*by, "mean", "sd", "num_seeds", "chose", "least", "most"])
    for name in {"panel", "label"}.intersection(by):
        data[name] = pd.Categorical(data[name], data[name].unique())
    return add_bands(data.fillna({"sd": 0.0}))


def add_bands(data: pd.DataFrame) -> pd.DataFrame:
    """Return points with the band from `low` to `high`: one SD around the mean, between the values `least` and `most`."""
    low = (data["mean"] - data["sd"]).clip(lower=data["least"])
    high = (data["mean"] + data["sd"]).clip(upper=data["most"])
    return data.drop(columns=["least", "most"]).assign(low=low, high=high)


def describe_points(data: pd.DataFrame, numbers_of: str = "accuracies", chosen_by: str = "these problems") -> str:
    """Return the sentences below a figure: about its bands, the seeds that they are over, and problems that are not a test.

    Args:
        data: From `points`, or `loss_curves`. Its labels count by `has_seeds`.
        numbers_of: The numbers of the figure that may have chosen the learning rates.
        chosen_by: The problems or numbers that chose them.
    """
    numbers = data.loc[has_seeds(data["label"]), "num_seeds"]
    least, most = numbers.min(), numbers.max()
    caption = "One seed."
    if most > 1:
        spread = _name_spread(data)
        seeds = f"{most}" if least == most else f"{least} to {most}"
        caption = f"{spread}: ± one standard deviation over {seeds} seeds."
        if least == 1:
            caption += f" A point of one seed has no {SINGULAR[spread]}."
    if "chose" in data and data["chose"].any():
        caption += f"\nThe {numbers_of} are not a test, because {chosen_by} chose the learning rates."
    return caption


SINGULAR = {"Bands": "band", "Bars": "bar", "Bands and bars": "band or bar"}
"""The texts of `_name_spread`, and the word for one of them."""


def _name_spread(data: pd.DataFrame) -> str:
    """Return what shows the spread over seeds: a band along a line, or a bar at the only point of a label (`line_plot`)."""
    lines = data.groupby([name for name in ("panel", "label") if name in data], observed=True)["num_seeds"]
    is_point = lines.size()[lines.max() > 1] == 1
    if is_point.all():
        return "Bars"
    return "Bands and bars" if is_point.any() else "Bands"


def overview_figure(results: pd.DataFrame) -> Any:
    """Return a plotnine figure of the first task: accuracy by depth, and both diagnostics with one active loop.

    The base model is scored by its last number, if this was measured, because it has not learned the format of the answers.

    Args:
        results: from `load_results`.

    Returns:
        The figure, or None if all accuracies are under chosen gates, which it does not draw.
    """
    from loopdropout_trainer.reports.plots import line_plot, mark_training_depth

    task = tasks_of(results[results["metric"] == "accuracy"])[0]
    own = results[(results["task"] == task) & (results["other_problems"] == "")]
    of_base = is_of_base(own)
    by_number = own[of_base & (own["metric"] == "last_number")].assign(method=f"{BASE_MODEL}, last number")
    accuracy = own[own["metric"] == "accuracy"]
    about_base = ""
    if len(by_number):
        about_base = _describe_base_points(accuracy[is_of_base(accuracy)])
        accuracy = pd.concat([accuracy[~is_of_base(accuracy)], by_number])
    groups = split_reductions(results)
    # A run can have those of its reference solutions and of held-out examples, or of different numbers of them.
    of_task = [rows for rows in groups.values() if task in {*rows["task"]}]
    reductions = next(iter(of_task or groups.values()), results.iloc[:0])
    is_ungated = accuracy["gates"].isin(["unit", "none"])  # and not under chosen gates
    of_all_loops = accuracy[accuracy["loop"].isna() & is_ungated]
    panels = {
        AT_DEPTHS: of_all_loops.assign(loop=of_all_loops["num_loops"]),
        "accuracy with the adapter in one loop": accuracy,
        "loss reduction, adapter in one loop": reductions,
    }
    single = "only loop t with the adapter"
    trained = results.loc[results["task"] == "training", "num_loops"].unique()
    has_one_depth = len(trained) == 1
    labels = {
        "x_label": ["loops K (dotted: in training)" if has_one_depth else "loops K", single, single],
        "y_label": ["accuracy (%)", "accuracy (%)", "loss reduction (%)"],
    }
    rows = pd.concat([own.assign(panel=panel) for panel, own in panels.items()]).dropna(subset="loop")
    if rows.empty:
        return None
    by = ["panel", "label", "loop"]
    data = points(labelled(rows), by)
    data["panel"] = pd.Categorical(data["panel"], [panel for panel in panels if panel in {*data["panel"]}])
    data = data.sort_values("panel", kind="stable")
    axes = pd.DataFrame(labels, [*panels])
    names_of_x = {**dict.fromkeys(panels, "t"), AT_DEPTHS: "K"}
    drawn = pd.concat([of_all_loops.sort_values("num_loops", kind="stable"), accuracy.dropna(subset="loop")])
    sentences = [
        describe_points(data),
        describe_hidden_lines(data, "loop"),
        describe_fewer_seeds(data, "loop", names_of_x),
        about_base,
        _describe_problems(drawn),
    ]
    caption = "\n".join(filter(None, sentences))
    figure = line_plot(data, "loop", axes, f"Results on {task}", caption=caption)
    if has_one_depth and hasattr(figure, "items"):  # a figure of several panels
        figure.items[0] += mark_training_depth(trained[0])
    return figure


def describe_fewer_seeds(data: pd.DataFrame, x: str, axes: Mapping[str, str]) -> str:
    """Return sentences about lines over other numbers of seeds than others, and points over fewer than their line, or "".

    Args:
        data: From `points`, with the columns `panel`, `label` and `x`.
        x: Column of the points of a line.
        axes: Name of the axis of `x` in each panel.
    """
    own = data[has_seeds(data["label"])]
    sentences = []
    most_of_lines = own.groupby("label", observed=True)["num_seeds"].max()
    if most_of_lines.nunique() > 1:
        counts = [f"{label} {number}" for label, number in most_of_lines.items()]
        sentences.append(f"The lines have different numbers of seeds: {', '.join(counts)}.")
    most = own.groupby(["panel", "label"], observed=True)["num_seeds"].transform("max")
    texts = []
    for (panel, label), fewer in own[own["num_seeds"] < most].groupby(["panel", "label"], observed=True):
        places = ", ".join(
            f"{name_value(place)} ({count(seeds, 'seed')})"
            for place, seeds in zip(fewer[x], fewer["num_seeds"], strict=True)
        )
        texts.append(f"{label} at {axes[panel]} = {places}")
    if texts:
        sentences.append(
            f"Points over fewer seeds than the rest of their line, which are not comparable with it: {'; '.join(texts)}."
        )
    return " ".join(sentences)


def _describe_base_points(accuracy: pd.DataFrame) -> str:
    """Return the sentences about a base model that is drawn by its last number, with its accuracies in percent."""
    text = "The base model is scored by its last number in any format, and the other methods are not."
    if accuracy.empty:
        return text
    least, most = (format_fixed(value, 2) for value in (accuracy["value"].min(), accuracy["value"].max()))
    values = f"{least}%" if least == most else f"{least} to {most}%"
    return f"{text} In their format, as in the table, its accuracy is {values}."


def _describe_problems(accuracy: pd.DataFrame) -> str:
    """Return the sentence about the problems of a figure's accuracies, or "" if all are on the same number of them."""
    counted = accuracy.dropna(subset="n")
    if counted["n"].nunique() < 2:
        return ""
    places = "at K = " + counted["num_loops"].astype(int).astype(str)
    places = places.where(counted["loop"].isna(), "with the adapter in one loop")
    texts = []
    for place, sizes in counted.groupby(places, sort=False)["n"]:
        numbers = " or ".join(f"{size:,.0f}" for size in sorted(sizes.unique()))
        texts.append(f"{numbers} {place}")
    return f"The numbers of problems differ: {', '.join(texts)}."


def loss_curves(results: pd.DataFrame) -> pd.DataFrame:
    """Return the training and held-out losses of runs by step, from the histories that their trainings have left.

    A training loss is a mean over equal numbers of steps (`average_windows`).

    Args:
        results: From `load_results`.

    Returns:
        A table with the columns `panel`, `label`, `step`, `mean`, `sd`, `num_seeds`, `chose`, `low` and `high` over seeds, and
        `unit`. It is empty without histories.
    """
    trained = labelled(results[(results["task"] == "training") & ~is_of_base(results)])
    lines = []
    chose = trained.groupby("run")["chose"].any()  # whether the held-out loss has chosen the learning rate
    for run, label in trained.drop_duplicates("run")[["run", "label"]].itertuples(index=False):
        history = read_history(run)
        for panel, name in LOSSES.items():
            values = pd.Series({log["step"]: log[name] for log in history if name in log}, dtype=float)
            if name == "loss":
                values = average_windows(values)
            lines += [[panel, label, step, value, chose[run]] for step, value in values.items()]
    losses = pd.DataFrame(lines, columns=["panel", "label", "step", "value", "chose"])
    by_step = losses.groupby(["panel", "label", "step"], sort=False)
    curves = by_step["value"].agg(mean="mean", sd="std", num_seeds="count").assign(chose=by_step["chose"].any())
    curves = curves.reset_index().assign(unit=name_loss_unit(trained["run"].unique()))
    curves["label"] = pd.Categorical(curves["label"], trained["label"].unique())
    curves = curves.sort_values(["panel", "label", "step"], ascending=[False, True, True], kind="stable")
    return add_bands(curves.fillna({"sd": 0.0}).assign(least=0.0, most=math.inf))  # a loss is not negative


def average_windows(losses: pd.Series) -> pd.Series:
    """Return the means of training losses over windows of equal length, by the last logged step of each window.

    The loss is logged at every `logging_steps`, and also at evaluations and checkpoints, and each time it is the mean of the
    steps since the last log. So a log after a single step is noisier than the others. A window is as long as the longest of
    these means.

    Args:
        losses: Logged losses by their steps, in ascending order.
    """
    if losses.empty:
        return losses
    steps = losses.index.to_series()
    num_steps = steps.diff().fillna(steps)  # that each loss is the mean of
    window = np.ceil(steps / num_steps.max())
    sums = (losses * num_steps).groupby(window).sum()
    means = sums / num_steps.groupby(window).sum()
    return means.set_axis(steps.groupby(window).last().to_numpy())


LOSSES = {"training loss": "loss", "held-out loss": "eval_loss"}
"""Panels of the loss curves, and the names of their losses in the history of a training."""


def loss_figure(curves: pd.DataFrame) -> Any:
    """Return a plotnine figure of the losses over the steps, from `loss_curves`."""
    from loopdropout_trainer.reports.plots import line_plot

    unit = PER_TOKEN if curves.empty else curves["unit"].iloc[0]
    axes = pd.DataFrame({"x_label": "step", "y_label": f"loss ({unit})"}, [*LOSSES])
    sentences = [describe_points(curves, "held-out losses", "they"), describe_hidden_lines(curves, "step")]
    return line_plot(curves, "step", axes, "Losses", caption="\n".join(filter(None, sentences)))
