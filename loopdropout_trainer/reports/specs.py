"""Tables and figures of a paper as YAML files (docs/reports.md): a pivot of the long table, with the paper's numbers beside.

A finished table is a DataFrame with a row for each cell: `row` (its names), `column`, `text`, `paper`, why it is `missing`,
and its numbers, by seed too. `attrs["spec"]` holds the file's content. Every format is the same grid of texts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pandas as pd
from huggingface_hub.dataclasses import type_validator

from loopdropout_trainer.checks import check_integer
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation.results import mean_sd
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.record.measurement import ALL
from loopdropout_trainer.reports.averaging import (
    average,
    check_alike,
    check_column,
    difference,
    numbers_in,
    select,
    shown,
)
from loopdropout_trainer.reports.reading import Missing, ReportError
from loopdropout_trainer.settings.recipe import load_recipe


NUMBERS = ("mean", "sd", "low", "high", "count", "seeds", "by_seed")

Scalar = str | int | float | bool | None
Selection = dict[str, Scalar | list[Scalar]]
"""Columns of the long table, each with its value or a list of them."""


@dataclass(kw_only=True)
class Cell:
    """What a cell shows of the rows that it selects; `recipe`: a field of a recipe, `of`, in place of results."""

    of: str | None = None
    show: Literal["mean", "seeds", "one"] | None = None
    minus: Selection | None = None
    part: Literal["both_extractable", "missing_in_either"] | None = None
    average_of: list[str] | None = None
    decimals: int | None = None
    scale: float | int | None = None
    bold: list[str] | None = None
    recipe: str | None = None

    def __post_init__(self) -> None:
        if self.decimals is not None:
            check_integer("decimals", self.decimals, 0, 20)
        if self.scale is not None and not abs(self.scale) < math.inf:
            raise ReportError(f"`scale` must be a finite number; got {self.scale!r}.")
        if self.average_of is not None and not self.average_of:
            raise ReportError("`average_of` must name one or more metrics.")
        kind = next((name for name in _TAKEN if getattr(self, name) is not None), "of")
        taken = {*_TAKEN.get(kind, ("of", "show", "average_of", "decimals", "scale", "bold")), kind}
        if stray := [
            each.name for each in fields(self) if getattr(self, each.name) is not None and each.name not in taken
        ]:
            raise ReportError(
                f"`{stray[0]}` has no effect here, beside which of {', '.join(sorted(taken))} would have one."
            )


_TAKEN = {"recipe": ("of",), "minus": ("part", "average_of", "decimals", "bold")}
_OPTIONS = {each.name for each in fields(Cell)}


@dataclass(kw_only=True)
class Spec:
    """What the files of tables and figures share. `made_by`: what to run, shown where numbers are missing."""

    name: str
    label: str
    title: str
    made_by: list[str] = field(default_factory=list)
    filter: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w:.-]+", self.label):  # which becomes part of LaTeX
            raise ReportError(f"`label` must be letters, digits, `:`, `.`, `-` and `_`; got {self.label!r}.")


@dataclass(kw_only=True)
class TableSpec(Spec):
    """A table: heads, columns and rows (docs/reports.md)."""

    note: str = ""
    heads: dict[str, str] = field(default_factory=lambda: {"Method": "method"})
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[list] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for column in self.columns.values():
            split({**self.filter, **column})
        for row in self.rows:
            for head in row[: len(self.heads)]:
                self._check_head(head)
            if len(row) not in (len(self.heads), len(self.heads) + len(self.columns)):
                wanted = f"{len(self.heads)} heads and {len(self.columns)} numbers of the paper, or none"
                raise ReportError(f"`rows` must have {wanted}; got {row!r}.")
            _check_type("rows", row[len(self.heads) :], list[Scalar])

    def _check_head(self, head: Any) -> None:
        if isinstance(head, dict):
            if len(head) != 1:
                raise ReportError(f"`rows` takes a head as {{text: selection}}; got {head!r}.")
            ((text, wanted),) = head.items()
            _check_type(f"rows: {text}", wanted, dict)
            split({**self.filter, **wanted})
        else:
            _check_type("rows", head, Scalar | list[Scalar])


@dataclass(kw_only=True)
class FigureSpec(Spec):
    """A figure of lines, bars or gates: `x` and `y` are {column: label}, `panels` {title: selection}."""

    figure: Literal["line", "bar", "heat", "gates"]
    x: dict[str, str] = field(default_factory=dict)
    y: dict[str, str] = field(default_factory=dict)
    panels: dict[str, Selection] = field(default_factory=dict)
    minus: Selection | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.figure == "gates":
            self._check_gates()
            return
        _check_type("filter", self.filter, Selection)
        for name in ("x", "y"):
            if len(getattr(self, name)) != 1:
                raise ReportError(f"`{name}` must be one column with its label; got {getattr(self, name)!r}.")
        if self.minus is not None and self.figure != "heat":
            raise ReportError("`minus` is for figures `heat`.")

    def _check_gates(self) -> None:
        given = {"num_loops": 4, "p": 0.5, "seed": 0, **self.filter}
        if unknown := sorted(given.keys() - {"num_loops", "p", "seed"}):
            raise ReportError(f"`filter` of gates takes num_loops, p and seed; got `{unknown[0]}`.")
        check_integer("num_loops", given["num_loops"], 1, 1000)
        check_integer("seed", given["seed"], 0)
        make_rule("loop_dropout", p=given["p"])


def load_spec(path: str | Path) -> TableSpec | FigureSpec:
    """Read a table's or figure's file; its name is that of all that is written of it. Faults are ReportErrors."""
    content = load_recipe(path)
    kind = FigureSpec if "figure" in content else TableSpec
    try:
        hints = get_type_hints(kind)
        for name, value in content.items():
            if name not in hints or name == "name":
                raise ReportError(f"`{name}` is no field of a {'figure' if kind is FigureSpec else 'table'}.")
            _check_type(name, value, hints[name])
        needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
        if missing := [name for name in needed if name not in content and name != "name"]:
            raise ReportError(f"`{missing[0]}` is missing.")
        return kind(**content, name=Path(path).stem)
    except UserError as error:
        raise ReportError(f"{path}: {error}") from None


def _check_type(name: str, value: Any, hint: Any) -> None:
    try:
        type_validator(name, value, hint)
    except TypeError:
        words = str(getattr(hint, "__name__", hint)).replace("typing.", "")
        raise ReportError(f"`{name}` must be of type `{words}`; got {value!r}.") from None


def split(wanted: Mapping[str, Any]) -> tuple[dict[str, Any], Cell]:
    """Return the columns that a cell selects by, and what it shows."""
    hints, options = get_type_hints(Cell), {name: value for name, value in wanted.items() if name in _OPTIONS}
    for name, value in options.items():
        _check_type(name, value, hints[name])
    selection = {name: value for name, value in wanted.items() if name not in _OPTIONS}
    for name, value in selection.items():
        _check_type(name, value, Scalar | list[Scalar])
    return selection, Cell(**options)


def build_table(spec: TableSpec, table: pd.DataFrame, missing: type[ReportError] = Missing) -> pd.DataFrame:
    """Fill a table from the long table; a cell that raises `missing` is a dash, with the reason below the table.

    Raises:
        ReportError: if a cell would average different settings, or two cells of one metric were not evaluated alike.
    """
    cells: list[dict[str, Any]] = []
    refused: list[str] = []
    said = any(
        name.startswith("evaluation.") or name in ("total", "panel")
        for column in spec.columns.values()
        for name in column
    )
    compared: dict[str, set[int]] = {}  # rows, by column where columns say how they were evaluated
    for row in spec.rows:
        names, selected = _heads(spec, row)
        paper = row[len(spec.heads) :] or [None] * len(spec.columns)
        for (title, column), printed in zip(spec.columns.items(), paper, strict=True):
            what, wanted = f"{spec.label}: {' / '.join(names)}, {title}", {**spec.filter, **selected, **column}
            cell = {"row": names, "column": title, "paper": "" if printed is None else shown(printed), "missing": ""}
            try:
                selection, option = split(wanted)
                for name in {*(option.bold or ())} - {"row", "column"}:
                    check_column(table, name)
                if option.bold is not None:
                    where = {**wanted, "row": names, "column": title}
                    cell["bold"] = str([where.get(name) for name in option.bold])
                numbers, rows = _cell(table, selection, option, what)
                compared.setdefault(title if said else "", set()).update(rows)
            except missing as reason:
                numbers = {"text": "–", "missing": str(reason)}
                refused += [] if isinstance(reason, Missing) else [str(reason)]
            cells.append(cell | numbers)
    for rows in compared.values():
        for _, part in table.loc[sorted(rows)].groupby("depth", dropna=False):
            check_alike(part, spec.label)
    found = pd.DataFrame(cells, columns=["row", "column", "text", "paper", "missing", "bold", *NUMBERS])
    found.attrs |= {"spec": spec, "refused": refused}
    return found


def _heads(spec: TableSpec, row: list[Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the printed names of a row, and what they select."""
    names, selected = [], {}
    for head, column in zip(row, spec.heads.values(), strict=False):
        if isinstance(head, dict):
            ((text, wanted),) = head.items()
        else:
            text, wanted = head if isinstance(head, str) else shown(head), {column: head}
        names.append(text)
        selected |= wanted
    return tuple(names), selected


