"""Printed tables of any results."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from loopdropout_trainer.diagnostics import FEWEST_PROBLEMS, compare_answers, describe_profile, explain_disagreements
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.reports.labels import name_as_in_report
from loopdropout_trainer.reports.loss_tables import title_losses
from loopdropout_trainer.reports.tables import OWN_FAMILY, name_examples
from loopdropout_trainer.results.run_files import read_samples
from loopdropout_trainer.terminal import format_fixed, join_numbers, print_sentences, wrap_for_terminal


ONE_DECIMAL = partial(format_fixed, decimals=1)
"""Function from a number to the text of a cell, by default."""

NARROWEST, WIDEST = 40, 120
"""Smallest and largest number of columns of a printed table."""

LINE_WIDTHS = range(18, 11, -1)
"""Numbers of characters of a line in a cell of a table that is too wide, from the first to try to the last."""

LONGEST_NAME = 18
"""Number of characters of the name of a model up to which it is in a table next to others. Longer ones are below it."""


def print_table(title: str, table: pd.DataFrame, format_cell: Callable[[Any], Any] = str) -> None:
    """Print a table in the columns of the terminal, from 40 to 120, and to a file or a pipe in 80.

    In a wider table, a key that all lines share is in the title, and texts and heads are wrapped, but never a number with its
    SD or interval. If it still does not fit, it is printed in parts, one below the other.

    Args:
        title: Text above the table.
        table: Texts or numbers. The index names the lines, and each part repeats it.
        format_cell: Function from a text or number to the text of its cell.
    """
    width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
    table = table.map(format_cell, na_action="ignore").fillna("")
    if measure_columns(cell_texts(table)).sum() > width + 2:
        title, table = move_keys_to_title(title, table)
    keys = [*range(table.index.nlevels)]
    cells = fit_cells(cell_texts(table), keys, width)
    widths = measure_columns(cells)
    parts = [keys]
    for place in cells.columns[len(keys) :]:
        if len(parts[-1]) > len(keys) and widths[[*parts[-1], place]].sum() > width + 2:
            parts.append(keys)
        parts[-1] = [*parts[-1], place]
    print("", *wrap_for_terminal(title, 0), sep="\n")
    for number, part in enumerate(parts):
        if number > 0:
            print()
        grid = Table(box=None, pad_edge=False, show_header=False)
        for place in part:
            grid.add_column(justify="left" if place in keys else "right", overflow="fold")
        for row in cells[part].itertuples(index=False):
            grid.add_row(*row)
        own_width = max(width, widths[part].sum())  # a part that is too wide is not folded, which would cut numbers
        Console(width=own_width, markup=False, highlight=False, emoji=False).print(grid)


def cell_texts(table: pd.DataFrame) -> pd.DataFrame:
    """Return the keys and cells of a table as texts. The heads are the first line."""
    return table.reset_index().T.reset_index().T.map(str)


def move_keys_to_title(title: str, table: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return a title with the keys that all lines of a table share, and the table without them. Its last key stays."""
    keys = [table.index.get_level_values(level) for level in range(table.index.nlevels)]
    shared = [level for level, values in enumerate(keys[:-1]) if values.nunique() == 1]
    if not shared:
        return title, table
    texts = [f"{keys[level].name} = {keys[level][0]}" for level in shared]
    return f"{title}, for {', '.join(texts)}", table.droplevel(shared)


def fit_cells(texts: pd.DataFrame, keys: Sequence[int], width: int) -> pd.DataFrame:
    """Return the texts of `cell_texts` in lines, so that they fit into a width with the fewest lines.

    The whole table fits if it can. Else each column fits next to the keys.
    """
    cells = texts.map(wrap_cell, width=width)
    if measure_columns(cells).sum() <= width + 2:  # as most tables, which need no narrower columns
        return cells
    longest = measure_columns(texts.map(wrap_cell, width=1)) - 2
    for limit in LINE_WIDTHS:
        cells = wrap_cells(texts, limit, longest)
        if measure_columns(cells).sum() <= width + 2:
            return cells
    for limit in LINE_WIDTHS:
        cells = wrap_cells(texts, limit, longest)
        widths = measure_columns(cells)
        if widths[keys].sum() + widths.drop(keys).max() <= width + 2:
            break
    return cells


def wrap_cells(texts: pd.DataFrame, width: int, longest: pd.Series) -> pd.DataFrame:
    """Return texts in lines of at most `width` characters, or as long as the longest number or word of their column."""
    return texts.apply(lambda column: column.map(partial(wrap_cell, width=max(width, longest[column.name]))))


def measure_columns(cells: pd.DataFrame) -> pd.Series:
    """Return the width of each column with the two spaces behind it, from texts in lines."""
    return cells.map(lambda text: max(map(len, text.split("\n")))).max() + 2


