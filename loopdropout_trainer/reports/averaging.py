"""Means over seeds, and only over seeds: runs that differ in anything else that has an effect are never averaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from loopdropout_trainer.record.identity import ALIKE, ONE_SETTING, differences
from loopdropout_trainer.record.measurement import ALL, PLACES
from loopdropout_trainer.reports.reading import OBJECTS, OF_ROWS, Missing, ReportError


FIRST = ("model", "sweep", "num_loops", "rank", "p", "learning_rate", "steps", "evaluation.rows")
"""Columns that `telling` tries first, in this order."""

_FACTS = ("benchmark", "family", "metric", "unit", "total", "method", "model", "sweep", "steps", *PLACES)
"""What rows say of themselves, which must agree where they are averaged."""

OF_THE_RUN = ("model", "sweep", "steps")
"""What a row says of its run."""

PLACES_OF_IDENTITIES = ("evaluation.num_loops", "evaluation.gates", "evaluation.readout")
"""What an identity says of which loops run; rows say it too."""

_NO_SETTINGS = {*OF_ROWS, *OBJECTS, "data_seed", "gate_seed", "panel", "label", "position"}


def settings_of(rows: pd.DataFrame) -> list[str]:
    """Return the columns that are settings of the run."""
    others = [name for name in rows if not name.startswith(("evaluation.", "weights.", "cost."))]
    return [*OF_THE_RUN, *(name for name in others if name not in _NO_SETTINGS)]


def varying(rows: pd.DataFrame, names: Iterable[str]) -> list[str]:
    """Return those columns that hold more than one value; a missing value counts as one."""
    return [name for name in names if name in rows and rows[name].nunique(dropna=False) > 1]


def telling(rows: pd.DataFrame, names: Sequence[str], beside: Sequence[str] = ()) -> list[str]:
    """Return those of the columns that, together with `beside`, distinguish as many rows as all of them do."""
    columns = list(beside)
    number = len(rows[columns].drop_duplicates()) if columns else 1
    for name in varying(rows, [*(first for first in FIRST if first in names), *names]):
        number_with_it = len(rows.drop_duplicates([*columns, name]))
        if number_with_it > number:
            columns.append(name)
            number = number_with_it
    return columns[len(beside) :]


def shown(value: Any) -> str:
    """Return a value of a column for people: small numbers as 1e-4, of text over 60 letters the beginning and a hash."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    if pd.isna(value):
        return "–"
    if isinstance(value, float):
        if 0 < abs(value) < 1e-3:
            return np.format_float_scientific(value, precision=3, trim="-", exp_digits=1)
        return f"{value:g}"
    text = " ".join(str(value).split())
    if len(text) <= 60:
        return text
    digest = hashlib.sha256(str(value).encode()).hexdigest()
    return f"{text[:48]}... ({digest[:6]})"


def check_column(table: pd.DataFrame, name: Any) -> None:
    """Refuse, by a ReportError, a column that no run has."""
    if name not in table:
        raise ReportError(
            f"`{name}` is no column of these results (docs/reports.md): long.csv has all that there are."
        )


def numbers_in(values: pd.Series, name: str) -> pd.Series:
    """Return a column's values as floats; ReportError if they are no numbers."""
    if pd.api.types.infer_dtype(values) not in ("integer", "floating", "mixed-integer-float"):
        first = shown(values.tolist()[:3])
        raise ReportError(f"`{name}` must hold numbers; got {first}.")
    return values.astype(float)


