"""Old names, which work for one more release. This is the one place that warns about them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any


def warn_about_rename(old: str, new: str) -> None:
    """Warn that a name has changed. The warning shows the line of the caller's caller."""
    warnings.warn(
        f"`{old}` is now `{new}`. The old name works until the next release.", DeprecationWarning, stacklevel=3
    )


def renamed_function(old: str, function: Callable) -> Callable:
    """Return a function under its old name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        warn_about_rename(old, function.__name__)
        return function(*args, **kwargs)

    return call


def renamed_attribute(old: str, new: str) -> property:
    """Return a property under the old name of an attribute."""

    def read(instance: Any) -> Any:
        warn_about_rename(old, new)
        return getattr(instance, new)

    return property(read)


def take_old_attribute(cls: type, old: str, new: str) -> None:
    """Set a class attribute to the value that a user's class gives it under its old name."""
    if old in vars(cls):
        warn_about_rename(old, new)
        setattr(cls, new, vars(cls)[old])
