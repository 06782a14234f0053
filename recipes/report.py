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
#
# From recipe.yaml: recipe_learning_rate, recipe_lora_r, recipe_num_loops, recipe_model_name_or_path, recipe_rule, recipe_p,
# recipe_run_name ("SWEEP/METHOD/lr_X/seed_S" for a run of a sweep, which gives the columns `sweep` and `variant`).

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import stats

from loopdropout_trainer.diagnostics import answer_decomposition, compare_answers
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.files import recipe_names
from loopdropout_trainer.gates import Draw, make_rule
from loopdropout_trainer.recipe import load_recipe
from loopdropout_trainer.results import COLUMNS, UNCOMPARED, read_recipe, read_results, read_samples


NO_EFFECT = {
    *("seed", "data_seed", "gate_seed", "evaluate_base", "merge", "adapter", "at_depths", "gates"),
    *("benchmarks", "own_benchmarks", "depths", "single_loop_batches", "single_loop_accuracy"),
    *("eval_strategy", "eval_steps", "save_strategy", "save_steps"),
}
IGNORED = {
    "value",
    "seed",
    "folder",
    "run",
    "adapter",
    "samples",
    *(f"recipe_{name}" for name in UNCOMPARED | NO_EFFECT),
}
"""Columns in which the results of one mean may differ."""

OF_BASE = {f"recipe_{name}" for name in ("model_name_or_path", "model_revision", "chat_template", "benchmark_limit")}
"""Settings that a result of the base model depends on."""

ACCURACY_TITLE = "Accuracy in %, mean ± SD over seeds, and difference to LoRA in points"
COSTS = ["trainable_parameters", "train_seconds", "tokens_per_second", "peak_memory_gb"]


class Missing(UserError):
    """A number that the results do not contain."""


# Results


def load_results(*folders: str | Path) -> pd.DataFrame:
    """Return all results below the folders, with the columns that the comment at the top of this file lists.

    Further columns are `trained_loops` (depth of the training), `sweep` and `variant` (name of the method in the sweep).

    Raises:
        UserError: if there are no results.
    """
    rows = read_results(*folders)
    if not rows:
        raise UserError(f"There are no results below {', '.join(map(str, folders))}. Train or evaluate first.")
    for row in rows:
        training = Path(row.get("adapter") or row["folder"]).resolve()
        row["run"] = str(training)
        settings = {name for name in row if name.startswith("recipe_")}
        if row.get("adapter") and (recipe := read_recipe(training)):
            row |= dict.fromkeys(settings) | {f"recipe_{name}": value for name, value in recipe.items()}
        if row["method"] == "base model":
            row |= dict.fromkeys(settings - OF_BASE)
    results = pd.DataFrame(rows).map(lambda value: json.dumps(value) if isinstance(value, (list, dict)) else value)
    columns = [*COLUMNS, "loop", "group", "samples", "recipe_run_name", *results]
    results = results.reindex(columns=list(dict.fromkeys(columns)))
    names = results["recipe_run_name"].astype(str).str.extract("^(?P<sweep>[^/]+)/(?P<variant>[^/]+)/lr_")
    depths = results[results["task"] == "training"].groupby("run")["num_loops"].first()
    return results.assign(**names, trained_loops=results["run"].map(depths).fillna(results["num_loops"]))


def select(results: pd.DataFrame, wanted: dict) -> pd.DataFrame:
    """Return the results whose columns have the wanted values, or one of a list of values.

    Without `gates` and `loop` the gates are one. Without `num_loops` and `loop` the depth is the depth of the training.
    """
    for name, value in wanted.items():
        results = results[results.reindex(columns=[name])[name].isin(pd.Series(value))]
    if not wanted.keys() & {"gates", "loop"}:
        results = results[results["gates"].isin(["unit", "none"]) & results["loop"].isna()]
    if not wanted.keys() & {"num_loops", "loop"}:
        results = results[results["num_loops"] == results["trained_loops"]]
    return results


def differing(results: pd.DataFrame) -> list[str]:
    """Return the columns in which the results of one mean must not differ, but do."""
    results = results[results.columns.difference([*IGNORED])]
    return [*results.columns[results.nunique() + results.isna().any() > 1]]


