"""Where the rows of a recipe come from: a data set or files, or several of them with shares."""

from __future__ import annotations

import difflib
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from loopdropout_trainer.errors import UserError, check_type, short_repr
from loopdropout_trainer.hints import closest_known


FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Kinds of files by the end of their names."""

ARCHIVES = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst")
"""Endings of files that hold other files, which can be compressed, too, as in `rows.tar.gz`."""

SPREADSHEETS = (".xlsx", ".xls", ".ods")
"""Endings of files of a spreadsheet program, which are not read."""

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip", ".zst", ".lz4", ".7z", ".rar")
"""Ends of the names of compressed files. The first four can be read, and the next two with a further package."""

_USUAL_NAMES = {
    "weight": "fraction",
    "probability": "fraction",
    "config": "name",
    "files": "data_files",
    "file": "path",
}
"""Names that people type by habit, and the names of the fields."""


@dataclass(frozen=True)
class DataSource:
    """A data set or files. In the list `datasets` of a recipe, the fields are those of TRL's `DatasetConfig` and two more.

    Attributes:
        path: Name or folder of a data set, a file, or the kind of `data_files`, such as `json`.
        name: Configuration of the data set.
        revision: Branch, tag or commit of a data set on the Hub.
        split: Split of the data set, such as `train` or `train[:1000]`.
        data_dir: Folder inside of the data set.
        data_files: Files on this computer, or inside of the data set.
        columns: Columns to read. Default: all.
        fraction: Share in the mixture. Shares are divided by their sum.
        column_mapping: {expected column: column of the data set}, instead of the recipe's.
    """

    path: str
    name: str | None = None
    revision: str | None = None
    split: str = "train"
    data_dir: str | None = None
    data_files: str | list[str] | None = None
    columns: list[str] | None = None
    fraction: float | None = None
    column_mapping: dict[str, str] | None = None

    @property
    def files(self) -> list[str]:
        """Files on this computer, or an empty list for a data set."""
        if _is_named_as_file(self.path) and not Path(self.path).is_dir():
            return [self.path]
        if self.path in FILE_KINDS.values() and self.data_files:
            return [self.data_files] if isinstance(self.data_files, str) else [*self.data_files]
        return []

    def __str__(self) -> str:
        return ", ".join(self.files) or self.path

    @property
    def public_name(self) -> str:
        """Name of the source without the folders of this computer."""
        if not self.files and not Path(self.path).is_dir():
            return self.path
        return ", ".join(Path(file).name for file in self.files or [self.path])


def file_kind(file: str) -> str | None:
    """Return the kind of a file (also compressed), such as "json", or None for another ending."""
    return FILE_KINDS.get(uncompressed_ending(file))


_SIMILAR_ENDING = 0.75
"""Least similarity of an ending, such as ".jsn", to the one that it is a mistake for."""


def _is_named_as_file(path: str) -> bool:
    """Return whether a path has the ending of a data file, or nearly so, unlike the name of a data set on the Hub."""
    ending = uncompressed_ending(path).lower()
    return bool(difflib.get_close_matches(ending, FILE_KINDS, n=1, cutoff=_SIMILAR_ENDING))


def uncompressed_ending(file: str) -> str:
    """Return the ending of a file's name in front of the one of its compression, such as ".jsonl" of `rows.jsonl.gz`."""
    path = Path(file)
    return path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix


def read_sources(recipe: Mapping[str, Any]) -> list[DataSource]:
    """Return the sources that the fields of a recipe name: `train_files`, `dataset_name` or `datasets`.

    Raises:
        UserError: If an item of `datasets` has wrong fields, or only some of them have a `fraction`.
    """
    if recipe.get("train_files"):
        return [DataSource("json", data_files=recipe["train_files"])]
    if recipe.get("dataset_name"):
        options = {"name": "dataset_config", "revision": "dataset_revision", "split": "dataset_split"}
        given = {name: recipe[field] for name, field in options.items() if recipe.get(field)}
        return [DataSource(recipe["dataset_name"], **given)]
    sources = [_read_item(item) for item in recipe.get("datasets") or ()]
    num_fractions = sum(source.fraction is not None for source in sources)
    if 0 < num_fractions < len(sources):
        raise UserError(
            f"`fraction` must be set for all of the {len(sources)} `datasets` or for none, got {num_fractions}."
        )
    return sources


def _read_item(item: Any) -> DataSource:
    """Return the source of an item of `datasets`."""
    if not isinstance(item, dict):
        raise UserError(f"An item of `datasets` must be a mapping such as {{path: a.jsonl}}, got {short_repr(item)}.")
    hints = get_type_hints(DataSource)
    for name, value in item.items():
        if name not in hints:
            hint = closest_known(name, hints, _USUAL_NAMES)
            raise UserError(f"`{name}` is not a field of an item of `datasets`.{hint}")
        if name != "fraction":
            check_type(f"`{name}` in `datasets`", value, hints[name])
    if not item.get("path"):
        raise UserError(f"`path` must be set for each item of `datasets`, got {short_repr(item)}.")
    fraction = item.get("fraction")
    is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if fraction is not None and not (is_number and 0 < fraction < float("inf")):
        raise UserError(f"`fraction` of {item['path']} must be a number above 0, got {short_repr(fraction)}.")
    given = {name: value for name, value in item.items() if value is not None}
    for name in ("path", "data_files"):
        if isinstance(given.get(name), str):
            given[name] = os.path.expanduser(given[name])
    source = DataSource(**given)
    if source.path in FILE_KINDS.values() and not source.data_files:
        raise UserError(f"`data_files` must be set if `path` is {source.path}.")
    return source


def find_shares(sources: Sequence[DataSource]) -> list[float] | None:
    """Return the shares of sources, whose sum is 1, or None if all of their examples are used."""
    if not sources or sources[0].fraction is None:
        return None
    total = sum(source.fraction for source in sources)
    return [source.fraction / total for source in sources]


def differ_in_text(share: float, trained_share: float) -> bool:
    """Return whether a share of the training examples differs from the share of the recipe as both are written."""
    return _percent(share) != _percent(trained_share)


def describe_other_share(share: float, trained_share: float) -> str:
    """Return the share of the training examples next to the share of the recipe, such as "66.7% instead of 75%"."""
    return f"{_percent(trained_share)} instead of {_percent(share)}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def describe_data(
    recipe: Mapping[str, Any], without_folders: bool = False, trained_shares: Sequence[float] = ()
) -> str:
    """Return the preparation of a recipe and the names of its training data, with the shares of a mixture.

    Args:
        recipe: Recipe of a training.
        without_folders: Whether to shorten paths to the names of the files.
        trained_shares: Shares of the training examples, as far as they are known. They can differ from those of the recipe,
            because few examples cannot have each share, and some are held out or too long.
    """
    sources = read_sources(recipe)
    texts = []
    shares = find_shares(sources) or [None] * len(sources)
    for number, (source, share) in enumerate(zip(sources, shares, strict=True)):
        text = source.public_name if without_folders else str(source)
        if share is not None:
            text = f"{_percent(share)} {text}"
            if len(trained_shares) == len(sources) and differ_in_text(share, trained_shares[number]):
                text += f" ({_percent(trained_shares[number])} of the examples)"
        texts.append(text)
    return f"{recipe.get('preparation') or ''} {', '.join(texts)}".strip()
