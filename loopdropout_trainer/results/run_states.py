"""Whether a run is being trained or measured now, and whether it is measured as far as its recipe asks for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import count
from loopdropout_trainer.files import is_locked, lock_path
from loopdropout_trainer.results.recipe_changes import compare_recipes
from loopdropout_trainer.results.run_files import is_finished
from loopdropout_trainer.settings.recipe_folders import LOCK, SETTINGS_FILE


_MOST_NAMES = 6
"""Number of runs that a sentence names."""


def name_runs(names: Sequence[str]) -> str:
    """Return the names of runs as a list in words, which has the first ones if there are many."""
    text = ", ".join(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        text += f" and {len(names) - _MOST_NAMES} more"
    return text


def _list_locks(folder: Path) -> list[Path]:
    """Return the locks of a folder: that of the sweep which trains its run, and that of a command which writes to it."""
    return [folder / LOCK, lock_path(folder, "folder")]


def is_running(folder: Path) -> bool:
    """Return whether a process trains or measures the run in a folder, be it of a sweep or of a command of its own."""
    return any(is_locked(path) for path in _list_locks(folder))


def name_start(folder: Path) -> str:
    """Return the time of the last start of a run, such as "22:31", with the date unless it is today, or "" if unknown.

    A sweep writes the recipe of a run at each start, while its waiting workers touch the lock. A command touches its lock.
    """
    for path in (folder / SETTINGS_FILE, lock_path(folder, "folder")):
        if path.is_file():
            start = time.localtime(path.stat().st_mtime)
            is_today = time.strftime("%Y-%m-%d", start) == time.strftime("%Y-%m-%d")
            return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", start)
    return ""


def describe_running(folder: str | Path, names: Iterable[str]) -> str:
    """Return the words about runs that processes train or measure now, with their last starts, or "" without any.

    Args:
        folder: Folder of the sweep.
        names: Names of the runs in it.
    """
    texts = []
    for name in names:
        start = name_start(Path(folder, name))
        texts.append(f"{name} since {start}" if start else name)
    if not texts:
        return ""
    verb = "is" if len(texts) == 1 else "are"
    return f"{count(len(texts), 'run')} {verb} being trained or measured now ({name_runs(texts)})"


def is_measured(folder: str | Path, saved: Mapping[str, Any], measure: Mapping[str, Any]) -> bool:
    """Return whether a run has finished with some measurements. It may have further ones, of fields that are no longer set.

    Args:
        folder: Folder of the run.
        saved: Recipe that it was started with last.
        measure: Fields of the recipe that it must have.
    """
    return is_finished(folder) and not compare_recipes(saved, measure, fields=measure)
