"""Numbers and folders that a setting may hold."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from loopdropout_trainer.settings.field_types import shown


def check_whole(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError unless a setting is a whole number in [least, most]."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not good or (most is not None and value > most):
        valid = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise ValueError(f"`{name}` must be a whole number {valid}; got {shown(value)}.")


def check_number(
    name: str, value: Any, least: float = 0.0, most: float = math.inf, above: bool = False, below: bool = False
) -> None:
    """Raise ValueError unless a setting is a finite number in [least, most]; `above`, `below` leave out an end."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    good = good and (value > least if above else value >= least) and (value < most if below else value <= most)
    if not good:
        if math.isinf(most):
            valid = f"a number above {least:g}" if above else f"a number of at least {least:g}"
        else:
            valid = f"a number in {'(' if above else '['}{least:g}, {most:g}{')' if below else ']'}"
        raise ValueError(f"`{name}` must be {valid}; got {shown(value)}.")


def check_list(name: str, value: Any) -> None:
    """Raise ValueError if a setting that takes a list of texts, or nothing, is a text or anything else."""
    if value is not None and not (isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)):
        raise ValueError(f"`{name}` must be a list of texts, such as [a, b]; got {shown(value)}.")
    if value is not None and len(set(value)) < len(value):
        raise ValueError(f"`{name}` must name each of its items once; got {shown(value)}.")


def check_folder(name: str, value: Any) -> None:
    """Raise ValueError if a setting names no folder that files can be written to; nothing is made."""
    if not isinstance(value, (str, os.PathLike)) or not str(value).strip() or "\0" in str(value):
        raise ValueError(f"`{name}` must be the path of a folder; got {shown(value)}.")
    folder = Path(value)
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
    except OSError as error:  # a name that is too long
        raise ValueError(f"`{name}` {shown(str(value))} cannot be used: {error.strerror}.") from None
    if not folder.is_dir():
        raise ValueError(f"`{name}` must be the path of a folder; {folder} is a file.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"`{name}` must be a folder that can be written to; {folder} cannot.")
