"""Old names: only this module warns about the package's own, and hides the warnings about those that libraries use."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


_OLD_CHECKPOINTING = re.compile(r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated")
_OUTPUTS_OF_LOSS = re.compile(r"`return_outputs=True`, and the logits it passes to `compute_metrics`")
_HIDDEN = (
    ("ignore", _OLD_CHECKPOINTING, FutureWarning, re.compile("transformers"), 0),
    ("ignore", _OUTPUTS_OF_LOSS, FutureWarning, re.compile("loopdropout_trainer|trl"), 0),
)
"""Filters of warnings about the calls of one library by another, which a user can do nothing about."""


@contextmanager
def hide_library_warnings() -> Iterator[None]:
    """Hide the warnings about names and arguments by which PEFT, TRL and transformers call each other in this block.

    `warnings.catch_warnings` would restore all filters in the end, also those that a callback or another thread has set
    meanwhile. This adds and removes only its own filters.
    """
    warnings.filters[:0] = _HIDDEN
    try:
        yield
    finally:
        for hidden in _HIDDEN:
            with suppress(ValueError):  # somebody has replaced the list
                warnings.filters.remove(hidden)


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

    return property(read, doc=f"Old name of `{new}`.")


def take_old_attribute(cls: type, old: str, new: str) -> None:
    """Set a class attribute to the value that a user's class gives it under its old name, for a decorator of the class."""
    if old in vars(cls):
        _warn(old, new, 3)
        setattr(cls, new, vars(cls)[old])
