"""Finished tables as Markdown, LaTeX (booktabs), CSV and JSON. The paper's numbers stand in columns of their own."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import Any

from rich.table import Table

from loopdropout_trainer.reports.tables import FinishedTable


def grid(table: FinishedTable) -> tuple[list[str], list[list[str]]]:
    """Return header and rows as text; a column with numbers of the paper is followed by them."""
    has_paper = [any(row[place] for row in table.paper) for place in range(len(table.spec.columns))]
    head = list(table.spec.heads)
    for column, with_paper in zip(table.spec.columns, has_paper, strict=True):
        head += [column["name"], f"{column['name']} (paper)"] if with_paper else [column["name"]]
    rows = []
    for names, cells, paper in zip(table.names, table.cells, table.paper, strict=True):
        row = names + [""] * (len(table.spec.heads) - len(names))
        for cell, printed, with_paper in zip(cells, paper, has_paper, strict=True):
            row += [cell.text, printed or "–"] if with_paper else [cell.text]
        rows.append(row)
    return head, rows


def footnotes(table: FinishedTable) -> list[str]:
    """Return what a reader must know below a table: seeds, what is missing, how to make it."""
    lines = [table.spec.note] if table.spec.note else []
    seeds = sorted({len(cell.seeds) for row in table.cells for cell in row if cell.seeds})
    if seeds:
        lines.append(
            f"Mean ± sample SD over {' or '.join(map(str, seeds))} training seed{'s' if seeds != [1] else ''}."
        )
    if any(cell.low is not None for row in table.cells for cell in row):
        lines.append("In brackets: 95% bootstrap interval over problems, for these seeds.")
    if table.missing:
        if table.filled:
            lines.append("Missing: " + "; ".join(table.missing) + ".")
        else:
            lines.append("Nothing of this table has been measured in these folders.")
        if table.spec.made_by:
            lines.append(f"Made by: {table.spec.made_by}")
    return lines


def console_table(table: FinishedTable) -> Table:
    """Return a table for the terminal; the paper's numbers are in the files."""
    out = Table(
        title=table.spec.title, title_justify="left", caption="\n".join(footnotes(table)), caption_justify="left"
    )
    for name in table.spec.heads:
        out.add_column(name)
    for column in table.spec.columns:
        out.add_column(column["name"], justify="right")
    for names, cells in zip(table.names, table.cells, strict=True):
        out.add_row(*names, *(cell.text for cell in cells))
    return out


def markdown(table: FinishedTable) -> str:
    """Return a Markdown table under its title, with its footnotes."""
    head, rows = grid(table)
    width = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    numbers = len(table.spec.heads)
    line = lambda row: (
        "| " + " | ".join(cell.replace("|", "\\|").ljust(w) for cell, w in zip(row, width, strict=True)) + " |"
    )
    rule = "|" + "|".join("-" * (w + 1) + (":" if place >= numbers else "-") for place, w in enumerate(width)) + "|"
    text = "\n".join([f"### {table.spec.title}", "", line(head), rule, *map(line, rows)])
    notes = footnotes(table)
    return text + ("\n\n" + "\n".join(f"*{note}*  " for note in notes) if notes else "") + "\n"


def latex(table: FinishedTable) -> str:
    """Return a booktabs table; the highest mean of each column is bold, as in the paper."""
    head, rows = grid(table)
    best = _best_cells(table)
    body = []
    for number, row in enumerate(rows):
        cells = [_tex(cell) for cell in row]
        for place in best.get(number, ()):
            cells[place] = rf"\textbf{{{cells[place]}}}"
        body.append(" & ".join(cells) + r" \\")
    columns = "l" * len(table.spec.heads) + "c" * (len(head) - len(table.spec.heads))
    notes = " ".join(_tex(note) for note in footnotes(table))
    return "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            r"\small",
            rf"\caption{{\textbf{{{_tex(table.spec.title)}.}} {notes}}}",
            rf"\label{{{table.spec.label}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(map(_tex, head)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _best_cells(table: FinishedTable) -> dict[int, list[int]]:
    """Return by row the places in its grid of the largest accuracy of each column, where there are several to compare."""
    best: dict[int, list[int]] = {}
    place = len(table.spec.heads)
    for index, column in enumerate(table.spec.columns):
        cells = [row[index] for row in table.cells]
        values = {
            number: cell.value
            for number, cell in enumerate(cells)
            if cell.value is not None and cell.benchmark and cell.low is None and " / " not in cell.text
        }
        measured = {table.spec.cell.get("measure"), column.get("measure", "accuracy")} & {"accuracy", "average"}
        one_benchmark = len({cells[number].benchmark for number in values}) == 1
        if len(values) > 1 and measured and one_benchmark and not column.get("minus"):
            best.setdefault(max(values, key=values.get), []).append(place)
        place += 2 if any(row[index] for row in table.paper) else 1
    return best


_TEX = {"&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--"}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def comma_separated(table: FinishedTable) -> str:
    """Return one line for each cell: row, column, mean, SD, each seed's value, interval, the paper's number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", "column", "text", "value", "sd", "seeds", "by_seed", "low", "high", "paper", "missing"])
    for names, cells, paper in zip(table.names, table.cells, table.paper, strict=True):
        for column, cell, printed in zip(table.spec.columns, cells, paper, strict=True):
            writer.writerow(
                [
                    " / ".join(names),
                    column["name"],
                    cell.text,
                    *("" if value is None else repr(value) for value in (cell.value, cell.sd)),
                    " ".join(map(str, cell.seeds)),
                    " ".join(map(repr, cell.by_seed)),
                    *("" if value is None else repr(value) for value in (cell.low, cell.high)),
                    printed or "",
                    cell.missing,
                ]
            )
    return out.getvalue()


def as_json(table: FinishedTable) -> dict[str, Any]:
    """Return all that is known of a table, for programs."""
    return {
        "label": table.spec.label,
        "title": table.spec.title,
        "made_by": table.spec.made_by,
        "heads": table.spec.heads,
        "columns": [column["name"] for column in table.spec.columns],
        "rows": [
            {"name": names, "cells": [asdict(cell) for cell in cells], "paper": paper}
            for names, cells, paper in zip(table.names, table.cells, table.paper, strict=True)
        ],
        "footnotes": footnotes(table),
    }


def json_text(table: FinishedTable) -> str:
    """Return `as_json` as text."""
    return json.dumps(as_json(table), indent=1, ensure_ascii=False) + "\n"
