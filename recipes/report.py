"""Make tables and figures from finished runs.

    loopdropout report outputs/quickstart
    loopdropout report outputs/sweeps --tables math_main figure_teaser
    loopdropout report outputs --tables all

Without `--tables` it summarizes all runs below the folders: tables of costs,
held-out losses, accuracies by depth and loss reductions, with differences to LoRA
and their 95% intervals, and the figures `overview` and `losses`. A table or
figure of the paper is a YAML file in recipes/tables/, which has the paper's
numbers too. Tables are written as Markdown, LaTeX and CSV, figures as PNG, PDF
and SVG, by default to `report` in the folder of the runs. Missing runs are
listed.
"""

# Columns of results.jsonl that the tables, figures, the summary, sweep.py and docs/replication filter on. Every result has
#   metric, value, unit, task, method, seed, step, num_loops, gates, n
# with these values:
#   method     title of the rule ("LoRA", "Loop Dropout", "LoRA+", "rsLoRA", "CoTo", "Input dropout", ...) or "base model"
#   num_loops  loops that ran in the measurement (results of the training itself: the depth of the training)
#   gates      "unit", "none" (base model), "loop 1" ... "loop K" (only this loop has the adapter), else "1-1-0-0"
#   loop       (optional) the only active loop of gates "loop t", or the loop that is read out
#   group      (optional) subset of a task, for metric "accuracy_by_<column>": "Algebra", "1", ...
#   samples    (optional) file in the folder of the result with one line per problem, in the order of the problems, with the
#              columns `correct` (0 to 1) and `answered` (1 if an answer was extracted), for paired intervals
#   adapter    (optional) folder of the training, if the result is stored elsewhere; its recipe.yaml gives `recipe_*`
#
#   task                               metric
#   metamath_gsm8k, metamath_math500   accuracy (%), missing (% of completions without an answer), accuracy_by_subject,
#                                      accuracy_by_level
#   gsm8k, gsm8k_platinum, gsm_plus_mini, arithmetic_*, development, mmlu, bbh, truthfulqa_mc2, humaneval, humaneval_plus,
#   mbpp, mbpp_plus, ifeval_strict, ifeval_loose, ...     accuracy (%): one task name for each headline number
#                                      (arithmetic_*: also accuracy_by_num_steps)
#   training                           train_loss and eval_loss (nats), examples, trainable_parameters, num_tokens,
#                                      train_seconds, step_seconds, tokens_per_second, peak_memory_gb, and of GRPO
#                                      reward_first, reward_last
#   of the diagnostics (task: "development" for held-out examples, or the name of a task):
#     single loop                      loss (nats) and loss_reduction (%) with gates "loop t" and loop t, or with gates
#                                      "unit"; frozen loss: metric loss, gates "none", method "base model"
#     readouts                         readout_loss (nats), loop t
#     curvature                        curvature (nats), loop t, and curvature_term (nats)
#
# From recipe.yaml: recipe_learning_rate, recipe_lora_r, recipe_num_loops, recipe_model_name_or_path, recipe_rule, recipe_p,
# recipe_run_name ("SWEEP/METHOD/lr_X/seed_S" for a run of a sweep, which gives the columns `sweep` and `variant`).

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd

from loopdropout_trainer.arguments import option
from loopdropout_trainer.diagnostics import TOO_FEW
from loopdropout_trainer.errors import UserError, count, run_script
from loopdropout_trainer.figures import loss_curves, loss_figure, overview_figure, points
from loopdropout_trainer.files import check_links, recipe_names
from loopdropout_trainer.frames import (
    average,
    describe_rejected,
    final_results,
    labelled,
    load_results,
    name_methods,
    select,
)
from loopdropout_trainer.gates import RULES, Draw, make_rule
from loopdropout_trainer.printing import print_table
from loopdropout_trainer.recipe import load_recipe, name_words, parse
from loopdropout_trainer.saving.checkpoints import STATE_FILE, find_early_stop, load_state
from loopdropout_trainer.tables import (
    ACCURACY_TITLE,
    LOSS_TITLE,
    NUMBERS,
    OWN_FAMILY,
    REDUCTION_TITLE,
    accuracy_numbers,
    accuracy_table,
    compare,
    describe_sizes,
    explain_equal,
    fit_title,
    loss_numbers,
    loss_table,
    mean_numbers,
    mean_sd,
    paired_gains,
    reduction_numbers,
    reduction_table,
    split_reductions,
)


