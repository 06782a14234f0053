"""Make tables and figures from finished runs.

    loopdropout report outputs/quickstart
    loopdropout report outputs/sweeps --tables math_main figure_teaser
    loopdropout report outputs --tables all

Without `--tables` it summarizes all runs below the folders: accuracy by depth,
differences to LoRA with 95% intervals, costs, and one figure. A table or figure
of the paper is a YAML file in recipes/tables/, which has the paper's numbers
too. Tables are written as Markdown, LaTeX and CSV, figures as PNG, PDF and SVG.
Missing runs are listed.
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

import argparse
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd

from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.files import check_links, recipe_names
from loopdropout_trainer.gates import Draw, make_rule
from loopdropout_trainer.recipe import load_recipe
from loopdropout_trainer.tables import (
    ACCURACY_TITLE,
    OWN_FAMILY,
    accuracy_table,
    average,
    difference,
    labelled,
    load_results,
    mean_sd,
    overview_figure,
    paired_gains,
    points,
    print_table,
    select,
)


COSTS = ["trainable_parameters", "train_seconds", "tokens_per_second", "peak_memory_gb"]


class Missing(UserError):
    """A number that the results do not contain."""


# Tables


def find(results: pd.DataFrame, wanted: dict) -> pd.DataFrame:
    """Return the selected results, by default accuracies. Raise `Missing` if a wanted seed, task or method has none."""
    rows = select(results, {"metric": "accuracy", **wanted})
    for name in ("seed", "task", "method"):
        if rows.empty or not {*rows[name]}.issuperset(pd.Series(wanted.get(name, rows[name]))):
            raise Missing(f"no result with {wanted}")
    return rows


@cache
def describe_recipe(name: str, num_fitting_examples: int | None = None) -> dict[str, Any]:
    """Return the settings of a recipe, `batch`, `steps`, and the `seeds`, `learning_rates` and `benchmarks` of its sweeps.

    The steps count the examples that fit into `max_length`, if their number is given, because the others are left out.
    """
    recipe, sweeps = load_recipe(name), map(load_recipe, recipe_names())
    own = [{**sweep, **sweep["measure"]} for sweep in sweeps if sweep.get("recipe") == name and "measure" in sweep]
    batch = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    steps = recipe["num_train_epochs"] * math.ceil((num_fitting_examples or recipe["num_train_examples"]) / batch)
    used = {
        field: ", ".join(map(str, sorted({value for sweep in own for value in sweep[field]})))
        for field in ("learning_rates", "seeds", "benchmarks")
    }
    return {**recipe, "batch": batch, "steps": steps, **used}


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
) -> str:
    """Return the text of a cell.

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
    if recipe:
        return str(describe_recipe(recipe, num_fitting_examples)[show])
    rows = find(results, wanted)
    if minus:
        other = find(results, {**wanted, **minus})
        if show == "seeds":
            return " / ".join(f"{gain:+.{decimals}f}" for gain in paired_gains(rows, other, part))
        return difference(rows, other, decimals, part)
    if of:
        costs = find(results, {"task": "training", "metric": of})
        rows = costs[costs["run"].isin(rows["run"])]
    by_task = [average(own) for _, own in rows.groupby("task")]
    values = pd.concat(by_task, axis=1).dropna().mean(axis=1) * scale
    if show == "mean":
        return mean_sd(values, decimals)
    return " / ".join(f"{value:.{decimals}f}" for value in values) if show == "seeds" else f"{rows[show].iloc[0]:g}"


def read_numbers(spec: dict) -> Iterator[tuple[dict[str, str], str, dict[str, Any], Any]]:
    """Yield the heads, the title of the column, the selection and the paper's number of each cell, row by row."""
    for row in spec["rows"]:
        heads, wanted = {}, spec.get("filter", {})
        for (title, column), head in zip(spec["heads"].items(), row, strict=False):
            ((heads[title], selection),) = (head if isinstance(head, dict) else {str(head): {column: head}}).items()
            wanted = {**wanted, **selection}
        for (title, column), paper in zip_longest(spec["columns"].items(), row[len(heads) :]):
            yield heads, title, {**wanted, **column}, paper


