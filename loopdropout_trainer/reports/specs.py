"""Tables and figures of a paper as YAML files: a pivot of the long table, with the paper's numbers beside.

    label: tab:rank_tuned
    title: Independent tuning at each adapter rank
    made_by: [sweeps/metamath_gsm.yaml]                   # sweeps, or whole commands, that leave the runs
    filter: {sweep: metamath_gsm}                         # of every cell: values of columns of the long table
    heads: {Rank: rank, Method: method}                   # printed head: the column that its values select
    columns:
      GSM8K: {metric: metamath_gsm8k, bold: [column]}
    rows:
      - [16, LoRA, 85.34 ± 0.64]                          # one value for each head, then the paper's numbers
      - [16, {LD: {method: Loop Dropout}}, 86.53 ± 0.44]  # a name of its own, and what it selects

A cell is the mean over seeds of the rows of the long table that have the values of filter, row and column together. Without
other words it is about the depth of training, unit gates and the last loop's readout. A figure has `figure: line`, `bar` or
`heat` with `x`, `y` and `panels` in the place of heads, columns and rows.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.reports import averaging
from loopdropout_trainer.reports.averaging import Average, Difference, average, groups, is_protocol, select, shown
from loopdropout_trainer.reports.reading import ALL, ReportError
from loopdropout_trainer.settings.recipe import load_recipe


if TYPE_CHECKING:
    import pandas as pd

OPTIONS = ("of", "show", "minus", "part", "average_of", "decimals", "scale", "bold", "recipe")
"""What a cell may say beside the columns that select its rows:

of: column that is shown; default: `value`. show: `mean` (± SD), `seeds` (each) or `one` (that all of them share).
minus: what to compare with, over the cell's own selection: the cell is the difference. part: of it, see `difference`.
average_of: metrics whose mean for each seed is the value. decimals, scale: of the printed number.
bold: `row`, `column` or columns of the long table, among whose equals the highest mean is bold; [] for the whole table.
recipe: whose field `of` is shown, or several (`a x b`) with their product.
"""


@dataclass(frozen=True)
class Spec:
    """A table or figure as its file says it; `name` is the file's, and that of everything written of it."""

    name: str
    label: str
    title: str
    made_by: list[str] = field(default_factory=list)
    note: str = ""
    filter: dict[str, Any] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=lambda: {"Method": "method"})
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[list[Any]] = field(default_factory=list)
    figure: str = ""
    x: dict[str, str] = field(default_factory=dict)
    y: dict[str, str] = field(default_factory=dict)
    panels: dict[str, dict[str, Any]] = field(default_factory=dict)
    minus: dict[str, Any] = field(default_factory=dict)


def load_spec(path: str | Path) -> Spec:
    """Read a table's or figure's file.

    Raises:
        ReportError: for an unknown, missing or wrong field; one sentence naming it.
        RecipeError: if it is not valid YAML.
    """
    content = load_recipe(path)
    known = {
        each.name: {"s": str, "l": list, "d": dict}[str(each.type)[0]] for each in fields(Spec) if each.name != "name"
    }
    for key, value in content.items():
        if key not in known:
            raise ReportError(f"{path} has an unknown field `{key}`; valid are {', '.join(known)}.")
        of_mappings = key not in ("columns", "panels") or all(isinstance(each, dict) for each in value.values())
        if not isinstance(value, known[key]) or not of_mappings:
            raise ReportError(f"`{key}` in {path} must be a {known[key].__name__}; got {value!r}.")
    spec = Spec(Path(path).stem, **{"label": "", "title": "", **content})
    heads, number = len(spec.heads), len(spec.columns)
    is_list = lambda value: isinstance(value, list) and len(value) > 0
    rules = [  # field, what was found, whether it is valid, what is
        ("title", spec.title, bool(spec.title), "a text"),
        ("label", spec.label, re.fullmatch(r"[\w:. -]+", spec.label), "letters, digits, `:`, `.`, `-`, `_`"),
        ("figure", spec.figure, spec.figure in ("", "line", "bar", "heat", "gates"), "line, bar, heat or gates"),
    ]
    for row in spec.rows:
        fits = isinstance(row, list) and len(row) in (heads, heads + number)
        rules.append(("rows", row, fits, f"{heads} heads and {number} numbers of the paper, or none"))
    for cell in spec.columns.values():
        average_of, show = cell.get("average_of", [""]), cell.get("show", "mean")
        rules.append(("average_of", average_of, is_list(average_of), "a list of metrics"))
        rules.append(("show", show, show in ("mean", "seeds", "one"), "mean, seeds or one"))
    for key, found, fits, wanted in rules:
        if not fits:
            raise ReportError(f"`{key}` in {path} must be {wanted}; got {found!r}.")
    return spec


