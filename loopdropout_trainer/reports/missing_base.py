"""Sentences of a report about results that the base model lacks, with the commands that measure them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from loopdropout_trainer.errors import join_command
from loopdropout_trainer.results.run_files import (
    EVALUATION_FOLDER,
    RUN_FILE,
    is_of_base,
    read_needed_imports,
    read_recipe,
    recipe_path,
)
from loopdropout_trainer.settings.read_yaml import read_yaml_file


def describe_missing_base(results: pd.DataFrame) -> list[str]:
    """Return sentences with the commands that evaluate the base model, if accuracies lack it and a recipe has their tasks.

    A sweep does not evaluate it by default, because each of its runs would. Only accuracies at the depth of a training ask for
    it: who wants it at other depths adds them to the command.
    """
    accuracy = results[(results["metric"] == "accuracy") & ~results["chose"]]
    if "recipe_benchmarks" not in accuracy:
        return []
    base = accuracy[is_of_base(accuracy)]
    known = set(zip(base["task"], base["num_loops"], strict=True))
    measured = accuracy[accuracy["recipe_benchmarks"].notna() & (accuracy["num_loops"] == accuracy["trained_loops"])]
    if measured.empty:
        return []
    if base.empty:
        command = _command_for_base(measured["run"].iloc[0], measured["num_loops"])
        return [f"The base model was not evaluated. {command} does so, and the next report has it."]
    sentences = []
    for run, rows in measured.groupby("run", sort=False):
        lacking = []
        for task, num_loops, benchmarks in rows[["task", "num_loops", "recipe_benchmarks"]].itertuples(index=False):
            if task in benchmarks and (task, num_loops) not in known:
                lacking.append((task, num_loops))
        if lacking:
            known.update(lacking)  # the command of this run measures them, also for the other runs
            tasks = ", ".join(sorted({task for task, _ in lacking}))
            command = _command_for_base(run, [num_loops for _, num_loops in lacking])
            sentences.append(f"The base model was not evaluated on {tasks}. {command} does so.")
    return sentences


def _command_for_base(run: str, depths: Iterable[float]) -> str:
    """Return the command that evaluates the base model of a run at some depths, in backquotes.

    Its results belong next to the run, which may be a copy of the folder that the recipe names.
    """
    path = recipe_path(run)
    words = ["evaluate", str(path), "none", "--eval_num_loops", *(f"{depth:g}" for depth in sorted(set(depths)))]
    folder = read_recipe(run).get("output_dir")
    if folder is not None and Path(folder).resolve() != Path(run).resolve():
        words += ["--output_dir", str(Path(run, EVALUATION_FOLDER))]
    return f"`{complete_command(words, run)}`"


def describe_missing_base_loss(results: pd.DataFrame) -> list[str]:
    """Return a sentence about the held-out loss of the base model if no run has measured it, with the way to measure it."""
    losses = results[(results["metric"] == "eval_loss") & (results["task"] == "training")]
    if is_of_base(losses).any():
        return []
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
        words = ["sft", str(path), "--evaluate_base", "true", "--output_dir", run]
        return f"The held-out loss of the base model is missing. `{complete_command(words, run)}` adds it."
    if starts_from_base and not Path(run, RUN_FILE).is_file():
        return (
            "The held-out loss of the base model is missing, because a training in Python does not measure it. There, "
            "`trainer.evaluate()` in front of `trainer.train()` returns it."
        )
    return ""


def complete_command(words: Sequence[str], run: str) -> str:
    """Return a command of this package as a text, with the files of `--import` that the recipe of a run needs."""
    imports = read_needed_imports(run)
    if imports:
        words = [*words, "--import", *imports]
    return join_command(*words)
