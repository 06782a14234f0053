"""Errors of the user's own code, such as a rule, a preparation, a reward or a scorer of a file of `--import`, in one sentence.

A command calls such code in many places, and the traceback of its error says where. So nothing needs a guard at these places.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple


_PACKAGE = Path(__file__).parent
_SCRIPTS = _PACKAGE.parent / "recipes"  # of a clone. An installed package has them inside.

IMPORTED: list[str] = []
"""Absolute paths of the files of `--import`."""


class _Place(NamedTuple):
    """A line of code, and the function that it belongs to."""

    file: Path
    line: int
    function: str


def describe_own_error(error: BaseException) -> str | None:
    """Return a sentence about an error that the user's own code has raised, or None for an error of other code.

    The sentence has the function, such as `MyRule.sample`, its file and its line, and the error. If both the user's code and
    this package were running, the error is of the one that ran last, apart from the libraries that it called.
    """
    place = _find_syntax_error(error) or _find_last_line(error) or _find_wrong_call(error)
    if place is None:
        return None
    function = "" if place.function == "<module>" else f"`{place.function}` in "
    text = " ".join("".join(traceback.format_exception_only(error)[-1:]).split())
    return f"{function}{place.file}, line {place.line}, raised {text}"


def _find_syntax_error(error: BaseException) -> _Place | None:
    """Return the place of a syntax error in a file of the user, which has not run."""
    if isinstance(error, SyntaxError) and error.filename and _is_own(error.filename):
        return _Place(Path(error.filename), error.lineno or 1, "<module>")
    return None


def _find_last_line(error: BaseException) -> _Place | None:
    """Return the line of the user's code that has raised an error itself, or by calling a library."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if _is_own(code.co_filename):
            place = _make_place(code, line)
        elif _is_of_package(code.co_filename):
            place = None
    return place


def _find_wrong_call(error: BaseException) -> _Place | None:
    """Return the beginning of a function of the user that takes other arguments than those that the package gives it."""
    match = re.match(r"([\w.]+)\(\) (takes|missing|got)", str(error))
    if not isinstance(error, TypeError) or match is None:
        return None
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if file and _is_own(file):
            code = _find_code(module, match[1])
            if code is not None and _is_own(code.co_filename):
                return _make_place(code, code.co_firstlineno)
    return None


def _find_code(holder: Any, name: str) -> CodeType | None:
    """Return the code of a function by its name in a module, such as `MyRule.sample`, or None."""
    for part in name.split("."):
        holder = inspect.getattr_static(holder, part, None)
    if isinstance(holder, staticmethod | classmethod):
        holder = holder.__func__
    return getattr(holder, "__code__", None)


def _make_place(code: CodeType, line: int) -> _Place:
    name = code.co_qualname.rpartition("<locals>.")[2]
    return _Place(Path(code.co_filename), line, name)


def _is_own(file: str) -> bool:
    """Return whether a file is one of `IMPORTED`, or the user's other code in their folders."""
    if file in IMPORTED:
        return True
    is_near = any(Path(file).is_relative_to(Path(own).parent) for own in IMPORTED)
    return is_near and not _is_of_package(file) and not is_of_libraries(file)


def _is_of_package(file: str) -> bool:
    """Return whether a file is of this package or one of its scripts, and not an example that the user imports."""
    path = Path(file)
    return file not in IMPORTED and (path.is_relative_to(_PACKAGE) or path.is_relative_to(_SCRIPTS))


@cache  # the commands of a sweep ask for the same folders thousands of times
def is_of_libraries(path: str) -> bool:
    """Return whether a path is of an installed library or of Python's own, as far as its text says."""
    parts = Path(path).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return Path(path).is_relative_to(sysconfig.get_path("stdlib"))
