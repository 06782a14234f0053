"""Tables of a paper as YAML files: which runs belong in a row, what is measured in a column, and what the paper printed.

    label: tab:mask_controls
    title: Ablating loop-level masking and inverse-survival rescaling
    made_by: python recipes/sweep.py recipes/sweeps/metamath_gsm_controls.yaml
    where: {sweep: metamath_gsm_controls}          # of every cell
    columns:
      - {name: GSM8K, measure: accuracy, benchmark: metamath_gsm8k}
    rows:
      - {name: LoRA, where: {method: LoRA}, paper: ["85.32 ± 0.92"]}

A cell is the measure of all runs that match the `where` of table, row and column together, over their seeds. Rows and columns
may each hold any of the fields of a cell; the row's win over the table's, and the column's over both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopdropout_trainer.reports.measures import MEASURES, Cell, CellSpec, evaluate_cell
from loopdropout_trainer.reports.records import Record, ReportError
from loopdropout_trainer.settings.recipe import load_recipe


@dataclass(frozen=True)
class TableSpec:
    """A table as its YAML file says it.

    Attributes:
        label, title: of the table; heads: names of the columns before the measured ones.
        made_by: command that leaves the runs.
        columns, rows: mappings with `name` and the fields of a cell.
        cell: fields that all cells share.
        bold: whether the largest mean of a column (or of a row) is the winner, "column", "row" or None.
        note: a sentence below the table.
    """

    label: str
    title: str
    columns: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    heads: list[str] = field(default_factory=lambda: ["Method"])
    made_by: str = ""
    cell: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    path: str = ""

    @property
    def name(self) -> str:
        """The label without its prefix."""
        return self.label.split(":")[-1]


_TABLE_FIELDS = {"label", "title", "columns", "rows", "heads", "made_by", "note", "figure"}


def load_table(path: str | Path) -> TableSpec:
    """Read a table's YAML file.

    Raises:
        ReportError: naming the field that is missing or unknown.
    """
    content = load_recipe(path)
    for name in ("label", "title", "columns", "rows"):
        if name not in content:
            raise ReportError(f"The table {path} has no `{name}`.")
    cell = {key: value for key, value in content.items() if key not in _TABLE_FIELDS}
    own = {key: value for key, value in content.items() if key in _TABLE_FIELDS - {"figure"}}
    spec = TableSpec(**own, cell=cell, path=str(path))
    for each in (cell, *spec.columns, *spec.rows):
        unknown = set(each) - CellSpec.fields() - {"name", "paper"}
        if unknown:
            raise ReportError(
                f"The table {path} has an unknown field `{min(unknown)}`; valid are {', '.join(sorted(CellSpec.fields()))}."
            )
        if each.get("measure", "accuracy") not in MEASURES:
            raise ReportError(f"`measure` in {path} must be one of {', '.join(MEASURES)}; got {each['measure']!r}.")
    for row in spec.rows:
        printed = row.get("paper", [])
        if printed and len(printed) != len(spec.columns):
            raise ReportError(
                f"The row {row.get('name')!r} of {path} has {len(printed)} numbers in `paper` for {len(spec.columns)} columns."
            )
    return spec


@dataclass(frozen=True)
class FinishedTable:
    """A table with its numbers.

    Attributes:
        spec: what it was made from.
        names: of each row, one for each head.
        cells: [rows][columns].
        paper: [rows][columns] of what the paper printed; None where it says nothing.
    """

    spec: TableSpec
    names: list[list[str]]
    cells: list[list[Cell]]
    paper: list[list[str | None]]

    @property
    def missing(self) -> list[str]:
        """What could not be filled in, one sentence each."""
        lines = []
        for names, row in zip(self.names, self.cells, strict=True):
            for column, cell in zip(self.spec.columns, row, strict=True):
                if cell.missing:
                    lines.append(f"{' / '.join(names)}, {column['name']}: {cell.missing}")
        return lines

    @property
    def filled(self) -> int:
        """Number of cells with a number."""
        return sum(not cell.missing for row in self.cells for cell in row)


def build_table(spec: TableSpec, records: Sequence[Record]) -> FinishedTable:
    """Fill a table from the runs.

    Raises:
        ReportError: if runs of one cell, or of one column, cannot be compared; it names the field that differs.
    """
    names, cells, paper = [], [], []
    for row in spec.rows:
        name = row.get("name", "")
        names.append([str(part) for part in (name if isinstance(name, list) else [name])])
        cells.append([evaluate_cell(_cell_spec(spec, row, column), records) for column in spec.columns])
        paper.append(list(row.get("paper", [])) or [None] * len(spec.columns))
    _check_columns(spec, names, cells)
    return FinishedTable(spec, names, cells, paper)


def _cell_spec(spec: TableSpec, row: Mapping[str, Any], column: Mapping[str, Any]) -> CellSpec:
    merged: dict[str, Any] = {}
    for part in (spec.cell, row, column):
        for key, value in part.items():
            if key in ("name", "paper"):
                continue
            merged[key] = {**merged.get(key, {}), **value} if key == "where" else value
    return CellSpec(**merged)


def _check_columns(spec: TableSpec, names: Sequence[Sequence[str]], cells: Sequence[Sequence[Cell]]) -> None:
    """Refuse a column whose cells are about other problems, prompts or token budgets."""
    for place, column in enumerate(spec.columns):
        first: tuple[str, Cell] | None = None
        for name, row in zip(names, cells, strict=True):
            cell = row[place]
            if not cell.basis:
                continue
            label = " / ".join(name)
            if first is not None and first[1].benchmark == cell.benchmark:
                for key in sorted({*first[1].basis, *cell.basis}):
                    one, other = first[1].basis.get(key), cell.basis.get(key)
                    if one is not None and other is not None and one != other:
                        raise ReportError(
                            f"`{first[0]}` and `{label}` cannot stand in one column `{column['name']}` of {spec.label}: their "
                            f"`{key}` differ ({_short(one)} and {_short(other)})."
                        )
            first = first or (label, cell)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
