"""The long table: every measurement below some folders, one in each row, with the settings of its run as columns."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd
from transformers.utils import flatten_dict

from loopdropout_trainer.errors import UserError, one_line
from loopdropout_trainer.record.identity import Identity
from loopdropout_trainer.record.measurement import (
    DIVERGED_FILE,
    MEASUREMENTS_FILE,
    PLACES,
    Measurement,
    read_measurements,
)


logger = logging.getLogger(__name__)

_FIRST = (
    "run",
    "method",
    "seed",
    "benchmark",
    "family",
    "metric",
    "value",
    "unit",
    "total",
    *PLACES,
    "steps",
    "sweep",
)
OF_ROWS = dict.fromkeys([*_FIRST, *(field.name for field in fields(Measurement)), "source"])
"""The columns that say what was measured, and where; all others come from identities."""

OF_METHODS = (
    *("rule", "rule_args.m", "rule_args.direction", "rule_args.p_start", "rule_args.p_end", "rule_args.c"),
    *("p", "rank", "learning_rate", "num_loops"),
)
"""The columns that the paper's tables tell methods apart by: they are there also where no run has a value in them."""

OBJECTS = ("of_run", "of_number")
"""Columns with the identities themselves: of the training, and of what the number depends on."""

_ONE_NUMBER = ["identity", "run", "method", "benchmark", "metric", "sweep", "steps", *PLACES]
"""The columns by which a number stands in the table once."""

_OLD = ("results.json", "evaluation.json")
_BEFORE_NAMES_OF_RUN = {"adapter": "", "settings": "", "loops": "", "seeds": "", "length": ""}
_BEFORE_NAMES = {"adapter": "", **dict.fromkeys(("data", "settings", "loops", "seeds", "length"), "evaluation")}
"""What the columns of an identity's parts begin with; those of the other parts begin with the part's name."""


class ReportError(UserError):
    """A report that cannot be made, in one sentence."""


class Missing(ReportError):
    """A number that these results do not hold."""


def load_table(folders: Iterable[str | Path]) -> pd.DataFrame:
    """Read all measurements below the folders into one long table.

    A number that was measured twice, such as the base's beside each adapter of a sweep, stands there once, as read first.
    `attrs["skipped"]` holds a sentence about each row and file that is left out.

    Raises:
        ReportError: if a folder is missing.
    """
    skipped = []
    rows = []
    for folder in folders_with_results(folders):
        try:
            measurements, identities, faults = read_measurements(folder)
        except (OSError, ValueError) as error:
            skipped.append(f"{one_line(error)}.")
            continue
        if (folder / DIVERGED_FILE).exists():
            skipped.append(f"{folder} holds a training that diverged.")
        elif not (folder / MEASUREMENTS_FILE).exists():
            skipped.append(
                f"{folder} has results, but no {MEASUREMENTS_FILE}, as another version of this package leaves them: run the "
                "command that made them again, in a folder of its own."
            )
        skipped += faults
        beside = {"source": str(folder), "sweep": _sweep_of(folder)}
        columns = {key: _columns(*key, identities) for key in {(row.run, row.identity) for row in measurements}}
        rows += [{**columns[row.run, row.identity], **asdict(row), **beside} for row in measurements]
    table = pd.DataFrame(rows, dtype=object)
    table = table.reindex(columns=list(dict.fromkeys([*OF_ROWS, *OF_METHODS, *table])))
    sweeps = table.groupby("run")["sweep"].transform("first")  # of what was evaluated elsewhere, that of its training
    table["sweep"] = table["sweep"].fillna(sweeps)
    table = table.where(table.notna(), None).astype({"value": float})
    skipped += _contradictions(table)
    for fault in skipped:
        logger.warning("Left out: %s", fault)
    table = table.drop_duplicates(_ONE_NUMBER, ignore_index=True)
    costs = table[table["family"] == "cost"].drop_duplicates(["run", "metric"])
    costs = costs.pivot(index="run", columns="metric", values="value").add_prefix("cost.")
    table = table.join(costs, on="run").copy()  # in one piece, which pandas warns about else
    table.attrs["skipped"] = skipped
    return table


def _contradictions(table: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence for each folder with numbers that another one holds with other values, and that depend on the same."""
    measured = table[table["family"] != "cost"]  # what a training takes differs each time
    first = measured.groupby(_ONE_NUMBER, dropna=False)["value"].transform("first")
    for folder, rows in measured[measured["value"] != first].groupby("source", sort=False):
        row = rows.iloc[0]
        yield (
            f"{folder}: `{row['metric']}` of {row['method']} is {row['value']:g}, and {first[row.name]:g} in a folder "
            f"read before, though both depend on the same (numbers that differ so: {len(rows)})."
        )


def folders_with_results(folders: Iterable[str | Path]) -> list[Path]:
    """Return the folders below some folders that hold measurements, a training that diverged, or results of other versions."""
    by_place = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ReportError(f"There is no folder {folder}: name folders that training, evaluation or sweeps wrote.")
        for name in (MEASUREMENTS_FILE, DIVERGED_FILE, *_OLD):
            for path in sorted(folder.rglob(name)):
                if not any(part.startswith(".") for part in path.relative_to(folder).parts):  # not yet complete
                    by_place.setdefault(path.parent.resolve(), path.parent)
    return list(by_place.values())


def _columns(run: str | None, identity: str, identities: Mapping[str, Identity]) -> dict[str, Any]:
    """Return the columns that identities say: first those of the training, whose values count where both have a column."""
    of_run = identities.get(run)
    of_number = identities[identity] if identity != run else None
    columns = {}
    if of_run is not None:
        columns = {**_flat(of_run, _BEFORE_NAMES_OF_RUN), "rank": of_run.get("adapter", {}).get("r")}
    return {**columns, **_flat(of_number or {}, _BEFORE_NAMES), **columns, "of_run": of_run, "of_number": of_number}


def _flat(identity: Identity, before_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of an identity. A list stands as its JSON, a mapping as columns of its own."""
    columns = {}
    for part, of_part in identity.items():
        for name, value in flatten_dict(of_part, before_names.get(part, part)).items():
            if value != {}:
                columns[name] = json.dumps(value) if isinstance(value, list) else value
    return columns


def _sweep_of(folder: Path) -> str | None:
    """Return the name of the sweep that a run's folder is in: of the nearest parent with a file `sweep.*`."""
    places = (folder.resolve(), *folder.resolve().parents)
    return next((place.name for place in places if any(place.glob("sweep.*"))), None)
