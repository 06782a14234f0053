"""Read and write the results of a run.

A folder of results has three files:

- `results.jsonl`: one flat JSON object per line, with at least the columns of `COLUMNS`.
- `recipe.yaml`: the settings of the run.
- `run.json`: facts such as versions and the device. Its `status` tells a finished run from others.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import UserError, find_unusable, short_repr
from loopdropout_trainer.files import (
    checkpoint_step,
    describe_version,
    is_checkpoint,
    lock_file,
    parse_json,
    read_json_object,
    read_text,
    sync_files,
    write_file,
)
from loopdropout_trainer.hints import folder_hint
from loopdropout_trainer.settings.command_fields import TRAININGS
from loopdropout_trainer.settings.field_hints import FORMER_NAMES
from loopdropout_trainer.settings.read_yaml import read_yaml_file
from loopdropout_trainer.settings.recipe import load_recipe
from loopdropout_trainer.settings.recipe_folders import SETTINGS_FILE, sort_folders


RESULTS_FILE, RECIPE_FILE, RUN_FILE = "results.jsonl", "recipe.yaml", "run.json"

DEVELOPMENT = "development"
"""Name of the task of held-out training examples."""

BASE_MODEL = "base model"
"""Method of the results of a base model."""

DRAWN = "drawn"
"""Gates of the results that are measured under the gates that a rule draws in training, such as `train_loss`."""

GATE_MEAN = "gate_mean"
"""Metric of the mean gate of each loop, which a training has only if its rule gives another mean than 1 by a fault."""

EVALUATION_FOLDER = "evaluation"
"""Subfolder of a run for the results of `evaluate`."""

DIAGNOSTICS_FOLDER = "diagnostics"
"""Subfolder of a run for the results of `diagnose`."""

COLUMNS = ("metric", "value", "unit", "task", "method", "seed", "step", "num_loops", "gates", "n")
"""The columns of every result.

`task` is a benchmark, a diagnostic or "training". `method` is the title of the rule, or "base model". `step` is the optimizer
step, or None for the base model. `num_loops` is the recurrence depth of the measurement. `gates` is "unit", "none"
(without an adapter), "loop 1", "1-1-0-0" or, of a training loss, `DRAWN`. `n` is the number of problems, examples or tokens.
"""

DIAGNOSTIC_METRICS = (
    "loss",
    "loss_reduction",
    "readout_loss",
    "readout_token_accuracy",
    "depth_loss",
    "depth_token_accuracy",
    "curvature",
    "curvature_term",
)
"""Metrics of the diagnostics, whose `n` is a number of tokens."""

_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")


def write_results(
    output_dir: str | Path, rows: Iterable[Mapping[str, Any]], step: int = 0, training: str | None = None
) -> None:
    """Add results to `results.jsonl`; a result replaces the older one of the same measurement (`_key`).

    Diagnostics on another number of tokens and accuracies with another `benchmark_limit` are another measurement and stay,
    except for those of the training itself, which measures again with `step`.

    Args:
        output_dir: folder of the run, created if it is missing.
        rows: flat mappings with the columns of `COLUMNS`, and any further columns. Columns that are None may be left out.
        step: optimizer step of the adapter in the folder. Older results have another step if the training was made longer
            since, and are removed. 0: all results stay.
        training: identifier of the adapter's training. Results of another training in the folder are removed with `step`.
    """
    path = Path(output_dir, RESULTS_FILE)
    with lock_file(path):
        kept = _read_lines(path)
        if step:
            kept = [row for row in kept if row.get("step") in (None, step)]
            kept = [row for row in kept if row.get("training") in (None, training)]
        by_key = {}
        for row in [*kept, *rows]:
            size = None
            if not step:
                size = row.get("n") if row.get("metric") in DIAGNOSTIC_METRICS else row.get("limit")
            by_key[_key(row), size] = row
        if not step:
            by_key = _drop_same_problems(by_key)
        write_file(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in by_key.values()))


def _drop_same_problems(by_key: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return the newest result of each measurement on the same problems, as with a limit that is above their number."""
    newest = {}
    for (key, size), row in by_key.items():
        newest[key, row.get("problems") or size] = (key, size)
    kept = {*newest.values()}
    return {place: row for place, row in by_key.items() if place in kept}


