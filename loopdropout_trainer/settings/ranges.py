"""What a setting may hold: numbers, lists, mappings and folders."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxdict = _repr.maxlist = 6
shown = _repr.repr
"""Return `repr` of a value of the user's, cut to a length that fits into a sentence."""


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError unless a setting is an integer in [least, most]."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not good or (most is not None and value > most):
        valid = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise ValueError(f"`{name}` must be an integer {valid}; got {shown(value)}.")


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


def check_choice(name: str, value: Any, valid: Sequence[str | None]) -> None:
    """Raise ValueError unless a setting is one of the valid values; None among them: it may be left out."""
    if value not in valid:
        names = ", ".join(each for each in valid if each is not None)
        raise ValueError(
            f"`{name}` must be one of {names}{', or be left out' if None in valid else ''}; got {shown(value)}."
        )


def check_list(name: str, value: Any) -> None:
    """Raise ValueError unless a setting is None or a list of different strings."""
    if value is None:
        return
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and item.strip() for item in value):
        raise ValueError(f"`{name}` must be a list of strings, such as [a, b]; got {shown(value)}.")
    check_distinct(name, value)


def check_distinct(name: str, values: list[Any] | tuple[Any, ...]) -> None:
    """Raise ValueError for a list that names something twice."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"`{name}` must name each of its values once; got {shown(value)} twice.")


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
