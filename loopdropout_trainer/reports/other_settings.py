"""The settings in which a method and the LoRA that it is compared with differ, next to the method itself, or two sweeps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd

from loopdropout_trainer.errors import short_repr
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.reports.frames import IGNORED, differing
from loopdropout_trainer.reports.labels import name_methods
from loopdropout_trainer.reports.recipe_columns import PREFIX, name_value, read_column
from loopdropout_trainer.results.run_files import is_of_base
from loopdropout_trainer.results.sweep_folder import find_chosen_rate, read_summaries


_OF_METHOD = {"rule", "run_name", "compare_with"}
"""Fields of recipes that say which method it is, next to the fields of its rule."""

_MOST_SWEEPS = 4
"""Number of sweeps whose values of a setting a sentence names."""

NOT_CHOSEN = "which its sweep did not choose"
"""Remark about a learning rate."""


def find_other_settings(ours: pd.DataFrame, baseline: pd.DataFrame) -> str:
    """Return the settings in which a method differs from its LoRA, such as "max_steps = 8 instead of 4", or "".

    The fields of the rule are the method itself. Learning rates are left out if a sweep has chosen both, because the
    comparison is one of methods at their best learning rates. Another rate than the chosen one has a remark.

    Args:
        ours: Results of one label, which differ in no other setting than those without an effect.
        baseline: Results of the LoRA, from `find_baseline`.
    """
    both = pd.concat([ours.iloc[:1], baseline.iloc[:1]])
    texts = []
    for column in sorted(both.columns[both.columns.str.startswith(PREFIX)].difference([*IGNORED])):
        name = column.removeprefix(PREFIX)
        saved = both[column]
        is_equal = saved.isna().all() or saved.iloc[0] == saved.iloc[1]
        if is_equal or name in _OF_METHOD or _is_of_rule(name, both):
            continue
        values = read_column(both, column)  # with defaults, which take seconds to load
        own, other = _name_setting(values.iloc[0]), _name_setting(values.iloc[1])
        if own == other:
            continue
        if name == "learning_rate":
            are_chosen = _find_choices(both)
            if all(are_chosen):
                continue
            if are_chosen[0] is False:
                own += f", {NOT_CHOSEN},"
            if are_chosen[1] is False:
                other += f", {NOT_CHOSEN}"
        texts.append(f"{name} = {own} instead of {other}")
    return ", ".join(texts)


def _is_of_rule(name: str, both: pd.DataFrame) -> bool:
    """Return whether a field is one of a rule. LoRA lacks those of a rule that is not imported here."""
    of_rules = {field.name for rule in RULES.values() for field in dataclasses.fields(rule)}
    rule = both[f"{PREFIX}rule"].iloc[0] if f"{PREFIX}rule" in both else None
    is_unknown_rule = rule not in RULES and pd.isna(both[f"{PREFIX}{name}"].iloc[1])
    return name in of_rules or is_unknown_rule


def _name_setting(value: Any) -> str:
    """Return a value of a setting as a text of some words."""
    if value is None or value is pd.NA or value != value:
        return "the default"
    return short_repr(name_value(value)).strip("'\"")


def _find_choices(both: pd.DataFrame) -> list[bool | None]:
    """Return whether a sweep has chosen the learning rate of each of two results. None: it has chosen none of the method."""
    summaries = read_summaries(both["run"])
    are_chosen = []
    for run, variant, rate in both[["run", "variant", f"{PREFIX}learning_rate"]].itertuples(index=False):
        best = find_chosen_rate(summaries[run], variant)
        are_chosen.append(None if best is None else rate == best)
    return are_chosen


def explain_other_settings(numbers: pd.DataFrame) -> list[str]:
    """Return a sentence about the settings in which compared methods differ from their LoRA, or nothing without any.

    Args:
        numbers: Table with the level or index `method`, and the columns `difference` and `other_settings`.
    """
    if "other_settings" not in numbers:
        return []
    compared = numbers[numbers["difference"].notna()]
    texts = pd.Series(compared["other_settings"].fillna("").to_numpy(), compared.index.get_level_values("method"))
    methods: dict[str, dict[str, None]] = {}
    for method, text in texts.items():
        if text:
            methods.setdefault(text, {})[method] = None
    parts = [f"{', '.join(names)}: {text}" for text, names in methods.items()]
    if not parts:
        return []
    return [f"Other settings than those of LoRA, from which a difference can come, too: {'; '.join(parts)}."]


def describe_other_sweeps(results: pd.DataFrame) -> list[str]:
    """Return a sentence about the settings that each sweep has another value of for the same method, or nothing without any.

    Labels have the names of the sweeps instead of these settings, and learning rates if they differ.

    Args:
        results: Results of a report.
    """
    trained = results[~is_of_base(results) & results["sweep"].notna()]
    texts: dict[str, None] = {}
    for _, rows in trained.groupby(name_methods(trained), sort=False):
        for column in differing(rows.loc[:, rows.columns.str.startswith(PREFIX)]):
            name = column.removeprefix(PREFIX)
            if name in _OF_METHOD or name == "learning_rate":
                continue
            values = read_column(rows, column).map(_name_setting)
            of_sweeps = values.groupby(rows["sweep"], sort=False).unique()
            if (of_sweeps.map(len) == 1).all():  # else the labels have it
                listed = [f"{sweep}: {own[0]}" for sweep, own in of_sweeps.items()]
                text = f" ({', '.join(listed)})" if len(listed) <= _MOST_SWEEPS else ""
                texts[f"{name}{text}"] = None
    if not texts:
        return []
    return [f"Other settings between the sweeps, from which a difference can come, too: {', '.join(sorted(texts))}."]
