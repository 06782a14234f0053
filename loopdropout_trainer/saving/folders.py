"""The kind of a folder by its files: a model, an adapter, a run without one, or a sweep. Only this module decides it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import is_checkpoint
from loopdropout_trainer.results.run_files import RECIPE_FILE, RUN_FILE, is_of_training, read_own_results, recipe_path
from loopdropout_trainer.saving.authors_format import CONFIG_FILE
from loopdropout_trainer.saving.checkpoints import STATE_FILE, list_checkpoints, warn_once
from loopdropout_trainer.saving.facts import MODELS, Kind
from loopdropout_trainer.saving.metadata import METADATA_FILE, read_metadata
from loopdropout_trainer.saving.saved_adapter import holds_adapter
from loopdropout_trainer.settings.recipe_folders import list_runs, sort_folders


_FILES_OF_A_RUN = (RECIPE_FILE, RUN_FILE, STATE_FILE, "training_args.bin")
"""Files next to an adapter that a training, also one of another program, has saved in a folder of its own."""

_DEPTHS_BELOW = ("*", "*/*", "*/*/*")
"""Patterns of the folders below one in which adapters are searched. The runs of a sweep are three folders below it."""


class Files(NamedTuple):
    """The kind of a folder, and the folder of its model or adapter, which is a subfolder for a named adapter."""

    kind: Kind
    folder: Path


def find_files(folder: Path, name: str, metadata: Mapping[str, Any]) -> Files:
    """Return the kind of a folder by its files, and the folder that holds the model or the adapter.

    PEFT saves the adapter `default` in the folder itself, and another adapter in a subfolder with its name. If there are
    several, `loop_dropout.json` is next to the trained ones, of which the last training's is meant. A subfolder can also be
    a run of its own, such as that of `compare_with`.

    Raises:
        UserError: If the folder holds neither a model nor an adapter, and is neither a run nor a sweep, or if several adapters
            could be meant.
    """
    trained = [path for path in find_named(folder) if (path / METADATA_FILE).is_file()]
    if holds_adapter(folder):
        if not trained:
            return Files("adapter", folder)
        if (folder / METADATA_FILE).is_file():
            return Files("adapter", _find_last_trained([folder, *trained], folder))
        return Files("adapter", _use_subfolder(trained, folder, name))
    if (folder / "config.json").is_file():
        return Files(_find_kind(folder, metadata), folder)
    if _is_run(folder):
        saved = _find_saved(folder, trained)
        if saved:
            return Files("adapter", _use_subfolder(saved, folder, name))
        return Files("unfinished run", folder)
    if list_runs(folder):
        return Files("sweep", folder)
    if find_named(folder):
        return Files("adapter", _use_subfolder(_find_adapters_below(folder), folder, name))
    raise UserError(
        f"The folder {name} holds neither a model nor an adapter: it has no config.json and no {CONFIG_FILE}, and it is not a "
        f"run.{_describe_runs_below(folder, name)}"
    )


def find_named(folder: Path) -> list[Path]:
    """Return the subfolders with an adapter that PEFT can have saved under its name, and not those of other runs."""
    subfolders = [path.parent for path in sort_folders(folder.glob(f"*/{CONFIG_FILE}"))]
    return [path for path in subfolders if not is_checkpoint(path) and not _is_own_run(path)]


def _find_saved(run: Path, trained: list[Path]) -> list[Path]:
    """Return the subfolders with the adapters that the trainer of a run has saved, as far as its files tell.

    A program can save other adapters in subfolders of a run, which are not meant by the folder of the run. A trainer of this
    package writes `loop_dropout.json` next to its adapter, and another one its arguments into the folder where it saves.
    """
    is_of_this_package = any((run / file).is_file() for file in (RECIPE_FILE, RUN_FILE))
    if trained or is_of_this_package:
        return trained
    if (run / "training_args.bin").is_file():
        return find_named(run)
    return []


def _find_adapters_below(folder: Path) -> list[Path]:
    """Return the folders with adapters, of runs and others, up to three folders below one, without checkpoints."""
    adapters = []
    for depth in _DEPTHS_BELOW:
        for config in sorted(folder.glob(f"{depth}/{CONFIG_FILE}")):
            names = config.parent.relative_to(folder).parts
            if not any(is_checkpoint(name) for name in names):
                adapters.append(config.parent)
    return adapters


def _is_run(folder: Path) -> bool:
    """Return whether a folder without an adapter of its own is that of a run or of a checkpoint."""
    # Saving an adapter begins with `loop_dropout.json`, which is alone in the folder if the process was killed there.
    has_file = _is_own_run(folder) or (folder / METADATA_FILE).is_file()
    return is_checkpoint(folder) or has_file or bool(list_checkpoints(folder))


def _is_own_run(folder: Path) -> bool:
    """Return whether a folder with an adapter is that of a training, and not of one of several adapters of a model."""
    return any((folder / file).is_file() for file in _FILES_OF_A_RUN)


def _describe_runs_below(folder: Path, name: str) -> str:
    """Return a sentence with a run in a folder of runs, or of one method of a sweep, or "" if there is none."""
    runs = []
    for depth in _DEPTHS_BELOW:
        recipes = folder.glob(f"{depth}/{RECIPE_FILE}")
        runs += sort_folders(path.parent for path in recipes if holds_adapter(path.parent))  # and not a merged model
    if not runs:
        return ""
    # Without their number, because deeper folders can have more.
    return f" Name one of the runs in it, such as {Path(name, runs[0].relative_to(folder))}."


def _use_subfolder(adapters: list[Path], folder: Path, name: str) -> Path:
    """Return the only one of several folders of adapters below `folder`, and say so, or raise UserError."""
    names = [path.relative_to(folder).as_posix() for path in adapters]
    if len(adapters) > 1:
        raise UserError(
            f"`adapter` must be the folder of one adapter, got {name} with the adapters {', '.join(names)}."
        )
    warn_once(f"{name} holds no trained adapter itself. The adapter in its subfolder {names[0]} is used.")
    return adapters[0]


def _find_last_trained(adapters: list[Path], folder: Path) -> Path:
    """Return the folder of the adapter that the last training in `folder` has trained, else `folder` itself."""
    trainings = [row.get("training") for row in read_own_results(recipe_path(folder).parent) if is_of_training(row)]
    chosen = folder
    for path in adapters:
        if trainings and read_metadata(path).get("training_id") == trainings[-1]:
            chosen = path
    names = {path: "default" if path == folder else path.name for path in adapters}
    warn_once(f"{folder} holds the trained adapters {', '.join(names.values())}. The adapter {names[chosen]} is used.")
    return chosen


def _find_kind(folder: Path, metadata: Mapping[str, Any]) -> Kind:
    """Return the kind of model in a folder: the saved one, or by the files of a folder that was saved without it."""
    if metadata.get("kind") in MODELS:
        return metadata["kind"]
    if (folder / "looped.py").is_file():
        return "standalone model"
    if (folder / RECIPE_FILE).is_file():
        return "merged model"
    return "base model"