@dataclass(frozen=True)
class Cell:
    """One number of a table: its text, mean, SD, seeds, interval (of a difference), or why there is none."""

    text: str = "–"
    found: Average | None = None
    bold: tuple[Any, ...] | None = None
    missing: str = ""
    rows: Any = None


@dataclass(frozen=True)
class FinishedTable:
    """A table with its numbers: `names` of each row, `cells` and what the `paper` printed [rows][columns]."""

    spec: Spec
    names: list[list[str]]
    cells: list[list[Cell]]
    paper: list[list[str]]

    @property
    def missing(self) -> list[str]:
        """What could not be filled in, and why."""
        columns = list(self.spec.columns)
        named = [(" / ".join(names), row) for names, row in zip(self.names, self.cells, strict=True)]
        return [f"{name}, {columns[i]}: {c.missing}" for name, row in named for i, c in enumerate(row) if c.missing]


def build_table(spec: Spec, table: pd.DataFrame) -> FinishedTable:
    """Fill a table from the long table.

    Raises:
        ReportError: if a cell would average different settings, or two cells of one metric were not evaluated alike.
    """
    number = len(spec.heads)
    in_columns = {name for column in spec.columns.values() for name in column}
    rows = select(table, {name: value for name, value in spec.filter.items() if name not in in_columns})
    names, cells, paper = [], [], []
    for row in spec.rows:
        heads = [_head(value, name) for value, name in zip(row, spec.heads.values(), strict=False)]
        names.append([text for text, _ in heads])
        paper.append(["" if value is None else shown(value) for value in row[number:]] or [""] * len(spec.columns))
        mine = {key: value for _, selected in heads for key, value in selected.items()}
        cells.append([])
        for title, column in spec.columns.items():
            wanted = {**{name: value for name, value in spec.filter.items() if name in in_columns}, **mine, **column}
            where = {**spec.filter, **wanted, "row": " / ".join(names[-1]), "column": title}
            cells[-1].append(_cell(wanted, where, rows, f"{spec.label}: {where['row']}, {title}"))
    filled = FinishedTable(spec, names, cells, paper)
    _check_alike(filled)
    return filled


def _head(value: Any, name: str) -> tuple[str, dict[str, Any]]:
    if isinstance(value, dict):
        ((text, selected),) = value.items()
        return str(text), selected
    return shown(value), {name: value}