COSTS = {
    "trainable_parameters": "trained parameters",
    "train_seconds": "training in s",
    "tokens_per_second": "tokens per s",
    "peak_memory_gb": "peak memory in GB",
}
"""Costs of a training, and their printed heads."""


@dataclass
class ReportArguments:
    """The runs, and the tables and figures to make."""

    first_words = "FOLDER [FOLDER ...]"

    folders: list[str] = option(..., "Folders of runs. All folders below them are read.")
    tables: list[str] = option([], "Names in recipes/tables, YAML files, or `all`. Default: a summary.")
    output_dir: str | None = option(
        None,
        "Folder of the report. Default: `report` in the folder of the runs, or `report_A_B` here for folders A and B.",
    )


ARGUMENTS = (ReportArguments,)


class Missing(UserError):
    """A number that the results do not contain."""


# Tables


def find(results: pd.DataFrame, wanted: dict) -> pd.DataFrame:
    """Return the selected results, by default accuracies. Raise `Missing` if a wanted seed, task or method has none."""
    rows = select(results, {"metric": "accuracy", **wanted})
    for name in ("seed", "task", "method"):
        missing = {*pd.Series(wanted.get(name, []), dtype=object)} - {*rows[name]}
        if rows.empty or missing:
            raise Missing(f"no result with {describe_selection(wanted)}.{describe_methods(results, wanted)}")
    return rows


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
    for method in pd.Series(wanted.get("method", [])):
        if method not in methods:
            sentence = f" The results have the methods {', '.join(methods)}"
            if method in RULES:
                sentence += f", and {method} is the rule of the method {RULES[method].title}"
            return f"{sentence}."
    return ""


@cache
def describe_recipe(name: str, num_fitting_examples: int | None = None) -> dict[str, Any]:
    """Return the settings of a recipe, `batch`, `steps`, and the `seeds`, `learning_rates` and `benchmarks` of its sweeps.

    The steps count the examples that fit into `max_length`, if their number is given, because the others are left out.
    """
    recipe = load_recipe(name)
    batch = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    num_examples = num_fitting_examples or recipe["num_train_examples"]
    steps = recipe["num_train_epochs"] * math.ceil(num_examples / batch)
    values: dict[str, set] = {"learning_rates": set(), "seeds": set(), "benchmarks": set()}
    for sweep in map(load_recipe, recipe_names()):
        if sweep.get("recipe") == name and "measure" in sweep:
            settings = {**sweep, **sweep["measure"]}
            for field, used in values.items():
                used.update(settings[field])
    texts = {field: ", ".join(map(str, sorted(used))) for field, used in values.items()}
    return {**recipe, "batch": batch, "steps": steps, **texts}


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
    """Return the text of a cell, and its numbers by `NUMBERS` and `num_problems`, as far as it has numbers.

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
    if minus and (of or scale != 1):
        raise UserError("`minus` must not be set together with `of` or `scale`: it compares accuracies in points.")
    if recipe:
        return str(describe_recipe(recipe, num_fitting_examples)[show]), {}
    rows = find(results, wanted)
    if minus:
        other = find(results, subtract_from(results, wanted, minus))
        gain = compare(rows, other, part)
        if gain is None:
            return "–", {}
        gains = paired_gains(rows, other, part)
        numbers = {**gain._asdict(), "num_seeds": len(gains), **count_problems(rows)}
        if show == "seeds":
            return " / ".join(f"{value:+.{decimals}f}" for value in gains), numbers
        is_over_problems = gain.test == TOO_FEW or gain.test.startswith("McNemar")
        return gain.text(1 if is_over_problems else decimals), numbers
    if of:
        costs = find(results, {"task": "training", "metric": of})
        rows = costs[costs["run"].isin(rows["run"])]
    by_task = [average(own) for _, own in rows.groupby("task")]
    values = pd.concat(by_task, axis=1).dropna().mean(axis=1) * scale  # by seed
    numbers = {**mean_numbers(values), **count_problems(rows)}
    if show == "mean":
        return mean_sd(values, decimals), numbers
    if show == "seeds":
        return " / ".join(f"{value:.{decimals}f}" for value in values), numbers
    return f"{rows[show].iloc[0]:g}", {}


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
    method, variant = pd.Series(wanted["method"]), pd.Series(wanted["variant"])
    return bool((results["method"].isin(method) & results["variant"].isin(variant)).any())


def count_problems(rows: pd.DataFrame) -> dict[str, float]:
    """Return `num_problems`, the number of problems of accuracies on all of their tasks, or no number for other metrics."""
    if {*rows["metric"]} != {"accuracy"}:
        return {}
    return {"num_problems": rows.groupby("task")["n"].first().sum()}


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


def build_table(spec: dict, results: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return a table with one line for each number, next to the paper's, and sentences about the missing numbers.

    The columns `NUMBERS` and `num_problems` have the numbers of the text in the column `here`.

    Args:
        spec: content of a YAML file (docs/reports.md).
        results: from `load_results`.
    """
    columns = ["num_problems", *NUMBERS]
    lines, missing = [], []
    for heads, title, wanted, paper in read_numbers(spec):
        text, numbers = "–", {}
        try:
            text, numbers = fill_cell(results, **wanted)
        except Missing as reason:
            missing.append((wanted.get("sweep"), f"{', '.join(heads.values())}, {title}", reason))
        lines.append({**heads, "column": title, "here": text, "paper": paper, **dict.fromkeys(columns), **numbers})
    table = pd.DataFrame(lines)
    texts = table.drop(columns=columns).dropna(axis=1, how="all").fillna("–").astype(str)
    return texts.join(table[columns]), describe_missing(missing)


