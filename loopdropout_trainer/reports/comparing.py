"""Compare the accuracy of runs on the same problems."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from loopdropout_trainer.diagnostics import Comparison, compare_answers
from loopdropout_trainer.errors import UserError, closest_match, join_command
from loopdropout_trainer.files import is_checkpoint
from loopdropout_trainer.results.problems import have_other_problems
from loopdropout_trainer.results.run_files import (
    DEVELOPMENT,
    check_results_folder,
    is_of_training,
    read_own_results,
    read_run_results,
    read_samples,
    weights_of,
)
from loopdropout_trainer.results.sweep_folder import find_choosing_task_of


logger = logging.getLogger(__name__)

PAIRED_SEEDS = "A difference is over the seeds that both methods have"
"""Begin of the sentence about differences that leave out seeds, in tables and in figures."""


EVALUATE_AGAIN = (
    "Evaluate both again with the same `benchmark_limit`, because the limit or the file of the task has changed."
)
"""Sentence about two results on different problems of a task."""


def compare_runs(folder: str | Path, baseline: str | Path, task: str, num_loops: int | None = None) -> Comparison:
    """Return the accuracy of a run minus the accuracy of another one on the same problems, with a 95% interval and a p-value.

    The interval is over problems, so it does not include the spread over training seeds (`compare_answers`). A warning says
    if a sweep chose the learning rate of a run on these problems, because the difference is then not a test.

    Args:
        folder: Folder of a run, or of a checkpoint that `evaluate` has measured.
        baseline: Folder of the run to compare with.
        task: Task that both were measured on.
        num_loops: Recurrence depth of both measurements. Default: the depth of the training.

    Raises:
        UserError: if a run was not measured on the task at this depth, or the problems differ.
    """
    found = _find_accuracies(folder, task, num_loops)
    others = _find_accuracies(baseline, task, num_loops)
    result, other = _pair(found, others)
    if have_other_problems(result, other):
        raise UserError(
            f"Both runs must be measured on the same problems of {task}, but {folder} has {result['n']} and {baseline} has "
            f"{other['n']} problems, which are not the same. {EVALUATE_AGAIN}"
        )
    chosen = []
    for place, row in ((folder, result), (baseline, other)):
        run = Path(row.get("adapter") or place).resolve()
        if find_choosing_task_of(run.parent if is_checkpoint(run) else run) == task:
            chosen.append(str(place))
    if chosen:
        logger.warning(
            "The problems of %s chose the learning rate of %s, so the difference is partly chance, and its interval is not "
            "that of a test. Compare the runs on another task.",
            task,
            " and of ".join(chosen),
        )
    return compare_answers(read_samples(result), read_samples(other))


def _pair(results: list[dict[str, Any]], others: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a result of each of two lists on the same problems, and of several such pairs that on most problems.

    `evaluate` keeps a result for each `benchmark_limit`. Without a common one, those on most problems are returned.
    """
    pairs = [(result, other) for result in results for other in others]
    pairs.sort(key=lambda pair: (not have_other_problems(*pair), pair[0]["n"], pair[1]["n"]))
    return pairs[-1]


