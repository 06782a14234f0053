"""Which results are shown, if several measure the same or their weights no longer exist."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import join_command
from loopdropout_trainer.files import is_checkpoint
from loopdropout_trainer.results.run_files import (
    DEVELOPMENT,
    DIAGNOSTIC_METRICS,
    is_of_base,
    is_of_training,
    is_run_folder,
    measurement_key,
    weights_of,
)
from loopdropout_trainer.results.sweep_folder import RUN_NAME, folder_of_run


_OF_PLACE = ("folder", "adapter")
"""Columns of a result that differ in a copy of its folder, next to the columns of the recipe there."""

LOOP_METRICS = ("loss", "loss_reduction", "readout_loss", "readout_token_accuracy")
"""Metrics that `single_loop_batches` measures."""


def split_copies(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide results into those that are shown, and those that a copy of a run's folder has again.

    A folder is a copy if it has a result of the same training, with the same value, as a folder before it. Results that only
    the copy has, as of a later evaluation, are shown.

    Args:
        rows: Results of `read_results`, in the order of the folders that the user gave.
    """
    first_folders: dict[frozenset, str] = {}  # by a result of a training
    originals: dict[str, str] = {}  # of each copy
    for row in rows:
        if is_of_training(row) and row.get("training"):
            first = first_folders.setdefault(_content_key(row), row["folder"])
            if first != row["folder"]:
                originals[row["folder"]] = first
    if not originals:
        return [*rows], []
    contents = {(row["folder"], _content_key(row)) for row in rows}
    shown, copied = [], []
    for row in rows:
        folder = _find_original(row["folder"], originals)
        if folder is not None and (folder, _content_key(row)) in contents:
            copied.append(row)
        else:
            shown.append(row)
    return shown, copied


def _content_key(row: Mapping[str, Any]) -> frozenset:
    """Return the columns of a result that a copy of it has, too."""
    content = []
    for name, value in row.items():
        if name == "recipe_run_name" or not (name in _OF_PLACE or name.startswith("recipe_")):
            content.append((name, str(value)))
    return frozenset(content)


def _find_original(folder: str, originals: Mapping[str, str]) -> str | None:
    """Return the folder that a folder in a copied run is a copy of, or None if its run is not a copy."""
    path = Path(folder)
    for run in (path, *path.parents):
        if str(run) in originals:
            return str(Path(originals[str(run)], path.relative_to(run)))
    return None


