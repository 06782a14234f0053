"""The long table: every measurement below some folders, one in each row, with the settings of its run as columns."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd

from loopdropout_trainer.errors import UserError, one_line
from loopdropout_trainer.record.identity import Identity
from loopdropout_trainer.record.measurement import MEASUREMENTS_FILE, PLACES, Measurement, read_measurements


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

OBJECTS = ("of_run", "of_number")
"""Columns with the identities themselves: of the training, and of what the number depends on."""

_OLD = ("results.json", "evaluation.json")
_DIVERGED = "diverged.json"  # in the place of a training's measurements
_BEFORE_NAMES_OF_RUN = {"adapter": "", "settings": "", "loops": "", "seeds": "", "length": ""}
_BEFORE_NAMES = {"adapter": "", **dict.fromkeys(("data", "settings", "loops", "seeds", "length"), "evaluation.")}
"""What the columns of an identity's parts begin with; those of the other parts begin with the part's name."""


class ReportError(UserError):
    """A report that cannot be made, in one sentence."""


class Missing(ReportError):
    """A number that these results do not hold."""


def load_table(folders: Iterable[str | Path]) -> pd.DataFrame:
    """Read all measurements below the folders into one long table.

    A number that was measured twice, such as the base's beside each adapter of a sweep, stands there once. `attrs["skipped"]`
    holds a sentence about each row and file that is left out.

    Raises:
        ReportError: if a folder is missing.
    """
    skipped = []
    tables = [pd.DataFrame(columns=list(OF_ROWS), dtype=object)]
    for folder in folders_with_results(folders):
        try:
            measurements, identities, faults = read_measurements(folder)
        except (OSError, ValueError) as error:
            skipped.append(f"{one_line(error)}.")
            continue
        if (folder / _DIVERGED).exists():
            skipped.append(f"{folder} holds a training that diverged.")
        elif not (folder / MEASUREMENTS_FILE).exists():
            skipped.append(
                f"{folder} has results, but no {MEASUREMENTS_FILE}, as another version of this package leaves them: run the "
                "command that made them again, in a folder of its own."
            )
        skipped += faults
        beside = {"source": str(folder), "sweep": _sweep_of(folder)}
        facts = {key: _facts(*key, identities) for key in {(row.run, row.identity) for row in measurements}}
        rows = [{**facts[row.run, row.identity], **asdict(row), **beside} for row in measurements]
        tables.append(pd.DataFrame(rows, dtype=object))
    for fault in skipped:
        logger.warning("Left out: %s", fault)
    table = pd.concat(tables, ignore_index=True)
    sweeps = table.dropna(subset=["run", "sweep"]).drop_duplicates("run").set_index("run")["sweep"]
    table["sweep"] = table["sweep"].fillna(table["run"].map(sweeps))  # of what was evaluated elsewhere
    table = table.where(table.notna(), None).astype({"value": float})
    once = ["identity", "run", "method", "benchmark", "metric", "sweep", "steps", *PLACES]
    table = table.drop_duplicates(once, ignore_index=True)
    costs = table[table["family"] == "cost"].drop_duplicates(["run", "metric"])
    costs = costs.pivot(index="run", columns="metric", values="value").add_prefix("cost.")
    table = table.join(costs, on="run").copy()  # in one piece, which pandas warns about else
    table.attrs["skipped"] = skipped
    return table


def folders_with_results(folders: Iterable[str | Path]) -> list[Path]:
    """Return the folders below some folders that hold measurements, a training that diverged, or results of other versions."""
    by_place: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ReportError(f"There is no folder {folder}: name folders that training, evaluation or sweeps wrote.")
        for name in (MEASUREMENTS_FILE, _DIVERGED, *_OLD):
            for path in sorted(folder.rglob(name)):
                if not any(part.startswith(".") for part in path.relative_to(folder).parts):  # not yet complete
                    by_place.setdefault(path.parent.resolve(), path.parent)
    return list(by_place.values())


def _facts(run: str | None, identity: str, identities: Mapping[str, Identity]) -> dict[str, Any]:
    """Return the columns that identities say: first those of the training, whose values count where both have a column."""
    of_run = identities.get(run)
    of_number = identities[identity] if identity != run else None
    columns = _columns_of_run(of_run) if of_run else {}
    columns = columns | _columns(of_number or {}, _BEFORE_NAMES) | columns
    return {**columns, "of_run": of_run, "of_number": of_number}


def _columns_of_run(identity: Identity) -> dict[str, Any]:
    """Return the columns of a training's identity, and what tables tell methods apart by."""
    settings = identity.get("settings", {})
    rule = settings.get("rule")
    p = settings.get("p")
    columns = _columns(identity, _BEFORE_NAMES_OF_RUN)
    columns["rank"] = identity.get("adapter", {}).get("r")
    columns["masked"] = rule not in ("lora", None) and p not in (None, 0)
    columns["shared"] = rule != "independent"
    if "noise" in str(rule):
        columns["noise_c"] = (settings.get("rule_args") or {}).get("c", 1.0)
    return columns


def _columns(identity: Identity, before_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of an identity. A list stands as its JSON, a mapping as columns of its own."""
    columns: dict[str, Any] = {}
    for part, of_part in identity.items():
        columns |= _flat(of_part, before_names.get(part, f"{part}."))
    return columns


def _flat(mapping: Mapping[str, Any], before: str) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, dict):
            columns |= _flat(value, f"{before}{name}.")
        else:
            columns[f"{before}{name}"] = json.dumps(value) if isinstance(value, list) else value
    return columns


def _sweep_of(folder: Path) -> str | None:
    """Return the name of the sweep that a run's folder is in: of the nearest parent with a file `sweep.*`."""
    places = (folder.resolve(), *folder.resolve().parents)
    return next((place.name for place in places if any(place.glob("sweep.*"))), None)
