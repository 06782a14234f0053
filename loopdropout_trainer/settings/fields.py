"""Fields of the scripts' dataclasses: their help, their bounds, and when they matter.

`option` declares all of it where the field is. `library_fields.py` does the same for inherited fields of TRL and transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, field, fields
from enum import Enum
from functools import cache
from numbers import Real
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from loopdropout_trainer.bounds import Bounds
from loopdropout_trainer.errors import (
    UserError,
    describe_type,
    find_unusable,
    hint_at_number,
    short_repr,
)
from loopdropout_trainer.hints import USUAL_DTYPES, closest_known
from loopdropout_trainer.settings.field_hints import field_hint
from loopdropout_trainer.settings.library_fields import LIBRARY_FIELDS


LARGEST_INTEGER = 2**31 - 1
"""Largest integer of a field without an upper bound. Libraries store larger ones in 32 bits."""


def option(
    default: Any,
    help: str,
    when: str = "training",
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    **metadata: Any,
) -> Any:
    """Return a field of a script's dataclass.

    Args:
        default: Default value. `...` makes the field required.
        help: Text in `--help`.
        when: Results that the field affects. All comparisons of recipes are derived from it:

            - `training`: It changes the trained adapter. A run is not continued with another value.
            - `repetition`: It differs between trainings that are averaged. A run is not continued with another value.
            - `monitoring`: It says when a training is evaluated and saved. It may change if a run is resumed.
            - `score`: It changes the scores of tasks after the training. Results with other values are not averaged.
            - `measurement`: It says what is measured after the training.
            - `output`: It says what is saved after the training.
            - `never`: It changes no result.
        at_least, above, at_most, below: Bounds of the number, or of each number of a list.
        **metadata: Further metadata, such as `choices`, or the `group` of `--help` that shows it instead of its class's.
    """
    metadata |= {
        "help": help,
        "when": when,
        "bounds": Bounds(at_least, above, at_most, below),
        "not_empty": default != "",
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=MISSING if default is ... else default, metadata=metadata)


def metadata_of(own: Field) -> Mapping[str, Any]:
    """Return the metadata of a field: from `option`, or from `LIBRARY_FIELDS` for a field that a library describes."""
    if "bounds" in own.metadata or not own.metadata:
        return own.metadata
    return LIBRARY_FIELDS.get(own.name, {})


def default_of(own: Field) -> Any:
    """Return the default of a field, or None if the field must be set."""
    if own.default_factory is not MISSING:
        return own.default_factory()
    return None if own.default is MISSING else own.default


@cache  # each training checks its 200 fields twice
def single_types(hint: Any) -> frozenset[Any]:
    """Return the types of a type hint without unions: `{list[int], str, None}` for `list[int] | str | None`."""
    if get_origin(hint) in (Union, UnionType):
        return frozenset().union(*map(single_types, get_args(hint)))
    return frozenset([None if hint is type(None) else hint])


def items_of(value: Any) -> list[Any]:
    """Return the items of a field's value."""
    return list(value) if isinstance(value, list | tuple) else [value]


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise UserError unless the value of a field, or each item of a list, is one of the field's choices, if it has any."""
    choices = [choice for choice in choices if choice]
    if not choices:
        return
    for item in items_of(value):
        if item is not None and item not in choices:
            matches = closest_known(str(item), choices, USUAL_DTYPES)
            raise UserError(f"`{name}` must be one of {', '.join(choices)}, got {short_repr(item)}.{matches}")


def check_value(own: Field, value: Any, hint: Any, given: Any) -> None:
    """Raise UserError unless a value of a field's type is within its bounds, and not an empty text.

    An empty text is accepted where it is the default, and for most inherited fields.

    Args:
        own: The field.
        value: Its value.
        hint: Its type.
        given: Value that the user has given, of which `value` was made, such as 0 for 0.0. The message names it.
    """
    metadata = metadata_of(own)
    if value == "" and metadata.get("not_empty"):
        raise UserError(f"`{own.name}` must not be empty.")
    types = single_types(hint)
    only_integers = int in types and float not in types
    bounds = metadata.get("bounds", Bounds())
    if isinstance(value, str) and metadata.get("words") and value not in metadata["words"]:
        raise UserError(
            f"`{own.name}` must be {bounds}, or {' or '.join(metadata['words'])}, got {short_repr(value)}."
        )
    for item, given_item in zip(items_of(value), items_of(given), strict=True):
        if isinstance(item, Real) and not isinstance(item, bool):
            _check_number(own.name, item, bounds, only_integers, short_repr(given_item))
        if isinstance(item, str) and (problem := find_unusable(item)):
            raise UserError(f"`{own.name}` must not have {problem}, got {short_repr(item)}.")