def select(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows whose columns have the wanted values, or one of a list of them; None: the value is missing."""
    for name, value in wanted.items():  # a list in a setting stands in the table as its JSON
        check_column(rows, name)
        values = [*value, json.dumps(value)] if isinstance(value, list) else [value]
        rows = rows[rows[name].isin(values)]
    return rows


def select_as_trained(rows: pd.DataFrame, wanted: Mapping[str, Any], axis: str = "") -> pd.DataFrame:
    """Return the selected rows; where neither the selection nor `axis` speaks of it, at unit gates, the last readout, and the
    depth of the training.
    """
    said = {*wanted, axis}
    rows = select(rows, wanted)
    if said.isdisjoint(("gates", "loop", "dose")):
        rows = rows[rows["gates"] == ALL]
    if said.isdisjoint(("readout", "loop")):
        rows = rows[rows["readout"].isna()]
    return rows if "depth" in said else rows[is_at_trained_depth(rows)]


def is_at_trained_depth(rows: pd.DataFrame) -> pd.Series:
    """Say which rows are at the depth that their models were trained at, if it is known."""
    trained = rows["num_loops"]
    return trained.isna() | (rows["depth"] == trained)


def average(rows: pd.DataFrame, what: str, column: str = "value") -> pd.Series:
    """Return the values by seed, of one column, of rows that are equal in all else that has an effect.

    Raises:
        ReportError: if they are not, with `what` and what differs; or if two of them are of one seed.
    """
    differing = []
    for name in varying(rows, _FACTS):
        values = ", ".join(map(shown, rows[name].unique()[:3]))
        differing.append(f"`{name}`: {values}")
    for identities in OBJECTS:
        differing = differing or changes(rows, identities, ONE_SETTING)
    if differing:
        settings = "; ".join(differing[:4])
        raise ReportError(f"{what} would average runs of different settings ({settings}): filter or tell them apart.")
    seeds = [f"unknown {place}" if seed is None else seed for place, seed in enumerate(rows["seed"])]
    values = pd.Series(rows[column].tolist(), seeds)
    values = values.sort_index(key=lambda index: index.map(str))
    if values.index.has_duplicates:
        seed = values.index[values.index.duplicated()][0]
        sources = ", ".join(rows["source"][rows["seed"] == seed])
        raise ReportError(f"{what} has two results of seed {shown(seed)} ({sources}): leave one out.")
    return values


def changes(rows: pd.DataFrame, column: str, parts: Sequence[str]) -> list[str]:
    """Return in words what the identities in a column differ in from the first one, of these parts."""
    identities = [identity for identity in rows.get(column, ()) if identity is not None]
    for identity in identities:
        if changed := differences(identities[0], identity, parts):
            return [f"{change.name}: {shown(change.before)[:60]}, {shown(change.after)[:60]}" for change in changed]
    return []


def difference(b: pd.DataFrame, a: pd.DataFrame, what: str, part: str | None = None) -> pd.DataFrame:
    """Return b - a [seeds, problems] in percentage points; [seeds, 1] of results that do not hold every prediction.

    `part`: `both_extractable` counts only problems where both completions hold an answer, `missing_in_either` only the others.

    Raises:
        ReportError: if either side is not one setting, they have different seeds, or were not evaluated alike.
    """
    ours = average(b, what)
    other = average(a, what)
    if list(ours.index) != list(other.index):
        seeds = [shown(list(values.index)) or "none" for values in (ours, other)]
        raise Missing(f"{what} compares the seeds {' with '.join(seeds)}.")
    both_sides = pd.concat([b, a])
    check_alike(both_sides, what)
    if both_sides["verdicts"].notna().all():
        gains = 100 * (_by_problem(b, "verdicts", what) - _by_problem(a, "verdicts", what))
    elif part is None:
        gains = (ours - other).astype(float).to_frame()
    else:
        raise Missing(f"{what} needs every prediction, which these results do not hold.")
    if part is None:
        return gains
    both = _by_problem(b, "answered", what) * _by_problem(a, "answered", what)
    return gains * (both if part == "both_extractable" else 1 - both)


def _by_problem(rows: pd.DataFrame, column: str, what: str) -> pd.DataFrame:
    """Return a column of lists as a table [seeds, problems]."""
    values = average(rows, what, column)
    return pd.DataFrame(values.tolist(), values.index, dtype=float)


def check_alike(rows: pd.DataFrame, what: str) -> None:
    """Refuse, by a ReportError, results of one metric that were not evaluated alike: problems, tokens, turns, template, ..."""
    for (_, metric), part in rows.groupby(["benchmark", "metric"], sort=False):
        if differing := changes(part, "of_number", ALIKE):
            raise ReportError(
                f"{what} would compare results on {metric} that were evaluated differently ({differing[0]})."
            )
