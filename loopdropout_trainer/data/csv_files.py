"""CSV files: their separators, and mistakes in their cells that pandas passes over or names by its own terms."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from loopdropout_trainer.errors import UserError


_SEPARATORS = (";", "\t")
"""Separators besides the comma. Spreadsheets of many countries use semicolons, because their numbers have commas."""

_LONGEST_NAME = 50
"""Characters of a long name of a column. A longer one is probably a text of the data."""

_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)*")
"""A number, also with the ".1" that pandas adds to a name that another column has."""

_LONGEST_CELL = 1 << 30
"""Characters of the longest cell. Python's reader has a limit of 131,072, which is shorter than some documents."""


def csv_options(file: str) -> dict[str, Any]:
    """Return the options of `load_dataset` that make all cells texts, also numbers and the word "None".

    Raises:
        UserError: If rows have more cells than the header, which pandas would take for the names of rows, or drop.
    """
    import pandas as pd
    from datasets import Features, Value

    options: dict[str, Any] = {}
    columns = pd.read_csv(file, nrows=0).columns
    for separator in _SEPARATORS:
        if len(columns) == 1 and separator in columns[0]:
            options["sep"] = separator
            columns = pd.read_csv(file, nrows=0, sep=separator).columns
    _check_first_row(file, options.get("sep", ","))
    features = Features(dict.fromkeys(columns, Value("string")))
    return {**options, "features": features, "keep_default_na": False, "index_col": False}


def _check_first_row(file: str, separator: str) -> None:
    """Raise UserError if the first row has more cells than the header. Of later rows, pandas raises an error."""
    with _open(file) as lines:
        reader = csv.reader(lines, delimiter=separator)
        header, first = next(reader, []), next(reader, [])
    if len(first) > len(header):
        check_cells(file, separator)


def lacks_header(names: Collection[str]) -> bool:
    """Return whether the names of a CSV file's columns are probably the cells of its first row, as "What is 7 times 8?"."""
    return any(_is_like_a_cell(name) for name in names)


def advise_header(columns: Iterable[str]) -> str:
    """Return how to add a header with some columns to a CSV file that lacks it."""
    return (
        "The file seems to have no header line, so its first row was read as the names of the columns. Add a first line with "
        f"the name of each column, such as `{','.join(columns)}`, and the separator of the other lines."
    )


def _is_like_a_cell(name: str) -> bool:
    """Return whether a name is a number, or a text that is too long for a name or ends like a sentence."""
    text = name.strip()
    is_number = _NUMBER.fullmatch(text) is not None
    return is_number or len(text) > _LONGEST_NAME or text.endswith((".", "?", "!"))


def check_cells(file: str, separator: str) -> None:
    """Raise UserError for the first row with more cells than the header, or with a quote that does not end.

    Empty cells behind the last column are ignored, because spreadsheets write them.
    """
    fix = "Put each text with separators, quotes or line ends between double quotes, and double the quotes in it."
    line = 1
    try:
        with _open(file) as lines:
            reader = csv.reader(lines, delimiter=separator, strict=True)
            header = next(reader, [])
            line = reader.line_num + 1  # at which the next row begins
            for row in reader:
                if any(row[len(header) :]):
                    raise UserError(
                        f"Line {line:,} of {file} has {len(row)} cells, and the header has {len(header)}. {fix}"
                    )
                line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"The row in line {line:,} of {file} is not CSV: {error}. {fix}") from None


@contextmanager
def _open(file: str) -> Iterator[Any]:
    """Open a file for Python's reader, whose limit of the length of a cell is higher inside of the block."""
    import fsspec

    former_limit = csv.field_size_limit(_LONGEST_CELL)
    try:
        with fsspec.open(file, "rt", compression="infer", encoding="utf-8-sig", newline="") as lines:
            yield lines
    finally:
        csv.field_size_limit(former_limit)
