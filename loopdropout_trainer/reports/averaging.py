"""Means over seeds, and only over seeds: runs that differ in anything else that has an effect are never averaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from loopdropout_trainer.record.identity import ALIKE, ONE_SETTING, Difference, differences
from loopdropout_trainer.record.measurement import PLACES
from loopdropout_trainer.reports.reading import OBJECTS, Missing, ReportError
from loopdropout_trainer.reports.statistics import estimate


FIRST = ("model", "sweep", "num_loops", "rank", "p", "learning_rate", "steps", "evaluation.rows")
"""Columns that `telling` tries first, in this order."""

_FACTS = ("benchmark", "family", "metric", "unit", "total", "method", "model", "sweep", "steps", *PLACES)
"""What rows say of themselves, which must agree where they are averaged."""

_NO_SETTINGS = {
    *(
        *_FACTS,
        "writer",
        "value",
        "identity",
        "run",
        "seed",
        "data_seed",
        "gate_seed",
        "verdicts",
        "answered",
        "source",
    ),
    *("panel", "label", "position", *OBJECTS),
}
OF_THE_RUN = ("model", "sweep", "steps")
"""What a row says of its run."""

PLACES_OF_IDENTITIES = {f"evaluation.{name}" for name in ("num_loops", "gates", "readout")}
"""What an identity says of which loops run; rows say it too."""


def settings_of(rows: pd.DataFrame) -> list[str]:
    """Return the columns that are settings of the run."""
    names = [
        name for name in rows if name not in _NO_SETTINGS and not name.startswith(("evaluation.", "weights.", "cost."))
    ]
    return [*OF_THE_RUN, *names]


def varying(rows: pd.DataFrame, names: Iterable[str]) -> list[str]:
    """Return those columns that hold more than one value; a missing value counts as one."""
    return [name for name in names if name in rows and rows[name].nunique(dropna=False) > 1]


def telling(rows: pd.DataFrame, names: Iterable[str], beside: Sequence[str] = ()) -> list[str]:
    """Return those of the columns that, together with `beside`, distinguish as many rows as all of them do."""
    number = lambda names: len(rows[names].drop_duplicates()) if names else 1
    found: list[str] = []
    for name in sorted(varying(rows, names), key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        if number([*beside, *found, name]) > number([*beside, *found]):
            found.append(name)
    return found


def shown(value: Any) -> str:
    """Return a value of a column for people: small numbers as 1e-4, of text over 60 letters the beginning and a hash."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    if pd.isna(value):
        return "–"
    if isinstance(value, float):
        small = 0 < abs(value) < 1e-3
        return np.format_float_scientific(value, precision=3, trim="-", exp_digits=1) if small else f"{value:g}"
    text = " ".join(str(value).split())
    digest = hashlib.sha256(str(value).encode()).hexdigest()[:6]
    return text if len(text) <= 60 else f"{text[:48]}... ({digest})"


def check_column(table: pd.DataFrame, name: Any) -> None:
    """Refuse, by a ReportError, a column that no run has."""
    if name not in table:
        raise ReportError(
            f"`{name}` is no column of these results (docs/reports.md): long.csv has all that there are."
        )


def numbers_in(values: pd.Series, name: str) -> pd.Series:
    """Return a column's values as floats; ReportError if they are no numbers."""
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise ReportError(f"`{name}` must hold numbers; got {str(values.tolist()[:3])[:80]}.")
    return values.astype(float)


