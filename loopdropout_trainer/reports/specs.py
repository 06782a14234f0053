"""Tables and figures of a paper as YAML files (docs/reports.md): a pivot of the long table, with the paper's numbers beside.

A finished table is a DataFrame with a row for each cell: `row` (its names), `column`, `text`, `paper`, why it is `missing`,
and its numbers, by seed too. `attrs["spec"]` holds the file's content. Every format is the same grid of texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from loopdropout_trainer.record.measurement import mean_sd
from loopdropout_trainer.reports.averaging import (
    average,
    check_alike,
    check_column,
    difference,
    numbers_in,
    select_as_trained,
    shown,
)
from loopdropout_trainer.reports.reading import Missing, ReportError
from loopdropout_trainer.reports.statistics import estimate
from loopdropout_trainer.settings.recipe import load_recipe


COLUMNS = [
    "row",
    "column",
    "text",
    "paper",
    "missing",
    "bold",
    "mean",
    "sd",
    "low",
    "high",
    "count",
    "seeds",
    "by_seed",
]
"""Of a finished table."""


def _check_value(value: Any) -> Any:
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, (list, dict)):
            raise PydanticCustomError("selection", "Input should be a value of a column, or a list of them")
    return value


Selection = dict[str, Annotated[Any, AfterValidator(_check_value)]]
"""Columns of the long table, each with its value or a list of them."""


class _Checked(BaseModel):
    """Fields that are what their types say, and no others."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Cell(_Checked):
    """A cell of a table: what it shows, and by all fields of other names which rows of the long table it shows it of.

    `fill` returns its text, its numbers, and as `rows` the places of what these are made of; ReportErrors begin with `what`.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: Selection

    bold: list[str] | None = None


class RecipeCell(Cell):
    """A field of a recipe, or a product of several, `a x b`."""

    recipe: str
    of: str
    bold: None = None

    def fill(self, table: pd.DataFrame, what: str) -> dict[str, Any]:
        recipe = load_recipe(self.recipe)
        names = self.of.split(" x ")
        if lacking := [name for name in names if recipe.get(name) is None]:
            raise Missing(f"{self.recipe} has no `{lacking[0]}`")
        values = [recipe[name] for name in names]
        if len(values) > 1:
            numbers_in(pd.Series(values, dtype=object), self.of)
            factors = " x ".join(map(str, values))
            product = math.prod(values)
            return {"text": f"{factors} = {product}"}
        value = values[0]
        if isinstance(value, int):
            return {"text": f"{value:,}"}
        return {"text": shown(value)}


class _OfRows(Cell):
    average_of: Annotated[list[str], Field(min_length=1)] | None = None
    decimals: int = Field(2, ge=0, le=20)

    def rows(self, table: pd.DataFrame, wanted: Selection) -> pd.DataFrame:
        """Return the rows that are selected; of `average_of` one for each run that has all the metrics, with their mean."""
        rows = select_as_trained(table, wanted)
        if self.average_of is not None:
            of_runs = rows[rows["metric"].isin(self.average_of)].groupby("run")
            rows = of_runs.filter(lambda of_run: sorted(of_run["metric"]) == sorted(self.average_of))
            means = rows.groupby("run")["value"].transform("mean")
            rows = rows.assign(
                value=means,
                metric="average",
                benchmark="",
                verdicts=None,
            )
            rows = rows.drop_duplicates("run")
        if not len(rows):
            said = [f"{name} {shown(value)}" for name, value in wanted.items()]
            raise Missing(f"no run with {', '.join(said)}")
        seeds = wanted.get("seed")
        if isinstance(seeds, list):
            lacking = [seed for seed in seeds if seed not in set(rows["seed"])]
            if lacking:
                raise Missing(f"no result of seed {shown(lacking)}")
        return rows


class ResultCell(_OfRows):
    """A column of the selected rows: its mean over seeds, the value of each seed, or the one that all seeds share."""

    of: str = "value"
    show: Literal["mean", "seeds", "one"] = "mean"
    scale: float = 1

    def fill(self, table: pd.DataFrame, what: str) -> dict[str, Any]:
        rows = self.rows(table, self.model_extra)
        check_column(rows, self.of)
        values = average(rows, what, self.of)
        if values.isna().any():
            raise Missing(f"no `{self.of}`")
        if self.show == "one":
            return {"text": self._shared(values), "rows": rows.index}
        values = numbers_in(values, self.of) * self.scale
        text = mean_sd(values, self.decimals)
        if self.show == "seeds":
            by_seed = [f"{value:.{self.decimals}f}" for value in values]
            text = " / ".join(by_seed)
        numbers = _numbers(values)
        return {"text": text, "rows": rows.index, **numbers}

    def _shared(self, values: pd.Series) -> str:
        if values.nunique() > 1:
            different = shown(values.unique().tolist())
            raise Missing(f"the runs differ in `{self.of}`: {different}")
        if self.model_fields_set & {"decimals", "scale"}:
            values = numbers_in(values, self.of) * self.scale
            values = values.round(self.decimals)
        return shown(values.iloc[0])


class DifferenceCell(_OfRows):
    """The selected rows less those that `minus` selects, with the interval of the difference."""

    minus: Selection
    part: Literal["both_extractable", "missing_in_either"] | None = None

    def fill(self, table: pd.DataFrame, what: str) -> dict[str, Any]:
        rows = self.rows(table, self.model_extra)
        other = self.rows(table, self.model_extra | self.minus)
        gains = difference(rows, other, what, self.part)
        numbers = _numbers(gains.mean(axis=1))
        form = f"+.{self.decimals}f"
        text = format(numbers["mean"], form)
        certainty = estimate(gains.to_numpy())
        if certainty is not None:
            low = certainty.low
            high = certainty.high
            numbers |= {"low": low, "high": high}
            text += f" [{low:{form}}, {high:{form}}]"
        return {"text": text, "rows": rows.index, **numbers}


def read_cell(fields: dict[str, Any]) -> RecipeCell | DifferenceCell | ResultCell:
    """Return the cell that these fields describe.

    Raises:
        ReportError, ValidationError: for an option that has no effect there, and one of another type.
    """
    kind = ResultCell
    if "recipe" in fields:
        kind = RecipeCell
    elif "minus" in fields:
        kind = DifferenceCell
    options = kind.model_fields.keys()
    stray = sorted(_OPTIONS & fields.keys() - options)
    if stray:
        valid = ", ".join(options)
        raise ReportError(f"`{stray[0]}` has no effect here, beside which of {valid} would have one.")
    return kind.model_validate(fields)


_OPTIONS = {*RecipeCell.model_fields, *DifferenceCell.model_fields, *ResultCell.model_fields}


def _numbers(values: pd.Series) -> dict[str, Any]:
    return {
        "mean": values.mean(skipna=False),
        "sd": values.std(skipna=False),
        "count": len(values),
        "seeds": shown(tuple(values.index)),
        "by_seed": " ".join(map(repr, values.tolist())),
    }


class Spec(_Checked):
    """What the files of tables and figures share. `made_by`: what to run, shown where numbers are missing."""

    label: str = Field(pattern=r"^[\w:.-]+$")  # which becomes part of LaTeX
    title: str
    made_by: list[str] = []
    filter: dict[str, Any] = {}


class TableSpec(Spec):
    """A table: heads, columns and rows (docs/reports.md)."""

    note: str = ""
    heads: dict[str, str] = {"Method": "method"}
    columns: dict[str, dict[str, Any]] = {}
    rows: list[list[Any]] = []

    def cells(self) -> Iterator[tuple[tuple[str, ...], str, Any, RecipeCell | DifferenceCell | ResultCell]]:
        """Yield the names of a row, the title of a column, the number of the paper there, and the cell.

        Raises:
            ReportError, ValidationError: for a row or a cell that cannot be made.
        """
        for row in self.rows:
            heads = row[: len(self.heads)]
            paper = row[len(self.heads) :] or [None] * len(self.columns)
            if (len(heads), len(paper)) != (len(self.heads), len(self.columns)):
                wanted = f"{len(self.heads)} heads and {len(self.columns)} numbers of the paper, or none"
                raise ReportError(f"`rows` must have {wanted}; got {row!r}.")
            names = []
            selected = self.filter
            for head, column in zip(heads, self.heads.values(), strict=True):
                name, selection = _read_head(head, column)
                names.append(name)
                selected = selected | selection
            for (title, column), printed in zip(self.columns.items(), paper, strict=True):
                yield tuple(names), title, printed, read_cell(selected | column)


def _read_head(head: Any, column: str) -> tuple[str, dict[str, Any]]:
    """Return the printed name of a head, and what it selects: `text: selection`, or a value of the head's column."""
    if not isinstance(head, dict):
        return head if isinstance(head, str) else shown(head), {column: head}
    for name, selection in head.items():
        if len(head) == 1 and isinstance(selection, dict):
            return str(name), selection
    raise ReportError(f"`rows` takes a head as {{text: selection}}; got {head!r}.")


