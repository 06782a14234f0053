"""Names of the lines of tables and figures: the method, and the settings that tell results of one method apart."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd

from loopdropout_trainer.gates import RULES
from loopdropout_trainer.reports.frames import differing
from loopdropout_trainer.results.run_files import BASE_MODEL, is_of_base, read_recipe
from loopdropout_trainer.results.sweep_folder import RUN_NAME, methods_of, read_summaries


def labelled(results: pd.DataFrame) -> pd.DataFrame:
    """Add `label`: a name, and the settings, checkpoints, sweeps or codes in which its results differ.

    The name in `label` is the user's name of the method in a sweep, unless that is the name of a rule, else the method. It has
    the learning rate as soon as that of one method has it. The results are in the order of `order_labels`, which all tables
    and legends have.
    """
    label = _with_settings(name_methods(results), results, ALIKE)
    named = results.assign(label=label)
    return named.sort_values("label", key=lambda labels: labels.map(order_labels(named)), kind="stable")


def order_labels(results: pd.DataFrame) -> dict[str, int]:
    """Return the place of each label: the base model, LoRA, the methods of a sweep in the order of its recipe, then others.

    Those at the same place are ordered by their names and the numbers in them.

    Args:
        results: Results with the column `label`.
    """
    summaries = read_summaries(results["run"].dropna().unique())
    keys = {}
    for row in results.drop_duplicates("label").to_dict("records"):
        methods = methods_of(summaries.get(row["run"], {}))
        place = methods.index(row["variant"]) if row["variant"] in methods else len(methods)
        numbers = [float(number) for number in re.findall(NUMBER, row["label"])]
        name = _name_in_label(row["label"])
        keys[row["label"]] = (name != BASE_MODEL, row["method"] != "LoRA", place, name, numbers, row["label"])
    return {label: place for place, label in enumerate(sorted(keys, key=keys.get))}  # False comes before True


NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
"""Number in a label, such as 4, 0.5 or 1e-04."""

ALIKE = ("recipe_learning_rate",)
"""Settings that all labels have if one label has them. In an unfinished sweep, a method may have one learning rate so far."""

SHORT_NAMES = {
    "recipe_learning_rate": "lr ",
    "recipe_num_loops": "K = ",
    "code": "code ",
    "readout": "readout of loop ",
}
"""Short names of settings in labels. The others are written as "p = 0.5"."""

MEASURED_AT = ("checkpoint", "readout")
"""Columns of results that are not of the final weights, or of the output of the last loop. Labels always have them."""


def name_methods(results: pd.DataFrame) -> pd.Series:
    """Return the user's name of each result's method in a sweep, unless that is the name of a rule, else the method.

    The rule of a run may be the user's own, whose file is not imported here.
    """
    variants, rules = results["variant"], results.reindex(columns=["recipe_rule"])["recipe_rule"]
    is_rule = variants.isin(RULES) | (variants == rules)
    is_own = variants.notna() & ~is_rule & ~is_of_base(results)
    return variants.where(is_own, results["method"])


def name_as_in_report(results: pd.DataFrame) -> pd.DataFrame:
    """Return new results of adapters in the order of a report, with the names that their methods have there as `label`.

    Args:
        results: Results with the columns `method` and `adapter`, the folder of each adapter.
    """
    recipes = {adapter: read_recipe(adapter) for adapter in results["adapter"].dropna().unique()}
    run_names = results["adapter"].map(lambda adapter: str(recipes[adapter].get("run_name")), na_action="ignore")
    rules = results["adapter"].map(lambda adapter: recipes[adapter].get("rule"), na_action="ignore")
    variants = run_names.astype(str).str.extract(RUN_NAME)["variant"]
    named = results.assign(run=results["adapter"], variant=variants, recipe_rule=rules)
    named["label"] = name_methods(named)
    return named.sort_values("label", key=lambda labels: labels.map(order_labels(named)), kind="stable")


def find_label_fields(results: pd.DataFrame) -> pd.Series:
    """Return the settings that the label of each result has in all tables of a report, with spaces between them.

    They are those in which trainings of one name differ anywhere in the report, so that a training has one label, also in a
    table that lacks the other trainings. Settings of `ALIKE` are in the labels of all names. The base model has its settings
    only in tables where they differ.

    Args:
        results: All results of the report.
    """
    names = name_methods(results)
    fields_of = {}
    for name, rows in results.reset_index(drop=True).groupby(names.to_numpy()):
        fields_of[name] = {*_differing_settings(rows)} - {*MEASURED_AT}
    alike = {*ALIKE} & set().union(*fields_of.values())
    fields_of[BASE_MODEL] = set()
    texts = {name: " ".join(sorted(fields | alike)) for name, fields in fields_of.items()}
    return names.map(texts)


def _with_settings(names: pd.Series, results: pd.DataFrame, alike: Collection[str] = ()) -> pd.Series:
    """Return the names of results, and the settings of their recipes, sweeps or codes in which those of one name differ.

    If a report is of several sweeps, results have the names of their sweeps, also in a table that only one sweep is in. The
    names stand for the settings that differ only between sweeps. The same holds for all settings of `find_label_fields`.

    Args:
        names: Name of each result.
        results: Results.
        alike: Settings that all names have if the results of one name differ in them.
    """
    fields_of = {name: _differing_settings(rows) for name, rows in results.groupby(names)}
    shared: set[str] = set()
    for fields in fields_of.values():
        shared.update({*alike}.intersection(fields))
    if results["sweep"].nunique() > 1 or results["num_sweeps"].max() > 1:
        shared.add("sweep")
    texts = names.copy()
    for name, rows in results.groupby(names):
        fields = shared.union(fields_of[name], _read_label_fields(rows))
        for field in sorted(fields, key=lambda field: (field in MEASURED_AT, field)):  # which come last
            title = SHORT_NAMES.get(field, f"{field.removeprefix('recipe_')} = ")
            settings = f", {title}" + rows[field].map(_setting_text)
            texts.loc[rows.index] += settings.where(rows[field].notna(), "")
    return texts


def _read_label_fields(rows: pd.DataFrame) -> set[str]:
    """Return the settings of `find_label_fields` that results of one name have. Those outside of a report have none."""
    if "label_fields" not in rows:
        return set()
    fields: set[str] = set()
    for text in rows["label_fields"].dropna().unique():
        fields.update(text.split())
    return fields


def _differing_settings(rows: pd.DataFrame) -> list[str]:
    """Return the settings, `sweep` and `code` in which results of one name differ, and those of `MEASURED_AT`.

    Settings that are equal inside of each sweep are left out, because the name of the sweep tells them apart.
    """
    columns = rows.filter(regex="^(recipe_|sweep$|code$)")
    fields = differing(columns)
    if "sweep" in fields:
        in_sweeps = {"sweep"}
        for _, own in columns.groupby("sweep", dropna=False):
            in_sweeps.update(differing(own))
        fields = sorted(in_sweeps)
    # Also if all of them are of one checkpoint, which is not the run's adapter.
    return fields + [name for name in MEASURED_AT if rows[name].notna().any()]


def _setting_text(value: Any) -> str:
    """Return a setting as a text. A list of one value is written as the value."""
    if isinstance(value, float) and value.is_integer():  # a whole number in a column where other results have none
        return f"{value:.0f}"
    return re.sub(r"^\[([^,]*)\]$", r"\1", str(value))


def _name_in_label(label: str) -> str:
    """Return the name that a label begins with. Settings may follow it."""
    return label.split(", ")[0]


def is_base_label(labels: Sequence[str] | pd.Series | pd.Index) -> np.ndarray:
    """Return whether each label is of the base model, perhaps with settings, such as "base model, split_seed = 0"."""
    return np.array([_name_in_label(str(label)) == BASE_MODEL for label in labels], dtype=bool)


def has_seeds(labels: Sequence[str] | pd.Series | pd.Index) -> np.ndarray:
    """Return whether the seeds of each label count. The base model, which has none, counts only if there is nothing else."""
    is_trained = ~is_base_label(labels)
    return is_trained | (not is_trained.any())


def find_baseline(ours: pd.DataFrame, results: pd.DataFrame) -> pd.DataFrame | None:
    """Return the results of the LoRA that a method is compared with, or None if there is none.

    It is the LoRA of the same sweep if there is one, at the same checkpoint and readout. If there are several, both methods
    must have results of several settings, and those with equal settings are compared.

    Args:
        ours: Results of one label.
        results: Results of `labelled` that measure the same.
    """
    lora = results[results["method"] == "LoRA"]
    of_method = results[results["method"] == ours["method"].iloc[0]]
    own_sweep = ours["sweep"].iloc[0]
    if (lora["sweep"] == own_sweep).any():
        lora = lora[lora["sweep"] == own_sweep]
        of_method = of_method[of_method["sweep"] == own_sweep]
    fields = {*_differing_settings(lora)} - {*MEASURED_AT}
    if not fields <= {*_differing_settings(of_method)}:
        return None
    for field in [*fields, *MEASURED_AT]:
        value = ours[field].iloc[0]
        if pd.isna(value):
            lora = lora[lora[field].isna()]
        else:
            lora = lora[lora[field].isin([value])]
    if lora.empty:
        return None
    return lora[lora["label"] == lora["label"].iloc[0]]
