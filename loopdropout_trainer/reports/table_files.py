"""Tables of YAML files, the paper's and a user's own: their cells are filled with results (docs/reports.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import pandas as pd

from loopdropout_trainer.errors import UserError, closest_match, docs_page, join_command, short_repr
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.reports.cell_options import check_cell, check_options
from loopdropout_trainer.reports.frames import average, has_method, select
from loopdropout_trainer.reports.missing_numbers import LeftOut, Missing, Misspelled, describe_missing, is_found
from loopdropout_trainer.reports.nearest_results import describe_nearest
from loopdropout_trainer.reports.other_problems import is_score
from loopdropout_trainer.reports.recipe_columns import (
    PREFIX,
    describe_values,
    hint_at_column,
    is_setting_column,
    read_column,
    setting_names,
)
from loopdropout_trainer.reports.recipe_texts import is_benchmark, show_setting
from loopdropout_trainer.reports.tables import NUMBERS, compare, mean_numbers, mean_sd, paired_gains
from loopdropout_trainer.results.run_files import is_of_base
from loopdropout_trainer.terminal import format_fixed


def find(results: pd.DataFrame, wanted: dict) -> pd.DataFrame:
    """Return the selected results, by default accuracies.

    Raises:
        Missing: if a wanted seed, task or method has none, or `Misspelled` if the results have a similar task or metric.
        UserError: for a column that results do not have.
    """
    check_columns(results, wanted)
    conditions = {"metric": "accuracy", **wanted}
    rows = select(results, conditions)
    for name in ("seed", "task", "method"):
        values = pd.Series(wanted.get(name, []), dtype=object)
        if name == "method":
            missing = [value for value in values if not has_method(rows, value).any()]
        else:
            missing = {*values} - {*rows[name]}
        if rows.empty or missing:
            check_spelling(results, wanted)
            others = describe_methods(results, wanted) + describe_sweeps(results, wanted)
            others = others or describe_values(results, wanted)
            if rows.empty and not others:
                others = describe_nearest(results, conditions)
            raise Missing(f"no result with {describe_selection(wanted)}.{others}")
    return rows


OPTIONS = ("show", "minus", "part", "of", "decimals", "scale", "recipe", "num_fitting_examples")
"""Options of a cell. Its other names are columns of the results."""

FURTHER_COLUMNS = ("adapter", "training", "readout")
"""Columns that results may lack, because only some measurements have them."""


def check_columns(results: pd.DataFrame, wanted: dict) -> None:
    """Raise UserError if a selection has a name that is no column of results.

    A setting `recipe_...` may be missing in all results, because recipes do not name settings at their defaults.
    """
    known = [*results.columns, *FURTHER_COLUMNS]
    for name in wanted:
        if name in known:
            continue
        if is_setting_column(name):
            continue
        if str(name).startswith(PREFIX):
            settings = [f"{PREFIX}{setting}" for setting in setting_names()]
            raise UserError(f"No training has the setting of the column `{name}`.{closest_match(name, settings)}")
        hint = closest_match(name, [*known, *OPTIONS]) or hint_at_column(name)
        hint = hint or f" The page {docs_page('reports')} lists the columns."
        raise UserError(f"The results have no column `{name}`.{hint}")


def check_spelling(results: pd.DataFrame, wanted: dict) -> None:
    """Raise `Misspelled` if no result has a wanted task or metric, but one with a similar name.

    A benchmark of the package's sweeps is no mistake. It was not measured.
    """
    for name in ("task", "metric"):
        names = [*results[name].unique()]
        for value in pd.Series(wanted.get(name, []), dtype=object):
            hint = closest_match(str(value), names, cutoff=0.8)
            if value not in names and hint and not is_benchmark(value):
                raise Misspelled(f"no {name} `{value}`. The results have the {name}s {', '.join(names)}.{hint}")


def describe_selection(wanted: dict) -> str:
    """Return the values that select results, such as "method = LoRA or CoTo, task = gsm8k"."""
    parts = []
    for name, value in wanted.items():
        values = pd.Series(value).unique()  # of a text, a number, a list or a column of the results
        parts.append(f"{name} = {' or '.join(map(str, values)) or 'any value'}")
    return ", ".join(parts)


def describe_methods(results: pd.DataFrame, wanted: dict) -> str:
    """Return a sentence with the methods of the results, if a wanted method is not among them."""
    methods = [*results["method"].unique()]
    in_sweeps = [name for name in results["variant"].dropna().unique() if name and name not in methods]
    for method in pd.Series(wanted.get("method", [])):
        if not has_method(results, method).any():
            sentence = f" The results have the methods {', '.join(methods)}"
            if in_sweeps:
                sentence += f" (in sweeps {', '.join(in_sweeps)})"
            if method in RULES:
                sentence += f", and {method} is the rule of the method {RULES[method].title}"
            return f"{sentence}.{closest_match(method, [*methods, *in_sweeps])}"
    return ""


def describe_sweeps(results: pd.DataFrame, wanted: dict) -> str:
    """Return a sentence with the sweeps of the results, if they have none of the wanted sweeps."""
    wanted_sweeps, sweeps = pd.Series(wanted.get("sweep", []), dtype=object), [*results["sweep"].dropna().unique()]
    if not sweeps or wanted_sweeps.empty or wanted_sweeps.isin(sweeps).any():
        return ""
    return f" The results have the sweeps {', '.join(sweeps)}."


def fill_cell(
    results: pd.DataFrame,
    *,
    show: str = "mean",
    minus: dict | None = None,
    part: str | None = None,
    of: str | None = None,
    decimals: int = 2,
    scale: float = 1.0,
    recipe: str | None = None,
    num_fitting_examples: int | None = None,
    **wanted: Any,
) -> tuple[str, dict[str, Any]]:
    """Return the text of a cell, and its numbers by `CELL_NUMBERS`, as far as it has numbers.

    Args:
        results: from `load_results`.
        show: `mean` (± SD over seeds, or a difference with its interval), `seeds` (the value of each seed), or a column.
        minus: columns of the results to subtract, paired by seed.
        part: part of this difference by `answer_decomposition`, such as `gain_both_answered`.
        of: cost of the training to show, such as `train_seconds`.
        decimals: digits after the decimal point.
        scale: factor on the values.
        recipe: file whose setting `show`, or value of `describe_recipe`, is the text.
        num_fitting_examples: argument of `describe_recipe`.
        wanted: values of the columns that select the results.
    """
    check_options({"minus": minus, "part": part, "of": of, "recipe": recipe, "decimals": decimals, "scale": scale})
    check_cell(minus, of, scale, wanted)
    if recipe:
        return show_setting(recipe, show, num_fitting_examples), {}
    rows = find(results, wanted)
    if minus:
        other = find(results, subtract_from(results, wanted, minus))
        return show_difference(rows, other, show, part, decimals)
    if of:
        costs = find(results, {"task": "training", "metric": of})
        rows = costs[costs["run"].isin(rows["run"])]
    by_task = [average(own) for _, own in rows.groupby("task")]
    values = pd.concat(by_task, axis=1).dropna().mean(axis=1) * scale  # by seed
    numbers = {**mean_numbers(values), **describe_problems(rows)}
    if is_of_base(rows).all():
        numbers["num_seeds"] = None
    if show == "mean":
        return mean_sd(values, decimals), numbers
    if show == "seeds":
        return " / ".join(format_fixed(value, decimals) for value in values), numbers
    return show_column(rows, show), {}


def show_difference(
    rows: pd.DataFrame, other: pd.DataFrame, show: str, part: str | None, decimals: int
) -> tuple[str, dict[str, Any]]:
    """Return the difference of results to others as `fill_cell` does."""
    gain = compare(rows, other, part)
    if gain is None:
        return "–", {}
    if math.isnan(gain.difference):
        return gain.text() or "–", gain._asdict()
    gains = paired_gains(rows, other, part)
    numbers = {**gain._asdict(), "num_seeds": len(gains), **describe_problems(rows)}
    if show == "seeds":
        return " / ".join(format_fixed(value, decimals, sign=True) for value in gains), numbers
    return gain.text(decimals), numbers


def show_column(rows: pd.DataFrame, name: str) -> str:
    """Return the values of a column of results as a text, or a dash if they have none.

    Raises:
        UserError: if results have no such column.
    """
    if name not in rows and not is_setting_column(name):
        hint = closest_match(str(name), ["mean", "seeds", *rows.columns]) or hint_at_column(name)
        raise UserError(f"`show` must be mean, seeds or a column of the results, got {name}.{hint}")
    texts = []
    for value in read_column(rows, name).dropna().unique():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        texts.append(f"{value:g}" if is_number else str(value))
    return ", ".join(texts) or "–"


def subtract_from(results: pd.DataFrame, wanted: dict, minus: dict) -> dict[str, Any]:
    """Return the columns that select the results to subtract.

    `method` and `variant` both name a method. If `minus` has one of them, which contradicts the other one of the cell, the
    other one is left out.
    """
    both = {**wanted, **minus}
    for name, other in (("method", "variant"), ("variant", "method")):
        if name in minus and other in wanted and other not in minus and not has_both(results, both):
            return {column: value for column, value in both.items() if column != other}
    return both


def has_both(results: pd.DataFrame, wanted: dict) -> bool:
    """Return whether there is a result with the method and the variant of a selection."""
    both = [has_method(results, method) for method in pd.Series(wanted["method"])]
    is_of_method = pd.concat(both, axis=1).any(axis=1)
    return bool((is_of_method & results["variant"].isin(pd.Series(wanted["variant"]))).any())


def describe_problems(rows: pd.DataFrame) -> dict[str, Any]:
    """Return `num_problems`, the problems of scores on all tasks, and `chose`, whether they chose a learning rate.

    The results of trainings and of diagnostics have no problems: their `n` counts examples or tokens.
    """
    if not is_score(rows).all():
        return {"chose": rows["chose"].any()}
    return {"num_problems": rows.groupby("task")["n"].first().sum(), "chose": rows["chose"].any()}


CELL_NUMBERS = ["num_problems", "chose", *NUMBERS]
"""Columns of numbers of a cell in a CSV file."""


def read_numbers(spec: dict) -> Iterator[tuple[dict[str, str], str, dict[str, Any], Any]]:
    """Yield the heads, the title of the column, the selection and the paper's number of each cell, row by row."""
    for row in spec["rows"]:
        heads, wanted = {}, dict(spec.get("filter", {}))
        for (title, column), head in zip(spec["heads"].items(), row, strict=False):
            if isinstance(head, dict):  # the text of the head, and the columns that it selects
                if len(head) != 1:
                    raise UserError(
                        f"A head in `rows` must be a column's value or `{{text: {{column: value}}}}`, got {head}."
                    )
                text, selection = next(iter(head.items()))
            else:
                text, selection = str(head), {column: head}
            heads[title] = text
            wanted |= selection
        papers = row[len(heads) :]  # it has no numbers if the paper has none
        if len(papers) > len(spec["columns"]):
            raise UserError(
                f"A row must have at most one number for each of the {len(spec['columns'])} columns, got {row}."
            )
        for (title, column), paper in zip_longest(spec["columns"].items(), papers):
            yield heads, title, {**wanted, **column}, paper