class FigureSpec(Spec):
    """A figure: `x` and `y` are {column: label}, `panels` {title: selection}."""

    figure: Literal["line", "bar", "heat", "gates"]  # `gates`: a GatesSpec
    filter: Selection = {}
    x: dict[str, str] = Field(min_length=1, max_length=1)
    y: dict[str, str] = Field(min_length=1, max_length=1)
    panels: dict[str, Selection] = Field({"": {}}, min_length=1)


class HeatSpec(FigureSpec):
    """A matrix, less the rows that `minus` selects."""

    minus: Selection = {}


Probability = Annotated[float, Field(ge=0, lt=1)]


class Gates(_Checked):
    """Gates of Loop Dropout: of K loops, with a drop probability, or one for each loop, and a seed."""

    num_loops: int = Field(4, ge=1, le=1000)
    p: Probability | list[Probability] = 0.5
    seed: int = Field(0, ge=0, lt=2**31)


class GatesSpec(Spec):
    """A figure of the gates that `filter` describes."""

    figure: Literal["gates"]
    filter: Gates = Gates()


_FIGURES = {"heat": HeatSpec, "gates": GatesSpec}


def load_spec(path: str | Path) -> TableSpec | FigureSpec | GatesSpec:
    """Read a table's or figure's file. Faults are ReportErrors."""
    content = load_recipe(path)
    what = "table"
    kind = TableSpec
    if "figure" in content:
        what = "figure"
        kind = _FIGURES.get(str(content["figure"]), FigureSpec)
    try:
        spec = kind.model_validate(content)
        if kind is TableSpec:
            list(spec.cells())  # each is checked
        return spec
    except ValidationError as error:
        fault = max(error.errors(), key=lambda fault: len(fault["loc"]))  # of several types the one that fits best
        name = ".".join(str(part) for part in fault["loc"] if "constrained" not in str(part))  # a type's name
        got = "" if fault["type"] == "missing" else f"; got {fault['input']!r}"
        reason = f"`{name}`: {fault['msg']}{got}."
    except ReportError as error:
        reason = str(error)
    raise ReportError(f"{path} describes no {what}: {reason}")


