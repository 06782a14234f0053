"""The folders that a training and a sweep write, which are not recipes, and the runs of a sweep."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from loopdropout_trainer.errors import count, join_command


SETTINGS_FILE = "sweep_recipe.yaml"
"""File in the folder of a run with the recipe that the sweep gives to its training."""

LOCK = "sweep.lock"
"""File in the folder of a run that the sweep locks which trains it."""


_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def sort_folders(folders: Iterable[Path]) -> list[Path]:
    """Return folders in the order of their names, in which numbers count as numbers: seed_9 is before seed_10."""
    return sorted(folders, key=_split_name)


def _split_name(folder: Path) -> tuple[list[list[str | float]], str]:
    """Return the texts and the numbers in each part of a path in turn, and the path, which decides between equal numbers."""
    parts: list[list[str | float]] = []
    for name in folder.parts:
        words: list[str | float] = []
        for place, word in enumerate(_NUMBER.split(name)):
            is_number = place % 2 == 1
            words.append(float(word) if is_number else word)
        parts.append(words)
    return parts, str(folder)


def list_runs(folder: str | Path) -> list[Path]:
    """Return the folders of the runs that a sweep has started in a folder."""
    runs = [path.parent for path in Path(folder).glob(f"*/lr_*/seed_*/{SETTINGS_FILE}")]
    return sort_folders(run for run in runs if has_started(run))


def has_started(run: Path) -> bool:
    """Return whether a run of a sweep was started. One whose command was only printed has nothing but its recipe.

    A sweep locks a run before it looks at its recipe, so the lock says nothing. A run that it starts has a log.
    """
    return run.is_dir() and any(path.name not in (SETTINGS_FILE, LOCK) for path in run.iterdir())


def hint_at_folder(folder: Path) -> str:
    """Return the end of a message about a folder that is given as a recipe: which file or command is meant, or ""."""
    recipe = folder / "recipe.yaml"
    if recipe.is_file():
        return f" Did you mean {recipe}? It is the recipe of a training, as for `{join_command('sft', recipe)}`."
    report = f"`{join_command('report', folder)}`"
    runs = list_runs(folder)
    if runs:
        return (
            f" It is a sweep of {count(len(runs), 'run')}, which `loopdropout sweep` continues if you give the recipe that it "
            f"was started with. {report} shows its results."
        )
    for depth in ("", "*/", "*/*/", "*/*/*/", "*/*/*/*/"):  # a folder of sweeps has runs four folders below it
        if any(folder.glob(f"{depth}results.jsonl")):
            return f" It is a folder of results, which {report} shows."
    recipes = sorted(str(path) for pattern in ("*.yaml", "*.yml") for path in folder.glob(pattern))
    if len(recipes) == 1:
        return f" Did you mean {recipes[0]}?"
    if recipes:
        return f" Name one of the {len(recipes)} recipes in it, such as {recipes[0]}."
    return ""
