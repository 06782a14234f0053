"""Read raw rows, one at a time, from local files; every row knows where it stands.

`datasets.load_dataset` does not do: one broken line makes it refuse the file without naming the line, it turns texts that look
like dates (in JSON) or numbers (in CSV) into such, and it fills fields that a row lacks.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet


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


def present(row: Mapping[str, Any], column: str) -> Any:
    """Return a column of a row that must be there.

    Raises:
        BadRow: if it is not, or is null.
    """
    value = row.get(column)
    if value is None:
        raise BadRow(f"missing field `{column}`", f" (it has {', '.join(f'`{key}`' for key in row) or 'none'})")
    return value


def read_files(paths: Sequence[str | Path]) -> Iterator[Row]:
    """Read the rows of JSONL, JSON, CSV (also with .gz) and Parquet files, in order.

    Rows count from 1; in JSONL a row is a line.

    Raises:
        DataError: if a file is missing, has no known ending, or cannot be read to its end.
    """
    for path in map(Path, paths):
        read = _READERS.get(Path(path.name.removesuffix(".gz")).suffix)
        if read is None:
            raise DataError(f"{path} must end in {', '.join(_READERS)} (the text formats also with .gz).")
        number = 0
        try:
            for number, value in enumerate(read(path), start=1):
                if value is not None:
                    yield Row(f"{path.name}, row {number}", value)
        except (OSError, UnicodeDecodeError, EOFError, zlib.error, csv.Error, pyarrow.ArrowException) as error:
            place = f" after row {number}" if number else ""
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"The data file {path} cannot be read{place}: {reason}.") from error


def _open(path: Path):
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _read_jsonl(path: Path) -> Iterator[dict[str, Any] | BadRow | None]:
    with _open(path) as file:
        for line in file:
            try:
                yield _object(json.loads(line)) if line.strip() else None
            except json.JSONDecodeError as error:
                yield BadRow("broken JSON", f" ({error.msg} at character {error.pos + 1})")
            except (ValueError, RecursionError) as error:  # a number with thousands of digits, a thousand brackets
                yield BadRow("broken JSON", f" ({error})")


def _read_json(path: Path) -> Iterator[dict[str, Any] | BadRow | None]:
    with _open(path) as file:
        if not file.read(1024).lstrip().startswith("["):  # one object a line, under the other name
            yield from _read_jsonl(path)
            return
        file.seek(0)
        try:
            values = json.load(file)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"The data file {path} is broken JSON ({error}), so none of its rows can be told apart; JSONL files can "
                "skip broken rows."
            ) from error
    yield from map(_object, values)


def _object(value: Any) -> dict[str, Any] | BadRow:
    return value if isinstance(value, dict) else BadRow("not an object", f" (a {type(value).__name__})")


def _read_csv(path: Path) -> Iterator[dict[str, Any] | BadRow]:
    csv.field_size_limit(2**31 - 1)  # Python's own limit is 128 KiB, less than a long document
    with _open(path) as file:
        for value in csv.DictReader(file):
            cells = {key: cell for key, cell in value.items() if cell is not None}
            yield BadRow("more cells than columns") if None in value else cells


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
        yield from batch.to_pylist()


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
