"""The rows of files and data sets."""

from __future__ import annotations

import codecs
import json
import logging
import lzma
import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.data.bars import hide_short_bars
from loopdropout_trainer.data.caching import digest_files
from loopdropout_trainer.data.csv_files import advise_header, check_cells, csv_options, lacks_header
from loopdropout_trainer.data.formats import enumerate_columns
from loopdropout_trainer.data.mixed_types import warn_of_mixed_types
from loopdropout_trainer.data.sources import (
    ARCHIVES,
    COMPRESSIONS,
    SPREADSHEETS,
    DataSource,
    file_kind,
    uncompressed_ending,
)
from loopdropout_trainer.data.unread_files import warn_of_unread
from loopdropout_trainer.errors import UserError, hint_at_login, short_repr
from loopdropout_trainer.hints import file_hint, list_hint
from loopdropout_trainer.limits import check_encoding, check_nesting


if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder


_DAMAGES = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""Errors about a damaged compressed file. They are not among those of other files."""

_LOAD_ERRORS = (OSError, ValueError, StopIteration, *_DAMAGES)
"""Errors about files that `datasets` cannot load. An empty JSON file raises StopIteration."""

_BLOCK = 1 << 16
"""Number of bytes that are read together in the search for the first character of a file."""


def load_rows(source: DataSource) -> Dataset:
    """Return the rows of files or of a data set.

    Raises:
        UserError: If they cannot be loaded, or have not the columns of the source.
    """
    from datasets.exceptions import DatasetsError

    files = []
    if source.files:
        check_files(source.files)
        files = expand_patterns(source.files)
        _check_one_kind(files)
    try:
        rows = read_files(files, source.split) if files else _read_dataset(source)
    except UserError:
        raise
    except (*_LOAD_ERRORS, DatasetsError) as error:
        raise _explain_load_error(source, files, error) from None
    if files:
        warn_of_mixed_types(rows, str(source))
    if source.columns is None:
        return rows
    missing = {*source.columns} - {*rows.column_names}
    if missing:
        raise UserError(
            f"`columns` of {source} must be among {', '.join(rows.column_names)}, got {', '.join(sorted(missing))}."
        )
    return rows.select_columns(source.columns)


def _explain_load_error(source: DataSource, files: Sequence[str], error: Exception) -> UserError:
    """Return the error about a source that `datasets` cannot load, which names the fault in its files."""
    if len(files) > 1:
        _check_one_schema(source, files)
    reason = str(error.__cause__ or error)
    if not reason or "corresponds to no data" in reason:  # as for `[]`, or a CSV file with a header alone
        return UserError(f"{source} is empty.")
    unknown = [file for file in files if file_kind(file) is None]
    if unknown:
        return UserError(
            f"{source} cannot be loaded as JSON ({reason}). Give the file an ending that names its kind: .jsonl, .json, .csv "
            f"(also for tabs between the cells) or .parquet, got {unknown[0]}."
        )
    if "load_from_disk" in reason:
        return UserError(
            f"{source} must be a folder of files such as .jsonl or .parquet, got one of `save_to_disk`. Write a file in "
            f"Python by `datasets.load_from_disk({source.path!r}).to_json('rows.jsonl')`, and set `train_files`."
        )
    return UserError(f"{source} cannot be loaded: {reason}{hint_at_login(error)}")


def _check_one_schema(source: DataSource, files: Sequence[str]) -> None:
    """Raise UserError if files have other columns or types than the first one, or if one of them cannot be loaded alone."""
    first, *others = [load_rows(DataSource("json", data_files=[file])).features for file in files]
    for file, features in zip(files[1:], others, strict=True):
        if {*features} != {*first}:
            raise UserError(
                f"{source} must have the same columns and types, got {', '.join(first)} in {files[0]} and "
                f"{', '.join(features)} in {file}. {_advise_schema(file, features, first)}"
            )
    for file, features in zip(files[1:], others, strict=True):
        differing = [name for name in first if features[name] != first[name]]
        if differing:
            raise UserError(
                f"{source} must have the same columns and types, got another type of {enumerate_columns(differing)} in {file} "
                f"than in {files[0]}. {_advise_items(file)}"
            )


def _check_one_kind(files: Sequence[str]) -> None:
    """Raise UserError if files are of several kinds, such as JSON and CSV, because one reader reads all of them."""
    first = files[0]
    for file in files:
        first_kind, kind = _kind_of(first), _kind_of(file)
        if kind != first_kind:
            raise UserError(
                f"Files that are read together must be of one kind, got {first} ({first_kind}) and {file} ({kind}). "
                f"{_advise_items(file)}"
            )


def _check_endings(files: Iterable[str]) -> None:
    """Raise UserError for a spreadsheet, an archive or a compressed file that cannot be read and would seem broken."""
    from fsspec.utils import infer_compression

    for file in files:
        compression = Path(file).suffix
        if compression.lower() in SPREADSHEETS:
            raise UserError(
                f"{file} must be a file of examples, and its ending is that of a spreadsheet. Save it there as CSV in UTF-8."
            )
        if compression in ARCHIVES or uncompressed_ending(file) in ARCHIVES:
            raise UserError(
                f"{file} must be a file of examples, and its ending is that of an archive of files. Unpack it."
            )
        if compression not in COMPRESSIONS:
            continue
        if file_kind(file) == "parquet":
            raise UserError(
                f"{file} must be a Parquet file that is not compressed again, got the ending {compression}. Unpack it."
            )
        if infer_compression(file) is None:  # it knows .zst and .lz4 if their package is installed
            raise UserError(
                f"{file} must be compressed as .gz, .bz2, .xz or .zip, or not at all, got the ending {compression}. Unpack it."
            )


def _has_kind(file: str) -> bool:
    return file_kind(file) is not None


def _kind_of(file: str) -> str:
    """Return the kind of a file, which is JSON if its ending is not known."""
    return file_kind(file) or "json"


def _advise_schema(file: str, names: Collection[str], expected: Collection[str]) -> str:
    """Return how to read a file with other columns than the expected ones. A part of a CSV file often lacks the header."""
    if file_kind(file) == "csv" and len(names) == len(expected) and lacks_header(names):
        return advise_header(expected)
    return _advise_items(file)


def _advise_items(file: str) -> str:
    return f"Give each file an item of `datasets` instead, such as `- path: {file}`."


def describe_row(source: DataSource, number: int) -> str:
    """Return the place of a row, such as "row 4 of chats.jsonl".

    Args:
        source: Source of the row.
        number: Number of the row among all rows of the source, from 0.
    """
    files = expand_patterns(source.files)
    if len(files) > 1 and source.split == "train":
        for file in files:
            num_rows = len(read_files(file))
            if number < num_rows:
                return f"row {number + 1:,} of {file}"
            number -= num_rows
    place = str(source)
    if "[" in source.split:  # rows are counted from its beginning
        place = f"`{source.split}` of {source}"
    return f"row {number + 1:,} of {place}"


def error_in_row(place: str, error: UserError) -> UserError:
    """Return the error of an example with the place of its row, such as "row 4 of chats.jsonl"."""
    return UserError(f"{place[0].upper()}{place[1:]}: {error}")


def read_files(files: str | Sequence[str], split: str = "train") -> Dataset:
    """Return the rows of JSONL, JSON, CSV (also compressed) or Parquet files, or a part of them, such as `train[:100]`."""
    from datasets import load_dataset_builder

    if isinstance(files, str):
        files = [files]
    check_files(files)
    files = expand_patterns(files)
    _check_endings(files)
    kind = _kind_of(files[0])
    builder = load_dataset_builder(kind, data_files=files)
    try:
        return _read_local(builder, kind, data_files=files, split=split)
    except Exception:  # each parser has its own error for a file without a character
        _check_not_blank(files)
        raise


def _check_not_blank(files: Iterable[str]) -> None:
    """Raise UserError for a file of this computer that is empty, or that has only spaces and line ends."""
    import fsspec

    for file in files:
        if not Path(file).is_file():
            continue
        try:
            with fsspec.open(file, "rb", compression="infer") as content:
                block = content.read(_BLOCK)
                while block and not block.strip():
                    block = content.read(_BLOCK)
        except (OSError, ValueError, *_DAMAGES):  # the error of the parser says what is wrong
            continue
        if not block:
            raise UserError(f"{file} is empty.")


def expand_patterns(files: Iterable[str]) -> list[str]:
    """Return paths and addresses with the files of each pattern, such as `part-*.jsonl`, in the order of `datasets`."""
    from datasets import load_dataset_builder

    expanded = []
    for file in files:
        if "://" in file or Path(file).exists():
            expanded.append(file)
            continue
        found = load_dataset_builder(_kind_of(file), data_files=[file]).config.data_files["train"]
        for path in found:  # absolute
            expanded.append(path if Path(file).is_absolute() else os.path.relpath(path))
    return expanded


def check_files(files: Iterable[str], benchmark: str | None = None) -> None:
    """Raise UserError if a file does not exist, or if it is a folder, a pipe or a device, which could be read without end.

    Args:
        files: Paths, patterns of paths, or addresses, which are not looked up.
        benchmark: Name of the own benchmark whose files they are. Default: those of a training.
    """
    fields, advice = "`train_files` and `eval_files`", " Set `dataset_name` instead."
    if benchmark is not None:
        fields, advice = f"`files` of the benchmark `{benchmark}`", ""
    for file in files:
        path = Path(file)
        if path.is_dir():
            raise UserError(f"{fields} must be files, got the folder {file}.{advice}")
        if path.exists() and not path.is_file():
            raise UserError(f"{fields} must be files, got {file}, which is a pipe or a device.")
        if is_absent(file):
            hint = list_hint(file) or file_hint(path, is_readable=_has_kind)
            if benchmark is None:
                raise UserError(f"The file {file} does not exist.{hint}")
            place = "" if path.is_absolute() else f" in {Path.cwd()}, where this command runs"
            raise UserError(f"{fields} must be files, and {file} does not exist{place}.{hint}")


def is_absent(file: str) -> bool:
    """Return whether a path, or a pattern of paths, leads to no file. An address is not looked up."""
    return "://" not in file and not Path(file).exists() and not glob(file, recursive=True)


def _read_dataset(source: DataSource) -> Dataset:
    """Return the rows of a data set on the Hub or in a folder."""
    from datasets import load_dataset, load_dataset_builder

    names = (source.path, source.name)
    place = {"data_dir": source.data_dir, "data_files": source.data_files}
    if not Path(source.path).is_dir():
        return load_dataset(*names, revision=source.revision, split=source.split, **place)
    builder = load_dataset_builder(*names, **place)
    warn_of_unread(source, builder)
    return _read_local(builder, *names, split=source.split, **place)


def _read_local(builder: DatasetBuilder, *names: str | None, **options: Any) -> Dataset:
    """Load files that `builder` has found, from a cache that is named by their contents.

    The cache of `datasets` knows files by path and time of change. A copied or restored file can keep its time.
    """
    from datasets import config, load_dataset
    from datasets.exceptions import DatasetsError

    files = sorted(file for split in builder.config.data_files.values() for file in split)
    local_files = [file for file in files if Path(file).is_file()]  # the others are addresses
    if builder.name == "csv":
        for file in local_files:
            check_encoding(file)
    cache = Path(config.HF_DATASETS_CACHE, f"contents-{digest_files(local_files)}")
    if builder.name == "json":
        for file in local_files:
            check_nesting(file)
            _check_no_lists(file)
    try:
        if builder.name == "csv":
            options |= csv_options(files[0])
        num_bytes = sum(Path(file).stat().st_size for file in local_files)
        if len(local_files) < len(files):
            num_bytes = math.inf  # the size of the others is unknown
        with hide_short_bars(num_bytes=num_bytes), _hide_reports():
            return load_dataset(*names, cache_dir=str(cache), **options)
    except (ValueError, DatasetsError):
        if builder.name == "csv":
            for file in local_files:
                check_cells(file, options.get("sep", ","))
        _check_lines(local_files)
        raise


@contextmanager
def _hide_reports() -> Iterator[None]:
    """Hide the line in which `datasets` reports a broken file before its exception, which says the same."""
    reporters = [logging.getLogger(f"datasets.packaged_modules.{kind}.{kind}") for kind in ("json", "csv")]
    were_disabled = [reporter.disabled for reporter in reporters]
    for reporter in reporters:
        reporter.disabled = True
    try:
        with warnings.catch_warnings():
            # Of empty cells behind the last column. `csv_options` checks that they are empty.
            warnings.filterwarnings("ignore", message="Length of header or names does not match")
            yield
    finally:
        for reporter, was_disabled in zip(reporters, were_disabled, strict=True):
            reporter.disabled = was_disabled


def _check_no_lists(file: str) -> None:
    """Raise UserError for a JSON file that is a list of lists, which `datasets` reads as columns named 0, 1, 2 and so on."""
    import fsspec

    with fsspec.open(file, "rb", compression="infer") as content:
        start = content.read(_BLOCK).removeprefix(codecs.BOM_UTF8)
    if b"".join(start.split()).startswith(b"[["):
        raise UserError(
            f'{file} must hold objects, got a list of lists. Write each of them as an object such as {{"messages": [...]}}.'
        )


def _check_lines(files: Iterable[str]) -> None:
    """Raise UserError for the first line of JSON Lines that is not JSON. The parser counts its rows from 0, in blocks."""
    import fsspec

    for file in files:
        if uncompressed_ending(file) != ".jsonl":
            continue
        with fsspec.open(file, "rt", compression="infer", encoding="utf-8-sig", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line.rstrip("\r\n")) if line.strip() else None
                except json.JSONDecodeError as error:
                    reason = error.msg.removesuffix(" at")  # such as "Unterminated string starting at"
                    raise UserError(
                        f"Line {number:,} of {file} is not JSON: {reason} at column {error.colno:,}."
                    ) from None
                if row is not None and not isinstance(row, dict):
                    raise UserError(
                        f'Line {number:,} of {file} must be an object such as {{"messages": [...]}}, got {short_repr(row)}.'
                    )
