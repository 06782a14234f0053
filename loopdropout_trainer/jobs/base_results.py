"""The accuracies of the base model in a run, which can be those that another run of its sweep has measured."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.files import describe_version
from loopdropout_trainer.jobs.measuring import evaluate, record
from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.results.recipe_changes import compare_recipes
from loopdropout_trainer.results.run_files import (
    DEVELOPMENT,
    is_of_base,
    read_imports,
    read_own_results,
    read_recipe,
    read_version,
)
from loopdropout_trainer.results.sweep_folder import folder_of_run
from loopdropout_trainer.settings.arguments import ModelArguments, TaskArguments
from loopdropout_trainer.settings.recipe_folders import list_runs
from loopdropout_trainer.terminal import print_sentences


if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from transformers import Trainer

READ_FIELDS = {*ModelArguments.__dataclass_fields__, *TaskArguments.__dataclass_fields__} - {"num_threads"}
"""Settings that an accuracy of the base model depends on, apart from its problems and its depth."""


def evaluate_base(trainer: Trainer, run: Run, tasks: Sequence[Task | Group]) -> None:
    """Write the accuracies of the base model: of all tasks at the trained depth, and of the first one at the other depths.

    They are those of another run of the same sweep if it has measured the same problems with the same settings and code.
    """
    depths = [trainer.num_loops, *(run.script_args.eval_num_loops or ())]
    for depth in dict.fromkeys(depths):
        own_tasks = tasks if depth == trainer.num_loops else tasks[:1]
        missing = [task for task in own_tasks if not _take_over(trainer, run, task, depth)]
        with trainer.model.disable_adapter():
            evaluate(trainer, run, missing, num_loops=depth)


def _take_over(trainer: Trainer, run: Run, task: Task | Group, depth: int) -> bool:
    """Write the results of another run of the sweep on a task, and return whether there are any."""
    from accelerate.utils import broadcast_object_list

    found = [None]
    if trainer.is_world_process_zero():
        found = [_find_results(Path(trainer.args.output_dir), run, task, depth)]
    rows = broadcast_object_list(found)[0]  # else one process could wait for another one
    if rows is None:
        return False
    record(trainer, run, rows)
    return True


def _find_results(folder: Path, run: Run, task: Task | Group, depth: int) -> list[dict[str, Any]] | None:
    """Return the results of the base model on a task in another run, whose samples it copies, or None without any."""
    from loopdropout_trainer.evaluation.harness import list_problems, name_of

    sweep = folder_of_run(folder.resolve())
    name = name_of(task)
    if sweep is None or name == DEVELOPMENT:  # whose prompts depend on the data, too
        return None
    problems = None
    for other in list_runs(sweep):
        rows = []
        if other != folder.resolve() and _has_same_settings(folder, run, other):
            rows = [row for row in read_own_results(other) if is_of_base(row) and row["task"] == name]
        rows = [row for row in rows if row["num_loops"] == depth and row.get("problems")]
        accuracy = [row for row in rows if row["metric"] == "accuracy" and row.get("samples")]
        if not accuracy or not (other / accuracy[0]["samples"]).is_file():
            continue
        if problems is None:
            problems = list_problems(task, run.script_args.benchmark_limit)
        if accuracy[0]["problems"] != problems.digest:
            continue
        shutil.copyfile(other / accuracy[0]["samples"], folder / accuracy[0]["samples"])
        print_sentences(
            f"The results of the base model on {name} at K = {depth} are those of {other}, which measured the same problems."
        )
        return [{column: value for column, value in row.items() if column != "folder"} for row in rows]
    return None


def _has_same_settings(folder: Path, run: Run, other: Path) -> bool:
    """Return whether another run has the same settings of the model and the tasks, and the same code."""
    recipe = read_recipe(other)
    if not recipe or compare_recipes(recipe, run.recipe, fields=READ_FIELDS):
        return False
    return read_version(other) == describe_version() and read_imports(other) == read_imports(folder)
