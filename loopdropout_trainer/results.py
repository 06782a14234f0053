"""Read and write the results of a run.

A folder of results has three files:

- `results.jsonl`: one flat JSON object per line, with at least the columns of `COLUMNS`.
- `recipe.yaml`: the settings of the run.
- `run.json`: facts such as versions and the device. Its `status` tells a finished run from others.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loopdropout_trainer.arguments import describe_adapter, names_of
from loopdropout_trainer.errors import UserError, find_unusable, short_repr
from loopdropout_trainer.files import (
    checkpoint_step,
    describe_version,
    is_checkpoint,
    lock_file,
    parse_json,
    public_name,
    read_json_object,
    read_text,
    sync_files,
    write_file,
)
from loopdropout_trainer.library_fields import SAFE_VALUES
from loopdropout_trainer.recipe import FORMER_NAMES, load_recipe
from loopdropout_trainer.sweeps import RUN_NAME


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

RESULTS_FILE, RECIPE_FILE, RUN_FILE = "results.jsonl", "recipe.yaml", "run.json"

DEVELOPMENT = "development"
"""Name of the task of held-out training examples."""

EVALUATION_FOLDER = "evaluation"
"""Subfolder of a run for the results of `evaluate`."""

DIAGNOSTICS_FOLDER = "diagnostics"
"""Subfolder of a run for the results of `diagnose`."""

COLUMNS = ("metric", "value", "unit", "task", "method", "seed", "step", "num_loops", "gates", "n")
"""The columns of every result.

`task` is a benchmark, a diagnostic or "training". `method` is the title of the rule, or "base model". `step` is the optimizer
step, or None for the base model. `num_loops` is the recurrence depth of the measurement. `gates` is "unit", "none" (the base
model), "loop 1" or "1-1-0-0". `n` is the number of problems, examples or tokens.
"""

UNITS = {
    "train_loss": "nats",
    "eval_loss": "nats",
    "num_tokens": "tokens",
    "train_seconds": "s",
    "step_seconds": "s",
    "tokens_per_second": "tokens/s",
    "peak_memory_gb": "GB",
}
"""Units of the results of a training. The others are numbers."""

UNCOMPARED = names_of("never")
"""Settings that `compare_recipes` ignores by default, since they do not change a result."""

MEASURED = names_of("score", "measurement", "output")
"""Settings of the steps after the training. They may change after a run has finished."""

LENGTH = {"max_steps", "num_train_epochs", "early_stopping_patience"}
"""Settings that may change when a run is resumed, usually to make it longer."""

RESUMABLE = UNCOMPARED | MEASURED | LENGTH | names_of("monitoring")
"""Settings that may change if a run is resumed. The weights after a step do not depend on them."""

_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")


def write_results(
    output_dir: str | Path, rows: Iterable[Mapping[str, Any]], step: int = 0, training: str | None = None
) -> None:
    """Add results to `results.jsonl`; a result replaces the older one of the same measurement (`_key`).

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
            kept = [row for row in kept if row.get("step") in (None, step) and row.get("training") in (None, training)]
        by_key = {_key(row): row for row in [*kept, *rows]}
        write_file(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in by_key.values()))


def read_results(*folders: str | Path) -> list[dict[str, Any]]:
    """Return all results below the folders.

    Each result gets the column `folder` and one column `recipe_<field>` for each field of the `recipe.yaml` next to it.

    Raises:
        UserError: if a folder does not exist, or a file is not readable.
    """
    rows = []
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"The folder {folder} does not exist.")
        for path in sorted(Path(folder).rglob(RESULTS_FILE)):
            columns = {f"recipe_{name}": value for name, value in read_recipe(path.parent).items()}
            rows += [{**columns, **row, "folder": str(path.parent)} for row in _read_rows(path)]
    return rows


def read_own_results(folder: str | Path) -> list[dict[str, Any]]:
    """Return the results in exactly this folder, with its column `folder`."""
    return [{**row, "folder": str(folder)} for row in _read_rows(Path(folder, RESULTS_FILE))]


