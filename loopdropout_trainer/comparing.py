"""Compare the accuracy of two runs on the same problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopdropout_trainer.diagnostics import Comparison, compare_answers
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.results import is_of_training, read_run_results, read_samples


def compare_runs(folder: str | Path, baseline: str | Path, task: str, num_loops: int | None = None) -> Comparison:
    """Return the accuracy of a run minus the accuracy of another one on the same problems, with a 95% interval and a p-value.

    The interval is over problems, so it does not include the spread over training seeds (`compare_answers`).

    Args:
        folder: Folder of a run, or of a checkpoint that `evaluate` has measured.
        baseline: Folder of the run to compare with.
        task: Task that both were measured on.
        num_loops: Recurrence depth of both measurements. Default: the depth of the training.

    Raises:
        UserError: if a run was not measured on the task at this depth, or the problems differ.
    """
    samples, others = (read_samples(_find_accuracy(place, task, num_loops)) for place in (folder, baseline))
    if [sample.get("target") for sample in samples] != [sample.get("target") for sample in others]:
        raise UserError(
            f"Both runs must be measured on the same problems of {task}, but {folder} has {len(samples)} and {baseline} has "
            f"{len(others)} problems, which are not the same. Evaluate both with the same `benchmark_limit`."
        )
    return compare_answers(samples, others)


def _find_accuracy(folder: str | Path, task: str, num_loops: int | None) -> dict[str, Any]:
    """Return the accuracy of a run on a task with all gates on."""
    if not Path(folder).is_dir():
        raise UserError(f"The folder {folder} does not exist.")
    rows = read_run_results(folder)
    own = [row for row in rows if row["metric"] == "accuracy" and row["gates"] == "unit" and row.get("samples")]
    depth = num_loops
    if depth is None:
        depth = next((row["num_loops"] for row in [*filter(is_of_training, rows), *own]), None)
    for row in own:
        if row["task"] == task and row["num_loops"] == depth:
            return row
    measured = ", ".join(f"{row['task']} at K = {row['num_loops']}" for row in own) or "no task"
    at_depth, option = (f" at K = {depth}", f" --eval_num_loops {depth}") if depth else ("", "")
    raise UserError(
        f"`task` must be one that {folder} was measured on{at_depth}, got {task}. It was measured on {measured}. "
        f"`loopdropout evaluate {folder} --benchmarks {task}{option}` measures it."
    )