def _cell(table: pd.DataFrame, wanted: Mapping, option: Cell, what: str) -> tuple[dict[str, Any], pd.Index]:
    """Return a cell's text and numbers, and the rows that it is made of."""
    if option.recipe is not None:
        return {"text": _of_recipe(option)}, table.index[:0]
    rows = _selected(table, wanted, option)
    if option.minus is not None:
        return _of_difference(rows, _selected(table, {**wanted, **option.minus}, option), option, what), rows.index
    return _of_rows(rows, option, what), rows.index


def _of_recipe(option: Cell) -> str:
    """Return a field of a recipe, or a product of several, as text."""
    recipe, names = load_recipe(option.recipe), (option.of or "").split(" x ")
    values = [recipe.get(name) for name in names]
    if None in values:
        raise Missing(f"{option.recipe} has no `{names[values.index(None)]}`")
    if len(values) > 1:
        numbers_in(pd.Series(values, dtype=object), option.of)
        return f"{' x '.join(map(str, values))} = {math.prod(values)}"
    return f"{values[0]:,}" if isinstance(values[0], int) else shown(values[0])


def _of_difference(rows: pd.DataFrame, other: pd.DataFrame, option: Cell, what: str) -> dict[str, Any]:
    """Return the difference of two selections, with its interval."""
    decimals = 2 if option.decimals is None else option.decimals
    values = difference(rows, other, what, option.part)
    low, high = values.attrs["interval"]
    text = f"{values.mean():+.{decimals}f}"
    text += "" if low is None else f" [{low:+.{decimals}f}, {high:+.{decimals}f}]"
    return {"text": text, "low": low, "high": high, **_numbers(values)}