def build_table(spec: dict, results: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return a table with one line for each number, next to the paper's, and a list of the missing numbers.

    Args:
        spec: content of a YAML file (docs/reports.md).
        results: from `load_results`.
    """
    lines, missing = [], []
    for heads, title, wanted, paper in read_numbers(spec):
        number = "–"
        try:
            number = fill_cell(results, **wanted)
        except Missing as reason:
            missing.append(f"Missing: {', '.join(heads.values())}, {title}: {reason}.")
        lines.append({**heads, "column": title, "here": number, "paper": paper})
    return pd.DataFrame(lines).dropna(axis=1, how="all").fillna("–").astype(str), missing


NOT_COMPARED = {"show", "minus", "part", "of", "recipe", "metric"}
"""Options of cells that are not accuracies, and so have no best value."""


def lay_out(spec: dict, table: pd.DataFrame, mark_best: Callable[[str], str]) -> pd.DataFrame:
    """Return a table with the rows and columns of the paper, and the paper's number and ours in neighboring columns.

    The best accuracy among methods at equal settings is marked, if all of them are known.

    Args:
        spec: content of a YAML file (docs/reports.md).
        table: from `build_table`.
        mark_best: Function from the text of a best value to the marked text, for example bold.
    """
    sources = [name for name in ("paper", "here") if name in table]
    groups = {}
    for line, (_, _, wanted, _) in enumerate(read_numbers(spec)):
        if not NOT_COMPARED & {*wanted}:
            settings = {name: value for name, value in wanted.items() if name not in ("method", "variant")}
            groups.setdefault(repr(sorted(settings.items())), []).append(line)
    texts = table[sources].copy()
    for lines in groups.values():
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


def escape_latex(text: str) -> str:
    """Return a text or a bold text of a table for LaTeX."""
    return re.sub(r"([&%$#_])", r"\\\1", text).replace("±", r"$\pm$").replace("–", "--")


# Figures (plots.py is imported in the functions, because tables do not need plotnine)


def draw_gates(num_loops: int, p: float, seed: int) -> pd.DataFrame:
    """Return the gates of eight examples, as a training draws them, and the gates of inference."""
    draw = Draw(seed=seed, step=0, example_ids=[(row, 0) for row in range(8)], num_loops=num_loops)
    gates = pd.DataFrame(make_rule("loop_dropout", p=p).sample(draw).tolist())  # [K, 8]
    data = gates.melt(var_name="example", value_name="mean", ignore_index=False).reset_index(names="loop") + [1, 1, 0]
    return pd.concat([data.assign(panel="during training"), data.assign(panel="inference", mean=1.0)])


def build_figure(spec: dict, results: pd.DataFrame) -> Any:
    """Return the figure of a YAML file. Raise `Missing` if there are no results for one of its panels."""
    from loopdropout_trainer.plots import heat_plot, line_plot

    labels = {name: spec[name] for name in ("x_label", "y_label")}
    if spec["figure"] == "gates":
        return heat_plot(draw_gates(**spec["filter"]), "loop", "example", spec["title"], **labels)
    x = spec["x"]

    def points_by(*by: str, **change: Any) -> pd.DataFrame:
        wanted = {x: results.reindex(columns=[x])[x].dropna(), **spec["filter"], **change}
        panels = [find(results, {**panel, **wanted}).assign(panel=title) for title, panel in spec["panels"].items()]
        return points(pd.concat(panels).assign(label=lambda rows: rows["method"]), ["panel", *by, x])

    if spec["figure"] == "heat":
        ours, other = points_by(spec["y"]), points_by(spec["y"], **spec["minus"])
        both = ours.merge(other, on=["panel", spec["y"], x], suffixes=("_ours", ""))
        gains = both.assign(mean=both["mean_ours"] - both["mean"])
        return heat_plot(gains, x, spec["y"], spec["title"], **labels, shows_gains=True)
    axes = pd.DataFrame(labels, [*spec["panels"]])
    return line_plot(points_by("label"), x, axes, spec["title"], spec.get("gain_over"))


# The command


def save_layout(spec: dict, table: pd.DataFrame, path: Path, notes: Sequence[str] = ()) -> None:
    """Print a table in the paper's layout, and save it as Markdown and LaTeX, and its numbers line by line as CSV."""
    title = spec["title"]
    print_table(title, lay_out(spec, table, str))
    print(*notes, sep="\n")
    markdown = lay_out(spec, table, bold_in_markdown).reset_index().to_markdown(index=False, disable_numparse=True)
    path.with_suffix(".md").write_text("\n\n".join([f"### {title}", markdown, *notes, ""]), encoding="utf-8")
    latex = lay_out(spec, table, bold_in_latex).reset_index().map(escape_latex).rename(columns=escape_latex)
    options = {"index": False, "escape": False, "caption": escape_latex(title), "label": f"tab:{path.name}"}
    path.with_suffix(".tex").write_text(latex.to_latex(**options), encoding="utf-8")
    table.to_csv(path.with_suffix(".csv"), index=False)


def save_table(table: pd.DataFrame, title: str, path: Path, notes: Sequence[str] = ()) -> None:
    """Print a table, whose index names the lines, and save it as Markdown, LaTeX and CSV. `path` has no ending."""
    print_table(title, table)
    print(*notes, sep="\n")
    table = table.reset_index()
    markdown = "\n\n".join([f"### {title}", table.to_markdown(index=False, disable_numparse=True), *notes, ""])
    path.with_suffix(".md").write_text(markdown, encoding="utf-8")
    table.to_latex(path.with_suffix(".tex"), index=False, escape=True, caption=title, label=f"tab:{path.name}")
    table.to_csv(path.with_suffix(".csv"), index=False)
    print(f"Wrote {path}.md, .tex and .csv")


def draw_figure(plot: Any, path: Path) -> None:
    """Save a figure as PNG, PDF and SVG, and print its path. `path` has no ending."""
    from loopdropout_trainer.plots import save_figure

    save_figure(plot, path)
    print(f"Wrote {path}.png, .pdf and .svg")


def held_out_losses(losses: pd.DataFrame) -> pd.DataFrame:
    """Return the held-out losses by method, from the results with the metric `eval_loss`."""
    rows = [[label, mean_sd(average(own), 4)] for label, own in labelled(losses).groupby("label", sort=False)]
    return pd.DataFrame(rows, columns=["method", "loss"]).set_index("method")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="Folders of runs. All folders below them are read.")
    parser.add_argument("--tables", nargs="+", default=[], help="Names in recipes/tables, YAML files, or `all`.")
    parser.add_argument("--output_dir", default="report", type=Path, help="Folder of the report (default: report).")
    arguments = parser.parse_args(argv)
    results, output_dir = load_results(*arguments.folders), arguments.output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    check_links(output_dir)

    # Tables and figures of YAML files
    names = arguments.tables
    if names == ["all"]:
        names = [name for name in recipe_names() if name.startswith("tables/")]
    for name in names:
        spec = load_recipe(name if name.endswith(".yaml") else f"tables/{name}.yaml")
        path = output_dir / Path(name).stem
        try:
            if "figure" in spec:
                draw_figure(build_figure(spec, results), path)
            else:
                table, missing = build_table(spec, results)
                family = [OWN_FAMILY] if table["here"].str.contains("significant").any() else []
                save_layout(spec, table, path, [*family, *missing, *(spec["made_by"] if missing else [])])
        except Missing as reason:
            print(f"Missing: {spec['title']}: {reason}.", *spec["made_by"], sep="\n")

    # Summary
    if not arguments.tables:
        costs = labelled(results[results["metric"].isin(COSTS)]).pivot_table("value", "label", "metric")
        save_table(costs.round(2).map("{:.12g}".format), "Costs of the training", output_dir / "costs")
        losses = results[(results["metric"] == "eval_loss") & (results["task"] == "training")]
        if len(losses):
            table = held_out_losses(losses)
            note = "The loss of the held-out examples at the end of the training, or of its best checkpoint. Lower is better."
            save_table(
                table, "Held-out loss in nats per token, mean ± SD over seeds", output_dir / "held_out_loss", [note]
            )
        if "accuracy" in {*results["metric"]}:
            note = f"The 95% intervals are over seeds, or over problems if there is one seed. {OWN_FAMILY}"
            save_table(accuracy_table(results), ACCURACY_TITLE, output_dir / "accuracy", [note])
            draw_figure(overview_figure(results), output_dir / "overview")


if __name__ == "__main__":
    run_script(main)