def _cell(wanted: Mapping[str, Any], where: Mapping[str, Any], rows: pd.DataFrame, what: str) -> Cell:
    option = {name: wanted[name] for name in OPTIONS if name in wanted}
    if "recipe" in option:
        return _recipe_cell(option)
    bold = tuple(str(where.get(name)) for name in option["bold"]) if "bold" in option else None
    found = _selected(rows, wanted, option)
    conditions = ", ".join(f"{k} {shown(v)}" for k, v in wanted.items() if k not in OPTIONS)
    if not len(found):
        return Cell(missing=f"no run with {conditions}")
    lacking = [seed for seed in _listed(wanted.get("seed")) if seed not in set(found["seed"])]
    if lacking:
        return Cell(missing=f"no result of seed {shown(lacking)}")
    decimals = option.get("decimals", 2)
    if "minus" in option:
        other = _selected(rows, {**wanted, **option["minus"]}, option)
        if not len(other):
            return Cell(missing=f"no run with {conditions} and {option['minus']} to compare with")
        try:
            change = averaging.difference(found, other, what, option.get("part"))
        except ReportError as error:
            if "compares the seeds" in str(error) or "every prediction" in str(error):
                return Cell(missing=str(error).removeprefix(what).strip())
            raise
        form = f"+.{decimals}f"
        text = f"{change.mean:{form}}" + (
            "" if change.low is None else f" [{change.low:{form}}, {change.high:{form}}]"
        )
        return Cell(text, change, None, rows=found)
    if option.get("of") is not None:
        average(found, what)  # refuse what must not be pooled
        found = found.assign(value=found.get(option["of"]))
        if found["value"].isna().any():
            return Cell(missing=f"no `{option['of']}`")
    if option.get("show") == "one" or isinstance(found["value"].iloc[0], str):
        only = list(dict.fromkeys(found["value"]))
        if len(only) > 1:
            return Cell(missing=f"the runs differ in `{option.get('of', 'value')}`: {shown(only)}")
        scaled = only[0] if isinstance(only[0], str) else float(only[0]) * option.get("scale", 1)
        return Cell(shown(round(scaled, decimals) if "scale" in option else scaled), rows=found)
    found = found.assign(value=[float(value) * option.get("scale", 1) for value in found["value"]])
    mean = average(found, what)
    text = mean.text(decimals)
    if option.get("show") == "seeds":
        text = " / ".join(f"{value:.{decimals}f}" for value in mean.values)
    return Cell(text, mean, bold, rows=found)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _selected(rows: pd.DataFrame, wanted: Mapping[str, Any], option: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of a cell; what it does not mention is as in the training: depth, all gates one, the last readout."""
    wanted = {key: value for key, value in wanted.items() if key not in OPTIONS}
    if "average_of" in option:
        return _averaged(select(rows, as_trained(wanted)), option["average_of"])
    found = select(rows, as_trained(wanted))
    return found[found["depth"] == found["num_loops"]] if "depth" not in wanted else found


def as_trained(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is wanted, and unit gates and the last loop's readout where it says nothing of these."""
    defaults: dict[str, Any] = {} if {"gates", "loop", "dose", "early"} & set(wanted) else {"gates": ALL}
    return {**defaults, **({} if {"readout", "loop"} & set(wanted) else {"readout": None}), **wanted}


def _averaged(rows: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Return one row for each seed with the mean of several metrics, for the seeds that have them all."""
    rows = rows[(rows["depth"] == rows["num_loops"]) & rows["metric"].isin(metrics)]
    by_run = rows.groupby("run", sort=False)["metric"]
    rows = rows[(by_run.transform("nunique") == len(set(metrics))) & (by_run.transform("size") == len(set(metrics)))]
    means = rows.groupby("run", sort=False)["value"].transform("mean")
    kept = [name for name in rows if not is_protocol(name) and name != "verdicts"]
    return rows[kept].assign(value=means, metric="average", benchmark="").drop_duplicates("run")


def _recipe_cell(option: Mapping[str, Any]) -> Cell:
    recipe, names = load_recipe(option["recipe"]), str(option.get("of")).split(" x ")
    values = [recipe.get(name) for name in names]
    if None in values:
        return Cell(missing=f"{option['recipe']} has no `{names[values.index(None)]}`")
    if len(values) > 1:
        return Cell(f"{' x '.join(map(str, values))} = {math.prod(values)}")
    return Cell(f"{values[0]:,}" if isinstance(values[0], int) else shown(values[0]))


def _check_alike(table: FinishedTable) -> None:
    """Refuse a table of results that were evaluated with other problems, tokens, turns or templates, by metric and depth.

    Where columns say how they were evaluated, only the cells of one column must be alike.
    """
    import pandas as pd

    said = any(is_protocol(name) for column in table.spec.columns.values() for name in column)
    for cells in zip(*table.cells, strict=True) if said else [[cell for row in table.cells for cell in row]]:
        used = [cell.rows.dropna(axis=1, how="all") for cell in cells if cell.rows is not None]
        if used:
            for _, part in groups(pd.concat(used), ["depth"]):
                averaging.check_alike(part, table.spec.label)


# Texts. Every format is the same grid of strings, with its own escapes and its own bold.


def grid(table: FinishedTable, escape: Any = str, strong: str = "{}") -> pd.DataFrame:
    """Return a table's texts; a column of ours is followed by the paper's, if it has one."""
    import pandas as pd

    best = {id(cell) for cell in best_cells([cell for row in table.cells for cell in row])}
    head, body = (
        [escape(name) for name in table.spec.heads],
        [[escape(text) for text in names] for names in table.names],
    )
    for place, title in enumerate(table.spec.columns):
        head.append(escape(title))
        for line, row in zip(body, table.cells, strict=True):
            text = escape(row[place].text)
            line.append(strong.format(text) if id(row[place]) in best else text)
        if any(row[place] for row in table.paper):
            head.append(escape(f"{title} (paper)"))
            for line, row in zip(body, table.paper, strict=True):
                line.append(escape(row[place] or "–"))
    return pd.DataFrame(body, columns=head)


def best_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with the highest printed mean among those of the same `bold`, where several are compared."""
    sets: dict[tuple, list[Cell]] = {}
    for cell in cells:
        if cell.bold is not None and cell.found is not None:
            sets.setdefault(cell.bold, []).append(cell)
    found = []
    for same in sets.values():
        highest = max(cell.found.mean for cell in same)
        found += [cell for cell in same if cell.found.mean == highest] if len(same) > 1 else []
    return found


def notes(table: FinishedTable) -> list[str]:
    """Return what a reader must know below a table: seeds, intervals, what is missing, and which commands make it."""
    cells = [cell for row in table.cells for cell in row if cell.found is not None]
    seeds = sorted({len(cell.found.seeds) for cell in cells})
    lines = [table.spec.note] if table.spec.note else []
    if seeds:
        lines.append(f"Mean ± SD over {' or '.join(map(str, seeds))} training seed{'' if seeds == [1] else 's'}.")
    if any(isinstance(cell.found, Difference) and cell.found.low is not None for cell in cells):
        lines.append("In brackets: 95% bootstrap interval over seeds and problems.")
    if any(math.isnan(cell.found.mean) for cell in cells):
        lines.append("nan: a seed's result is not a number, and none is left out of a mean.")
    if table.missing:
        commands = [each if " " in each else f"loopdropout sweep {each}" for each in table.spec.made_by]
        nothing = len(table.missing) == sum(map(len, table.cells))
        lines.append(
            "Nothing of this table is in these folders." if nothing else f"Missing: {'; '.join(table.missing)}."
        )
        lines += [f"Made by: {' ; '.join(commands)}"] if commands else []
    return lines


def markdown(table: FinishedTable) -> str:
    """Return a Markdown table under its title, with its notes."""
    texts = grid(table, lambda text: str(text).replace("|", "\\|"), "**{}**")
    align = ["left"] * len(table.spec.heads) + ["right"] * (texts.shape[1] - len(table.spec.heads))
    body = texts.to_markdown(index=False, disable_numparse=True, colalign=align) if len(texts) else ""
    return "\n\n".join([f"### {table.spec.title}", body, *notes(table)]) + "\n"


_TEX = {"&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--"}  # fmt: skip


def latex(table: FinishedTable) -> str:
    """Return a booktabs table with its caption and label."""
    escape = lambda text: str(text).translate(str.maketrans(_TEX))
    texts = grid(table, escape, r"\textbf{{{}}}")
    columns = "l" * len(table.spec.heads) + "c" * (texts.shape[1] - len(table.spec.heads))
    caption = escape(" ".join([f"{table.spec.title}.", *notes(table)]))
    of_page = {"caption": caption, "label": table.spec.label, "position": "t", "position_float": "centering"}
    return texts.style.hide(axis="index").to_latex(hrules=True, column_format=columns, **of_page)


def page_table(table: FinishedTable) -> str:
    """Return a table for the page."""
    return grid(table, lambda text: html.escape(str(text)), "<b>{}</b>").to_html(index=False, escape=False, border=0)


def numbers(table: FinishedTable) -> pd.DataFrame:
    """Return a line for each cell, for the CSV."""
    import pandas as pd

    lines = []
    for names, cells, printed in zip(table.names, table.cells, table.paper, strict=True):
        for title, cell, paper in zip(table.spec.columns, cells, printed, strict=True):
            line = {
                "row": " / ".join(names),
                "column": title,
                "text": cell.text,
                "paper": paper,
                "missing": cell.missing,
            }
            if (found := cell.found) is not None:
                line |= {name: getattr(found, name, None) for name in ("mean", "sd", "low", "high")}
                line |= {"seeds": shown(found.seeds), "by_seed": " ".join(map(repr, found.values))}
            lines.append(line)
    return pd.DataFrame(lines)