def read_results(*folders: str | Path) -> list[dict[str, Any]]:
    """Return all results below the folders, once if a folder contains another one.

    Each result gets the column `folder` and one column `recipe_<field>` for each field of the `recipe.yaml` next to it. A run
    of a sweep measures the base model before it writes one, so until then the recipe counts that the sweep gives to it.

    Raises:
        UserError: if a folder does not exist, or a file is not readable.
    """
    rows, seen = [], set()
    for folder in folders:
        check_results_folder(folder)
        for path in sort_folders(Path(folder).rglob(RESULTS_FILE)):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            recipe = read_recipe(path.parent) or _load_recipe(path.with_name(SETTINGS_FILE))
            columns = {f"recipe_{name}": value for name, value in recipe.items()}
            rows += [{**columns, **row, "folder": str(path.parent)} for row in _read_rows(path)]
    return rows


def check_results_folder(folder: str | Path) -> None:
    """Raise UserError, with the folder that is meant, if a folder of results does not exist or is a file."""
    if not isinstance(folder, str | os.PathLike):
        hint = ""
        if isinstance(folder, Collection):
            hint = " Give several folders as separate arguments, as in `load_results(*folders)`."
        raise UserError(f"A folder of results must be a path, got {short_repr(folder)}.{hint}")
    path = Path(folder)
    if path.is_dir():
        return
    if not path.exists():
        raise UserError(f"The folder {folder} does not exist.{folder_hint(folder)}")
    meant = str(path.parent)
    if path.suffix in (".yaml", ".yml") and path.name != RECIPE_FILE:  # not of a run
        meant = load_recipe(path).get("output_dir") or "its `output_dir`"
    raise UserError(f"Results are read from folders, and {folder} is a file. Give the folder of its results, {meant}.")


def read_own_results(folder: str | Path) -> list[dict[str, Any]]:
    """Return the results in exactly this folder, with its column `folder`."""
    return [{**row, "folder": str(folder)} for row in _read_rows(Path(folder, RESULTS_FILE))]