def describe_missing(missing: list[tuple]) -> list[str]:
    """Return a sentence for each sweep about its missing numbers.

    Args:
        missing: The sweep or the sweeps, the place in the table and the reason of each missing number.
    """
    by_sweep: dict[str, list[tuple]] = {}
    for sweep, place, reason in missing:
        sweeps = sweep if isinstance(sweep, list) else [sweep]
        by_sweep.setdefault(" or ".join(map(str, sweeps)), []).append((place, reason))
    sentences = []
    for sweep, places in by_sweep.items():
        place, reason = places[0]
        if len(places) == 1:
            sentences.append(f"Missing: {place}: {reason}")
            continue
        of_sweep = "" if sweep == "None" else f" of the sweep {sweep}"
        sentences.append(f"Missing: {len(places)} numbers{of_sweep}. The first is {place}: {reason}")
    return sentences


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


def lay_out(spec: dict, table: pd.DataFrame, mark_best: Callable[[str], str]) -> pd.DataFrame:
    """Return a table with the rows and columns of the paper, and the paper's number and ours in neighboring columns.

    The best accuracy among methods at equal settings is marked, if all of them are known.

    Args:
        spec: content of a YAML file (docs/reports.md).
        table: from `build_table`.
        mark_best: Function from the text of a best value to the marked text, for example bold.
    """
    sources = [name for name in ("paper", "here") if name in table]
    texts = table[sources].copy()
    for lines in compared_lines(spec):
        for source in sources:
            means = table.loc[lines, source].str.extract(r"^([-+]?[\d.]+)")[0].astype(float)
            if len(means) > 1 and means.notna().all():
                best = means.index[means == means.max()]
                texts.loc[best, source] = texts.loc[best, source].map(mark_best)
    rows = []
    width = len(spec["columns"])
    for start in range(0, len(table), width):
        cells = texts.iloc[start : start + width]
        titles = table["column"].iloc[start : start + width]
        row = table[[*spec["heads"]]].iloc[start].to_dict()
        for title, (_, own) in zip(titles, cells.iterrows(), strict=True):
            row |= {f"{title}, {source}": own[source] for source in sources}
        rows.append(row)
    return pd.DataFrame(rows).set_index([*spec["heads"]])


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


