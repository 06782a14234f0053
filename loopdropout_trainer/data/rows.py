"""Read raw rows, one at a time, from local files or the Hub; every row knows where it stands."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class DataError(ValueError):
    """Data that cannot be used; one sentence that names the file and the row."""


class BadRow(ValueError):
    """One row that cannot be used; the text says what is wrong with it, `kind` names the fault in the report."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}{detail}")
        self.kind = kind


class Row(NamedTuple):
    """A raw row (`value`) and its place, such as `train.jsonl, row 17`; a row that cannot be read is a `BadRow`."""

    place: str
    value: dict[str, Any] | BadRow


def read_files(paths: Sequence[str | Path]) -> Iterator[Row]:
    """Read the rows of JSONL, JSON, CSV (also with .gz) and Parquet files, in order.

    Rows count from 1; in JSONL a row is a line.

    Raises:
        DataError: if a file is missing, has no known ending, or cannot be read as a whole.
    """
    for path in map(Path, paths):
        suffix = Path(path.name.removesuffix(".gz")).suffix
        read = _READERS.get(suffix)
        if read is None:
            raise DataError(f"{path} must end in {', '.join(_READERS)} (the text formats also with .gz).")
        if not path.is_file():
            raise DataError(f"The data file {path} {'is a folder' if path.is_dir() else 'does not exist'}.")
        try:
            for number, value in read(path):
                yield Row(f"{path.name}, row {number}", value)
        except (OSError, UnicodeDecodeError, EOFError, zlib.error, csv.Error) as error:
            raise DataError(f"The data file {path} cannot be read: {error}.") from error


def _open(path: Path):
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _json_value(text: str) -> dict[str, Any] | BadRow:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return BadRow("broken JSON", f" ({error.msg} at character {error.pos + 1})")
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, a thousand brackets
        return BadRow("broken JSON", f" ({error})")
    return value if isinstance(value, dict) else BadRow("not an object", f" (a {type(value).__name__})")


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _json_value(line)


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    with _open(path) as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
    if start != "[":  # one object a line, under the other name
        yield from _read_jsonl(path)
        return
    with _open(path) as file:
        try:
            values = json.load(file)
        except json.JSONDecodeError as error:
            raise DataError(
                f"The data file {path} is broken JSON (line {error.lineno}: {error.msg}), so none of its rows can be told "
                "apart; JSONL files can skip broken rows."
            ) from error
        except (ValueError, RecursionError) as error:
            if isinstance(error, UnicodeDecodeError):
                raise
            raise DataError(f"The data file {path} is broken JSON: {error}.") from error
    for number, value in enumerate(values, start=1):
        yield number, value if isinstance(value, dict) else BadRow("not an object", f" (a {type(value).__name__})")


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(2**31 - 1)  # Python's own limit is 128 KiB, less than a long document
    with _open(path) as file:
        for number, value in enumerate(csv.DictReader(file), start=1):
            if None in value:
                yield number, BadRow("more cells than columns")
            else:
                yield number, {key: cell for key, cell in value.items() if cell is not None}


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"The data file {path} is not Parquet: {error}") from error
    number = 0
    try:
        for batch in file.iter_batches(batch_size=1024):
            for value in batch.to_pylist():
                number += 1
                yield number, value
    except pyarrow.ArrowException as error:
        raise DataError(f"The data file {path} is damaged after row {number}: {error}") from error


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
