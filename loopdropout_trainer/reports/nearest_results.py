"""A sentence about the results that are nearest to a selection without any: those that miss one of its conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from loopdropout_trainer.reports.frames import select
from loopdropout_trainer.reports.recipe_columns import name_value, read_column


MOST_VALUES = 5
"""Number of values that a sentence names."""


def describe_nearest(results: pd.DataFrame, wanted: Mapping[str, Any]) -> str:
    """Return a sentence with the values of the only condition that results do not fulfil, or "" if all miss several.

    Of several such conditions, the one is named in which the results have the fewest values. The metric comes last, because
    a user knows what the number shall be.

    Args:
        results: From `load_results`.
        wanted: Conditions that no result fulfils together.
    """
    values_by_condition: dict[str, list[Any]] = {}
    for name in sorted(wanted, key=lambda name: name == "metric"):
        # A column without any condition would have its default one, such as the depth of the training.
        any_value = read_column(results, name).unique()
        values = read_column(select(results, {**wanted, name: any_value}), name).dropna().unique()
        if len(values):
            values_by_condition[name] = [*values]
    if not values_by_condition:
        return ""
    name = min(values_by_condition, key=lambda name: len(values_by_condition[name]))
    texts = [name_value(value) for value in values_by_condition[name]]
    ending = ""
    if len(texts) > MOST_VALUES:
        ending = f" and {len(texts) - MOST_VALUES} more"
    return f" The results with all other conditions have {name} = {', '.join(texts[:MOST_VALUES])}{ending}."