def weights_of(columns: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return the identifier of the training and the step, which tell weights apart, of a result or of `Source.columns`."""
    return columns.get("training"), columns.get("step")


def is_of_training(row: Mapping[str, Any]) -> bool:
    """Return whether a result is one of the training itself, such as its loss. The base model has a held-out loss, too."""
    return row.get("task") == "training" and row.get("method") != "base model"


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
    has_training = weights is not None and weights.get("training") is not None  # an older adapter has none
    run = _run_of_checkpoint(folder)
    if run is not None:
        step = checkpoint_step(Path(folder).resolve())
        for row in _read_evaluated(run):
            is_of_step = checkpoint_step(row.get("adapter") or "") == step
            is_of_other_training = has_training and row.get("training") != weights["training"]
            if _is_of_base(row) or is_of_step and not is_of_other_training:
                own.append(row)
        return own
    training = next(filter(is_of_training, own), None)
    if training is None:
        return own
    if has_training and weights_of(training) != weights_of(weights):
        own = [row for row in own if _is_of_base(row)]
        training = {**training, **weights}
    measured = {_measurement(row) for row in own}
    added = []
    for row in _read_evaluated(folder):
        is_of_adapter = all(row.get(name) == training.get(name) for name in ("training", "method", "seed", "step"))
        if (is_of_adapter or _is_of_base(row)) and _measurement(row) not in measured:
            added.append(row)
    return own + added


def _read_evaluated(run: str | Path) -> list[dict[str, Any]]:
    """Return the results of `evaluate` in a run's folder. The readout of an earlier loop is not the answer of the model."""
    return [row for row in read_own_results(Path(run, EVALUATION_FOLDER)) if row.get("readout") is None]


def _is_of_base(row: Mapping[str, Any]) -> bool:
    """Return whether a result is one of the base model."""
    return row.get("method") == "base model"


def _run_of_checkpoint(folder: str | Path) -> Path | None:
    """Return the folder of the run that a checkpoint belongs to, or None for another folder, or for a checkpoint alone."""
    folder = Path(folder)
    if not is_checkpoint(folder):
        folder = folder.resolve()  # of "."
    path = recipe_path(folder)
    if not is_checkpoint(folder) or path.parent == folder.resolve() or not path.is_file():
        return None
    return folder.parent


def measurement_folder(output_dir: str | Path, name: str) -> str:
    """Return the folder of the results of a command that measures trained models: `output_dir`, or `name` in a run's folder.

    The folder of a run holds the results of its training alone, because a later measurement can use other examples, and also
    measures other models. The two would replace each other, and mix in the mean over the seeds. The results of a checkpoint
    go there, too, because a checkpoint is deleted when newer ones are saved. They have the number of its step.
    """
    output_dir = _run_of_checkpoint(output_dir) or output_dir
    is_run = Path(output_dir, RUN_FILE).is_file() or any(map(is_of_training, read_own_results(output_dir)))
    return str(Path(output_dir, name)) if is_run else str(output_dir)


def split_repeated(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide results into those that are shown, and those that repeat a measurement of a training itself.

    A training's own result is the one in its run's folder without the column `adapter`. `evaluate` and `diagnose` can measure
    the same again, perhaps on another number of examples, so that the results of two runs are not comparable any more.

    Args:
        rows: Results of `read_results` with the column `run`, the folder of their training.
    """
    # A folder is a run's if it has a result of a training, even if only the held-out loss of the base model is left of it.
    run_folders = {row["folder"] for row in rows if row["task"] == "training"}
    is_own = [row["folder"] in run_folders and not row.get("adapter") for row in rows]
    own_keys = {_measurement(row) for row, own in zip(rows, is_own, strict=True) if own}
    shown, repeated = [], []
    for row, own in zip(rows, is_own, strict=True):
        if own or _measurement(row) not in own_keys:
            shown.append(row)
        else:
            repeated.append(row)
    return shown, repeated


def split_choices(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide results into those that are shown, and losses of a sweep's run that only served the choice of a learning rate.

    The run of the first seed has them, also if the recipe of the final runs does not ask for them. If `diagnose` has measured
    all seeds since, on its own number of examples, the seeds can only be compared by its results.

    Args:
        rows: Results of `read_results` with the column `run`, the folder of their training.
    """
    later = {_measurement(row) for row in rows if row.get("adapter")}
    shown, of_choice = [], []
    for row in rows:
        is_of_choice = (
            row.get("task") == DEVELOPMENT
            and row["metric"] in LOOP_METRICS
            and not row.get("adapter")
            and re.match(RUN_NAME, str(row.get("recipe_run_name")))
            and not row.get("recipe_single_loop_batches")
        )
        if is_of_choice and _measurement(row) in later:
            of_choice.append(row)
        else:
            shown.append(row)
    return shown, of_choice


LOOP_METRICS = ("loss", "loss_reduction", "readout_loss", "readout_token_accuracy")
"""Metrics that `single_loop_batches` measures."""


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


def recipe_path(folder: str | Path) -> Path:
    """Return the path of the recipe of the run in a folder, or of the run that a checkpoint belongs to."""
    folder = Path(folder).resolve()
    is_in_run = is_checkpoint(folder) and not (folder / RECIPE_FILE).is_file()
    return (folder.parent if is_in_run else folder) / RECIPE_FILE


def read_recipe(folder: str | Path) -> dict[str, Any]:
    """Return the recipe of the run in a folder, with the present names of its fields, or an empty dict."""
    path = recipe_path(folder)
    recipe = load_recipe(path) if path.is_file() else {}
    return {FORMER_NAMES.get(name, name): value for name, value in recipe.items()}


def read_samples(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of the samples of a result, from its columns `folder` and `samples`."""
    return _read_lines(Path(result["folder"], result["samples"]))


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


def read_imports(output_dir: str | Path) -> dict[str, str]:
    """Return the digests of the files of `--import` that a run was trained with, by their absolute paths."""
    imports = read_run(output_dir).get("imports")
    return imports if isinstance(imports, dict) else {}


def has_trained(output_dir: str | Path) -> bool:
    """Return whether `run.json` says that a training has ended in a folder. Its measurements may be missing.

    A sweep counts only the trainings that are measured as far as it needs them (`Sweep.is_done`).
    """
    return read_run(output_dir).get("status") in ("trained", "finished")


def is_finished(output_dir: str | Path) -> bool:
    """Return whether the run in a folder has finished."""
    return read_run(output_dir).get("status") == "finished"


class Difference(NamedTuple):
    """A field in which two recipes differ. Its text is a clause, "`learning_rate` changed from 0.001 to 0.0003"."""

    field: str
    saved: Any
    new: Any

    def __str__(self) -> str:
        return f"`{self.field}` changed from {self._text(self.saved)} to {self._text(self.new)}"

    def _text(self, value: Any) -> str:
        if self.field == "num_loops" and value is None:
            return "the model's own"
        if value is None:
            return "the default"
        return short_repr(value)


def compare_recipes(
    saved: Mapping[str, Any],
    new: Mapping[str, Any],
    ignored: Collection[str] = UNCOMPARED,
    fields: Collection[str] | None = None,
) -> Difference | None:
    """Find the first difference between two recipes.

    Args:
        saved: settings of the earlier run. new: settings of the later run.
        ignored: fields that may differ.
        fields: fields to compare. Default: all.

    Returns:
        The first field that differs, with its values, or None without a difference.
    """
    if fields is None:
        fields = {**saved, **new}
    for name in fields:
        if name not in ignored and saved.get(name) != new.get(name):
            return Difference(name, saved.get(name), new.get(name))
    return None


def find_difference(
    folder: str | Path,
    new: Mapping[str, Any],
    ignored: Collection[str] = UNCOMPARED,
    fields: Collection[str] | None = None,
) -> Difference | None:
    """Compare the recipe of the run in a folder, if there is one, with a new recipe, as `compare_recipes` does."""
    saved = read_recipe(folder)
    return compare_recipes(saved, new, ignored, fields) if saved else None


def saved_step(trainer: Trainer) -> int:
    """Return the optimizer step of a trainer's weights, which is the best one after `load_best_model_at_end`."""
    state = trainer.state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        return checkpoint_step(state.best_model_checkpoint)  # the best step may have no checkpoint
    return state.global_step


def result_columns(trainer: Trainer, method: str) -> dict[str, Any]:
    """Return the columns that all results of a trainer's model share."""
    return {
        "method": method,
        "num_loops": trainer.num_loops,
        "seed": trainer.args.seed,
        "step": saved_step(trainer),
        "training": trainer.training_id,
    }


def count_examples(dataset: Dataset) -> tuple[int, int | None]:
    """Return the number of examples of a dataset, and the number of the rows that they are packed into, or None."""
    if "seq_lengths" not in dataset.column_names:
        return len(dataset), None
    return sum(len(lengths) for lengths in dataset["seq_lengths"]), len(dataset)


def training_results(trainer: Trainer, first_step: int = 0) -> list[dict[str, Any]]:
    """Return the results of a training, without the columns of `task`, `method`, `seed` and `num_loops`.

    `eval_loss` belongs to the weights that the trainer has now: it is measured at their step, or before if no evaluation was
    at the last step.

    Args:
        trainer: Trainer after its training.
        first_step: Number of steps before the last interruption, whose time is estimated from the steps after it.
    """
    import numpy as np
    import torch
    from datasets import Dataset

    history, num_steps = trainer.state.log_history, trainer.state.global_step
    last = {name: value for log in history for name, value in log.items()}
    losses = [log["loss"] for log in history if "loss" in log]
    eval_losses = [log["eval_loss"] for log in history if "eval_loss" in log and log["step"] <= saved_step(trainer)]
    steps = [0, *(log["step"] for log in history if "loss" in log)]
    rewards = [log["reward"] for log in history if "reward" in log]
    tenth = max(1, len(rewards) // 10)
    sampling = sum(getattr(callback, "seconds", 0) for callback in trainer.callback_handler.callbacks)
    seconds = (last.get("train_runtime", math.nan) - sampling) * num_steps / (num_steps - first_step or math.nan)
    num_tokens = last.get("num_tokens", math.nan)
    num_examples, num_packed_rows = math.nan, None
    if isinstance(trainer.train_dataset, Dataset):
        num_examples, num_packed_rows = count_examples(trainer.train_dataset)
    elif isinstance(trainer.train_dataset, Sized):
        num_examples = len(trainer.train_dataset)
    values = {
        "train_loss": np.dot(losses, np.diff(steps)) / num_steps if losses else math.nan,
        "eval_loss": eval_losses[-1] if eval_losses else math.nan,
        "examples": num_examples,
        "packed_rows": math.nan if num_packed_rows is None else num_packed_rows,
        "trainable_parameters": trainer.model.get_nb_trainable_parameters()[0],
        "num_tokens": num_tokens,
        "train_seconds": seconds,
        "step_seconds": seconds / num_steps,
        "tokens_per_second": num_tokens / seconds,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 or math.nan,
    }
    if rewards:
        values |= {"reward_first": np.mean(rewards[:tenth]), "reward_last": np.mean(rewards[-tenth:])}
    return [
        {"metric": name, "value": value, "unit": UNITS.get(name, ""), "gates": "unit"}
        for name, value in values.items()
        if not math.isnan(value)
    ]


ALWAYS_SAVED = (
    "rule",
    "p",
    "learning_rate",
    "seed",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)
"""Arguments of a training that `training_recipe` has also if the user has not given them."""

_UNSAVED = {
    "output_dir",
    "resume_from_checkpoint",
    "hub_token",
    "model_init_kwargs",  # the model has fields of its own
    "generation_batch_size",  # GRPOConfig derives it
    *SAFE_VALUES,
}
"""Arguments of a training that `training_recipe` leaves out, also because they can run code."""


def training_recipe(trainer: Trainer) -> dict[str, Any]:
    """Return the settings of a training in Python as a recipe. It has no data, which the program made.

    It has the fields that the user has given, and not the values that the libraries have chosen for this machine.
    """
    model, args, facts = trainer.model, trainer.args, trainer.looped.trained_with
    recipe = {
        "model_name_or_path": public_name(model.get_base_model().config.name_or_path),
        "model_revision": facts.get("base_revision"),
        "num_loops": trainer.num_loops,
        "dtype": facts.get("dtype"),
        "adapter_name_or_path": facts.get("initial_adapter"),
        **describe_adapter(model),
    }
    recipe = {name: value for name, value in recipe.items() if value is not None}
    given = {*args.given_fields()} - _UNSAVED
    for field in dataclasses.fields(trainer.config_class):
        value = getattr(args, field.name)
        if field.name in given or field.name in ALWAYS_SAVED and value is not None:
            value = value.value if isinstance(value, Enum) else value
            with suppress(TypeError):  # an object, such as `accelerator_config`
                recipe[field.name] = json.loads(json.dumps(value))
    return recipe


def _key(row: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the columns that two results in a folder share if one replaces the other."""
    ignored = {"value", "n", "samples"}
    if row.get("training"):
        ignored.add("adapter")  # its folder may have been moved
    return frozenset((name, str(value)) for name, value in row.items() if name not in ignored and value is not None)


def _measurement(row: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return what a result measures, wherever it is stored. Results of several runs need the column `run`."""
    ignored = {"folder", "adapter", "training"}
    if row.get("method") == "base model":  # it has results next to those of each training
        ignored |= {"run", "seed", "step"}
    settings = {name for name in row if name.startswith("recipe_")} - {"recipe_model_name_or_path"}
    return _key({name: value for name, value in row.items() if name not in ignored | settings})


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
