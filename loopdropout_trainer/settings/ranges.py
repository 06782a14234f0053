"""What a setting may hold: numbers, lists, mappings and folders. Each check raises ValueError."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import UserError


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxdict = _repr.maxlist = 6
shown = _repr.repr
"""Return `repr` of a value of the user's, cut to a length that fits into a sentence."""


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < math.inf


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError unless a setting is an integer in [least, most]."""
    if not _is_number(value, int) or value < least or (most is not None and value > most):
        valid = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise UserError(f"`{name}` must be an integer {valid}; got {shown(value)}.")


def check_number(
    name: str, value: Any, least: float = 0.0, most: float = math.inf, above: bool = False, below: bool = False
) -> None:
    """Raise ValueError unless a setting is a finite number in [least, most]; `above`, `below` leave out an end."""
    good = _is_number(value, int, float) and (value > least if above else value >= least)
    if not good or not (value < most if below else value <= most):
        valid = f"in {'(' if above else '['}{least:g}, {most:g}{')' if below else ']'}"
        if math.isinf(most):
            valid = f"above {least:g}" if above else f"of at least {least:g}"
        raise UserError(f"`{name}` must be a number {valid}; got {shown(value)}.")


def check_choice(name: str, value: Any, valid: Sequence[str | None]) -> None:
    """Raise ValueError unless a setting is one of the valid values; None among them: it may be left out."""
    if value not in valid:
        raise UserError(f"`{name}` must be one of {', '.join(filter(None, valid))}; got {shown(value)}.")


def check_list(name: str, value: Any) -> None:
    """Raise ValueError unless a setting is None or a list of different strings."""
    good = isinstance(value, (list, tuple)) and all(isinstance(item, str) and item.strip() for item in value)
    if value is not None and not good:
        raise UserError(f"`{name}` must be a list of strings, such as [a, b]; got {shown(value)}.")
    check_distinct(name, value or ())


def check_distinct(name: str, values: Sequence[Any]) -> None:
    """Raise ValueError for a list that names something twice."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise UserError(f"`{name}` must name each of its values once; got {shown(value)} twice.")


def check_folder(name: str, value: Any) -> None:
    """Raise ValueError if a setting names no folder that files can be written to; nothing is made."""
    if not isinstance(value, (str, os.PathLike)) or not str(value).strip() or "\0" in str(value):
        raise UserError(f"`{name}` must be the path of a folder; got {shown(value)}.")
    folder = next(folder for folder in (Path(value), *Path(value).parents) if folder.exists())
    if not folder.is_dir():
        raise UserError(f"`{name}` must be the path of a folder; {folder} is a file.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"`{name}` must be a folder that can be written to; {folder} cannot.")
