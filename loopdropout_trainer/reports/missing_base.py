"""Sentences of a report about results that the base model lacks, with the commands that measure them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from loopdropout_trainer.data.files import is_absent
from loopdropout_trainer.data.sources import read_sources
from loopdropout_trainer.errors import count
from loopdropout_trainer.reports.base_names import NAME
from loopdropout_trainer.reports.frames import select_accuracies
from loopdropout_trainer.reports.other_problems import is_held_out_loss
from loopdropout_trainer.results.run_commands import complete_command
from loopdropout_trainer.results.run_files import (
    DEVELOPMENT,
    EVALUATION_FOLDER,
    RECIPE_FILE,
    RUN_FILE,
    is_of_base,
    measurement_folder,
    read_recipe,
    recipe_path,
)
from loopdropout_trainer.settings.fields import items_of
from loopdropout_trainer.settings.read_yaml import read_yaml_file


class Lacking(NamedTuple):
    """An accuracy that the base model lacks.

    Attributes:
        folder: Folder of the recipe that has the task.
        limit: Limit of the problems, or None for all.
        task, depth: Place of the accuracy.
        num_problems: Number of problems if the base model was evaluated there on another number, else None.
        is_changed: Whether it was evaluated there on as many other problems.
    """

    folder: str
    limit: int | None
    task: str
    depth: float
    num_problems: float | None
    is_changed: bool


def describe_missing_base(results: pd.DataFrame) -> list[str]:
    """Return a sentence with a command for the accuracies of the base model that the table of a report lacks.

    A sweep does not evaluate it by default, because each of its runs would. The base model lacks an accuracy if a trained
    model has one at the same depth, on the same problems and over the same base model, and if a recipe has its task. If it
    has one on as many other problems, the table does not show the difference, so there is a sentence in any case.
    """
    groups: dict[tuple[str, bool, int | None], list[Lacking]] = {}
    for lacking in _find_lacking(results):
        groups.setdefault((lacking.folder, lacking.is_changed, lacking.limit), []).append(lacking)
    sentences = []
    for (folder, is_changed, limit), group in groups.items():
        describe = _describe_changed_problems if is_changed else _describe_commands
        sentences += describe(folder, read_recipe(folder), group, limit)
    return sentences


def _find_lacking(results: pd.DataFrame) -> list[Lacking]:
    """Return the accuracies that the base model lacks, each one once."""
    accuracy = select_accuracies(results).assign(base=_name_bases(results))
    trained = accuracy[~is_of_base(accuracy) & accuracy["readout"].isna() & (accuracy["task"] != DEVELOPMENT)]
    of_base = accuracy[is_of_base(accuracy)]
    known = set(of_base[PLACE].itertuples(index=False, name=None))
    evaluated = {place[:3] for place in known}  # perhaps on other problems
    sizes = set(of_base[[*PLACE[:3], "n"]].itertuples(index=False, name=None))
    found = []
    for folder, rows in trained.groupby(_find_folders(trained), sort=False):
        recipe = read_recipe(folder)
        for row in rows.to_dict("records"):
            place = tuple(row[name] for name in PLACE)
            is_changed = (*place[:3], row["n"]) in sizes
            has_task = row["task"] in (recipe.get("benchmarks") or ())
            if place in known or not (has_task or is_changed):
                continue
            known.add(place)  # the command measures it for all runs
            num_problems = row["n"] if place[:3] in evaluated else None
            limit = _find_limit(row, recipe)
            found.append(Lacking(folder, limit, row["task"], row["num_loops"], num_problems, is_changed))
    return found


def _describe_changed_problems(
    folder: str, recipe: dict[str, Any], group: Sequence[Lacking], limit: int | None
) -> list[str]:
    """Return a sentence for each task whose problems have changed between the base model's measurement and another one.

    The present ones can be those of either measurement, so both may have to be repeated. Arguments: as `_describe_commands`.
    """
    sentences = []
    for task, depths in _list_depths(group).items():
        texts = [f"{depth:g}" for depth in depths]
        sentence = (
            f"The accuracies of the base model on {task} at K = {', '.join(texts)} are on other problems than those of "
            "trained models, although on as many. The file or data set of the task has changed between the measurements. "
            "Measure all models again on the same one."
        )
        if task in (recipe.get("benchmarks") or ()):
            files = _find_benchmark_files(recipe, [task])
            command = _command_for_base(folder, recipe, [task], texts, limit, files)
            sentence += f" {command} measures the base model.{_explain_absent_file(folder, files)}"
        sentences.append(sentence)
    return sentences


PLACE = ["base", "task", "num_loops", "problem_set"]
"""Columns of an accuracy that the base model and a trained model must share."""


def _name_bases(results: pd.DataFrame) -> pd.Series:
    """Return the name of the base model of each result, or "" if it is not known."""
    return results.reindex(columns=[NAME])[NAME].astype(object).fillna("")


def _find_folders(results: pd.DataFrame) -> pd.Series:
    """Return the folder of the recipe that each result was measured with: its own, as of `evaluate`, or that of its run."""
    folders = []
    for folder, run in results[["folder", "run"]].itertuples(index=False):
        has_recipe = Path(folder, RECIPE_FILE).is_file()
        folders.append(folder if has_recipe else run)
    return pd.Series(folders, results.index, dtype=object)


def _find_limit(row: dict[str, Any], recipe: dict[str, Any]) -> int | None:
    """Return the `benchmark_limit` of a result, None for all problems, from the recipe that it was measured with.

    `evaluate` also saves it in each result, because the recipe in its folder has the limit of the first evaluation there. A
    result of an older version does not have it. Then its number of problems is the limit.
    """
    if not pd.isna(row["limit"]):
        return int(row["limit"])
    limit = recipe.get("benchmark_limit")
    if row.get("adapter") and limit is not None and row["n"] > limit:
        return int(row["n"])
    return limit


def _describe_commands(folder: str, recipe: dict[str, Any], group: Sequence[Lacking], limit: int | None) -> list[str]:
    """Return a sentence with a command for each set of depths, because a command measures all of its tasks at all depths.

    Args:
        folder: Folder of the recipe.
        recipe: Recipe that has the tasks.
        group: Accuracies that the base model lacks.
        limit: Number of problems of each task, or None for all.
    """
    names = {lacking.task: lacking.task for lacking in group}
    for lacking in group:
        if lacking.num_problems is not None:  # the table has it, on another number of problems
            names[lacking.task] = f"the same {lacking.num_problems:,.0f} problems of {lacking.task}"
    tasks_of_depths: dict[tuple[float, ...], list[str]] = {}
    for task, depths in _list_depths(group).items():
        tasks_of_depths.setdefault(depths, []).append(task)
    sentences = []
    for depths, tasks in tasks_of_depths.items():
        texts = [f"{depth:g}" for depth in depths]
        files = _find_benchmark_files(recipe, tasks)
        command = _command_for_base(folder, recipe, tasks, texts, limit, files)
        printed = ", ".join(names[task] for task in tasks)
        sentences.append(
            f"The base model was not evaluated on {printed} at K = {', '.join(texts)}. {command} does so, and the "
            f"next report has it.{_explain_absent_file(folder, files)}"
        )
    return sentences


def _list_depths(group: Sequence[Lacking]) -> dict[str, tuple[float, ...]]:
    """Return the depths of some accuracies by task, in ascending order."""
    depths: dict[str, set[float]] = {}
    for lacking in group:
        depths.setdefault(lacking.task, set()).add(lacking.depth)
    return {task: tuple(sorted(own)) for task, own in depths.items()}


def _find_benchmark_files(recipe: dict[str, Any], tasks: Sequence[str]) -> list[str]:
    """Return the files of the own benchmarks among some tasks of a recipe."""
    files = []
    for task in tasks:
        fields = (recipe.get("own_benchmarks") or {}).get(task) or {}
        files += items_of(fields.get("files", ()))
    return files


def _explain_absent_file(folder: str, files: Sequence[str]) -> str:
    """Return the end of a sentence with a command if a file that its recipe names is not here, or "".

    The paths of a recipe belong to the folder in which it is run, and a report may be made in another folder or of a copy.
    """
    for file in files:
        if is_absent(file):
            return (
                f" The command needs the file {file} of {recipe_path(folder)}, which does not exist here. Run it where this "
                "path leads to the file."
            )
    return ""


def _name_folder(folder: str, files: Sequence[str]) -> str:
    """Return the path of a folder for a command, which is absolute if the command must be run in another folder."""
    if any(map(is_absent, files)):
        return str(Path(folder).resolve())
    return folder


def _command_for_base(
    folder: str, recipe: dict[str, Any], tasks: list[str], depths: list[str], limit: int | None, files: Sequence[str]
) -> str:
    """Return the command that evaluates the base model on the problems that other results in a folder are on, in backquotes.

    Its results belong next to them, and the folder may be a copy of the folder that the recipe names.
    """
    path = recipe_path(folder)
    words = ["evaluate", str(path), "none"]
    if tasks != recipe["benchmarks"]:
        words += ["--benchmarks", *tasks]
    words += ["--eval_num_loops", *depths]
    if limit != recipe.get("benchmark_limit"):
        words += ["--benchmark_limit", str(limit)]
    for name in ("gates", "readout"):  # of an adapter, and of another measurement
        if recipe.get(name) is not None:
            words += [f"--{name}", "null"]
    output_dir, named = recipe.get("output_dir"), _name_folder(folder, files)
    is_moved = output_dir is not None and Path(output_dir).resolve() != Path(folder).resolve()
    if is_moved or named != folder:
        words += ["--output_dir", measurement_folder(named, EVALUATION_FOLDER)]
    return f"`{complete_command(words, folder)}`"


def describe_missing_base_loss(results: pd.DataFrame) -> list[str]:
    """Return a sentence about the held-out loss of the base model if no run has measured it, with the way to measure it.

    If it was measured on other held-out examples than losses of trainings, the sentence says so.
    """
    losses = results[is_held_out_loss(results) & (results["other_problems"] == "")]
    of_base = is_of_base(losses)
    if of_base.any():
        is_other = losses["problem_set"].notna() & ~losses["problem_set"].isin(losses.loc[of_base, "problem_set"])
        others = losses.loc[is_other, "run"].unique()
        if len(others) == 0 or losses.loc[of_base, "problem_set"].isna().any():
            return []
        return [
            f"The losses of {count(len(others), 'training')} such as {others[0]} are on other held-out examples than the loss "
            "of the base model, or on other tokens of them, so they do not compare with it."
        ]
    for run in losses["run"].unique():
        sentence = _describe_base_loss(run)
        if sentence:
            return [sentence]
    return []


def _describe_base_loss(run: str) -> str:
    """Return the sentence about the base model's held-out loss for a run that lacks it, or "" if there is no way to it.

    `sft` trains a finished run no further, and only measures what is missing. The recipe of a run in Python, which has no
    `run.json`, does not have its examples.
    """
    path = recipe_path(run)
    recipe = read_yaml_file(path, f"The recipe of {run}") if path.is_file() else {}
    starts_from_base = recipe.get("adapter_name_or_path") is None
    if recipe.get("command") == "dpo":
        if starts_from_base and recipe.get("loss_type", "sigmoid") in ("sigmoid", ["sigmoid"]):
            return "The held-out loss of the base model is ln 2 = 0.6931, because DPO compares a model with its base model."
        return ""
    if recipe.get("command") != "sft":
        return ""
    if recipe.get("evaluate_base") is False:
        files = [file for source in read_sources(recipe) for file in source.files]
        files += recipe.get("eval_files") or ()
        words = ["sft", str(path), "--evaluate_base", "true", "--output_dir", _name_folder(run, files)]
        command = complete_command(words, run)
        return (
            f"The held-out loss of the base model is missing. `{command}` adds it.{_explain_absent_file(run, files)}"
        )
    if starts_from_base and not Path(run, RUN_FILE).is_file():
        return (
            "The held-out loss of the base model is missing, because a training in Python does not measure it. There, "
            "`trainer.evaluate()` in front of `trainer.train()` returns it."
        )
    return ""