def save_latex(table: pd.DataFrame, title: str, path: Path, label: str | None = None) -> None:
    """Save a table for LaTeX with the packages booktabs and graphicx. A table that is too wide shrinks to the text.

    Args:
        table: Texts, whose index names the lines. Columns with two levels have two lines of heads.
        title: Caption.
        path: Path of the table, without ending.
        label: Label for `\\ref`. Default: `tab:` and the name of the file.
    """
    num_keys, num_columns = table.index.nlevels, table.shape[1]
    if table.astype(str).map(lambda text: "not significant" in text).any(axis=None):
        title += f" (n.s.: not significant. {OWN_FAMILY})"
    texts = table.reset_index(col_level=-1).astype(str).map(latex_cell)
    texts = texts.rename(columns=partial(latex_cell, width=18))
    latex = texts.style.hide(axis="index").to_latex(
        hrules=True,
        position_float="centering",
        multicol_align="c",
        column_format="l" * num_keys + "r" * num_columns,
        caption=escape_latex(title),
        label=label or f"tab:{path.name}",
    )
    if table.columns.nlevels > 1:  # a line under each group of columns
        size = table.columns.get_level_values(1).nunique()
        firsts = range(num_keys + 1, num_keys + num_columns + 1, size)
        rules = [f"\\cmidrule(lr){{{first}-{first + size - 1}}}" for first in firsts]
        head, end_of_line, body = latex.partition("\\\\\n")
        latex = "".join([head, end_of_line, " ".join(rules), "\n", body])
    latex = latex.replace(r"\begin{tabular}", SHRINK + "\n" + r"\begin{tabular}")
    path.with_suffix(".tex").write_text(latex.replace(r"\end{tabular}", r"\end{tabular}}"), encoding="utf-8")


# Figures (plots.py is imported in the functions, because tables do not need plotnine)


def draw_gates(num_loops: int, p: float, seed: int) -> pd.DataFrame:
    """Return the gates of eight examples, as a training draws them, and the gates of inference."""
    draw = Draw(seed=seed, step=0, example_ids=[(row, 0) for row in range(8)], num_loops=num_loops)
    gates = pd.DataFrame(make_rule("loop_dropout", p=p).sample(draw).tolist())  # [K, 8]
    data = gates.melt(var_name="example", value_name="mean", ignore_index=False).reset_index(names="loop")
    data[["loop", "example"]] += 1  # both count from 1 in the figure
    return pd.concat([data.assign(panel="during training"), data.assign(panel="inference", mean=1.0)])


def build_figure(spec: dict, results: pd.DataFrame) -> Any:
    """Return the figure of a YAML file. Raise `Missing` if there are no results for one of its panels."""
    from loopdropout_trainer.plots import heat_plot, line_plot

    of_kind = [] if spec["figure"] == "gates" else ["x", "panels"]
    for name in ("title", "x_label", "y_label", *of_kind):
        if name not in spec:
            raise UserError(f"`{name}` must be set for a figure.")
    labels = {name: spec[name] for name in ("x_label", "y_label")}
    if spec["figure"] == "gates":
        return heat_plot(draw_gates(**spec["filter"]), "loop", "example", spec["title"], **labels)
    x = spec["x"]
    if spec["figure"] == "heat":
        ours = panel_points(spec, results, [spec["y"], x])
        other = panel_points(spec, results, [spec["y"], x], spec["minus"])
        both = ours.merge(other, on=["panel", spec["y"], x], suffixes=("_ours", ""))
        gains = both.assign(mean=both["mean_ours"] - both["mean"])
        return heat_plot(gains, x, spec["y"], spec["title"], **labels, shows_gains=True)
    axes = pd.DataFrame(labels, [*spec["panels"]])
    data, gain_over = panel_points(spec, results, ["label", x]), spec.get("gain_over") or {}
    unknown = {*gain_over, *gain_over.values()} - {*data["label"]}
    if unknown:
        lines = ", ".join(data["label"].unique())
        raise UserError(f"`gain_over` must name lines of the figure ({lines}), got {', '.join(sorted(unknown))}.")
    return line_plot(data, x, axes, spec["title"], gain_over)


def panel_points(spec: dict, results: pd.DataFrame, by: Sequence[str], change: dict | None = None) -> pd.DataFrame:
    """Return the points of all panels of a figure.

    Args:
        spec: Content of a YAML file of a figure.
        results: From `load_results`.
        by: Columns that tell the points of a panel apart. `label` is the method.
        change: Columns of the results to select instead of the values of the file.
    """
    x = spec["x"]
    wanted = {x: results.reindex(columns=[x])[x].dropna(), **spec["filter"], **(change or {})}
    panels = [find(results, {**panel, **wanted}).assign(panel=title) for title, panel in spec["panels"].items()]
    rows = pd.concat(panels)
    return points(rows.assign(label=name_lines(rows, ["panel", x])), ["panel", *by])