def check_parts(spec: dict) -> None:
    """Raise UserError if the filter, a column or a row of a table has another form than cells read."""
    check_mappings({"filter": spec.get("filter", {}), **spec["columns"]}, "table")
    for row in spec["rows"]:
        if not isinstance(row, list):
            raise UserError(f"Each item of `rows` must be a list, such as [LoRA], got {short_repr(row)}.")


def check_mappings(parts: dict[str, Any], kind: str) -> None:
    """Raise UserError if a part of a table or a figure, by its name in the file, does not map columns to values."""
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise UserError(
                f"`{name}` of a {kind} must be a mapping, such as {{num_loops: 4}}, got {short_repr(part)}."
            )


def check_fields(spec: dict, types: dict[str, type], kind: str, example: str) -> None:
    """Raise UserError if the content of a YAML file does not have a field, or has it as another type.

    Args:
        spec: Content of the file, or of one of its fields.
        types: Type of each field that must be set.
        kind: Words for it, such as "table" or "figure".
        example: Name of a file in recipes/tables that the message names as an example.
    """
    words = {str: "a text", int: "a whole number", dict: "a mapping", list: "a list"}
    for name, wanted_type in types.items():
        if name not in spec:
            raise UserError(
                f"`{name}` must be set for a {kind}. The file has {', '.join(spec)}. {name_example(example)}"
            )
        if not isinstance(spec[name], wanted_type):
            raise UserError(
                f"`{name}` of a {kind} must be {words[wanted_type]}, got {short_repr(spec[name])}. {name_example(example)}"
            )