def _of_rows(rows: pd.DataFrame, option: Cell, what: str) -> dict[str, Any]:
    """Return the mean of a selection, the value of each seed, or the one that all seeds share."""
    decimals, column = 2 if option.decimals is None else option.decimals, option.of or "value"
    check_column(rows, column)
    values = average(rows, what, column)
    if values.isna().any():
        raise Missing(f"no `{column}`")
    if option.show == "one":
        if values.nunique() > 1:
            raise Missing(f"the runs differ in `{column}`: {shown(tuple(values.unique()))}")
        if option.scale is None and option.decimals is None:
            return {"text": shown(values.iloc[0])}
        return {"text": shown(round(float(numbers_in(values, column).iloc[0]) * (option.scale or 1), decimals))}
    values = numbers_in(values, column) * (1 if option.scale is None else option.scale)
    by_seed = " / ".join(f"{value:.{decimals}f}" for value in values)
    return {"text": by_seed if option.show == "seeds" else mean_sd(values, decimals), **_numbers(values)}


def _numbers(values: pd.Series) -> dict[str, Any]:
    mean, sd = values.mean(skipna=False), values.std(skipna=False)
    seeds, by_seed = shown(tuple(values.index)), " ".join(map(repr, map(float, values)))
    return {"mean": mean, "sd": sd, "count": len(values), "seeds": seeds, "by_seed": by_seed}


def _selected(table: pd.DataFrame, wanted: Mapping[str, Any], option: Cell) -> pd.DataFrame:
    """Return the rows that a cell is made of; at the training depth, unit gates and the last readout if it says nothing."""
    rows = select(table, as_trained(wanted))
    if "depth" not in wanted and "num_loops" in rows:
        rows = rows[(rows["depth"] == rows["num_loops"]) | rows["num_loops"].isna()]
    if metrics := option.average_of:  # a row for each run that has them all, with their mean
        rows = rows[rows["metric"].isin(metrics)]
        rows = rows.groupby("run").filter(lambda of: sorted(of["metric"]) == sorted(metrics))
        means = rows.groupby("run")["value"].transform("mean")
        rows = rows.assign(value=means, metric="average", benchmark="", verdicts=None).drop_duplicates("run")
    if not len(rows):
        raise Missing(f"no run with {', '.join(f'{name} {shown(value)}' for name, value in wanted.items())}")
    seeds = wanted.get("seed") if isinstance(wanted.get("seed"), list) else []
    if lacking := [seed for seed in seeds if seed not in set(rows["seed"])]:
        raise Missing(f"no result of seed {shown(lacking)}")
    return rows