def wrap_cell(text: str, width: int) -> str:
    """Return a text in lines of at most `width` characters, or of a longer word, number or setting (`join_numbers`)."""
    if " " not in text and text.isprintable():  # one word
        return text
    lines = textwrap.fill(join_numbers(text), width, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def print_by_method(
    title: str,
    rows: pd.DataFrame,
    columns: str | pd.Series,
    format_cell: Callable[[float], Any] = ONE_DECIMAL,
) -> None:
    """Print results with one line for each method. `columns`: name or values of the column that each result is in."""
    if len(rows):
        print_table(title, rows.pivot_table("value", "method", columns, sort=False), format_cell)


def print_evaluation(rows: list[dict], averages: dict[str, list[str]]) -> None:
    """Print results of `evaluate` with a line for each task or average, and a column for each model, or for each depth.

    Long names of several models are below the table, which has their numbers.
    """
    results = pd.DataFrame(rows)
    tasks = results["task"] + (", " + results["metric"]).replace(", accuracy", "")
    models = results["name"] + (", " + results["gates"]).replace([", unit", ", none"], "")
    names, legend = models.unique(), []
    if len(names) > 1 and max(map(len, names)) > LONGEST_NAME:
        numbers = {name: str(number) for number, name in enumerate(names, start=1)}
        models, legend = models.map(numbers), [f"model {number}: {name}" for name, number in numbers.items()]
    named = results.assign(task=tasks, model=models, K="K = " + results["num_loops"].astype(str))
    table = named.pivot_table("value", "task", ["model", "K"], sort=False)
    for title, parts in averages.items():
        table.loc[title] = table.reindex(parts).mean(skipna=False)
    depths = named["K"].unique()
    readout = ""
    if "readout" in named and named["readout"].notna().any():  # one for all results of a command
        readout = f", read out after loop {named['readout'].iloc[0]:g}"
    if len(depths) == 1:
        table = table.droplevel("K", axis=1)
        if legend:
            table = table.add_prefix("model ")
    else:
        keys = pd.MultiIndex.from_product([table.index, models.unique()], names=["task", "model"])
        table = table.stack("model", future_stack=True).reindex(keys)[depths].dropna(how="all")
        if len(names) == 1:
            table = table.swaplevel()  # so that the name moves to the title if the table is too wide
    title = f"Results at {depths[0]}" if len(depths) == 1 else "Results with K loops"
    print_table(title + readout, table.rename_axis(columns=None), partial(format_fixed, decimals=2))
    print_sentences(*legend)


def print_loss_reductions(results: pd.DataFrame) -> None:
    """Print the loss reductions with the adapter in one loop only, and the examples that they were measured on.

    A training measures some batches of the held-out examples and `diagnose` measures all of them, so their numbers differ.
    """
    reductions = results.query("metric == 'loss_reduction'").replace({"gates": {"unit": "all loops"}})
    for task, own in reductions.groupby("task", sort=False):
        title = f"Loss reduction on {name_examples(task, own)}, adapter in one loop only, in %"
        print_by_method(title, own, "gates")


def print_losses(results: pd.DataFrame) -> None:
    """Print the losses at each depth, and the losses of the readout of each loop, in nats per token."""
    depths = results.query("metric == 'depth_loss'").sort_values("num_loops", kind="stable")
    for task, own in depths.groupby("task", sort=False):
        title = title_losses("depth_loss", task, own)
        print_by_method(title, own, "K=" + own["num_loops"].astype(str), partial(format_fixed, decimals=4))
    readouts = results.query("metric == 'readout_loss'")
    for task, own in readouts.groupby("task", sort=False):
        title = title_losses("readout_loss", task, own)
        print_by_method(title, own, "loop " + own["loop"].astype(int).astype(str), partial(format_fixed, decimals=4))


def print_diagnostics(rows: list[dict[str, Any]]) -> None:
    """Print a table of each diagnostic of `loopdropout diagnose`, and the profile of LoRA."""
    results = pd.DataFrame(rows)
    results["is_lora"] = results["method"] == "LoRA"
    if "adapter" in results:
        results = name_as_in_report(results)
        is_shared = results.groupby("label")["adapter"].transform("nunique") > 1
        is_of_adapter = results["adapter"].notna()  # the base model has results of its own
        results["method"] = results["label"]
        results.loc[is_shared & is_of_adapter, "method"] += ", " + shorten_folders(results["adapter"])
    curvatures = results.query("metric == 'curvature'")
    if len(curvatures):
        loops = "loop " + curvatures["loop"].astype(int).astype(str)
        print_by_method("curvature (nats per token)", curvatures, loops, "{:.4g}".format)
    print_losses(results)
    print_loss_reductions(results)
    reductions = results.query("metric == 'loss_reduction'")
    for method, own in reductions.query("gates != 'unit'").groupby("method", sort=False):
        has_recipe = own["seed"].notna().all()
        if own["is_lora"].all() or not has_recipe:
            print()
            print_sentences(f"{method}: {describe_profile(own.groupby('loop')['value'].mean(), own['n'].iloc[0])}")


def shorten_folders(names: pd.Series) -> pd.Series:
    """Return the names of adapters without the folder that all of them are in."""
    folders = names.dropna().unique()
    if not all(map(os.path.isabs, folders)):  # a repository on the Hub
        return names
    common = os.path.commonpath([os.path.dirname(folder) for folder in folders])
    return names.map(lambda folder: os.path.relpath(folder, common), na_action="ignore")


def print_differences(accuracy: pd.DataFrame, baseline: str = "LoRA") -> None:
    """Print the differences in accuracy to a method, on the same problems: one table for each other method."""
    lines, intervals = [], []
    for (task, num_loops), rows in accuracy.groupby(["task", "num_loops"], sort=False):
        samples = {row["method"]: read_samples(row) for row in rows.to_dict("records")}
        for method in samples:
            if method != baseline:
                difference = compare_answers(samples[method], samples[baseline])
                lines.append([f"{method} minus {baseline}", task, num_loops, difference.n, str(difference)])
                if difference.n >= FEWEST_PROBLEMS:
                    intervals.append((difference.low, difference.high, difference.p))
    if not lines:
        return
    table = pd.DataFrame(lines, columns=["title", "task", "K", "n", "points [95% interval]"])
    for names, own in table.groupby("title", sort=False):
        tasks = own["task"].unique()
        title, keys = f"{names}, accuracy on the same n problems", ["task", "K"]
        if len(tasks) == 1:
            title, keys = f"{title} of {tasks[0]}", ["K"]
        print_table(title, own.set_index(keys)[["n", "points [95% interval]"]])
    about = "The intervals are over problems. They do not include other training seeds."
    print_sentences(" ".join([about, *explain_disagreements(intervals), OWN_FAMILY]))


_printed_sentences: list[set[str]] = []
"""Sentences of the notes of tables and figures that the report which is being made has printed. Else the list is empty."""

_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?]) (?=[A-Z`])")

_REFERRING = ("It ", "Its ", "Some ", "Their ", "They ", "This ")
"""Beginnings of a sentence that is not understood without the one before it."""


def print_notes(*lines: str) -> None:
    """Print the sentences of a table or a figure that the report has not printed yet, below one that they are true of, too.

    The files have all notes of their table.
    """
    printed = _printed_sentences[-1] if _printed_sentences else set()
    new = []
    for line in lines:
        sentences = _leave_out_printed(_BETWEEN_SENTENCES.split(line), printed)
        if sentences:
            new.append(" ".join(sentences))
            printed.update(sentences)
    print_sentences(*new)


def _leave_out_printed(sentences: Sequence[str], printed: Collection[str]) -> list[str]:
    """Return the sentences of a line that were not printed before, and those that the next one of them refers to."""
    kept: list[str] = []
    for sentence in reversed(sentences):
        is_needed = bool(kept) and kept[0].startswith(_REFERRING)
        if is_needed or sentence not in printed:
            kept.insert(0, sentence)
    return kept


@contextmanager
def making_report(output_dir: Path, parts: Sequence[str] = ()) -> Iterator[None]:
    """Make the folder of a report for this block, and print after the block where the report is and what it replaced.

    A new folder that the block has written nothing into, as after an error, is removed and not printed. After a report, the
    tables and figures of a former one that it does not have are removed, because they are of other results.

    Args:
        output_dir: Folder of the report.
        parts: Names of the tables and figures that a report of this kind can have.
    """
    is_new = not output_dir.exists()
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"`output_dir` must be a folder that can be written, got {output_dir} ({error.strerror})."
        ) from None
    before = _find_write_times(output_dir)
    _printed_sentences.append(set())
    try:
        yield
    finally:
        _printed_sentences.pop()
        after = _find_write_times(output_dir)
        if is_new and not after:
            output_dir.rmdir()
    if after == before:
        return
    # A folder that the user names may have other files, which the report leaves as they are.
    unchanged = {path for path, time in before.items() if after.get(path) == time}
    former = _find_parts(unchanged, parts)
    for path in former:
        path.unlink()
    is_replaced = bool(former) or len(unchanged) < len(before)
    replaced = ", and has replaced the report there" if is_replaced else ""
    print_sentences(f"The report is written to {output_dir}{replaced}.")


TABLE_ENDINGS, FIGURE_ENDINGS = (".md", ".tex", ".csv"), (".png", ".pdf", ".svg")
"""Endings of the files of a table and of a figure."""


def _find_parts(paths: Collection[Path], parts: Sequence[str]) -> list[Path]:
    """Return the files of tables and figures of a report with some names, perhaps with a number, such as `depth_loss_2`.

    A report writes all files of a table or figure. A single file of such a name is the user's.
    """
    found = []
    for path in paths:
        if re.sub(r"_\d+$", "", path.stem) not in parts:
            continue
        for endings in (TABLE_ENDINGS, FIGURE_ENDINGS):
            files = {path.with_suffix(ending) for ending in endings}
            if path in files and files <= {*paths}:
                found.append(path)
    return found


def _find_write_times(folder: Path) -> dict[Path, int]:
    """Return the time at which each file of a folder was last written, in nanoseconds."""
    return {path: path.lstat().st_mtime_ns for path in folder.iterdir()}
