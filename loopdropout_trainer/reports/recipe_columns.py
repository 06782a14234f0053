"""The settings of recipes as columns of results, which tables select by, also those that a recipe leaves at their default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import Field
from functools import cache
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from loopdropout_trainer.data.arguments import SFTDataArguments
from loopdropout_trainer.results.run_files import is_of_base
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, SFTArguments
from loopdropout_trainer.settings.command_fields import TRAININGS, find_command_fields, find_default, find_fields


PREFIX = "recipe_"
"""Start of the names of the columns."""


@cache
def _quick_fields() -> dict[str, Field]:
    """Return the fields of `sft` that need no library of the trainings, by name."""
    return find_fields((ModelArguments, AdapterArguments, SFTArguments, SFTDataArguments))[0]


@cache
def setting_names() -> list[str]:
    """Return the names of the fields of all trainings. It loads the libraries of the trainings, which takes seconds."""
    names: dict[str, None] = {}
    for command in TRAININGS:
        names.update(dict.fromkeys(find_command_fields(command)))
    return [*names]


def is_setting_column(name: Any) -> bool:
    """Return whether a name is the column of a setting, also of one that the results do not have."""
    if not str(name).startswith(PREFIX):
        return False
    setting = name.removeprefix(PREFIX)
    return setting in _quick_fields() or setting in setting_names()


def hint_at_column(name: Any) -> str:
    """Return the end of a message about an unknown column that is the name of a setting, or ""."""
    return f" The setting has the column `{PREFIX}{name}`." if name in setting_names() else ""


def read_column(results: pd.DataFrame, name: str) -> pd.Series:
    """Return a column of results. A setting that the recipe of a training does not name has its default.

    A list of one value, such as `p: [0.5]` in the recipes of trainings, is the value. A column that no result has is empty.
    """
    values = results[name] if name in results else pd.Series(None, results.index, dtype=object)
    if not name.startswith(PREFIX):
        return values
    if _has_lists(values):
        values = values.map(_take_single)
    is_unnamed = values.isna()
    if "method" in results:
        is_unnamed &= ~is_of_base(results)  # it has only the settings that it depends on
    if not is_unnamed.any():
        return values
    rules = results.reindex(columns=["recipe_rule"])["recipe_rule"][is_unnamed]
    values = values.astype(object)
    for rule in rules.unique():
        of_rule = rules.index[rules.isna() if pd.isna(rule) else rules == rule]
        values[of_rule] = _default_of(name.removeprefix(PREFIX), None if pd.isna(rule) else rule)
    return values


def _has_lists(values: pd.Series) -> bool:
    """Return whether a column may hold lists, as texts. Each cell of a table asks, so only the different values are read."""
    if is_numeric_dtype(values):
        return False
    return any(isinstance(value, str) and value.startswith("[") for value in values.unique())


def _take_single(value: Any) -> Any:
    """Return the item of a list of one item, which a cell holds as a text, and every other value unchanged."""
    if isinstance(value, str) and value.startswith("["):
        items = json.loads(value)
        if len(items) == 1:
            return items[0]
    return value


@cache
def _default_of(name: str, rule: str | None) -> Any:
    """Return the default of a setting, or None if there is none, or not the same for all trainings."""
    if name in _quick_fields():
        return _as_text(find_default(_quick_fields(), name))
    defaults = []
    for command in TRAININGS:
        fields = find_command_fields(command)
        if name in fields:
            defaults.append(_as_text(find_default(fields, name, rule)))
    return defaults[0] if defaults and defaults.count(defaults[0]) == len(defaults) else None


def _as_text(value: Any) -> Any:
    """Return a default as a cell of a result has it: a list or a mapping as a text, and the value of an enumeration."""
    value = getattr(value, "value", value)
    return json.dumps(value) if isinstance(value, list | Mapping) else value


def describe_values(results: pd.DataFrame, wanted: Mapping[str, Any]) -> str:
    """Return a sentence with the values of the first wanted setting that no result has with this value, or ""."""
    for name, value in wanted.items():
        if not str(name).startswith(PREFIX):
            continue
        values = read_column(results, name)
        if values.isin(pd.Series(value, dtype=object)).any():
            continue
        present = [name_value(own) for own in values.dropna().unique()]
        if present:
            return f" The results have {name} = {', '.join(present)}."
    return ""


def name_value(value: Any) -> str:
    """Return a value of a setting as a text. A whole number is a float in a column where other results have none."""
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    return str(value)
