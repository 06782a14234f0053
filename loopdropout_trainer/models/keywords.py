"""The keywords of a model's `forward`: both of transformers' names for the cache, and an error for unknown names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import TransformersKwargs


_CACHE_NAMES = ("cache", "past_key_values")  # before transformers 5.24 only the second one
CACHE = next(name for name in _CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)
"""Name of the cache in the installed transformers: of the field of its outputs and of the argument of its functions."""

PASS_THROUGH = frozenset({"return_dict", *TransformersKwargs.__optional_keys__})
"""Keywords that every model of transformers takes, for attention, loss and outputs."""


def check_keywords(*more: str) -> Callable[[Callable], Callable]:
    """Let a `forward` take its cache under both names, and raise TypeError for keywords that it does not know.

    Args:
        more: keywords that `forward` passes on to another `forward`.
    """

    def decorate(forward: Callable) -> Callable:
        own = inspect.signature(forward).parameters
        known = PASS_THROUGH | set(own) | set(more)
        own_name, other_name = sorted(_CACHE_NAMES, key=lambda name: name not in own)

        @functools.wraps(forward)
        def checked(self, *args, **kwargs):
            if other_name in kwargs and own_name not in kwargs:
                kwargs[own_name] = kwargs.pop(other_name)
            unknown = [name for name in kwargs if name not in known]
            if unknown:
                raise TypeError(f"{type(self).__name__}.forward() got an unexpected keyword argument '{unknown[0]}'")
            return forward(self, *args, **kwargs)

        return checked

    return decorate
