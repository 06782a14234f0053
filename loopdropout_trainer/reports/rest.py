"""Sentences about the results that the tables of a summary do not have."""

from __future__ import annotations

import pandas as pd

from loopdropout_trainer.errors import count, docs_page
from loopdropout_trainer.results.run_files import is_of_base


def describe_rest(results: pd.DataFrame, has_left_out: bool) -> str:
    """Return a sentence about results without a table: those of trained models have others, or there are none of them."""
    trained = results[~is_of_base(results)]
    if trained.empty and has_left_out:
        return "There is no table yet, because the results of all trainings are left out."
    if trained.empty:
        return "There is no result of a training to report yet, only measurements of the base model."
    gates = trained.loc[trained["metric"] == "accuracy", "gates"].unique()
    if len(gates):
        return (
            f"There is no accuracy with all gates at 1 to report, only with the gates {', '.join(gates)}. A table of your own "
            f"selects them, by `gates: {gates[0]}` ({docs_page('reports')})."
        )
    metrics = ", ".join(sorted(trained["metric"].unique()))
    return f"There is no accuracy, held-out loss or cost of a training to report, only {metrics}."


def describe_curvature(results: pd.DataFrame) -> list[str]:
    """Return a sentence about the curvature, the only diagnostic without a table in the summary, if it was measured."""
    if "curvature" not in {*results["metric"]}:
        return []
    return [
        "The summary has no table of the curvature. A table of your own selects it for each loop, such as by "
        f"`metric: curvature, loop: 1` ({docs_page('reports')})."
    ]


def describe_other_gates(results: pd.DataFrame) -> list[str]:
    """Return a sentence about the accuracies under other gates than 1, which the tables of the summary leave out."""
    accuracies = results[(results["metric"] == "accuracy") & ~results["gates"].isin(["unit", "none"])]
    if accuracies.empty:
        return []
    sets = []
    for (task, n, depth), own in accuracies.groupby(["task", "n", "num_loops"], sort=False):
        gates = ", ".join(own["gates"].unique())
        sets.append(f"on {task} ({count(int(n), 'problem')}) at K = {depth:g} with the gates {gates}")
    one = accuracies["gates"].iloc[0]
    sentence = f"Left out of the tables: accuracies {'; '.join(sets)}."
    if accuracies["loop"].notna().any():
        sentence += " The overview has those of the first benchmark with the adapter in one loop."
    return [f"{sentence} A table of your own selects them, such as by `gates: {one}` ({docs_page('reports')})."]