def name_lines(rows: pd.DataFrame, place: list[str]) -> pd.Series:
    """Return the name of the line of each result: the method, or the sweep's names if it has several methods of one rule.

    Args:
        rows: Results of a figure.
        place: Columns of a place in the figure, where a line has one point.
    """
    names = name_methods(rows)
    num_names = rows.assign(name=names).groupby([*place, "method"])["name"].transform("nunique")
    has_several = rows["method"].isin(rows.loc[num_names > 1, "method"])
    return names.where(has_several, rows["method"])


# The command


def save_layout(spec: dict, table: pd.DataFrame, path: Path, notes: Sequence[str] = ()) -> None:
    """Print a table in the paper's layout, and save it as Markdown and LaTeX, and its numbers line by line as CSV."""
    title, sizes = spec["title"], describe_sizes(table[["num_problems", "num_seeds"]])
    notes = [*filter(None, [sizes]), *notes]
    print_table(title, lay_out(spec, table, str))
    print(*notes, sep="\n")
    markdown = lay_out(spec, table, bold_in_markdown).reset_index().to_markdown(index=False, disable_numparse=True)
    path.with_suffix(".md").write_text("\n\n".join([f"### {title}", markdown, *notes, ""]), encoding="utf-8")
    bold = lay_out(spec, table, bold_in_latex)
    bold.columns = pd.MultiIndex.from_tuples([name.rsplit(", ", 1) for name in bold], names=[None, "numbers"])
    if len(bold.columns) > WIDEST:
        bold = bold.stack("numbers", future_stack=True)
    save_latex(bold, f"{title}. {sizes}" if sizes else title, path, spec.get("label"))
    table.to_csv(path.with_suffix(".csv"), index=False)


def save_table(
    numbers: pd.DataFrame, table: pd.DataFrame, title: str, path: Path, notes: Sequence[str] = (), sizes: str = ""
) -> None:
    """Print a table, save it as Markdown and LaTeX, and its numbers as CSV.

    Args:
        numbers: Numbers, with one line for each line of the table.
        table: Texts, whose index names the lines.
        title: Text above the table.
        path: Path of the files, without ending.
        notes: Sentences below the table.
        sizes: Sentences from `describe_sizes`, which come first below the table and end the caption in LaTeX.
    """
    print_table(title, table)
    notes = [*filter(None, [sizes]), *notes]
    print(*notes, sep="\n")
    save_latex(table, f"{title}. {sizes}" if sizes else title, path)
    numbers.to_csv(path.with_suffix(".csv"))
    table = table.reset_index()
    markdown = "\n\n".join([f"### {title}", table.to_markdown(index=False, disable_numparse=True), *notes, ""])
    path.with_suffix(".md").write_text(markdown, encoding="utf-8")
    print(f"Wrote {path}.md, .tex and .csv")


def draw_figure(plot: Any, path: Path) -> None:
    """Save a figure as PNG, PDF and SVG, and print its path. `path` has no ending."""
    from loopdropout_trainer.plots import save_figure

    save_figure(plot, path)
    print(f"Wrote {path}.png, .pdf and .svg")


def mean_costs(costs: pd.DataFrame) -> pd.DataFrame:
    """Return the mean costs of a training by method, from the results with the metrics `COSTS`."""
    return (
        labelled(costs)
        .pivot_table("value", "label", "metric")
        .rename_axis("method")[[name for name in COSTS if name in {*costs["metric"]}]]
    )


def describe_early_stops(folders: Sequence[str]) -> list[str]:
    """Return a line with the trainings in some folders that stopped early, and where, or no line if there are none."""
    stops = []
    for folder in folders:
        if not Path(folder, STATE_FILE).is_file():  # of an older run
            continue
        state = load_state(folder)
        if find_early_stop(state) is not None:
            stops.append(f"{folder} after {state.global_step:,} of {count(state.max_steps, 'step')}")
    return [f"Stopped early: {'; '.join(stops)}."] if stops else []


