"""The commands that a sentence about a run names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from loopdropout_trainer.errors import join_command
from loopdropout_trainer.results.run_files import RECIPE_FILE, read_needed_imports
from loopdropout_trainer.settings.read_yaml import read_yaml_file


def complete_command(words: Sequence[str], run: str) -> str:
    """Return a command of this package as a text, with the files of `--import` that the recipe of a run needs."""
    imports = read_needed_imports(run)
    if imports:
        words = [*words, "--import", *imports]
    return join_command(*words)


def find_copy_command(run: Path) -> str | None:
    """Return the command that continues a copy of a run in its own folder, or None for a run where its recipe has it.

    The command that has started the run, or its sweep, would go on in the former folder.

    Args:
        run: Folder of the run.
    """
    path = run / RECIPE_FILE
    recipe = read_yaml_file(path, f"The recipe of {run}") if path.is_file() else {}
    command, output_dir = recipe.get("command"), recipe.get("output_dir")
    if not command or not output_dir:  # of a training in Python
        return None
    # A relative folder is one of the folder in which the command was run, which is not known.
    names = [name for name in Path(os.path.normpath(output_dir)).parts if name != ".."]
    if [*run.resolve().parts[-len(names) :]] == names:
        return None
    words = [command, str(path), "--output_dir", str(run), "--resume_from_checkpoint", "true"]
    return complete_command(words, str(run))
