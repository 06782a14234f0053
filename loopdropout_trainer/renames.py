"""Old names, which work for one more release. This is the one place that warns about them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any


def _warn(old: str, new: str, num_frames: int) -> None:
    """Warn that a name has changed, with the line of the user's code, `num_frames` calls above this one."""
    message = f"`{old}` is now `{new}`. The old name works until the next release."
    warnings.warn(message, DeprecationWarning, stacklevel=num_frames + 1)


def renamed_function(old: str, function: Callable) -> Callable:
    """Return a function under its old name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _warn(old, function.__name__, 2)
        return function(*args, **kwargs)

    return call


def renamed_attribute(old: str, new: str) -> property:
    """Return a property under the old name of an attribute."""

    def read(instance: Any) -> Any:
        _warn(old, new, 2)
        return getattr(instance, new)

    return property(read)


def take_old_attribute(cls: type, old: str, new: str) -> None:
    """Set a class attribute to the value that a user's class gives it under its old name, for a decorator of the class."""
    if old in vars(cls):
        _warn(old, new, 3)
        setattr(cls, new, vars(cls)[old])
