"""Does a value fit the type of a dataclass's field, and how is that type called in a sentence?"""

from __future__ import annotations

import enum
import json
import reprlib
import types
import typing
from typing import Any


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_PLURALS = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts"}

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxdict = _repr.maxlist = 6
shown = _repr.repr
"""Return `repr` of a value of the user's, cut to a length that fits into a sentence."""


def fits(value: Any, hint: Any) -> bool:
    """Say whether a value from YAML or JSON fits a field's type; what the hint does not say is accepted.

    A whole number is a number, true and false are not; a bare number or text stands for a list of one.
    """
    if stands_for_a_list(value, hint):
        value = [value]
    options = _options(hint)
    if len(options) > 1:
        return any(fits(value, option) for option in options)
    (hint,) = options
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (int, float):
        return isinstance(value, (int, origin)) and not isinstance(value, bool)
    if origin in (bool, str):
        return isinstance(value, origin)
    if origin is type(None):
        return value is None
    if origin is typing.Literal:
        return value in args
    if origin is list:
        return isinstance(value, (list, tuple)) and (not args or all(fits(item, args[0]) for item in value))
    if origin is dict:
        return isinstance(value, dict) and (
            not args or all(fits(key, args[0]) and fits(item, args[1]) for key, item in value.items())
        )
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return any(value in (member, member.value) for member in origin)
    return True


def stands_for_a_list(value: Any, hint: Any) -> bool:
    """Say whether a bare number or text is given where a list of such is expected, and nothing else would take it."""
    lists = [option for option in _options(hint) if typing.get_origin(option) is list]
    kinds = [option for option in _options(hint) if option not in (type(None), *lists)]
    if len(lists) != 1 or kinds or not isinstance(value, (int, float, str)):
        return False
    return fits(value, typing.get_args(lists[0])[0])


def takes_mapping(hint: Any) -> bool:
    """Say whether a field takes a mapping."""
    return any((typing.get_origin(option) or option) is dict for option in _options(hint))


def described(hint: Any) -> str:
    """Return what a field accepts, in words."""
    options = [option for option in _options(hint) if option is not type(None)]
    return " or ".join(dict.fromkeys(map(_described, options)))


def json_of(field: str, text: str, kind: type = dict) -> Any:
    """Return a field's value, given as JSON on the command line.

    Raises:
        ValueError: naming the field, if the text is not JSON of that kind.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be read"
        raise ValueError(
            f"`{field}` must be a mapping (JSON on the command line, such as '{{\"name\": value}}'); got {shown(text)} "
            f"({reason})."
        ) from None
    if not isinstance(value, kind):
        raise ValueError(f"`{field}` must be a mapping; got {shown(value)}.")
    return value


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, those with more than one value to tell from any text before `str`."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return (hint,)
    options = typing.get_args(hint)
    # `SchedulerType | str`: the text must be one of the enumeration's.
    return tuple(option for option in options if option is not str) if any(map(_is_enum, options)) else options


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _described(hint: Any) -> str:
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is list:
        example = {float: "0.5, 0.5", int: "1, 2"}.get(args[0] if args else None, "a, b")
        return f"a list of {_PLURALS.get(args[0] if args else None, 'values')}, such as [{example}]"
    if origin is dict:
        values = f" with {_PLURALS[args[1]]}" if len(args) == 2 and args[1] in _PLURALS else ""
        return f"a mapping{values}, such as {{name: value}}"
    if _is_enum(origin):
        return f"one of {', '.join(str(member.value) for member in origin)}"
    if origin is typing.Literal:
        return " or ".join(str(value).lower() for value in args)
    return _NAMES.get(origin, getattr(origin, "__name__", str(origin)))
