"""Read raw rows, one at a time, from local files; every row knows where it stands, and a report counts them.

`datasets.load_dataset` does not do: one broken line makes it refuse the file without naming the line, it turns texts that look
like dates (in JSON) or numbers (in CSV) into such, and it fills fields that a row lacks.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import fsspec
import pyarrow.parquet


Columns = Mapping[str, Any]
"""A row's values, by column."""

_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")


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
    value: Columns | BadRow


@dataclass
class DataReport:
    """How many rows were read, used and dropped; `print` shows the counts as a table."""

    source: str = ""
    read: int = 0
    train: int = 0
    held_out: int = 0
    lengths: list[int] = field(default_factory=list)  # of the training examples, in tokens
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    bad_rows: list[str] = field(default_factory=list)  # the first few that were skipped, with their places

    def drop(self, reason: str, number: int) -> None:
        """Count rows that are left out."""
        if number:
            self.dropped[reason] += int(number)

    @property
    def train_tokens(self) -> int:
        """Tokens of the training examples, each counted once."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest training example."""
        return max(self.lengths, default=0)

    @property
    def unused(self) -> int:
        """Usable rows beyond the number to train on."""
        return self.read - self.train - self.held_out - sum(self.dropped.values())

    def __str__(self) -> str:
        counts = {"read": self.read, "  to train on": self.train, "  held out": self.held_out}
        if self.unused:
            counts["  not used"] = self.unused
        for reason, number in sorted(self.dropped.items()):
            counts[f"  dropped: {reason}"] = number
        width = max(map(len, counts))
        lines = [f"{name:<{width}} {count:>11,}" for name, count in counts.items()]
        return "\n".join([f"Rows of {self.source}", *lines, *(f"    {bad}" for bad in self.bad_rows)])


def present(row: Columns, column: str) -> Any:
    """Return a column of a row that must be there, and not null."""
    if row.get(column) is None:
        raise BadRow(f"missing field `{column}`", fields_of(row))
    return row[column]


def text(row: Columns, column: str) -> str:
    """Return a text column of a row."""
    value = present(row, column)
    if not isinstance(value, str):
        raise BadRow(f"field `{column}` is not text", f" (a {type(value).__name__})")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"field `{column}` is not valid Unicode") from None
    return value


def fields_of(row: Columns) -> str:
    return f" (it has {', '.join(f'`{key}`' for key in row) or 'none'}; `column_mapping` may help)"


def read_files(paths: Sequence[str | Path]) -> Iterator[Row]:
    """Read the rows of JSONL, JSON, CSV (also with .gz) and Parquet files, in order.

    Rows count from 1; in JSONL a row is a line.

    Raises:
        DataError: if a file is missing, has no known ending, or cannot be read to its end.
    """
    for path in map(Path, paths):
        number = 0
        try:
            for number, value in enumerate(_read(path), start=1):
                if value is not None:
                    yield Row(f"{path.name}, row {number}", value)
        except Exception as error:  # whatever the reader of a format raises
            place = f" after row {number}" if number else ""
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"The data file {path} cannot be read{place}: {reason}.") from error


def _read(path: Path) -> Iterator[Columns | BadRow | None]:
    """Yield each row of a file, or what is wrong with it; None for an empty line."""
    ending = Path(path.name.removesuffix(".gz")).suffix
    if ending not in _ENDINGS:
        raise ValueError(f"its name must end in {', '.join(_ENDINGS)} (the text formats also with .gz)")
    if ending == ".parquet":
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            yield from batch.to_pylist()
        return
    with fsspec.open(path, "rt", compression="infer", encoding="utf-8-sig", newline="") as file:
        if ending == ".csv":
            yield from _csv_rows(file)
        elif ending == ".json" and file.read(1024).lstrip().startswith("["):
            file.seek(0)
            yield from map(_object, json.load(file, object_pairs_hook=_unique))
        else:  # one object a line, also under the other name
            file.seek(0)
            yield from map(_line, file)


def _csv_rows(file: TextIO) -> Iterator[Columns | BadRow]:
    csv.field_size_limit(2**31 - 1)  # Python's own limit is 128 KiB, less than a long document
    reader = csv.DictReader(file)
    _unique([(name, None) for name in reader.fieldnames or ()])
    for cells in reader:
        if None in cells:
            yield BadRow("more cells than columns")
        else:
            yield {name: cell for name, cell in cells.items() if cell is not None}


def _line(line: str) -> Columns | BadRow | None:
    try:
        return _object(json.loads(line, object_pairs_hook=_unique)) if line.strip() else None
    except (ValueError, RecursionError) as error:
        return BadRow("broken JSON", f" ({error})")


def _unique(pairs: list[tuple[str, Any]]) -> Columns:
    """Return a row; of a name that stands twice Python's readers would keep the last value."""
    row = {}
    for name, value in pairs:
        if name in row:
            raise ValueError(f"`{name}` stands twice")
        row[name] = value
    return row


def _object(value: Any) -> Columns | BadRow:
    return value if isinstance(value, dict) else BadRow("not an object", f" (a {type(value).__name__})")