def _check_number(name: str, number: float, bounds: Bounds, only_integers: bool, written: str) -> None:
    """Raise UserError unless a number is within its bounds. `written` is the number in the message."""
    if not bounds.allow(number):
        raise UserError(f"`{name}` must be {bounds}, got {written}.")
    if only_integers and number != int(number):
        raise UserError(f"`{name}` must be an integer, got {written}.")
    largest = LARGEST_INTEGER if only_integers else sys.float_info.max
    has_largest = bounds.at_most is not None or bounds.below is not None
    if not has_largest and abs(number) > largest:
        raise UserError(f"`{name}` must be from {-largest:,} to {largest:,}, got {written}.")


@cache
def _type_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def check_fields(instance: Any, names: Collection[str] | None = None) -> None:
    """Check the numbers and texts of a dataclass that Python code has made, as `check_value` does.

    Args:
        instance: The dataclass.
        names: Fields to check. Default: all.

    Raises:
        UserError: for a value out of bounds, and for a text or a mapping instead of a number, and for one number
            instead of a list of numbers.
    """
    hints = _type_hints(type(instance))
    for own in fields(instance):
        if names is not None and own.name not in names:
            continue
        value = getattr(instance, own.name)
        types = single_types(hints[own.name]) - {None}
        _check_is_number(own, value, hints[own.name])
        if types == {bool} and isinstance(value, str):  # "false" would count as true
            raise UserError(f"`{own.name}` must be true or false, got {short_repr(value)}.")
        check_choice(own.name, value, choices_of(own, types))
        check_value(own, value, hints[own.name], given=value)


def _check_is_number(own: Field, value: Any, hint: Any) -> None:
    """Raise UserError for a text instead of a number, also in a list, and for one number instead of a list of numbers.

    A list that also takes one number is checked where its bounds are known, as `p` by its rule.
    """
    types = single_types(hint) - {None}
    if value is None or not types:
        return
    advice = hint_at_number(value)
    if types <= {int, float}:
        is_wrong = not isinstance(value, Real)
    elif types <= {list[int], list[float]} and not own.metadata.get("takes_one_number"):
        is_wrong = any(isinstance(item, str) for item in items_of(value))
        if isinstance(value, Real):
            is_wrong = True
            advice = f" Write [{value}]."
    else:
        return
    if is_wrong:
        kinds = own.metadata.get("kinds") or describe_type(hint)
        raise UserError(f"`{own.name}` must be {kinds}, got {short_repr(value)}.{advice}")


def choices_of(own: Field, types: Collection[Any]) -> list[str]:
    """Return the words that a field accepts: those of `option` or of the library's metadata, or those of its enumeration.

    A library raises an error about a wrong word of an enumeration without the name of the field, or ignores other words.
    """
    choices = metadata_of(own).get("choices") or own.metadata.get("choices") or []
    words = list(choices)
    for kind in types:
        if isinstance(kind, type) and issubclass(kind, Enum):
            words += [member.value for member in kind]
    return words


class NamedFieldsMixin:
    """Errors for unknown fields of a dataclass, which name the field that is meant."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        known = [own.name for own in fields(cls)]
        for name, value in kwargs.items():
            if name not in known:
                raise UserError(f"`{name}` is not a field of {cls.__name__}.{field_hint(name, known, value)}")
        return super().__new__(cls)


def check_mappings(instance: Any, names: Collection[str]) -> None:
    """Raise UserError if one of these fields is set, but is not a mapping. A field that the dataclass lacks is not checked."""
    for name in names:
        value = getattr(instance, name, None)
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"`{name}` must be a mapping, got {short_repr(value)}.")
