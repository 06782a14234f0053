"""The long table: every measurement below some folders, one in each row, with the settings of its run as columns."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd

from loopdropout_trainer.errors import UserError, one_line
from loopdropout_trainer.record.identity import Identity
from loopdropout_trainer.record.measurement import MEASUREMENTS_FILE, PLACES, Measurement, read_measurements


logger = logging.getLogger(__name__)

OF_ROWS = (
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
"""The first columns, in this order."""

OBJECTS = ("of_run", "of_number")
"""Columns with the identities themselves: of the training, and of what the number depends on."""

_OLD = ("results.json", "evaluation.json")


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
    rows, skipped, identities = [], [], {}
    for folder in folders_with_results(folders):
        try:
            found, known, faults = read_measurements(folder)
        except (OSError, UserError, ValueError) as error:
            found, known, faults = [], {}, [f"{one_line(error)}."]
        if not found and not faults:
            faults = [
                f"{folder} has results, but no {MEASUREMENTS_FILE}, as another version of this package leaves them: run the "
                "command that made them again, in a folder of its own."
            ]
        identities |= known
        skipped += faults
        rows += [{**asdict(row), "source": str(folder), "sweep": _sweep_of(folder)} for row in found]
    for fault in skipped:
        logger.warning("Left out: %s", fault)
    columns = dict.fromkeys([*OF_ROWS, *(each.name for each in fields(Measurement)), "source"])
    table = pd.DataFrame(rows, columns=list(columns), dtype=object)
    runs = set(table["run"].dropna())
    facts: dict[str, pd.Series] = {}
    for key, prefix, objects in (("run", "", "of_run"), ("identity", "evaluation.", "of_number")):
        named = {name: identities[name] for name in table[key].dropna() if key == "run" or name not in runs}
        facts[objects] = table[key].map(named)
        for column, values in _by_column({name: _columns(each, prefix) for name, each in named.items()}).items():
            found = table[key].map(values)
            facts[column] = facts[column].fillna(found) if column in facts else found
    of_identities = pd.DataFrame(facts, index=table.index, dtype=object)
    table = table.join(of_identities[[name for name in of_identities if name not in table]])
    sweeps = table.dropna(subset=["sweep"]).drop_duplicates("run").set_index("run")["sweep"]
    table["sweep"] = table["sweep"].fillna(table["run"].map(sweeps))  # of what was evaluated elsewhere
    table = table.where(table.notna(), None).astype({"value": float})
    once = ["identity", "run", "method", "benchmark", "metric", "sweep", "steps", *PLACES]
    table = table.drop_duplicates(once, ignore_index=True)
    costs = table[table["family"] == "cost"].drop_duplicates(["run", "metric"])
    costs = costs.pivot(index="run", columns="metric", values="value").add_prefix("cost.")
    table = table.join(costs, on="run").copy()  # in one piece
    table.attrs["skipped"] = skipped
    return table


def folders_with_results(folders: Iterable[str | Path]) -> list[Path]:
    """Return the folders with measurements below some folders, and those with results of other versions."""
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ReportError(f"There is no folder {folder}: name folders that training, evaluation or sweeps wrote.")
        for name in (MEASUREMENTS_FILE, *_OLD):
            for path in sorted(folder.rglob(name)):
                if not any(part.startswith(".") for part in path.relative_to(folder).parts):  # not yet complete
                    found.setdefault(path.parent.resolve(), path.parent)
    return list(found.values())


def _by_column(facts: Mapping[str, Iterable[tuple[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return {column: {key: value}} of {key: (column, value) pairs}."""
    columns: dict[str, dict[str, Any]] = {}
    for key, pairs in facts.items():
        for column, value in pairs:
            columns.setdefault(column, {})[key] = value
    return columns


def _columns(identity: Identity, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the columns of an identity: a training's settings by their own names, other parts after theirs.

    A list stands as its JSON, a mapping as columns of its own.
    """
    for part, of_part in identity.items():
        own = prefix if part in ("settings", "loops", "seeds", "length") else f"{part}."
        if prefix and part == "data":
            own = prefix
        for name, value in _flat(of_part):
            yield f"{'' if part == 'adapter' else own}{name}", value
    adapter, settings = identity.get("adapter", {}), identity.get("settings", {})
    if not prefix:
        rule, p = settings.get("rule"), settings.get("p")
        yield "rank", adapter.get("r")
        yield "masked", rule not in ("lora", None) and p not in (None, 0)
        yield "shared", rule != "independent"
        if "noise" in str(rule):
            yield "noise_c", (settings.get("rule_args") or {}).get("c", 1.0)


def _flat(mapping: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", json.dumps(value) if isinstance(value, list) else value


def _sweep_of(folder: Path) -> str | None:
    """Return the name of the sweep that a run's folder is in: of the nearest parent with a file `sweep.*`."""
    places = (folder.resolve(), *folder.resolve().parents)
    return next((each.name for each in places if any(each.glob("sweep.*"))), None)
