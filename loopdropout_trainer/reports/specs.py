"""Tables and figures of a paper as YAML files (docs/reports.md): a pivot of the long table, with the paper's numbers beside.

A finished table is a DataFrame with a row for each cell: `row` (its names), `column`, `text`, `paper`, why it is `missing`,
and its numbers, by seed too. `attrs["spec"]` holds the file's content. Every format is the same grid of texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from loopdropout_trainer.evaluation.results import mean_sd
from loopdropout_trainer.reports.averaging import average, check_alike, difference, is_protocol, select, shown
from loopdropout_trainer.reports.reading import ALL, FORMS, Missing, ReportError, check, check_column
from loopdropout_trainer.settings.recipe import load_recipe


OPTIONS = {word for words in FORMS["cells"].values() for word in words.split()}
"""What a cell may say beside the columns that select its rows."""

NUMBERS = ("mean", "sd", "low", "high", "count", "seeds", "by_seed")


def load_spec(path: str | Path) -> SimpleNamespace:
    """Read a table's or figure's file; its name is that of all that is written of it. Faults are ReportErrors."""
    content = load_recipe(path)
    kind = content.get("figure", "table")
    try:
        check(kind, "table or line or bar or heat or gates", "figure")
        check(content, FORMS["specs"][kind], complete=True)
        spec = make_spec(Path(path).stem, **content)
        for row in spec.rows:
            check(row[len(spec.heads) :], ["a scalar"], "rows")
            for head in row[: len(spec.heads)]:
                form = FORMS["head"] if isinstance(head, dict) else "a scalar, or a list of such"
                check(head, form, "rows", complete=True)
            if len(row) not in (len(spec.heads), len(spec.heads) + len(spec.columns)):
                wanted = f"{len(spec.heads)} heads and {len(spec.columns)} numbers of the paper, or none"
                raise ReportError(f"`rows` must have {wanted}; got {row!r}.")
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from None
    return spec


def make_spec(name: str, **content: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**FORMS["defaults"], **content, "name": name})


def build_table(spec: SimpleNamespace, table: pd.DataFrame, missing: type[ReportError] = Missing) -> pd.DataFrame:
    """Fill a table from the long table; a cell that raises `missing` is a dash, with the reason below the table.

    Raises:
        ReportError: if a cell would average different settings, or two cells of one metric were not evaluated alike.
    """
    cells: list[dict[str, Any]] = []
    refused: list[str] = []
    said = any(is_protocol(name) or name == "panel" for column in spec.columns.values() for name in column)
    compared: dict[str, set[int]] = {}  # rows, by column where columns say how they were evaluated
    for row in spec.rows:
        heads = [each if isinstance(each, dict) else {each if isinstance(each, str) else shown(each): {name: each}}
                 for each, name in zip(row, spec.heads.values(), strict=False)]  # fmt: skip
        names = tuple(text for head in heads for text in head)
        paper = row[len(heads) :] or [None] * len(spec.columns)
        for (title, column), printed in zip(spec.columns.items(), paper, strict=True):
            wanted = dict(spec.filter)
            for selected in (*(selected for head in heads for selected in head.values()), column):
                wanted |= selected
            where = {**wanted, "row": names, "column": title}
            option = {name: value for name in OPTIONS if (value := wanted.pop(name, None)) is not None}
            what = f"{spec.label}: {' / '.join(names)}, {title}"
            valid = FORMS["cells"][next((each for each in ("recipe", "minus") if each in option), "of")]
            if stray := sorted(option.keys() - valid.split()):
                raise ReportError(f"{what}: `{stray[0]}` has no effect here, beside which of {valid} would have one.")
            for name in {*option.get("bold", ())} - {"row", "column"}:
                check_column(table, name)
            try:
                cell, rows = _cell(table, wanted, option, what)
                compared.setdefault(title if said else "", set()).update(rows)
            except missing as reason:
                cell = {"text": "–", "missing": str(reason)}
                refused += [] if isinstance(reason, Missing) else [str(reason)]
            bold = str([where.get(name) for name in option["bold"]]) if "bold" in option else None
            paper_text = "" if printed is None else shown(printed)
            cells.append({"row": names, "column": title, "paper": paper_text, "missing": "", "bold": bold, **cell})
    for rows in compared.values():
        for _, part in table.loc[sorted(rows)].groupby("depth", dropna=False):
            check_alike(part, spec.label)
    found = pd.DataFrame(cells, columns=["row", "column", "text", "paper", "missing", "bold", *NUMBERS])
    found.attrs |= {"spec": spec, "refused": refused}
    return found


def _cell(table: pd.DataFrame, wanted: Mapping, option: Mapping, what: str) -> tuple[dict[str, Any], pd.Index]:
    """Return a cell's text and numbers, and the rows that it is made of."""
    if "recipe" in option:
        recipe, names = load_recipe(option["recipe"]), option.get("of", "").split(" x ")
        values = [recipe.get(name) for name in names]
        if None in values:
            raise Missing(f"{option['recipe']} has no `{names[values.index(None)]}`")
        if len(values) > 1:
            check(values, ["a number"], option["of"])
        text = f"{values[0]:,}" if isinstance(values[0], int) else shown(values[0])
        product = f"{' x '.join(map(str, values))} = {math.prod(values)}"
        return {"text": product if len(values) > 1 else text}, table.index[:0]
    rows, decimals = _selected(table, wanted, option), option.get("decimals", 2)
    if "minus" in option:
        other = _selected(table, {**wanted, **option["minus"]}, option)
        values = difference(rows, other, what, option.get("part"))
        low, high = values.attrs["interval"]
        text = f"{values.mean():+.{decimals}f}"
        text += "" if low is None else f" [{low:+.{decimals}f}, {high:+.{decimals}f}]"
        return {"text": text, "low": low, "high": high, **_numbers(values)}, rows.index
    column, one = option.get("of", "value"), option.get("show") == "one"
    check_column(table, column)
    values = average(rows.assign(value=rows.get(column)), what)
    if values.isna().any():
        raise Missing(f"no `{column}`")
    if one and values.nunique() > 1:
        raise Missing(f"the runs differ in `{column}`: {shown(tuple(values.unique()))}")
    if one and not {"scale", "decimals"} & option.keys():
        return {"text": shown(values.iloc[0])}, rows.index
    check(values.tolist(), ["a number"], column)
    values = values.astype(float) * option.get("scale", 1)
    if one:
        return {"text": shown(round(values.iloc[0], decimals))}, rows.index
    by_seed = " / ".join(f"{value:.{decimals}f}" for value in values)
    text = by_seed if option.get("show") == "seeds" else mean_sd(values, decimals)
    return {"text": text, **_numbers(values)}, rows.index


def _numbers(values: pd.Series) -> dict[str, Any]:
    mean, sd = values.mean(skipna=False), values.std(skipna=False)
    seeds, by_seed = shown(tuple(values.index)), " ".join(map(repr, map(float, values)))
    return {"mean": mean, "sd": sd, "count": len(values), "seeds": seeds, "by_seed": by_seed}


def _selected(table: pd.DataFrame, wanted: Mapping[str, Any], option: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of a cell; what it does not mention is as in the training: depth, all gates one, the last readout."""
    rows = select(table, as_trained(wanted))
    rows = rows[rows["depth"] == rows["num_loops"]] if "depth" not in wanted else rows
    if metrics := option.get("average_of"):  # a row for each run that has them all, with their mean
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