def make_named(name: str, results: pd.DataFrame, output_dir: Path) -> None:
    """Make the table or the figure of a YAML file, or print what is missing for it."""
    spec = load_recipe(name if name.endswith(".yaml") else f"tables/{name}.yaml")
    path = output_dir / Path(name).stem
    try:
        if "figure" in spec:
            draw_figure(build_figure(spec, results), path)
            return
        table, missing = build_table(spec, results)
        notes = []
        if table["here"].str.contains("significant").any():
            notes.append(OWN_FAMILY)
        notes += explain_equal(table)
        if missing:
            notes += [*missing, *spec["made_by"]]
        save_layout(spec, table, path, notes)
    except Missing as reason:
        print(f"Missing: {spec['title']}: {reason}", *spec["made_by"], sep="\n")


def summarize(results: pd.DataFrame, output_dir: Path) -> None:
    """Make the tables of costs, losses, accuracies and loss reductions, and the figures of all runs."""
    costs = results[results["metric"].isin(COSTS)]
    if len(costs):
        numbers = mean_costs(costs)
        texts = numbers.round(2).map("{:.12g}".format, na_action="ignore").fillna("–").rename(columns=COSTS)
        notes = describe_early_stops(costs["folder"].unique())
        save_table(numbers, texts, "Costs of the training", output_dir / "costs", notes)
    losses = loss_numbers(results)
    if len(losses):
        notes = [
            "The loss of the held-out examples at the end of the training, or of its best checkpoint. Lower is better.",
            f"The 95% intervals and p-values are over seeds (t test). {OWN_FAMILY}",
        ]
        notes += explain_equal(losses)
        save_table(losses, loss_table(losses), fit_title(LOSS_TITLE, losses), output_dir / "held_out_loss", notes)
    has_accuracy = "accuracy" in {*results["metric"]}
    groups = split_reductions(results)
    if not (len(costs) or len(losses) or groups or has_accuracy):
        metrics = ", ".join(sorted(results["metric"].unique()))
        print(f"There is no accuracy, loss or cost of a training to report, only {metrics}.")
    if has_accuracy:
        note = (
            "The 95% intervals and p-values are over seeds (t test), or over problems if there is one seed (McNemar's exact "
            f"test). {OWN_FAMILY}"
        )
        numbers = accuracy_numbers(results)
        notes = [note, *explain_equal(numbers)]
        is_of_base = numbers.index.get_level_values("method").str.startswith("base model")
        sizes = describe_sizes(numbers[~is_of_base] if not is_of_base.all() else numbers)
        title = fit_title(ACCURACY_TITLE, numbers)
        save_table(numbers, accuracy_table(numbers), title, output_dir / "accuracy", notes, sizes)
        draw_figure(overview_figure(results), output_dir / "overview")
    for number, (examples, reductions) in enumerate(groups.items(), start=1):
        numbers = reduction_numbers(reductions)
        path = output_dir / ("loss_reduction" if number == 1 else f"loss_reduction_{number}")
        title = fit_title(REDUCTION_TITLE.format(examples), numbers)
        save_table(numbers, reduction_table(numbers), title, path)
    curves = loss_curves(results)
    if len(curves):
        draw_figure(loss_figure(curves), output_dir / "losses")


def find_output_dir(args: ReportArguments) -> Path:
    """Return the folder of the report, and print it if the user has not set it."""
    if args.output_dir is not None:
        return Path(args.output_dir)
    if len(args.folders) == 1:
        folder = Path(args.folders[0], "report")
    else:
        names = "_".join(Path(name).resolve().name for name in args.folders)
        folder = Path(f"report_{names[:100]}")
    check_links(folder)
    replaced = ", and replaces the report there" if folder.exists() else ""
    print(f"The report is written to {folder}{replaced}.")
    return folder


def main(argv: list[str] | None = None) -> None:
    (args,) = parse(ARGUMENTS, name_words(argv, "folders"), __doc__)
    results, output_dir = load_results(*args.folders), find_output_dir(args)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"`output_dir` must be a folder that can be written, got {output_dir} ({error.strerror})."
        ) from None
    final = final_results(results)
    for line in filter(None, [results.attrs["left_out"], *describe_rejected(results, final)]):
        print(line)
    names = args.tables
    if names == ["all"]:
        names = [name for name in recipe_names() if name.startswith("tables/")]
    for name in names:
        make_named(name, final, output_dir)
    if not names:
        summarize(final, output_dir)


if __name__ == "__main__":
    run_script(main)
