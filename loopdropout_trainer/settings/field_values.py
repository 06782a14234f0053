"""The value of a field, from a recipe or the words of a command line, with the type and the choices of the field."""

from __future__ import annotations

import dataclasses
import json
import os.path
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from typing import Any, get_args, get_origin

from loopdropout_trainer.errors import UserError, check_type, describe_type, short_repr
from loopdropout_trainer.settings.field_hints import HOW_TO_COMPARE, SEVERAL_TEXTS, WITHOUT_VALUE, WORDS_FOR_NULL
from loopdropout_trainer.settings.fields import check_choice, check_value, choices_of, items_of, single_types
from loopdropout_trainer.settings.read_yaml import read_yaml


_COMMAS = re.compile(r"[\d.eE+-]+(,[\d.eE+-]+)+,?")
"""Numbers that are separated by commas."""

_COMMA_AS_POINT = re.compile(r"0,\d+")
"""A number below 1 with a comma instead of its point."""


def _is_list(hint: Any) -> bool:
    """Return whether a field takes several values."""
    types = single_types(hint)
    return _item_type(types) is not None or list in types


def is_optional(hint: Any) -> bool:
    """Return whether a field takes None. Another field with the value `null` has its default."""
    return type(None) in get_args(hint)


def read_value(field: dataclasses.Field, value: Any, hint: Any) -> Any:
    """Return a value as a field takes it. Raise UserError unless it has the field's type, choices and bounds."""
    _check_null(field.name, value, hint)
    _check_commas(field.name, value, hint)
    fitted = _fit(value, hint)
    check_choice(field.name, fitted, choices_of(field, single_types(hint)))
    if isinstance(fitted, list):
        _check_single(field.name, fitted, hint)
    kinds = field.metadata.get("kinds") or describe_accepted(hint)
    check_type(f"`{field.name}`", fitted, hint, kinds, given=value)
    check_value(field, fitted, hint, given=value)
    return fitted


def describe_accepted(hint: Any) -> str:
    """Return the type of a field in words, with the single values of which `read_value` makes a list."""
    types = single_types(hint)
    if not _takes_single_item(types):
        return describe_type(hint)
    return f"{describe_type(_item_type(types))} or {describe_type(hint)}"


def _check_single(name: str, values: Sequence[Any], hint: Any) -> None:
    """Raise UserError that says how to compare values if one of `HOW_TO_COMPARE` has several ones."""
    if name in HOW_TO_COMPARE and len(values) > 1 and not _is_list(hint):
        words = short_repr([*values])
        raise UserError(
            f"`{name}` must be {describe_accepted(hint)}, got {words}. To compare several, {HOW_TO_COMPARE[name]}."
        )


def _check_null(name: str, value: Any, hint: Any) -> None:
    """Raise UserError that says how to write no value if a list that is optional gets a word such as "none" as its item."""
    words = value if isinstance(value, list) else [value]
    if not is_optional(hint) or not _takes_single_item(single_types(hint)) or len(words) != 1:
        return
    if isinstance(words[0], str) and words[0].lower() in WORDS_FOR_NULL:
        purpose = WITHOUT_VALUE.get(name, "for no value")
        raise UserError(f"`{name}` must be {describe_accepted(hint)}, got {words[0]!r}. Write `null` {purpose}.")


def _check_commas(name: str, value: Any, hint: Any) -> None:
    """Raise UserError with the right form if a list of numbers gets numbers with commas in one word, such as "1,2,3"."""
    types = single_types(hint)
    if not _takes_single_item(types):
        return
    for word in items_of(value):
        if not isinstance(word, str):
            continue
        if _item_type(types) is float and _COMMA_AS_POINT.fullmatch(word):
            continue  # the error about its type says to write a point
        if _COMMAS.fullmatch(word):
            numbers = " ".join(word.replace(",", " ").split())
            raise UserError(
                f"`{name}` must be {describe_accepted(hint)}, got {word!r}. Separate the numbers by spaces: `--{name} "
                f"{numbers}`."
            )


def _fit(value: Any, hint: Any) -> Any:
    """Return a value as a field's type takes it: a list, a float of an integer, a text of a number, or a path without `~`."""
    types = single_types(hint)
    item_type = _item_type(types)
    is_single_item = value is not None and _takes_single_item(types)
    if item_type is not None and (isinstance(value, list) or is_single_item):
        return [_fit(item, item_type) for item in items_of(value)]
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    if float in types and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if str in types and isinstance(value, int | float) and type(value) not in types:
        return json.dumps(value)
    return value


def _takes_single_item(types: Collection[Any]) -> bool:
    """Return whether a single value is accepted as a list of one item. Where a text is another type, it stays a text."""
    return _item_type(types) is not None and str not in types


def _item_type(types: Collection[Any]) -> Any:
    """Return the type of the items if one of the types is a list, else None."""
    for kind in types:
        if get_origin(kind) is list:
            return get_args(kind)[0]
    return None


def option_value(name: str, words: Sequence[str], hint: Any, first_words: str) -> Any:
    """Return the value of `--name words`, for a field of a type."""
    if words == ["null"]:
        return None
    if not words and hint is bool:
        return True
    types = single_types(hint)
    item_type = _item_type(types)
    is_list = _is_list(hint)
    if len(words) > 1 and not is_list:
        _check_single(name, words, hint)
        fixes = [f"Words without `--field` must come first, {first_words}."]
        if name in SEVERAL_TEXTS:
            fixes.insert(0, SEVERAL_TEXTS[name])
        raise UserError(f"`{name}` must have one value, got {shlex.join(words)}. {' '.join(fixes)}")
    is_text = str in types or str in single_types(item_type)
    is_missing = not words and not is_list
    is_null = "" in words and not is_text  # as YAML reads an empty text
    if is_missing or is_null:
        raise UserError(f"`{name}` must have a value.")
    takes_mapping = any(dict in (kind, get_origin(kind)) for kind in types)
    values = []
    for word in words:
        is_mapping = takes_mapping and word.startswith("{")
        if is_text and not is_mapping:
            values.append(word)
        else:
            values.append(read_yaml(word, f"`{name}`"))
    return values[0] if len(values) == 1 else values
