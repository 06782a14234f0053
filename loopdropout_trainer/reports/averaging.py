"""Means over seeds, and only over seeds: runs that differ in any other setting are never averaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from loopdropout_trainer.reports.reading import OUTCOMES, PLACES, Missing, ReportError, check_column
from loopdropout_trainer.reports.statistics import estimate


FIRST = ("checkpoint", "model", "sweep", "num_loops", "rank", "p", "learning_rate", "total", "evaluation.num_rows")
"""Columns that `telling` tries first, in this order."""


def is_protocol(name: str) -> bool:
    """Say whether a column is about how a benchmark was evaluated, rather than about the run."""
    return name.startswith("evaluation.") or name in ("total", "problems")


def settings_of(rows: pd.DataFrame) -> list[str]:
    """Return the columns that are settings of the run: all but its outcomes, and what was measured where and how."""
    other = {*OUTCOMES, *PLACES, "benchmark", "metric", "method"}
    return [name for name in rows if name not in other and not is_protocol(name)]


def varying(rows: pd.DataFrame, names: Iterable[str]) -> list[str]:
    """Return those columns that hold more than one value; a missing value counts as one."""
    return [name for name in names if rows[name].nunique(dropna=False) > 1]


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


def listed(rows: pd.DataFrame, name: str) -> str:
    """Return the first values of a column, for an error."""
    return f"`{name.removeprefix('evaluation.')}`: {', '.join(map(shown, rows[name].unique()[:3]))}"


def select(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows whose columns have the wanted values, or one of a list of them; None: the value is missing."""
    for name, value in wanted.items():  # a list in a setting stands in the table as its JSON
        check_column(rows, name)
        values = [*value, json.dumps(value)] if isinstance(value, list) else [value]
        rows = rows[rows[name].isin(values)] if name in rows else rows if None in values else rows.iloc[:0]
    return rows


def average(rows: pd.DataFrame, what: str, column: str = "value") -> pd.Series:
    """Return the values by seed, of one column, of rows that are equal in every other setting, and so may be averaged.

    Raises:
        ReportError: if they are not, with `what` and the settings that differ; or if two of them are of one seed.
    """
    if different := varying(rows, [name for name in rows if name not in OUTCOMES]):
        values = "; ".join(listed(rows, name) for name in different[:4])
        raise ReportError(f"{what} would average runs of different settings ({values}): filter or tell them apart.")
    values = rows.assign(seed=rows.get("seed")).set_index("seed")[column].sort_index(key=lambda seeds: seeds.map(str))
    if values.index.has_duplicates:
        seed = values.index[values.index.duplicated()][0]
        twice = listed(rows[rows["seed"].isin([seed])], "source")
        raise ReportError(f"{what} has two results of seed {shown(seed)} ({twice}): leave one out.")
    return values


def difference(b: pd.DataFrame, a: pd.DataFrame, what: str, part: str | None = None) -> pd.Series:
    """Return b - a by seed; `attrs["interval"]` is the 95% interval of the mean over seeds and problems.

    `part`: `both_extractable` counts only problems where both completions hold an answer, `missing_in_either` only the others,
    both in percentage points of all problems.

    Raises:
        ReportError: if either side is not one setting, they have different seeds, or were not evaluated alike.
    """
    values = [average(side, what) for side in (b, a)]
    if list(values[0].index) != list(values[1].index):
        seeds = (shown(tuple(each.index)) or "none" for each in values)
        raise Missing(f"{what} compares the seeds {' with '.join(seeds)}.")
    check_alike(pd.concat([b, a]), what)
    gains = (values[0] - values[1]).to_numpy(dtype=float)[:, None]  # [seeds, 1]
    if all("verdicts" in side and side["verdicts"].notna().all() for side in (b, a)):
        ours, other = (np.stack(average(side, what, "verdicts")) for side in (b, a))
        gains = 100 * (ours - other)  # [seeds, problems]
    elif part is not None:
        raise Missing(f"{what} needs every prediction, which these results do not hold.")
    if part is not None:
        ours, other = (np.stack(average(side, what, "answered")) for side in (b, a))
        gains = gains * {"both_extractable": ours & other, "missing_in_either": ~(ours & other)}[part]
    found = pd.Series(gains.mean(axis=1), values[0].index)
    certainty = estimate(gains)
    found.attrs["interval"] = (None, None) if certainty is None else (certainty.low, certainty.high)
    return found


def check_alike(rows: pd.DataFrame, what: str) -> None:
    """Refuse, by a ReportError, results of one metric that were not evaluated alike: problems, tokens, turns, template, ..."""
    of_model = {f"evaluation.{name}" for name in ("model", "weights", "dtype", "attn_implementation")}
    names = [name for name in rows if is_protocol(name) and name not in of_model]
    for (_, metric), part in rows.groupby(["benchmark", "metric"], sort=False):
        if different := sorted(varying(part, names), key=lambda name: name == "problems"):
            how = listed(part, different[0])
            raise ReportError(f"{what} would compare results on {metric} that were evaluated differently ({how}).")
