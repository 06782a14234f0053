"""The commands that a sentence about a run names."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import join_command
from loopdropout_trainer.results.run_files import RECIPE_FILE, read_needed_imports
from loopdropout_trainer.settings.read_yaml import read_yaml_file
from loopdropout_trainer.settings.recipe_folders import list_runs


def complete_command(words: Sequence[str], run: str) -> str:
    """Return a command of this package as a text, with the files of `--import` that the recipe of a run needs."""
    imports = read_needed_imports(run)
    if imports:
        words = [*words, "--import", *imports]
    return join_command(*words)


def find_copy_command(run: Path) -> str | None:
    """Return the command that continues a copy of a run in its own folder, or None for a run where its recipe has it.

    The command that has started the run would go on in the former folder.

    Args:
        run: Folder of the run.
    """
    if not is_copy(run):
        return None
    words = [read_command(run), str(run / RECIPE_FILE), "--output_dir", str(run)]
    return complete_command([*words, "--resume_from_checkpoint", "true"], str(run))


def is_copy(run: Path) -> bool:
    """Return whether a run is in another folder than the one that its recipe names, which it has if a command made it."""
    recipe = _read_recipe(run)
    output_dir = recipe.get("output_dir")
    if read_command(run) is None or not output_dir:
        return False
    # A relative folder is one of the folder in which the command was run, which is not known.
    names = [name for name in Path(os.path.normpath(output_dir)).parts if name != ".."]
    return [*run.resolve().parts[-len(names) :]] != names


def read_command(run: Path) -> str | None:
    """Return the command that has trained a run, such as "sft", or None if its recipe names none, as in Python."""
    return _read_recipe(run).get("command")


def _read_recipe(run: Path) -> dict[str, Any]:
    """Return the recipe of a training, or an empty dict without one."""
    path = run / RECIPE_FILE
    return read_yaml_file(path, f"The recipe of {run}") if path.is_file() else {}


def name_sweep_command(folder: str | Path) -> str:
    """Return the words for the command that continues the sweep in a folder, which a copy of the sweep needs to be given."""
    words = "same `loopdropout sweep` command"
    if any(is_copy(run) for run in list_runs(folder)):
        words += f" with `--output_dir {shlex.quote(str(folder))}`"
    return words