def _list_accuracies(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the accuracies of an adapter with all gates on, read out after the last loop, whose answers are known."""
    own = [row for row in rows if row["metric"] == "accuracy" and row["gates"] == "unit" and row.get("samples")]
    return [row for row in own if row.get("readout") is None]


def compare_folders(folders: Sequence[str]) -> pd.DataFrame:
    """Return the accuracies of runs, and their differences to the last run on the same problems, as `compare_runs` does.

    Held-out examples are left out, because they may have chosen a learning rate.

    Args:
        folders: Folders of runs. The last one is the baseline.

    Returns:
        One line for each task, depth and run that was measured there, if the baseline was measured there, too. The index is
        `task`, `K` and `run`, and the columns are `method`, `seed`, `num_problems`, `accuracy` in %, and `comparison`. It is
        None for the baseline and for a run with other problems. There is no line if a folder has no accuracies of its
        own, or those of several adapters.
    """
    measured = {folder: _find_comparable(folder) for folder in folders}
    lines, baseline = [], {}
    if all(measured.values()):
        baseline = measured[folders[-1]]
    for place in sorted(baseline):
        rows = {folder: own[place] for folder, own in measured.items() if place in own}
        if len(rows) == 1:  # of the baseline alone
            continue
        others = _choose_baseline(rows, folders[-1])
        for folder, own in rows.items():
            row, other = _pair(own, others)
            comparison = None
            if folder != folders[-1] and not have_other_problems(row, other):
                comparison = compare_answers(read_samples(row), read_samples(other))
            facts = {
                "method": row["method"],
                "seed": row["seed"],
                "num_problems": row["n"],
                "accuracy": row["value"],
            }
            lines.append({"task": place[0], "K": str(place[1]), "run": folder, **facts, "comparison": comparison})
    columns = ["task", "K", "run", "method", "seed", "num_problems", "accuracy", "comparison"]
    return pd.DataFrame(lines, columns=columns).set_index(columns[:3])


def explain_missing_runs(folders: Sequence[str], compared: pd.DataFrame) -> list[str]:
    """Return a sentence about the runs that the user has named, but that `compare_folders` does not compare, or nothing.

    Args:
        folders: Folders. There is no sentence unless they are two or more, and all of them are those of trainings.
        compared: From `compare_folders`.
    """
    are_runs = all(_count_trainings(folder) == 1 for folder in folders)
    missing = [folder for folder in dict.fromkeys(folders) if folder not in compared.index.get_level_values("run")]
    if len({*folders}) == 1 or not are_runs or not missing:
        return []
    unmeasured = [folder for folder in missing if not _find_comparable(folder)]
    if not unmeasured:
        return [f"Left out of the comparison, because no task and depth was measured for all: {', '.join(missing)}."]
    return [
        f"The accuracies are not compared, because there is none of a benchmark for {', '.join(unmeasured)}. Held-out "
        "examples do not count, because they may have chosen a learning rate. "
        f"`{join_command('evaluate', unmeasured[0], '--benchmarks', 'TASK')}` measures one."
    ]


def _count_trainings(folder: str) -> int:
    """Return the number of trainings with results in exactly this folder: one in the folder of a run."""
    return len({(row["method"], row["seed"]) for row in filter(is_of_training, read_own_results(folder))})


def _find_comparable(folder: str) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the accuracies of a run by task and depth, without held-out examples. There is none of several adapters."""
    by_place: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in _list_accuracies(read_run_results(folder)):
        if row["task"] != DEVELOPMENT:
            by_place.setdefault((row["task"], row["num_loops"]), []).append(row)
    are_of_one = all(_count_adapters(rows) == 1 for rows in by_place.values())
    return by_place if are_of_one else {}  # a folder of `evaluate` can have several adapters


def _count_adapters(rows: list[dict[str, Any]]) -> int:
    """Return the number of adapters that some results are of. One adapter has a result for each `benchmark_limit`."""
    return len({(row["method"], row.get("seed"), row.get("adapter"), *weights_of(row)) for row in rows})


def _choose_baseline(rows: dict[str, list[dict[str, Any]]], baseline: str) -> list[dict[str, Any]]:
    """Return the result of the baseline on the problems that most of the other runs have, as a list of one result.

    Args:
        rows: Accuracies of each run at one task and depth.
        baseline: Run that the others are compared with.
    """

    def count_pairs(other: dict[str, Any]) -> tuple[int, int]:
        others = [own for folder, own in rows.items() if folder != baseline]
        num_pairs = sum(any(not have_other_problems(row, other) for row in own) for own in others)
        return num_pairs, other["n"]

    return [max(rows[baseline], key=count_pairs)]


def _find_accuracies(folder: str | Path, task: str, num_loops: int | None) -> list[dict[str, Any]]:
    """Return the accuracy of a run on a task with all gates on, one for each number of problems."""
    check_results_folder(folder)
    rows = read_run_results(folder)
    own = _list_accuracies(rows)
    depth = num_loops
    if depth is None:
        of_training = [row for row in rows if is_of_training(row)]
        known = of_training or own  # without results of the training, the depth of the first measurement
        if known:
            depth = known[0]["num_loops"]
    found = [row for row in own if row["task"] == task and row["num_loops"] == depth]
    if _count_adapters(found) > 1:
        raise UserError(
            f"`folder` and `baseline` must be folders of runs, but {folder} has {len(found)} accuracies on {task} at K = "
            f"{depth}, of several adapters."
        )
    if found:
        return found
    measured = ", ".join(f"{row['task']} at K = {row['num_loops']}" for row in own) or "no task"
    at_depth, words = "", ["evaluate", folder, "--benchmarks", task]
    if depth:
        at_depth = f" at K = {depth}"
        words += ["--eval_num_loops", depth]
    fix = f"`{join_command(*words)}` measures it."
    tasks = sorted({row["task"] for row in own})
    hint = "" if task in tasks else closest_match(task, tasks).strip()
    if hint:  # the task may not exist, so that no command can measure it
        fix = f"{hint} If it is another task, {fix}"
    raise UserError(
        f"`task` must be one that {folder} was measured on{at_depth}, got {task}. It was measured on {measured}. {fix}"
    )