def split_repeated(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide results into those that are shown, and those that repeat a measurement of a training itself.

    A training's own result is the one in its run's folder without the column `adapter`. `evaluate` and `diagnose` can measure
    the same again, perhaps on another number of examples, so that the results of two runs are not comparable any more. Losses
    of the base model on these examples are left out, too, if nothing else that is shown was measured on them.

    Args:
        rows: Results of `read_results` with the column `run`, the folder of their training.
    """
    # A folder is a run's if it has a result of a training, even if only the held-out loss of the base model is left of it. A
    # run that measures the base model before its training, or has failed since, has no such result.
    run_folders = {row["folder"] for row in rows if row["task"] == "training"}
    for folder in {row["folder"] for row in rows} - run_folders:
        if is_run_folder(folder):
            run_folders.add(folder)
    is_own = [row["folder"] in run_folders and not row.get("adapter") for row in rows]
    own_keys = {measurement_key(row) for row, own in zip(rows, is_own, strict=True) if own}
    shown, repeated = [], []
    for row, own in zip(rows, is_own, strict=True):
        if own or measurement_key(row) not in own_keys:
            shown.append(row)
        else:
            repeated.append(row)
    lone = _find_lone_bases(shown, repeated)
    return [row for row in shown if id(row) not in lone], [*repeated, *(row for row in shown if id(row) in lone)]


def _find_lone_bases(shown: Sequence[dict[str, Any]], repeated: Sequence[dict[str, Any]]) -> set[int]:
    """Return the `id` of each loss of the base model on examples on which the losses of all trained models are left out.

    A table of such examples would have the base model alone, next to the table of the trainings' own examples.
    """
    compared = {_examples_key(row) for row in shown if not is_of_base(row)}
    left_out = {_examples_key(row) for row in repeated if not is_of_base(row)}
    lone = set()
    for row in shown:
        is_loss = is_of_base(row) and row["metric"] in DIAGNOSTIC_METRICS
        if is_loss and _examples_key(row) in left_out - compared:
            lone.add(id(row))
    return lone


def _examples_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return which table a loss belongs to: those of the same metric, examples and depth are compared."""
    return row["metric"], row["task"], row.get("n"), row.get("problems"), row.get("num_loops")


def split_choices(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide results into those that are shown, and losses of a sweep's run that only served the choice of a learning rate.

    The run of the first seed has them, also if the recipe of the final runs asks for none, by `single_loop_batches: 0` or in
    an older version by no such field. If `diagnose` has measured all seeds since, on its own number of examples, the seeds can
    only be compared by its results.

    Args:
        rows: Results of `read_results` with the column `run`, the folder of their training.
    """
    measured_later = {measurement_key(row) for row in rows if row.get("adapter")}  # by `diagnose`
    shown, of_choice = [], []
    for row in rows:
        if _is_loop_loss_of_sweep(row) and _is_of_one_seed(row, measured_later):
            of_choice.append(row)
        else:
            shown.append(row)
    return shown, of_choice


def describe_choice_reason(of_choice: Sequence[dict[str, Any]], shown: Sequence[dict[str, Any]]) -> str:
    """Return why losses of `split_choices` are left out, with the command that measures all seeds unless it already has.

    Args:
        of_choice: Results that are left out.
        shown: The other results.
    """
    reason = "they only served the choice of a learning rate."
    if not of_choice:
        return reason
    measured_later = {measurement_key(row) for row in shown if row.get("adapter")}  # by `diagnose`
    if all(measurement_key(row) in measured_later for row in of_choice):
        return f"{reason} The results of `diagnose` are shown instead."
    run = of_choice[0]["folder"]
    sweep = folder_of_run(run)
    if sweep is None:  # a copy of the run
        return f"{reason} `{join_command('diagnose', run)}`, and the same for the run of each other seed, measures all alike."
    return f"{reason} `{join_command('diagnose', sweep)}` measures all seeds alike."


def _is_loop_loss_of_sweep(row: dict[str, Any]) -> bool:
    """Return whether a result is a loss of `single_loop_batches` that a run of a sweep has measured itself."""
    if row.get("adapter") or not re.match(RUN_NAME, str(row.get("recipe_run_name"))):
        return False
    return row.get("task") == DEVELOPMENT and row["metric"] in LOOP_METRICS


def _is_of_one_seed(row: dict[str, Any], measured_later: Collection[frozenset]) -> bool:
    """Return whether only the run of the first seed has a loss, by the number of batches in the recipe of the final runs."""
    num_batches = row.get("recipe_single_loop_batches")
    if num_batches is None:  # of an older version, whose recipe does not tell it
        return measurement_key(row) in measured_later
    return num_batches == 0


def split_replaced(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide results into those of present weights, and those of weights that a later training in a run's folder replaced.

    The later training was longer, or began again. Results of checkpoints stay, because their folders name their steps.

    Args:
        rows: Results of `read_results` with the column `run`, the folder of their training.
    """
    weights: dict[str, set] = {}  # of a run. A copy of its folder may have other ones.
    for row in rows:
        if is_of_training(row) and row.get("training"):
            weights.setdefault(row["run"], set()).add(weights_of(row))
    present, replaced = [], []
    for row in rows:
        is_of_final_weights = row.get("adapter") and row.get("training") and not is_checkpoint(row["adapter"])
        if is_of_final_weights and row["run"] in weights and weights_of(row) not in weights[row["run"]]:
            replaced.append(row)
        else:
            present.append(row)
    return present, replaced