def average(rows: pd.DataFrame) -> pd.Series:
    """Return the values by seed.

    Raises:
        UserError: if the results differ in more than the seed, or a seed has two results.
    """
    for name in differing(rows):
        values = ", ".join(map(str, rows[name].unique()))
        raise UserError(
            f"`{name}` differs ({values}) between the results in {[*rows['folder']]}. Do not average them."
        )
    values = rows.drop_duplicates(["seed", "value"]).set_index("seed")["value"].sort_index()
    if values.index.has_duplicates:
        raise UserError(f"One seed has two results, in {[*rows['folder']]}.")
    return values


def mean_sd(values: pd.Series, decimals: int = 2) -> str:
    """Return `mean ± SD` with the sample standard deviation, or the value of a single seed."""
    spread = f" ± {values.std():.{decimals}f}" if len(values) > 1 else ""
    return f"{values.mean():.{decimals}f}{spread}"


def difference(ours: pd.DataFrame, other: pd.DataFrame, decimals: int = 1, part: str | None = None) -> str:
    """Return the difference between two settings, paired by seed, with its 95% interval (Student's t).

    The interval of a single seed is over problems. `part`: part of the difference by `answer_decomposition`, such as
    `gain_both_answered`.
    """
    gains = (average(ours) - average(other)).dropna()
    samples = lambda seed: [
        read_samples(side.drop_duplicates("seed").set_index("seed").loc[seed]) for side in (ours, other)
    ]
    if part:
        parts = [pd.DataFrame(answer_decomposition(*samples(seed))).set_index("metric") for seed in gains.index]
        gains[:] = [values["value"][part] for values in parts]
    elif len(gains) == 1 and pd.concat([ours, other])["samples"].notna().all():
        return str(compare_answers(*samples(gains.index[0])))
    if len(gains) < 2:
        return "".join(f"{gain:+.{decimals}f}" for gain in gains) or "–"
    test = stats.ttest_1samp(gains, 0)
    mean, low, high = [f"{value:+.{decimals}f}" for value in (gains.mean(), *test.confidence_interval())]
    return f"{mean} [{low}, {high}]" + ", not significant" * (not test.pvalue < 0.05)  # NaN if all are equal


# Tables


def find(results: pd.DataFrame, wanted: dict) -> pd.DataFrame:
    """Return the selected results, by default accuracies. Raise `Missing` if a wanted seed or task has none."""
    rows = select(results, {"metric": "accuracy", **wanted})
    for name in ("seed", "task"):
        if rows.empty or not {*rows[name]}.issuperset(pd.Series(wanted.get(name, rows[name]))):
            raise Missing(f"no result with {wanted}")
    return rows


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
    **wanted: Any,
) -> str:
    """Return the text of a cell.

    Args:
        results: from `load_results`.
        show: `mean` (± SD over seeds), `seeds` (the value of each seed), or a column.
        minus: columns of the results to subtract, paired by seed.
        part: part of this difference by `answer_decomposition`, such as `gain_both_answered`.
        of: cost of the training to show, such as `train_seconds`.
        decimals: digits after the decimal point.
        scale: factor on the values.
        recipe: file whose setting `show` is the text.
        wanted: values of the columns that select the results.
    """
    if recipe:
        return str(load_recipe(recipe)[show])
    rows = find(results, wanted)
    if minus:
        return difference(rows, find(results, {**wanted, **minus}), decimals, part)
    if of:
        costs = find(results, {"task": "training", "metric": of})
        rows = costs[costs["run"].isin(rows["run"])]
    by_task = [average(own) for _, own in rows.groupby("task")]
    values = pd.concat(by_task, axis=1).dropna().mean(axis=1) * scale
    if show == "mean":
        return mean_sd(values, decimals)
    return " / ".join(f"{value:.{decimals}f}" for value in values) if show == "seeds" else f"{rows[show].iloc[0]:g}"


