"""One name for each base model of several trainings, and the same settings for its losses on the same examples.

A training saves a digest of its base model's weights next to its adapter, and one of the held-out tokens in its losses. The
same digest is the same model, or the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.results.run_files import is_of_base
from loopdropout_trainer.saving.metadata import read_metadata


NAME = "recipe_model_name_or_path"
"""Column with the name or the path of a base model."""


def unify_base_names(rows: Sequence[dict[str, Any]]) -> None:
    """Give results on the same base model the name of the first one, also if their trainings have it in different folders.

    Results of the base model itself have no digest. Their name counts if trainings with this name have one digest.

    Args:
        rows: Results with the columns `run` and `recipe_*` of their trainings.
    """
    digests: dict[str, set[str]] = {}  # of the trainings on each name
    for run, name in dict.fromkeys((row["run"], row.get(NAME)) for row in rows):
        digest = _read_digest(run)
        if name is not None and digest is not None:
            digests.setdefault(name, set()).add(digest)
    first_names: dict[str, str] = {}  # of each digest
    shared_names: dict[str, str] = {}  # of each name
    for name, own in digests.items():
        if len(own) == 1:  # else the weights in the folder have changed between two trainings
            (digest,) = own
            shared_names[name] = first_names.setdefault(digest, name)
    for row in rows:
        if row.get(NAME) in shared_names:
            row[NAME] = shared_names[row[NAME]]


def unify_base_settings(rows: Sequence[dict[str, Any]], names: Collection[str]) -> None:
    """Give results of the base model on the same problems or held-out tokens the settings of the first one.

    Trainings can name the same held-out examples in different ways, such as by another `max_length` that leaves out none.

    Args:
        rows: Results with the columns `recipe_*` of their trainings.
        names: Columns of the settings that decide about the held-out tokens.
    """
    first_settings: dict[tuple, dict[str, Any]] = {}  # of each measurement
    for row in rows:
        if not is_of_base(row) or row.get("problems") is None:
            continue
        measurement = (row["task"], row["metric"], row["problems"], row.get(NAME))
        settings = {name: row[name] for name in names if name in row}
        row.update(first_settings.setdefault(measurement, settings))


def _read_digest(run: str) -> str | None:
    """Return the digest of the base model of the adapter in a folder, or None if it is not known."""
    with suppress(UserError):  # a damaged file, or one of a newer version
        return read_metadata(Path(run)).get("base_weights")
    return None