def build_table(spec: TableSpec, table: pd.DataFrame, missing: type[ReportError] = Missing) -> pd.DataFrame:
    """Fill a table from the long table; a cell that raises `missing` is a dash, with the reason below the table.

    Raises:
        ReportError: if a cell would average different settings, or two cells of one metric were not evaluated alike.
    """
    filled = []
    refused = []
    compared: dict[str, set[int]] = {}  # rows, by column where columns say how they were evaluated
    named = {name.split(".")[0] for column in spec.columns.values() for name in column}
    by_column = named & {"evaluation", "total", "panel"}
    for row, column, printed, cell in spec.cells():
        numbers = {"row": row, "column": column, "paper": "", "missing": ""}
        if printed is not None:
            numbers["paper"] = shown(printed)
        if cell.bold is not None:
            for name in {*cell.bold} - {"row", "column"}:
                check_column(table, name)
            where = cell.model_extra | numbers
            numbers["bold"] = str([where.get(name) for name in cell.bold])
        names = " / ".join(row)
        try:
            numbers |= cell.fill(table, f"{spec.label}: {names}, {column}")
            rows = compared.setdefault(column if by_column else "", set())
            rows.update(numbers.pop("rows", ()))
        except missing as reason:
            numbers |= {"text": "–", "missing": str(reason)}
            if not isinstance(reason, Missing):
                refused.append(str(reason))
        filled.append(numbers)
    for rows in compared.values():
        rows = table.loc[sorted(rows)]
        for _, at_depth in rows.groupby("depth", dropna=False):
            check_alike(at_depth, spec.label)
    cells = pd.DataFrame(filled, columns=COLUMNS)
    cells.attrs |= {"spec": spec, "refused": refused}
    return cells