def build_table(spec: dict, results: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return a table with one line for each number, next to the paper's, and a list of the missing numbers.

    Args:
        spec: content of a YAML file (docs/reports.md).
        results: from `load_results`.
    """
    lines, missing = [], []
    for row in spec["rows"]:
        heads, wanted = {}, spec.get("filter", {})
        for (title, column), head in zip(spec["heads"].items(), row, strict=False):
            ((heads[title], selection),) = (head if isinstance(head, dict) else {str(head): {column: head}}).items()
            wanted = {**wanted, **selection}
        for (title, column), paper in zip_longest(spec["columns"].items(), row[len(heads) :]):
            number = "–"
            try:
                number = fill_cell(results, **{**wanted, **column})
            except Missing as reason:
                missing.append(f"Missing: {', '.join(heads.values())}, {title}: {reason}.")
            lines.append({**heads, "column": title, "here": number, "paper": paper})
    return pd.DataFrame(lines).dropna(axis=1, how="all").fillna("–").astype(str), missing


# Summary


def labelled(results: pd.DataFrame) -> pd.DataFrame:
    """Add `label`: the method, and the settings of its recipe in which its runs differ."""
    results = results.assign(label=results["method"])
    for _, rows in results.groupby("method"):
        for name in differing(rows.filter(like="recipe_")):
            results.loc[rows.index, "label"] += [f", {name[7:]} = {value}" for value in rows[name]]
    return results


def accuracy_table(results: pd.DataFrame) -> pd.DataFrame:
    """Return accuracies (%) by task, recurrence depth and method, mean ± SD over seeds, and differences to LoRA (points).

    A method is compared with the LoRA of the same settings, or with the only LoRA. The 95% intervals are over seeds. For a
    single seed they are over problems.
    """
    rows = labelled(select(results, {"metric": "accuracy", "num_loops": results["num_loops"]}))
    lines = []
    for (task, depth), part in rows.sort_values("num_loops", kind="stable").groupby(["task", "num_loops"], sort=False):
        by_label = dict(tuple(part.groupby("label", sort=False)))
        for label, ours in by_label.items():
            method = ours["method"].iloc[0]
            lora = by_label.get(label.replace(method, "LoRA", 1), by_label.get("LoRA"))
            line = {"task": task, "K": f"{depth:g}", "method": label, "accuracy": mean_sd(average(ours))}
            is_compared = lora is not None and method not in ("LoRA", "base model")
            lines.append({**line, "minus LoRA": difference(ours, lora) if is_compared else ""})
    return pd.DataFrame(lines)


# Figures (plots.py is imported in the functions, because sweeps do not need plotnine)


def points(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return `mean` and `sd` over seeds for each value of the columns `by`, with panels and labels in their order."""
    values = [(key, average(part)) for key, part in rows.groupby(by, sort=False)]
    data = pd.DataFrame([[*key, own.mean(), own.std()] for key, own in values], columns=[*by, "mean", "sd"])
    for name in {"panel", "label"} & {*by}:
        data[name] = pd.Categorical(data[name], data[name].unique())
    return data.fillna({"sd": 0.0})


def draw_gates(num_loops: int, p: float, seed: int) -> pd.DataFrame:
    """Return the gates of eight examples, as a training draws them, and the gates of inference."""
    draw = Draw(seed=seed, step=0, example_ids=[(row, 0) for row in range(8)], num_loops=num_loops)
    gates = pd.DataFrame(make_rule("loop_dropout", p=p).sample(draw).tolist())  # [K, 8]
    data = gates.melt(var_name="example", value_name="mean", ignore_index=False).reset_index(names="loop") + [1, 1, 0]
    return pd.concat([data.assign(panel="during training"), data.assign(panel="inference", mean=1.0)])


def build_figure(spec: dict, results: pd.DataFrame) -> Any:
    """Return the figure of a YAML file. Raise `Missing` if there are no results for one of its panels."""
    from loopdropout_trainer.plots import heat_plot, line_plot

    labels = {name: spec[name] for name in ("title", "x_label", "y_label")}
    if spec["figure"] == "gates":
        return heat_plot(draw_gates(**spec["filter"]), "loop", "example", **labels)
    x = spec["x"]

    def points_by(*by: str, **change: Any) -> pd.DataFrame:
        wanted = {x: results.reindex(columns=[x])[x].dropna(), **spec["filter"], **change}
        panels = [find(results, {**panel, **wanted}).assign(panel=title) for title, panel in spec["panels"].items()]
        return points(pd.concat(panels).assign(label=lambda rows: rows["method"]), ["panel", *by, x])

    if spec["figure"] == "heat":
        ours, other = points_by(spec["y"]), points_by(spec["y"], **spec["minus"])
        both = ours.merge(other, on=["panel", spec["y"], x], suffixes=("_ours", ""))
        return heat_plot(both.assign(mean=both["mean_ours"] - both["mean"]), x, spec["y"], **labels)
    return line_plot(points_by("label"), x, **labels)


def overview_figure(results: pd.DataFrame) -> Any:
    """Return a plotnine figure of the first task: accuracy by depth, and both diagnostics with one active loop.

    Args:
        results: from `load_results`.
    """
    from loopdropout_trainer.plots import line_plot

    accuracy = results.query("metric == 'accuracy'")
    task = accuracy["task"].iloc[0]
    accuracy = accuracy.query("task == @task")
    panels = {
        "accuracy with K loops": accuracy[accuracy["loop"].isna()].assign(loop=accuracy["num_loops"]),
        "loss reduction, only loop t": results.query("metric == 'loss_reduction'"),
        "accuracy, only loop t": accuracy,
    }
    rows = pd.concat([rows.assign(panel=panel) for panel, rows in panels.items()]).dropna(subset="loop")
    by = ["panel", "label", "loop"]
    data = points(labelled(rows).drop_duplicates([*by, "seed"], keep="last"), by)  # diagnose.py measures again
    return line_plot(data, "loop", "number of loops K, or the only loop t with the adapter", "%", f"Results on {task}")


def save_figure(plot: Any, path: str | Path) -> None:
    """Save a plotnine figure as PNG, PDF and SVG. `path` has no ending."""
    for ending in ("png", "pdf", "svg"):
        plot.save(f"{path}.{ending}", dpi=200, verbose=False)


# The command


def print_table(table: pd.DataFrame, title: str) -> None:
    """Print a table of texts in 80 columns."""
    grid = Table(*table, title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for row in table.itertuples(index=False):
        grid.add_row(*row)
    Console(width=80, markup=False, highlight=False).print(grid)


def save_table(table: pd.DataFrame, title: str, path: Path, notes: Sequence[str] = ()) -> None:
    """Print a table, and save it as Markdown, LaTeX and CSV. `path` has no ending."""
    print_table(table, title)
    print(*notes, sep="\n")
    markdown = "\n\n".join([f"### {title}", table.to_markdown(index=False, disable_numparse=True), *notes, ""])
    path.with_suffix(".md").write_text(markdown, encoding="utf-8")
    table.to_latex(path.with_suffix(".tex"), index=False, escape=True, caption=title, label=f"tab:{path.name}")
    table.to_csv(path.with_suffix(".csv"), index=False)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="Folders of runs. All folders below them are read.")
    parser.add_argument("--tables", nargs="+", default=[], help="Names in recipes/tables, YAML files, or `all`.")
    parser.add_argument("--output_dir", default="report", type=Path, help="Folder of the report (default: report).")
    arguments = parser.parse_args(argv)
    results, output_dir = load_results(*arguments.folders), arguments.output_dir
    output_dir.mkdir(parents=True, exist_ok=True)

    # Tables and figures of YAML files
    names = arguments.tables
    if names == ["all"]:
        names = [name for name in recipe_names() if name.startswith("tables/")]
    for name in names:
        spec = load_recipe(name if name.endswith(".yaml") else f"tables/{name}.yaml")
        path = output_dir / Path(name).stem
        try:
            if "figure" in spec:
                save_figure(build_figure(spec, results), path)
            else:
                table, missing = build_table(spec, results)
                save_table(table, spec["title"], path, [*missing, *(spec["made_by"] if missing else [])])
        except Missing as reason:
            print(f"Missing: {spec['title']}: {reason}.", *spec["made_by"], sep="\n")

    # Summary
    if not arguments.tables:
        costs = labelled(results[results["metric"].isin(COSTS)]).pivot_table("value", "label", "metric")
        save_table(costs.round(2).map("{:.12g}".format).reset_index(), "Costs of the training", output_dir / "costs")
        if "accuracy" in {*results["metric"]}:
            note = "The 95% intervals are over seeds, or over problems if there is one seed."
            save_table(accuracy_table(results), ACCURACY_TITLE, output_dir / "accuracy", [note])
            save_figure(overview_figure(results), output_dir / "overview")


if __name__ == "__main__":
    run_script(main)