def weights_of(columns: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return the identifier of the training and the step, which tell weights apart, of a result or of `Source.columns`."""
    return columns.get("training"), columns.get("step")


def unneeded_columns(columns: Mapping[str, Any]) -> set[str]:
    """Return the columns that do not tell the weights of a result or of `Source.columns`, because its training tells them.

    It is the folder of the adapter, which may have been moved.
    """
    return {"adapter"} if columns.get("training") else set()


def is_of_training(row: Mapping[str, Any]) -> bool:
    """Return whether a result is one of the training itself, such as its loss. The base model has a held-out loss, too."""
    return row.get("task") == "training" and not is_of_base(row)


def read_run_results(folder: str | Path, weights: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the results of the adapter in a run's folder: those of its training, and those that `evaluate` added later.

    A checkpoint in a run has only the second ones, which `evaluate` writes into the run's folder under the step's number.

    Args:
        folder: Folder of a run or of a checkpoint.
        weights: Columns `training` and `step` of the adapter there, as in `Source.columns`. The results of a folder can also
            be of another training: a later one whose adapter was not saved, or a former one that had a checkpoint of the same
            step. They are left out then. None: the adapter is not known, and the results decide.
    """
    own = read_own_results(folder)
    if weights is not None and weights.get("training") is None:  # of an older adapter
        weights = None
    run = _run_of_checkpoint(folder)
    if run is not None:
        return own + _read_of_checkpoint(folder, run, weights)
    trainings = [row for row in own if is_of_training(row)]
    if not trainings:
        return own
    adapter = trainings[0]  # has the columns by which the results of the adapter are found
    if weights is not None and weights_of(adapter) != weights_of(weights):
        # The training's own results are of other weights. `evaluate` may have measured the ones of the adapter.
        own = [row for row in own if is_of_base(row)]
        adapter = {**adapter, **weights}
    return own + _read_added(folder, own, adapter)


def _read_added(run: str | Path, own: Iterable[Mapping[str, Any]], adapter: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the results that `evaluate` has added to a run, of its adapter or of the base model.

    Args:
        run: Folder of the run.
        own: Results of the training itself, which count instead of added ones that measure the same.
        adapter: Columns `training`, `method`, `seed` and `step` of the adapter.
    """
    measured = {measurement_key(row) for row in own}
    added = []
    for row in _read_evaluated(run):
        is_of_adapter = all(row.get(name) == adapter.get(name) for name in ("training", "method", "seed", "step"))
        is_needed = is_of_adapter or is_of_base(row)
        if is_needed and measurement_key(row) not in measured:
            added.append(row)
    return added


def _read_of_checkpoint(
    checkpoint: str | Path, run: str | Path, weights: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return the results in a run's folder that `evaluate` has measured on a checkpoint, or on the base model.

    Args:
        checkpoint: Folder of the checkpoint.
        run: Folder of its run.
        weights: Columns with the `training` of the checkpoint. None: the number of the step decides alone.
    """
    step = checkpoint_step(Path(checkpoint).resolve())
    found = []
    for row in _read_evaluated(run):
        is_of_adapter = checkpoint_step(row.get("adapter") or "") == step
        if weights is not None and row.get("training") != weights["training"]:
            is_of_adapter = False
        if is_of_adapter or is_of_base(row):
            found.append(row)
    return found


def _read_evaluated(run: str | Path) -> list[dict[str, Any]]:
    """Return the results of `evaluate` in a run's folder. The readout of an earlier loop is not the answer of the model."""
    return [row for row in read_own_results(Path(run, EVALUATION_FOLDER)) if row.get("readout") is None]


def is_of_base(row: Any) -> Any:
    """Return whether a result, or each result of a data frame, is one of the base model.

    The method decides. A result that has none yet is of a trained model, whose base model runs without any gate. The gates of
    a merged model are "none", too, but its results have a method.
    """
    if row.get("method") is None:
        return row.get("gates") == "none"
    return row["method"] == BASE_MODEL


def _run_of_checkpoint(folder: str | Path) -> Path | None:
    """Return the folder of the run that a checkpoint belongs to, or None for another folder, or for a checkpoint alone."""
    folder = Path(folder)
    if not is_checkpoint(folder):
        folder = folder.resolve()  # of "."
    if not is_checkpoint(folder):
        return None
    path = recipe_path(folder)
    has_own_recipe = path.parent == folder.resolve()
    if has_own_recipe or not path.is_file():
        return None
    return folder.parent


def measurement_key(row: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return what a result measures, wherever it is stored. Results of several runs need the column `run`."""
    ignored = {"folder", "adapter", "training"}
    if is_of_base(row):  # it has results next to those of each training
        ignored |= {"run", "seed", "step"}
    for name in row:
        # The base model tells results of several base models apart. The other settings may differ between two recipes, such
        # as the ones of a training and of `evaluate`, although the results measure the same.
        if name.startswith("recipe_") and name != "recipe_model_name_or_path":
            ignored.add(name)
    return _key({name: value for name, value in row.items() if name not in ignored})


def measurement_folder(output_dir: str | Path, name: str) -> str:
    """Return the folder of the results of a command that measures trained models: `output_dir`, or `name` in a run's folder.

    The folder of a run holds the results of its training alone, because a later measurement can use other examples, and also
    measures other models. The two would replace each other, and mix in the mean over the seeds. The results of a checkpoint
    go there, too, because a checkpoint is deleted when newer ones are saved. They have the number of its step.
    """
    output_dir = _run_of_checkpoint(output_dir) or output_dir
    is_run = Path(output_dir, RUN_FILE).is_file() or any(map(is_of_training, read_own_results(output_dir)))
    if is_run:
        return str(Path(output_dir, name))
    return str(output_dir)


def is_run_folder(folder: str | Path) -> bool:
    """Return whether a folder is the one of a training, also before its first step, when it may measure the base model."""
    if Path(folder, RUN_FILE).is_file() or Path(folder, SETTINGS_FILE).is_file():
        return True
    path = Path(folder, RECIPE_FILE)
    own_recipe = read_yaml_file(path, f"The recipe of {folder}") if path.is_file() else None
    return isinstance(own_recipe, dict) and own_recipe.get("command") in TRAININGS


def recipe_path(folder: str | Path) -> Path:
    """Return the path of the recipe of the run in a folder, or of the run that a checkpoint belongs to."""
    folder = Path(folder).resolve()
    if is_checkpoint(folder) and not (folder / RECIPE_FILE).is_file():
        folder = folder.parent
    return folder / RECIPE_FILE


def read_recipe(folder: str | Path) -> dict[str, Any]:
    """Return the recipe of the run in a folder, with the present names of its fields, or an empty dict."""
    return _load_recipe(recipe_path(folder))


def _load_recipe(path: Path) -> dict[str, Any]:
    """Return the recipe in a file, with the present names of its fields, or an empty dict without the file."""
    recipe = load_recipe(path) if path.is_file() else {}
    return {FORMER_NAMES.get(name, name): value for name, value in recipe.items()}


def read_samples(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of the samples of a result, from its columns `folder`, `samples` and `n`.

    A file can have more problems than the result, because `evaluate` with a smaller `benchmark_limit` keeps it. Then the
    lines are those of the first problems of each task.
    """
    samples = _read_lines(Path(result["folder"], result["samples"]))
    num_problems = result.get("n")
    if num_problems is None or len(samples) <= num_problems:
        return samples
    numbers = sorted(sample.get("doc_id", 0) for sample in samples)
    last = numbers[int(num_problems) - 1]
    first = [sample for sample in samples if sample.get("doc_id", 0) <= last]
    return first if len(first) == num_problems else samples


def write_run(output_dir: str | Path, **facts: Any) -> None:
    """Write `run.json` with the versions of the libraries, new facts and the facts before.

    Without a `status` among the facts, the run has finished.

    The other files of the folder reach the disk first, so that a power failure never leaves a finished run with empty files.
    """
    versions = {"python": platform.python_version(), "loopdropout-trainer": describe_version()}
    versions |= {name: version(name) for name in _LIBRARIES}
    path = Path(output_dir, RUN_FILE)
    with lock_file(path):
        sync_files(file for file in path.parent.iterdir() if file.is_file())
        facts = {**read_run(output_dir), "status": "finished", **facts, "versions": versions}
        write_file(path, json.dumps(facts, indent=2, default=str) + "\n")


def read_run(output_dir: str | Path) -> dict[str, Any]:
    """Return the facts of `run.json`, or an empty dict if there is no readable file."""
    try:
        return read_json_object(Path(output_dir, RUN_FILE))
    except (OSError, ValueError):
        return {}


def read_version(output_dir: str | Path) -> str | None:
    """Return the version of this package that trained a run, or None without a `run.json`."""
    versions = read_run(output_dir).get("versions")
    version_text = versions.get("loopdropout-trainer") if isinstance(versions, dict) else None
    return version_text if isinstance(version_text, str) else None


def read_trained_shares(output_dir: str | Path) -> list[float]:
    """Return the shares of the data sets of a mixture in the training examples, or an empty list if they are not known."""
    shares = read_run(output_dir).get("trained_shares")
    is_known = isinstance(shares, list) and all(isinstance(share, int | float) for share in shares)
    return shares if is_known else []


def read_imports(output_dir: str | Path) -> dict[str, str]:
    """Return the digests of the files of `--import` that a run was trained with, by their absolute paths."""
    imports = read_run(output_dir).get("imports")
    return imports if isinstance(imports, dict) else {}


def read_used_imports(output_dir: str | Path) -> list[str]:
    """Return the files of `--import` that a run depends on. Of an older run, they are not known, so all Python files are."""
    used = read_run(output_dir).get("used_imports")
    if isinstance(used, list):
        return used
    return [path for path in read_imports(output_dir) if path.endswith(".py")]


def read_needed_imports(output_dir: str | Path) -> list[str]:
    """Return the files of `--import` that the recipe of a run needs: those that the run depends on, and its task files."""
    task_files = [path for path in read_imports(output_dir) if not path.endswith(".py")]
    return [*read_used_imports(output_dir), *task_files]


def read_accepted_imports(output_dir: str | Path) -> dict[str, str]:
    """Return the digests of files of `--import` that changed since a run, and that the user accepted for its results."""
    accepted = read_run(output_dir).get("accepted_imports")
    return accepted if isinstance(accepted, dict) else {}


def has_trained(output_dir: str | Path) -> bool:
    """Return whether `run.json` says that a training has ended in a folder. Its measurements may be missing.

    A sweep starts such a run again until it is measured as far as the sweep needs it (`Sweep.is_done`).
    """
    return read_run(output_dir).get("status") in ("trained", "finished")


def is_finished(output_dir: str | Path) -> bool:
    """Return whether the run in a folder has finished."""
    return read_run(output_dir).get("status") == "finished"


def _key(row: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the columns that two results in a folder share if one replaces the other, except for the number of tokens."""
    ignored = {"value", "n", "limit", "samples", "problems", *unneeded_columns(row)}
    return frozenset((name, str(value)) for name, value in row.items() if name not in ignored and value is not None)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file. They name folders and files, and can come from somebody else."""
    rows = _read_lines(path)
    for row in rows:
        for name, value in row.items():
            if isinstance(value, str) and (problem := find_unusable(value)):
                raise UserError(f"`{name}` in {path} must not have {problem}, got {short_repr(value)}.")
    return rows


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return [dict(parse_json(line)) for line in read_text(path).splitlines()]
    except ValueError as error:
        raise UserError(f"{path} is not a file of JSON lines ({error}). Remove it and measure again.") from None
