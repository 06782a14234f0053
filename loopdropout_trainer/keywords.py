"""Unknown keywords of functions, which Python names without the argument that is meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from loopdropout_trainer.errors import UserError, closest_match
from loopdropout_trainer.usual_names import hint_at_p


Function = TypeVar("Function", bound=Callable[..., Any])


def explain_unknown(function: Function) -> Function:
    """Let a function raise UserError for an unknown keyword, with the one that is meant. Its signature stays the same."""
    arguments = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*positional: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in arguments:
                hint = hint_at_p(name) if "p" in arguments else ""
                hint = hint or closest_match(name, arguments)
                raise UserError(f"`{name}` is not an argument of `{function.__name__}`.{hint}")
        return function(*positional, **keywords)

    return checked
