"""The score of a sweep's run, which chooses the learning rate: how it is read from the folder of the run, and named.

A score is a pair, of which a higher one is better: the number that `select_on` of the sweep names, and the negative held-out
loss, which breaks ties.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loopdropout_trainer.results.problems import have_other_problems
from loopdropout_trainer.results.run_files import DEVELOPMENT, read_own_results, read_recipe, read_run, recipe_path
from loopdropout_trainer.settings.read_yaml import read_yaml_file
from loopdropout_trainer.terminal import format_fixed


NON_FINITE = (-math.inf, -math.inf)
"""Score of a run whose training has failed with a loss that is not finite."""


def read_score(folder: Path, select_on: str, num_batches: int | None = None) -> tuple[float, float] | None:
    """Return the score of the run in a folder, `NON_FINITE` if its training failed, or None if it is not measured.

    Args:
        folder: Folder of the run.
        select_on: Task that chooses the learning rate, or `eval_loss`.
        num_batches: Number of batches that a held-out loss must be measured on if the training has measured none itself. A
            run with another number is not measured. None: any number.
    """
    if read_run(folder).get("status") == "non-finite":
        return NON_FINITE
    results = read_own_results(folder)
    rows = [row for row in results if row["gates"] == "unit"]
    depths = {row.get("num_loops") for row in results if row["task"] == "training"}
    if depths:  # a final run can have accuracies on the same task at other depths, which choose nothing
        rows = [row for row in rows if row.get("num_loops") in depths]
    values = {(row["metric"], row["task"]): row["value"] for row in rows}
    loss = values.get(("eval_loss", "training"))
    if loss is None:
        loss = values.get(("loss", DEVELOPMENT), math.inf)
        if math.isfinite(loss) and num_batches not in (None, _read_loss_batches(folder)):
            return None
    score = values.get(("accuracy", select_on), -math.inf)
    if select_on == "eval_loss":
        score = -loss
    return (score, -loss) if score > -math.inf else None


def describe_other_examples(folders: Iterable[Path], select_on: str) -> str:
    """Return a remark if the held-out losses of some runs, which choose, are known to be on different examples, or ""."""
    if select_on != "eval_loss":
        return ""
    losses: dict[str, list[dict[str, Any]]] = {"training": [], DEVELOPMENT: []}
    for folder in folders:
        for row in read_own_results(folder):
            is_loss = (row["metric"], row["task"]) in (("eval_loss", "training"), ("loss", DEVELOPMENT))
            if is_loss and row["gates"] == "unit":
                losses[row["task"]].append(row)
    own = losses["training"] or losses[DEVELOPMENT]
    if not any(have_other_problems(own[0], other) for other in own[1:]):
        return ""
    return (
        "The held-out losses are on different examples, so they do not compare. The data have changed between the trainings. "
        "Train all learning rates on the same data, in another `output_dir`."
    )


def _read_loss_batches(folder: Path) -> int:
    """Return the number of batches of a run's held-out losses.

    An older version did not save it. There, the runs that chose a learning rate measured on 16 batches, and the final ones on
    those of their recipe, unless it had none.
    """
    number = read_run(folder).get("loss_batches")
    if number is None:
        number = read_recipe(folder).get("single_loop_batches") or 16
    return number


PER_TOKEN = "nats per token"
"""Unit of a held-out loss, apart from that of DPO."""

PER_PAIR = "per pair"
"""Unit of the losses of DPO, which score a pair of answers in ways that have no common unit."""


def unit_of_objective(objective: str | None) -> str:
    """Return the unit of the held-out loss of a training, by its objective or its command, such as "DPO" or "dpo"."""
    return PER_PAIR if (objective or "").lower() == "dpo" else PER_TOKEN


def name_loss_unit(runs: Iterable[str | Path]) -> str:
    """Return the unit of the held-out losses of the runs in some folders, or "per pair" if DPO has trained all of them."""
    units = set()
    for run in runs:
        path = recipe_path(run)
        recipe = read_yaml_file(path, f"The recipe of {run}") if path.is_file() else {}
        units.add(unit_of_objective(recipe.get("command")))
    return PER_PAIR if units == {PER_PAIR} else PER_TOKEN


def name_score(score: tuple[float, float] | None, select_on: str, run: Path) -> str:
    """Return a score of the run in a folder with its name and unit, or "" without a score."""
    if score is None:
        return ""
    if score == NON_FINITE:
        return "held-out loss not finite" if select_on == "eval_loss" else "loss not finite"
    if select_on == "eval_loss":
        return f"held-out loss {-score[1]:.4f} {name_loss_unit([run])}"
    return f"accuracy {format_fixed(score[0], 2)}% on {select_on}"


def find_accuracy(folder: Path, select_on: str) -> str | None:
    """Return the first accuracy of a run on a task that does not choose the learning rate, with its name, or None."""
    for row in read_own_results(folder):
        is_default = row["gates"] == "unit" and row["metric"] == "accuracy"
        if is_default and row["task"] not in (DEVELOPMENT, select_on):
            return f"accuracy {format_fixed(row['value'], 2)}% on {row['task']} at K = {row['num_loops']}"
    return None


def describe_edge(scores: Mapping[float, tuple[float, float]], best: float, extend_grid: bool, select_on: str) -> str:
    """Return a remark if the best learning rate is at the edge of its grid, or others have the same score, or "".

    Args:
        scores: Score of each learning rate.
        best: Learning rate that is chosen.
        extend_grid: Whether the sweep adds learning rates at the edge, as far as it may.
        select_on: Task that chooses the learning rate, or `eval_loss`.
    """
    remarks = []
    if best in (min(scores), max(scores)):
        side, end = ("smaller", "smallest") if best == min(scores) else ("larger", "largest")
        remedy = f"a {side} one to `--learning_rates`"
        if not extend_grid:
            remedy = f"`--extend_grid true`, or {remedy}"
        remarks.append(f"The best rate is the {end} of the grid. Add {remedy}.")
    ties = [f"{rate:g}" for rate, (score, _) in scores.items() if score == scores[best][0]]
    if len(ties) > 1:
        remarks.append(
            f"The selection was uninformative. {' and '.join(ties)} have equal scores on {select_on}. The tie was broken by "
            "the held-out loss, then by the smaller rate."
        )
    return " ".join(remarks)
