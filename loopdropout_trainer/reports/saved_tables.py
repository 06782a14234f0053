"""Tables as printed text and as files: Markdown, LaTeX and CSV."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from loopdropout_trainer.reports.labels import has_seeds
from loopdropout_trainer.reports.printing import print_notes, print_table
from loopdropout_trainer.reports.table_files import lay_out
from loopdropout_trainer.reports.tables import (
    OWN_FAMILY,
    explain_choice,
    explain_differences,
    name_seeds,
)
from loopdropout_trainer.reports.unpaired import explain_unpaired
from loopdropout_trainer.terminal import print_sentences


class TableText(NamedTuple):
    """The text around a table.

    Attributes:
        title: Text above the table.
        about: Sentences about the numbers, which come first below the table and are in the caption in LaTeX.
        notes: Further sentences below the table.
        label: Label for `\\ref` in LaTeX. Default: `tab:` and the name of the file.
    """

    title: str
    about: Sequence[str] = ()
    notes: Sequence[str] = ()
    label: str | None = None

    @property
    def caption(self) -> str:
        return " ".join([f"{self.title}.", *self.about]) if self.about else self.title

    @property
    def lines(self) -> list[str]:
        """All sentences below the table."""
        return [*self.about, *self.notes]


def save_layout(spec: dict, table: pd.DataFrame, path: Path, notes: Sequence[str] = ()) -> None:
    """Print a table of a YAML file in its layout, and save it as Markdown and LaTeX, and its numbers line by line as CSV."""
    about = [*describe_sizes(table[["num_problems", "num_seeds"]]), *describe_means(table)]
    if table["chose"].any():
        chosen = table[table["chose"]]
        places = ", ".join(chosen["column"].unique())
        numbers_of = "losses" if chosen["num_problems"].isna().all() else "accuracies"
        note = explain_choice(numbers_of, has_test=False)
        about.append(f"The learning rates were chosen on the problems of: {places}. {note}")
    names = table[[*table.columns.intersection([*spec["heads"]]), "column"]].agg(", ".join, axis=1)
    about += [*explain_differences(table), *explain_unpaired(table, names)]
    text = TableText(spec["title"], about, notes, spec.get("label"))
    bold = lay_out(spec, table, bold_in_latex)
    if "paper" in table:
        bold.columns = pd.MultiIndex.from_tuples([name.rsplit(", ", 1) for name in bold], names=[None, "numbers"])
        if len(bold.columns) > WIDEST:
            bold = bold.stack("numbers", future_stack=True)
    print_text(lay_out(spec, table, str), text)
    save_markdown(lay_out(spec, table, bold_in_markdown), text, path)
    save_latex(bold, text, path)
    save_csv(table, path, index=False)


def save_table(numbers: pd.DataFrame, table: pd.DataFrame, text: TableText, path: Path) -> None:
    """Print a table, save it as Markdown and LaTeX, and its numbers as CSV.

    Args:
        numbers: Numbers, with one line for each line of the table.
        table: Texts, whose index names the lines.
        text: Text around the table.
        path: Path of the files, without ending.
    """
    print_text(table, text)
    save_markdown(table, text, path)
    save_latex(table, text, path)
    save_csv(numbers, path)


def save_csv(numbers: pd.DataFrame, path: Path, index: bool = True) -> None:
    """Save the numbers of a table as CSV, as the last of its files, and print their names. `path` has no ending.

    A column of counts with a missing value has floats, which become whole numbers again.
    """
    counts = numbers.columns.intersection(["num_problems", "num_seeds", "num_pairs"])
    numbers.astype(dict.fromkeys(counts, "Int64")).to_csv(path.with_suffix(".csv"), index=index)
    print_sentences(f"Wrote {path}.md, .tex and .csv")


def print_text(table: pd.DataFrame, text: TableText) -> None:
    """Print a table with the text around it."""
    print_table(text.title, table)
    if not text.lines:
        print()  # between the table and the line about its files
    print_notes(*text.lines)


def save_markdown(table: pd.DataFrame, text: TableText, path: Path) -> None:
    """Save a table as Markdown. `path` has no ending."""
    cells = table.reset_index().to_markdown(index=False, disable_numparse=True)
    path.with_suffix(".md").write_text("\n\n".join([f"### {text.title}", cells, *text.lines, ""]), encoding="utf-8")


def bold_in_markdown(text: str) -> str:
    return f"**{text}**"


def bold_in_latex(text: str) -> str:
    return rf"\textbf{{{text}}}"


LATEX = {name: rf"\{name}" for name in "&%$#_"} | {"±": r"$\pm$", "–": "--", "~": r"$\sim$", "<": "$<$", ">": "$>$"}
WIDEST = 8
"""Number of columns with numbers. In a wider table for LaTeX, the paper's numbers and ours are in neighboring lines."""
SHRINK = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""Beginning of a box that is as wide as the text at most. It needs the package graphicx."""


def escape_latex(text: str) -> str:
    """Return a text or a bold text of a table for LaTeX, with real minus signs."""
    text = re.sub("|".join(map(re.escape, LATEX)), lambda match: LATEX[match[0]], text)
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", text)


def latex_cell(text: str, width: int = 40) -> str:
    """Return the text of a cell for LaTeX, in lines of at most `width` characters."""
    lines = textwrap.wrap(text.replace("not significant", "n.s."), width, break_long_words=False)
    lines = [escape_latex(line) for line in lines]
    if len(lines) < 2:
        return "".join(lines)
    return r"\shortstack[r]{" + r" \\ ".join(lines) + "}"


def save_latex(table: pd.DataFrame, text: TableText, path: Path) -> None:
    """Save a table for LaTeX with the packages booktabs and graphicx. A table that is too wide shrinks to the text.

    Args:
        table: Texts, whose index names the lines. Columns with two levels have two lines of heads.
        text: Text around the table, whose notes are left out.
        path: Path of the table, without ending.
    """
    caption = text.caption
    num_keys, num_columns = table.index.nlevels, table.shape[1]
    cells = table.astype(str)
    if cells.map(lambda text: "not significant" in text).any(axis=None):
        num_intervals = cells.map(lambda text: "[" in text).sum().sum()
        family = f" {OWN_FAMILY}" if num_intervals > 1 and OWN_FAMILY not in caption else ""
        caption += f" (n.s.: not significant.{family})"
    texts = table.reset_index(col_level=-1).astype(str).map(latex_cell)
    texts = texts.rename(columns=partial(latex_cell, width=18))
    latex = texts.style.hide(axis="index").to_latex(
        hrules=True,
        position_float="centering",
        multicol_align="c",
        column_format="l" * num_keys + "r" * num_columns,
        caption=escape_latex(caption),
        label=text.label or f"tab:{path.name}",
    )
    if table.columns.nlevels > 1:  # a line under each group of columns
        size = table.columns.get_level_values(1).nunique()
        firsts = range(num_keys + 1, num_keys + num_columns + 1, size)
        rules = [f"\\cmidrule(lr){{{first}-{first + size - 1}}}" for first in firsts]
        head, end_of_line, body = latex.partition("\\\\\n")
        latex = "".join([head, end_of_line, " ".join(rules), "\n", body])
    latex = latex.replace(r"\begin{tabular}", SHRINK + "\n" + r"\begin{tabular}")
    path.with_suffix(".tex").write_text(latex.replace(r"\end{tabular}", r"\end{tabular}}"), encoding="utf-8")


def describe_means(table: pd.DataFrame) -> list[str]:
    """Return the sentence about the numbers with ± in the texts `here` of a table of a YAML file, if there are any."""
    seeds = name_seeds(table.loc[table["here"].str.contains("±"), "num_seeds"])
    return [f"A number with ± is mean ± SD over {seeds} seeds."] if seeds else []


def explain_accuracies(numbers: pd.DataFrame) -> list[str]:
    """Return the lines below a table of accuracies: about its problems and seeds, its intervals and its differences.

    A report and the end of a sweep both have them.

    Args:
        numbers: From `accuracy_numbers`.
    """
    methods = numbers.index.get_level_values("method")
    return [*describe_sizes(numbers), *explain_differences(numbers), *explain_unpaired(numbers, methods)]


def describe_sizes(numbers: pd.DataFrame) -> list[str]:
    """Return one line about the problems of each task, if they are known, and the seeds of each trained model's accuracy.

    Args:
        numbers: Columns `num_problems` and `num_seeds`, and `task` if there are several ones. A column or level
            `method` counts by `has_seeds`.
    """
    numbers = numbers.reset_index().dropna(subset=["num_problems"])
    if numbers.empty:
        return []
    if "task" not in numbers:
        numbers["task"] = ""
    sizes = []
    for task, own in numbers.groupby("task", sort=False, observed=True):
        problems = " or ".join(f"{n:,.0f}" for n in sorted({*own["num_problems"]}))
        sizes.append(f"{task} {problems}".strip())
    if "method" in numbers:
        numbers = numbers[has_seeds(numbers["method"])]
    seeds = name_seeds(numbers["num_seeds"])
    text = f"Problems: {', '.join(sizes)}."
    if seeds:
        text += f" Seeds: {seeds}."
    return [text]