def select(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows whose columns have the wanted values, or one of a list of them; None: the value is missing."""
    for name, value in wanted.items():  # a list in a setting stands in the table as its JSON
        check_column(rows, name)
        values = [*value, json.dumps(value)] if isinstance(value, list) else [value]
        rows = rows[rows[name].isin(values)]
    return rows


def average(rows: pd.DataFrame, what: str, column: str = "value") -> pd.Series:
    """Return the values by seed, of one column, of rows that are equal in all else that has an effect.

    Raises:
        ReportError: if they are not, with `what` and what differs; or if two of them are of one seed.
    """
    named = [f"`{name}`: {', '.join(map(shown, rows[name].unique()[:3]))}" for name in varying(rows, _FACTS)]
    if named := named or [f"{each.name}: {of_both(each)}" for each in changes(rows, OBJECTS, ONE_SETTING)]:
        differ = "; ".join(named[:4])
        raise ReportError(f"{what} would average runs of different settings ({differ}): filter or tell them apart.")
    seeds = [f"unknown {place}" if seed is None else seed for place, seed in enumerate(rows["seed"])]
    values = rows.assign(seed=seeds).set_index("seed")[column].sort_index(key=lambda seeds: seeds.map(str))
    if values.index.has_duplicates:
        seed = values.index[values.index.duplicated()][0]
        sources = ", ".join(rows["source"][rows["seed"] == seed])
        raise ReportError(f"{what} has two results of seed {shown(seed)} ({sources}): leave one out.")
    return values


def changes(rows: pd.DataFrame, columns: Iterable[str], parts: Iterable[str]) -> list[Difference]:
    """Return what the identities in these columns differ in from the first one, of these parts."""
    for name in columns:
        first, *others = {id(each): each for each in rows.get(name, ()) if each is not None}.values() or [None]
        for other in others:
            if found := differences(first, other, parts):
                return found
    return []


def of_both(difference: Difference) -> str:
    """Return the two values of a difference for people; of hashes their beginnings."""
    return ", ".join(shown(each)[:60] for each in (difference.before, difference.after))


def difference(b: pd.DataFrame, a: pd.DataFrame, what: str, part: str | None = None) -> pd.Series:
    """Return b - a by seed; `attrs["interval"]` is the 95% interval of the mean over seeds and problems.

    `part`: `both_extractable` counts only problems where both completions hold an answer, `missing_in_either` only the others,
    both in percentage points of all problems.

    Raises:
        ReportError: if either side is not one setting, they have different seeds, or were not evaluated alike.
    """
    ours, other = (average(side, what) for side in (b, a))
    if list(ours.index) != list(other.index):
        seeds = (shown(tuple(each.index)) or "none" for each in (ours, other))
        raise Missing(f"{what} compares the seeds {' with '.join(seeds)}.")
    check_alike(pd.concat([b, a]), what)
    gains = (ours - other).to_numpy(dtype=float)[:, None]  # [seeds, 1]
    if b["verdicts"].notna().all() and a["verdicts"].notna().all():
        gains = 100 * (_by_problem(b, "verdicts", what) - _by_problem(a, "verdicts", what))  # [seeds, problems]
    elif part is not None:
        raise Missing(f"{what} needs every prediction, which these results do not hold.")
    if part is not None:
        both = _by_problem(b, "answered", what) * _by_problem(a, "answered", what)
        gains = gains * (both if part == "both_extractable" else 1 - both)
    found = pd.Series(gains.mean(axis=1), ours.index)
    certainty = estimate(gains)
    found.attrs["interval"] = (None, None) if certainty is None else (certainty.low, certainty.high)
    return found


def _by_problem(rows: pd.DataFrame, column: str, what: str) -> np.ndarray:
    """Return a column of lists as an array [seeds, problems]."""
    return np.array(average(rows, what, column).tolist(), dtype=float)


def check_alike(rows: pd.DataFrame, what: str) -> None:
    """Refuse, by a ReportError, results of one metric that were not evaluated alike: problems, tokens, turns, template, ..."""
    for (_, metric), part in rows.groupby(["benchmark", "metric"], sort=False):
        if found := changes(part, ["of_number"], ALIKE):
            how = f"{found[0].name}: {of_both(found[0])}"
            raise ReportError(f"{what} would compare results on {metric} that were evaluated differently ({how}).")