def name_example(example: str) -> str:
    """Return the sentence of a message with the command that prints a file of recipes/tables."""
    return f"`{join_command('recipes', f'tables/{example}.yaml')}` prints an example."


def build_table(
    spec: dict, results: pd.DataFrame, all_results: pd.DataFrame | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Return a table with one line for each number, next to the paper's, and lines about the missing numbers.

    The last of these lines are the commands that measure them, unless all of them are only misspelled or left out.
    The columns `CELL_NUMBERS` have the numbers of the text in the column `here`.

    Args:
        spec: content of a YAML file (docs/reports.md).
        results: from `load_results`, or those of them that the report shows.
        all_results: from `load_results`. A number that only these have is `LeftOut`. Default: `results`.
    """
    check_fields(spec, {"title": str, "heads": dict, "columns": dict, "rows": list}, "table", "p_study")
    check_parts(spec)
    lines, missing = [], []
    decimals = {"decimals": find_decimals(spec)}
    for heads, title, wanted, paper in read_numbers(spec):
        defaults = decimals if wanted.get("minus") else {}
        text, numbers = "–", {}
        options = {**defaults, **wanted}
        try:
            text, numbers = fill_cell(results, **options)
        except Missing as error:
            reason = error
            if all_results is not None and is_found(partial(fill_cell, all_results, **options)):
                reason = LeftOut(error)
            minus = wanted.get("minus") or {}
            is_own = bool(minus) and minus.items() <= wanted.items()  # of a method to itself, which is always a dash
            if not is_own:
                missing.append((wanted.get("sweep"), f"{', '.join(heads.values())}, {title}", reason))
        lines.append(
            {**heads, "column": title, "here": text, "paper": paper, **dict.fromkeys(CELL_NUMBERS), **numbers}
        )
    table = pd.DataFrame(lines)
    texts = table.drop(columns=CELL_NUMBERS).dropna(axis=1, how="all").astype(object).fillna("–").astype(str)
    numbers = table[CELL_NUMBERS].assign(chose=table["chose"].eq(True))
    notes = describe_missing(missing)
    if not all(isinstance(reason, Misspelled | LeftOut) for _, _, reason in missing):
        notes += spec.get("made_by", [])
    return texts.join(numbers), notes


def find_decimals(spec: dict) -> int:
    """Return the decimals of the differences of a table that set none: those of its means, as far as they set some, else 2."""
    decimals = []
    for column in spec["columns"].values():
        is_mean = column.keys().isdisjoint(("minus", "of", "metric"))
        if is_mean and isinstance(column.get("decimals"), int):
            decimals.append(column["decimals"])
    return max(decimals, default=2)


NOT_COMPARED = {"show", "minus", "part", "of", "recipe", "metric"}
"""Options of cells that are not accuracies, and so have no best value."""


def compared_lines(spec: dict) -> list[list[int]]:
    """Return the lines of the table of `build_table` whose settings are equal apart from the method, in groups."""
    groups: dict[str, list[int]] = {}
    for line, (_, _, wanted, _) in enumerate(read_numbers(spec)):
        if NOT_COMPARED & wanted.keys():
            continue
        settings = {name: value for name, value in wanted.items() if name not in ("method", "variant")}
        groups.setdefault(repr(sorted(settings.items())), []).append(line)
    return list(groups.values())


def find_best(spec: dict, table: pd.DataFrame, source: str) -> list[int]:
    """Return the lines of a table with the best accuracies among methods at equal settings.

    There is no best one if an accuracy is missing, if they are not a test, or if all of them are equal. Ours also need the
    same number of seeds: a failed run could make a method the best one. The base model has no seeds.

    Args:
        spec: content of a YAML file (docs/reports.md).
        table: from `build_table`.
        source: column of the accuracies, "paper" or "here".
    """
    best = []
    for lines in compared_lines(spec):
        own = table.loc[lines]
        means = own[source].str.extract(r"^([-+]?[\d.]+)")[0].astype(float)
        is_test = not own["chose"].any()
        has_equal_seeds = source == "paper" or own["num_seeds"].nunique() <= 1
        if is_test and has_equal_seeds and means.notna().all() and means.nunique() > 1:
            best += means.index[means == means.max()].tolist()
    return best


def lay_out(spec: dict, table: pd.DataFrame, mark_best: Callable[[str], str]) -> pd.DataFrame:
    """Return a table with the rows and columns of its file. The paper's number and ours are in neighboring columns, if any.

    Args:
        spec: content of a YAML file (docs/reports.md).
        table: from `build_table`.
        mark_best: Function from the text of a best value (`find_best`) to the marked text, for example bold.
    """
    sources = [name for name in ("paper", "here") if name in table]
    has_paper = "paper" in sources
    texts = table[sources].copy()
    for source in sources:
        best = find_best(spec, table, source)
        texts.loc[best, source] = texts.loc[best, source].map(mark_best)
    rows = []
    width = len(spec["columns"])
    heads = table.reindex(columns=[*spec["heads"]], fill_value="–")  # rows may leave out the last heads
    for start in range(0, len(table), width):
        cells = texts.iloc[start : start + width]
        titles = table["column"].iloc[start : start + width]
        row = heads.iloc[start].to_dict()
        for title, (_, own) in zip(titles, cells.iterrows(), strict=True):
            for source in sources:
                head = f"{title}, {source}" if has_paper else title
                row[head] = own[source]
        rows.append(row)
    return pd.DataFrame(rows).set_index([*spec["heads"]])