def as_trained(wanted: Mapping[str, Any], *named: str) -> dict[str, Any]:
    """Return what is wanted; of gates and readout, where it and `named` say nothing: unit gates, and the last readout."""
    said = {*wanted, *named}
    gates = {} if {"gates", "loop", "dose"} & said else {"gates": ALL}
    return {**gates, **({} if {"readout", "loop"} & said else {"readout": None}), **wanted}


# Texts.


def grid(cells: pd.DataFrame, escape: Callable[[str], str] = str, strong: str = "{}") -> pd.DataFrame:
    """Return a table's texts, the best of each comparison in bold; a column of ours is followed by the paper's, if any."""
    spec, texts = cells.attrs["spec"], cells["text"].map(escape)
    texts = texts.mask(best(cells), texts.map(strong.format))
    names = cells["row"].iloc[:: max(1, len(spec.columns))]
    found = {escape(head): [escape(row[place]) for row in names] for place, head in enumerate(spec.heads)}
    for place, title in enumerate(spec.columns):
        of_column = slice(place, None, len(spec.columns))
        found[escape(title)] = texts.iloc[of_column].tolist()
        if cells["paper"].iloc[of_column].any():
            found[escape(f"{title} (paper)")] = [escape(text or "–") for text in cells["paper"].iloc[of_column]]
    return pd.DataFrame(found)


def best(cells: pd.DataFrame) -> pd.Series:
    """Say which cells have the highest mean among those of the same `bold`, where several are compared."""
    means = cells["mean"].astype(float).groupby(cells["bold"])
    return (cells["mean"] == means.transform("max")) & (means.transform("count") > 1)


def notes(cells: pd.DataFrame) -> list[str]:
    """Return what a reader must know below a table: seeds, intervals, what is missing, and which commands make it."""
    spec, lines = cells.attrs["spec"], []
    if counts := sorted(cells["count"].dropna().astype(int).unique()):
        lines.append(f"Mean ± SD over {' or '.join(map(str, counts))} training seed{'' if counts == [1] else 's'}.")
    if cells["low"].notna().any():
        lines.append("In brackets: 95% interval over seeds and problems.")
    lines += cells.attrs["refused"]
    if spec.made_by and (missing := missing_of(cells)):
        commands = " ; ".join(each if " " in each else f"loopdropout sweep {each}" for each in spec.made_by)
        nothing = len(missing) == len(cells)
        lines.append("Nothing of this table is in these folders." if nothing else f"Missing: {'; '.join(missing)}.")
        lines.append(f"Made by: {commands}")
    return [*filter(None, [spec.note]), *lines]


def missing_of(cells: pd.DataFrame) -> list[str]:
    """Return what could not be filled in, and why."""
    return [
        f"{' / '.join(row)}, {column}: {why}" for row, column, why in cells[["row", "column", "missing"]].values if why
    ]


def markdown(cells: pd.DataFrame) -> str:
    """Return a Markdown table under its title, with its notes."""
    texts, spec = grid(cells, lambda text: text.replace("|", "\\|"), "**{}**"), cells.attrs["spec"]
    align = ["left"] * len(spec.heads) + ["right"] * (texts.shape[1] - len(spec.heads))
    body = texts.to_markdown(index=False, disable_numparse=True, colalign=align) if len(texts) else ""
    return "\n\n".join([f"### {spec.title}", body, *notes(cells)]) + "\n"


_TEX = {"&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--"}  # fmt: skip


def latex(cells: pd.DataFrame) -> str:
    """Return a booktabs table with its caption and label."""
    escape = lambda text: text.translate(str.maketrans(_TEX))
    texts, spec = grid(cells, escape, r"\textbf{{{}}}"), cells.attrs["spec"]
    columns = "l" * len(spec.heads) + "c" * (texts.shape[1] - len(spec.heads))
    caption = escape(" ".join([f"{spec.title}.", *notes(cells)]))
    of_page = {"caption": caption, "label": spec.label, "position": "t", "position_float": "centering"}
    return texts.style.hide(axis="index").to_latex(hrules=True, column_format=columns, **of_page)
