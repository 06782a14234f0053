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
    as_trained,
    at_trained_depth,
    average,
    check_alike,
    check_column,
    difference,
    numbers_in,
    select,
    shown,
)
from loopdropout_trainer.reports.reading import Missing, ReportError
from loopdropout_trainer.reports.statistics import estimate
from loopdropout_trainer.settings.recipe import load_recipe


NUMBERS = ("mean", "sd", "low", "high", "count", "seeds", "by_seed")


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
    """A cell of a table: what it shows, and by all other fields which rows of the long table it shows it of.

    `recipe`: a field of a recipe, `of`, in place of results.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: Selection

    of: str = "value"
    show: Literal["mean", "seeds", "one"] = "mean"
    minus: Selection | None = None
    part: Literal["both_extractable", "missing_in_either"] | None = None
    average_of: Annotated[list[str], Field(min_length=1)] | None = None
    decimals: int = Field(2, ge=0, le=20)
    scale: float = 1
    bold: list[str] | None = None
    recipe: str | None = None

    def check_options(self) -> None:
        """Refuse, by a ReportError, an option without effect."""
        given = self.model_fields_set - self.model_extra.keys()
        kind = next((kind for kind in _TAKEN if kind in given), "of")
        if stray := sorted(given - _TAKEN[kind]):
            others = ", ".join(sorted(_TAKEN[kind]))
            raise ReportError(f"`{stray[0]}` has no effect here, beside which of {others} would have one.")

    def fill(self, table: pd.DataFrame, what: str) -> tuple[dict[str, Any], pd.Index]:
        """Return the text and the numbers, and the rows that they are made of; ReportErrors begin with `what`."""
        if self.recipe is not None:
            return {"text": self._of_recipe()}, table.index[:0]
        rows = self._rows(table, {})
        if self.minus is None:
            return self._of_rows(rows, what), rows.index
        return self._of_difference(rows, self._rows(table, self.minus), what), rows.index

    def _rows(self, table: pd.DataFrame, change: Selection) -> pd.DataFrame:
        """Return the rows that are selected; at the training depth, unit gates and the last readout if nothing is said."""
        wanted = {**self.model_extra, **change}
        rows = select(table, as_trained(wanted))
        if "depth" not in wanted:
            rows = at_trained_depth(rows)
        if self.average_of:
            rows = _averaged(rows, self.average_of)
        if not len(rows):
            said = [f"{name} {shown(value)}" for name, value in wanted.items()]
            raise Missing(f"no run with {', '.join(said)}")
        seeds = wanted.get("seed") if isinstance(wanted.get("seed"), list) else []
        if lacking := [seed for seed in seeds if seed not in set(rows["seed"])]:
            raise Missing(f"no result of seed {shown(lacking)}")
        return rows

    def _of_recipe(self) -> str:
        """Return a field of a recipe, or a product of several, as text."""
        recipe = load_recipe(self.recipe)
        names = self.of.split(" x ")
        if lacking := [name for name in names if recipe.get(name) is None]:
            raise Missing(f"{self.recipe} has no `{lacking[0]}`")
        values = [recipe[name] for name in names]
        if len(values) > 1:
            numbers_in(pd.Series(values, dtype=object), self.of)
            factors = " x ".join(map(str, values))
            return f"{factors} = {math.prod(values)}"
        value = values[0]
        return f"{value:,}" if isinstance(value, int) else shown(value)

    def _of_difference(self, rows: pd.DataFrame, other: pd.DataFrame, what: str) -> dict[str, Any]:
        """Return the difference of two selections, with its interval."""
        gains = difference(rows, other, what, self.part)
        numbers = _numbers(gains.mean(axis=1))
        form = f"+.{self.decimals}f"
        text = format(numbers["mean"], form)
        certainty = estimate(gains.to_numpy())
        if certainty is None:
            return {"text": text, **numbers}
        low = certainty.low
        high = certainty.high
        interval = f"[{low:{form}}, {high:{form}}]"
        return {"text": f"{text} {interval}", "low": low, "high": high, **numbers}

    def _of_rows(self, rows: pd.DataFrame, what: str) -> dict[str, Any]:
        """Return the mean of a selection, the value of each seed, or the one that all seeds share."""
        check_column(rows, self.of)
        values = average(rows, what, self.of)
        if values.isna().any():
            raise Missing(f"no `{self.of}`")
        if self.show == "one" and values.nunique() > 1:
            different = shown(values.unique().tolist())
            raise Missing(f"the runs differ in `{self.of}`: {different}")
        if self.show == "one" and not self.model_fields_set & {"decimals", "scale"}:
            return {"text": shown(values.iloc[0])}
        values = numbers_in(values, self.of) * self.scale
        if self.show == "one":
            return {"text": shown(values.round(self.decimals).iloc[0])}
        text = mean_sd(values, self.decimals)
        if self.show == "seeds":
            by_seed = [f"{value:.{self.decimals}f}" for value in values]
            text = " / ".join(by_seed)
        return {"text": text, **_numbers(values)}


_TAKEN = {
    "recipe": {"recipe", "of"},
    "minus": {"minus", "part", "average_of", "decimals", "bold"},
    "of": {"of", "show", "average_of", "decimals", "scale", "bold"},
}
"""Which options have an effect, by the first of these that is given."""


def _averaged(rows: pd.DataFrame, metrics: list[str]) -> pd.DataFrame:
    """Return a row for each run that has all of the metrics, with their mean."""
    rows = rows[rows["metric"].isin(metrics)]
    of_runs = rows.groupby("run")
    rows = of_runs.filter(lambda of_run: sorted(of_run["metric"]) == sorted(metrics))
    means = rows.groupby("run")["value"].transform("mean")
    return rows.assign(value=means, metric="average", benchmark="", verdicts=None).drop_duplicates("run")


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

    def cells(self) -> Iterator[tuple[tuple[str, ...], str, Any, Cell]]:
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
                cell = Cell.model_validate(selected | column)
                cell.check_options()
                yield tuple(names), title, printed, cell


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
    kind = TableSpec
    if "figure" in content:
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
    what = "figure" if "figure" in content else "table"
    raise ReportError(f"{path} describes no {what}: {reason}")


def build_table(spec: TableSpec, table: pd.DataFrame, missing: type[ReportError] = Missing) -> pd.DataFrame:
    """Fill a table from the long table; a cell that raises `missing` is a dash, with the reason below the table.

    Raises:
        ReportError: if a cell would average different settings, or two cells of one metric were not evaluated alike.
    """
    filled: list[dict[str, Any]] = []
    refused: list[str] = []
    compared: dict[str, set[int]] = {}  # rows, by column where columns say how they were evaluated
    named = {name.split(".")[0] for column in spec.columns.values() for name in column}
    by_column = named & {"evaluation", "total", "panel"}
    for row, column, printed, cell in spec.cells():
        paper = "" if printed is None else shown(printed)
        texts = {"row": row, "column": column, "paper": paper, "missing": ""}
        if cell.bold is not None:
            for name in {*cell.bold} - {"row", "column"}:
                check_column(table, name)
            where = {**cell.model_extra, "row": row, "column": column}
            texts["bold"] = str([where.get(name) for name in cell.bold])
        try:
            names = " / ".join(row)
            numbers, rows = cell.fill(table, f"{spec.label}: {names}, {column}")
            compared.setdefault(column if by_column else "", set()).update(rows)
        except missing as reason:
            numbers = {"text": "–", "missing": str(reason)}
            if not isinstance(reason, Missing):
                refused.append(str(reason))
        filled.append(texts | numbers)
    for rows in compared.values():
        for _, part in table.loc[sorted(rows)].groupby("depth", dropna=False):
            check_alike(part, spec.label)
    cells = pd.DataFrame(filled, columns=["row", "column", "text", "paper", "missing", "bold", *NUMBERS])
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
    if counts := sorted(cells["count"].dropna().astype(int).unique()):
        seeds = "seed" if counts == [1] else "seeds"
        numbers = " or ".join(map(str, counts))
        lines.append(f"Mean ± SD over {numbers} training {seeds}.")
    if cells["low"].notna().any():
        lines.append("In brackets: 95% interval over seeds and problems.")
    lines += cells.attrs["refused"]
    missing = missing_of(cells)
    if spec.made_by and missing:
        commands = [name if " " in name else f"loopdropout sweep {name}" for name in spec.made_by]
        nothing = len(missing) == len(cells)
        lines.append("Nothing of this table is in these folders." if nothing else f"Missing: {'; '.join(missing)}.")
        lines.append(f"Made by: {' ; '.join(commands)}")
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
    {"&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
     "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--"}
)  # fmt: skip


def latex(cells: pd.DataFrame) -> str:
    """Return a booktabs table with its caption and label."""
    escape = lambda text: text.translate(_TEX)
    texts = grid(cells, escape, r"\textbf{{{}}}")
    spec = cells.attrs["spec"]
    heads = len(spec.heads)
    columns = "l" * heads + "c" * (texts.shape[1] - heads)
    caption = escape(" ".join([f"{spec.title}.", *notes(cells)]))
    of_page = {"caption": caption, "label": spec.label, "position": "t", "position_float": "centering"}
    return texts.style.hide(axis="index").to_latex(hrules=True, column_format=columns, **of_page)