# Texts.


def grid(cells: pd.DataFrame, escape: Callable[[str], str] = str, strong: str = "{}") -> pd.DataFrame:
    """Return a table's texts, the best of each comparison in bold; a column of ours is followed by the paper's, if any."""
    spec = cells.attrs["spec"]
    texts = cells["text"].map(escape)
    texts = texts.mask(best(cells), texts.map(strong.format))
    names = cells["row"].iloc[:: len(spec.columns) or 1]
    columns = {}
    for place, head in enumerate(spec.heads):
        columns[escape(head)] = names.str[place].map(escape).tolist()
    for title in spec.columns:
        in_column = cells["column"] == title
        columns[escape(title)] = texts[in_column].tolist()
        paper = cells["paper"][in_column]
        if paper.any():
            columns[escape(f"{title} (paper)")] = paper.replace("", "–").map(escape).tolist()
    return pd.DataFrame(columns)


def best(cells: pd.DataFrame) -> pd.Series:
    """Say which cells have the highest mean among those of the same `bold`, where several are compared."""
    means = cells["mean"].astype(float).groupby(cells["bold"])
    is_highest = cells["mean"] == means.transform("max")
    return is_highest & (means.transform("count") > 1)


def notes(cells: pd.DataFrame) -> list[str]:
    """Return what a reader must know below a table: seeds, intervals, what is missing, and which commands make it."""
    spec = cells.attrs["spec"]
    lines = [spec.note] if spec.note else []
    counts = sorted(cells["count"].dropna().astype(int).unique())
    if counts:
        seeds = "seed" if counts == [1] else "seeds"
        numbers = " or ".join(map(str, counts))
        lines.append(f"Mean ± SD over {numbers} training {seeds}.")
    if cells["low"].notna().any():
        lines.append("In brackets: 95% interval over seeds and problems.")
    lines += cells.attrs["refused"]
    missing = missing_of(cells)
    if spec.made_by and missing:
        commands = [name if " " in name else f"loopdropout sweep {name}" for name in spec.made_by]
        cause = f"Missing: {'; '.join(missing)}."
        if len(missing) == len(cells):
            cause = "Nothing of this table is in these folders."
        lines += [cause, f"Made by: {' ; '.join(commands)}"]
    return lines


def missing_of(cells: pd.DataFrame) -> list[str]:
    """Return what could not be filled in, and why."""
    lacking = cells[cells["missing"] != ""]
    names = lacking["row"].map(" / ".join) + ", " + lacking["column"]
    return (names + ": " + lacking["missing"]).tolist()


def markdown(cells: pd.DataFrame) -> str:
    """Return a Markdown table under its title, with its notes."""
    texts = grid(cells, lambda text: text.replace("|", "\\|"), "**{}**")
    spec = cells.attrs["spec"]
    heads = len(spec.heads)
    align = ["left"] * heads + ["right"] * (texts.shape[1] - heads)
    body = texts.to_markdown(index=False, disable_numparse=True, colalign=align) if len(texts) else ""
    return "\n\n".join([f"### {spec.title}", body, *notes(cells)]) + "\n"


_TEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%#_${}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "–": "--",
    }
)


def latex(cells: pd.DataFrame) -> str:
    """Return a booktabs table with its caption and label."""
    escape = lambda text: text.translate(_TEX)
    texts = grid(cells, escape, r"\textbf{{{}}}")
    spec = cells.attrs["spec"]
    heads = len(spec.heads)
    columns = "l" * heads + "c" * (texts.shape[1] - heads)
    caption = " ".join([f"{spec.title}.", *notes(cells)])
    return texts.style.hide(axis="index").to_latex(
        hrules=True,
        column_format=columns,
        caption=escape(caption),
        label=spec.label,
        position="t",
        position_float="centering",
    )
