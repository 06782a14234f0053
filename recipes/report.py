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
#   training                           train_seconds, step_seconds, tokens_per_second, peak_memory_gb, trainable_parameters,
#                                      examples, num_tokens, eval_loss (nats, on held-out examples)
#   of the diagnostics (task: "development" for held-out examples, or the name of a task):
#     single loop                      loss (nats) and loss_reduction (%) with gates "loop t" and loop t, or with gates
#                                      "unit"; frozen loss: metric loss, gates "none", method "base model"
#     readouts                         readout_loss (nats), loop t
#
# From recipe.yaml: recipe_learning_rate, recipe_lora_r, recipe_num_loops, recipe_model_name_or_path, recipe_rule, recipe_p,
# recipe_run_name ("SWEEP/METHOD/lr_X/seed_S" for a run of a sweep, which gives the columns `sweep` and `variant`).
#
# recipes/sweep.py starts `sft.py RUN.yaml --output_dir FOLDER` with `resume_from_checkpoint: true`. In a finished folder the
# script trains nothing, evaluates with the new settings, and adds results (the results of the training stay). A loss that is
# not finite ends it with run.json of status "non-finite".

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterable, Mapping
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import stats

from loopdropout_trainer.diagnostics import answer_decomposition, compare_answers
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.gates import Draw, make_rule
from loopdropout_trainer.recipe import load_recipe
from loopdropout_trainer.results import COLUMNS, RECIPE_FILE, UNCOMPARED, compare_recipes, read_results, read_samples


TABLES = Path(__file__).parent / "tables"

NO_EFFECT = UNCOMPARED | {
    *("seed", "data_seed", "gate_seed", "evaluate_base", "merge", "adapter", "at_depths", "gates"),
    *("benchmarks", "depths", "single_loop_batches", "single_loop_accuracy"),
}
IGNORED = {"value", "seed", "folder", "run", "adapter", "samples", *(f"recipe_{name}" for name in NO_EFFECT)}
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
        if row.get("adapter") and (training / RECIPE_FILE).exists():
            recipe = load_recipe(training / RECIPE_FILE)
            row |= dict.fromkeys(settings) | {f"recipe_{name}": value for name, value in recipe.items()}
        if row["method"] == "base model":
            row |= dict.fromkeys(settings - OF_BASE)
    results = pd.DataFrame(rows).map(lambda value: json.dumps(value) if isinstance(value, (list, dict)) else value)
    columns = [*COLUMNS, "loop", "group", "samples", "recipe_run_name", *results]
    results = results.reindex(columns=list(dict.fromkeys(columns)))
    names = results["recipe_run_name"].astype(str).str.extract("^(?P<sweep>[^/]+)/(?P<variant>[^/]+)/lr_")
    depths = results[results["task"] == "training"].groupby("run")["num_loops"].first()
    return results.assign(**names, trained_loops=results["run"].map(depths).fillna(results["num_loops"]))


def select(results: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """Return the results whose columns have the wanted values, or one of a list of values.

    Without `gates` and `loop` the gates are one. Without `num_loops` and `loop` the depth is the depth of the training.
    """
    for name, value in wanted.items():
        column = results.reindex(columns=[name])[name]
        results = results[column.isin(value if isinstance(value, list) else [value])]
    if not wanted.keys() & {"gates", "loop"}:
        results = results[results["gates"].isin(["unit", "none"]) & results["loop"].isna()]
    if not wanted.keys() & {"num_loops", "loop"}:
        results = results[results["num_loops"] == results["trained_loops"]]
    return results


def average(rows: pd.DataFrame, place: str) -> pd.Series:
    """Return the values by seed.

    Raises:
        UserError: if the results differ in more than the seed, with `place` and the first difference.
    """
    first, *others = rows.astype(object).where(rows.notna(), None).to_dict("records")
    for other in others:
        if difference := compare_recipes(first, other, IGNORED):
            raise UserError(
                f"{place}: {difference} between {first['folder']} and {other['folder']}. Do not average them."
            )
    values = rows.drop_duplicates(["seed", "value"]).set_index("seed")["value"].sort_index()
    if values.index.has_duplicates:
        raise UserError(f"{place}: one seed has two results, in {[*rows['folder']]}.")
    return values


def mean_sd(values: pd.Series, decimals: int = 2) -> str:
    """Return `mean ± SD` with the sample standard deviation, or the value of a single seed."""
    spread = f" ± {values.std():.{decimals}f}" if len(values) > 1 else ""
    return f"{values.mean():.{decimals}f}{spread}"


def answers(ours: pd.DataFrame, other: pd.DataFrame, seed: int) -> list[list[dict[str, Any]]]:
    """Return the samples of two settings for a seed."""
    return [read_samples(side.drop_duplicates("seed").set_index("seed").loc[seed]) for side in (ours, other)]


def differences(ours: pd.DataFrame, other: pd.DataFrame, place: str, part: str | None = None) -> pd.Series:
    """Return ours - other by seed, of the seeds that both settings have.

    `part`: part of the difference by `answer_decomposition`, such as `gain_both_answered`.
    """
    gains = (average(ours, place) - average(other, place)).dropna()
    for seed in gains.index if part else ():
        parts = answer_decomposition(*answers(ours, other, seed))
        gains[seed] = next(row["value"] for row in parts if row["metric"] == part)
    return gains


def with_interval(gains: pd.Series, decimals: int = 2) -> str:
    """Return the mean over seeds with its 95% interval (Student's t), or the gain of a single seed."""
    if not len(gains):
        return "–"
    interval = stats.ttest_1samp(gains, 0).confidence_interval() if len(gains) > 1 else ()
    mean, *limits = [f"{value:+.{decimals}f}" for value in (gains.mean(), *interval)]
    return f"{mean} [{', '.join(limits)}]" if limits else mean


# Tables

OPTIONS = {"of", "show", "minus", "part", "average_of", "decimals", "scale"}


def find(results: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """Return the selected results, by default accuracies. Raise `Missing` if there are none, or not of all wanted seeds."""
    rows = select(results, {"metric": "accuracy", **wanted})
    seeds = wanted.get("seed")
    lacking = {*seeds} - {*rows["seed"]} if isinstance(seeds, list) else not len(rows)
    if lacking:
        raise Missing(f"no result with {wanted}")
    return rows


def fill_cell(results: pd.DataFrame, cell: Mapping[str, Any], place: str) -> str:
    """Return the text of a cell.

    Args:
        results: from `load_results`.
        cell: options of `OPTIONS`, and for other columns the values that select the results.
        place: start of error messages.
    """
    show, decimals = cell.get("show", "mean"), cell.get("decimals", 2)
    if "recipe" in cell:
        return str(load_recipe(cell["recipe"])[show])
    wanted = {name: value for name, value in cell.items() if name not in OPTIONS}
    if "average_of" in cell:
        by_task = {task: average(find(results, {**wanted, "task": task}), place) for task in cell["average_of"]}
        return mean_sd(pd.DataFrame(by_task).dropna().mean(axis=1), decimals)
    rows = find(results, wanted)
    if "of" in cell:
        costs = find(results, {"task": "training", "metric": cell["of"]})
        rows = costs[costs["run"].isin(rows["run"])]
    if "minus" in cell:
        other = find(results, {**wanted, **cell["minus"]})
        return with_interval(differences(rows, other, place, cell.get("part")), decimals)
    values = average(rows, place) * cell.get("scale", 1)
    if show == "mean":
        return mean_sd(values, decimals)
    return " / ".join(f"{value:.{decimals}f}" for value in values) if show == "seeds" else f"{rows[show].iloc[0]:g}"


def build_table(spec: Mapping[str, Any], results: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
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
        names = ", ".join(heads.values())
        for (title, column), paper in zip_longest(spec["columns"].items(), row[len(heads) :]):
            try:
                number = fill_cell(results, {**wanted, **column}, f"{spec['label']}, {names}, {title}")
            except Missing as reason:
                number = "–"
                missing.append(f"Missing: {names}, {title}: {reason}.")
            lines.append({**heads, "column": title, "here": number, "paper": paper})
    return pd.DataFrame(lines).dropna(axis=1, how="all").fillna("–").astype(str), missing


# Summary


def labelled(results: pd.DataFrame) -> pd.DataFrame:
    """Add `label`: the method, and the settings of its recipe in which its runs differ."""
    results = results.assign(label=results["method"])
    for _, rows in results.groupby("method"):
        for name in rows.filter(like="recipe_").columns.difference([*IGNORED]):
            if rows[name].nunique(dropna=False) > 1:
                results.loc[rows.index, "label"] += [f", {name[7:]} = {value}" for value in rows[name]]
    return results


def accuracy_table(results: pd.DataFrame) -> pd.DataFrame:
    """Return accuracies (%) by task, recurrence depth and method, mean ± SD over seeds, and differences to LoRA (points).

    A method is compared with the LoRA of the same settings, or with the only LoRA. The 95% intervals are over seeds. For a
    single seed they are over problems.
    """
    rows = labelled(select(results, {"metric": "accuracy", "num_loops": [*results["num_loops"].unique()]}))
    lines = []
    for (task, depth), part in rows.sort_values("num_loops", kind="stable").groupby(["task", "num_loops"], sort=False):
        by_label = dict(tuple(part.groupby("label", sort=False)))
        for label, ours in by_label.items():
            method = ours["method"].iloc[0]
            lora = by_label.get(label.replace(method, "LoRA", 1), by_label.get("LoRA"))
            line = {"task": task, "K": f"{depth:g}", "method": label, "accuracy": mean_sd(average(ours, label))}
            is_compared = lora is not None and method not in ("LoRA", "base model")
            lines.append({**line, "minus LoRA": show_difference(ours, lora, label) if is_compared else ""})
    return pd.DataFrame(lines)


def show_difference(ours: pd.DataFrame, other: pd.DataFrame, place: str) -> str:
    """Return a difference with its 95% interval over seeds, or over problems for a single seed."""
    gains = differences(ours, other, place)
    if len(gains) == 1 and ours["samples"].notna().all() and other["samples"].notna().all():
        return str(compare_answers(*answers(ours, other, gains.index[0])))
    is_open = len(gains) > 1 and stats.ttest_1samp(gains, 0).pvalue >= 0.05
    return with_interval(gains, 1) + ", not significant" * is_open


def cost_table(results: pd.DataFrame) -> pd.DataFrame:
    """Return the costs of the trainings, means over seeds, by method."""
    rows = labelled(results[results["metric"].isin(COSTS)])
    return rows.pivot_table("value", "label", "metric").round(2).reset_index().astype(str)


# Figures (plotnine is imported in the functions, because sweeps do not need it)

COLORS = {
    "base model": "#7a7a7a",
    "LoRA": "#E69F00",
    "Loop Dropout": "#0072B2",
    "LoRA+": "#009E73",
    "CoTo": "#CC79A7",
    "LoRA Dropout": "#D55E00",
    "rsLoRA": "#56B4E9",
}
"""Colors of Okabe and Ito, which color-blind readers can tell apart."""
OTHER_COLORS = ["#000000", "#8c6d1f", "#7b3294", "#b2182b", "#66a61e", "#1b7837", "#4d4dff", "#c51b7d"]


def color_of(method: str) -> str:
    """Return the color of a method, the same one in every figure."""
    return COLORS.get(method) or OTHER_COLORS[zlib.crc32(method.encode()) % len(OTHER_COLORS)]


def points(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return `mean` and `sd` over seeds for each value of the columns `by`, with panels and labels in their order."""
    values = {key: average(part, str(key)) for key, part in rows.groupby(by, sort=False)}
    data = pd.DataFrame([[*key, own.mean(), own.std()] for key, own in values.items()], columns=[*by, "mean", "sd"])
    for name in {"panel", "label"} & {*by}:
        data[name] = pd.Categorical(data[name], data[name].unique())
    return data.fillna({"sd": 0.0})


def decorate(plot: Any, title: str, x_label: str, y_label: str, num_panels: int = 1) -> Any:
    """Add the title, the axis labels and the theme that all figures share."""
    import plotnine as p9

    return (
        plot
        + p9.labs(title=title, x=x_label, y=y_label)
        + p9.theme_minimal(base_size=10)
        + p9.theme(
            figure_size=(max(5.0, 3.4 * num_panels), 3.8),
            plot_title=p9.element_text(size=12),
            plot_background=p9.element_rect(fill="white", color="white"),
            legend_position="bottom",
            legend_title=p9.element_blank(),
            legend_key_width=24,
            panel_grid_minor=p9.element_blank(),
            panel_spacing=0.03,
        )
    )


def line_plot(data: pd.DataFrame, x: str, x_label: str, y_label: str, title: str) -> Any:
    """Return lines of the mean by `label`, with a band of one SD, and one panel for each value of `panel`.

    Args:
        data: columns `panel`, `label`, which begins with the method, `mean`, `sd` and the column named `x`.
    """
    import plotnine as p9

    labels = data["label"].unique()
    colors = [color_of(label.split(", ")[0]) for label in labels]
    ticks = sorted(data[x].unique())
    scale = p9.scale_x_log10 if ticks[-1] >= 16 * ticks[0] > 0 else p9.scale_x_continuous
    legend = lambda: p9.guide_legend(ncol=max(1, 90 // (12 + max(map(len, labels)))))
    plot = (
        p9.ggplot(data, p9.aes(x, "mean", color="label", fill="label", shape="label"))
        + p9.geom_ribbon(p9.aes(ymin="mean - sd", ymax="mean + sd"), alpha=0.2, color="none")
        + p9.geom_line(size=1.1)
        + p9.geom_point(size=2)
        + p9.facet_wrap("panel", scales="free")
        + p9.scale_color_manual(colors)
        + p9.scale_fill_manual(colors)
        + p9.scale_shape_manual([shape for shape, _ in zip(cycle("os^Dv<>P"), labels, strict=False)])
        + p9.guides(color=legend(), fill=legend(), shape=legend())
        + scale(breaks=ticks, labels=[f"{tick:g}" for tick in ticks])
    )
    return decorate(plot, title, x_label, y_label, data["panel"].nunique())


def heat_plot(data: pd.DataFrame, x: str, y: str, x_label: str, y_label: str, title: str) -> Any:
    """Return a matrix of the means with their numbers, the first row on top."""
    import plotnine as p9

    data = data.assign(**{name: data[name].astype(int).astype(str) for name in (x, y)})
    order = lambda name: sorted(data[name].unique(), key=int)
    plot = (
        p9.ggplot(data, p9.aes(x, y))
        + p9.geom_tile(p9.aes(fill="mean"), color="white")
        + p9.geom_text(p9.aes(label="mean"), format_string="{:.1f}", size=9)
        + p9.scale_fill_gradient2(COLORS["LoRA"], "#f7f7f7", COLORS["Loop Dropout"], guide=None)
        + p9.scale_x_discrete(limits=order(x))
        + p9.scale_y_discrete(limits=order(y)[::-1])
        + p9.facet_wrap("panel")
    )
    return decorate(plot, title, x_label, y_label, data["panel"].nunique())


def gates_plot(num_loops: int, p: float, seed: int, **labels: str) -> Any:
    """Return the gates of eight examples, as a training draws them, and the gates of inference."""
    draw = Draw(seed=seed, step=0, example_ids=[(row, 0) for row in range(8)], num_loops=num_loops)
    gates = pd.DataFrame(make_rule("loop_dropout", p=p).sample(draw).tolist())  # [K, 8]
    training = gates.stack().rename_axis(["loop", "example"]).reset_index(name="mean").assign(panel="training")
    training[["loop", "example"]] += 1
    both = pd.concat([training, training.assign(panel="inference", mean=1.0)])
    return heat_plot(
        both.assign(panel=pd.Categorical(both["panel"], ["training", "inference"])), "loop", "example", **labels
    )


def build_figure(spec: Mapping[str, Any], results: pd.DataFrame) -> Any:
    """Return the figure of a YAML file. Raise `Missing` if there are no results for one of its panels."""
    labels = {name: spec[name] for name in ("title", "x_label", "y_label")}
    if spec["figure"] == "gates":
        return gates_plot(**spec["filter"], **labels)
    x = spec["x"]

    def rows_of(change: Mapping[str, Any]) -> pd.DataFrame:
        wanted = {x: [*results[x].dropna().unique()], **spec["filter"], **change}
        panels = [find(results, {**panel, **wanted}).assign(panel=title) for title, panel in spec["panels"].items()]
        return pd.concat(panels).assign(label=lambda rows: rows["method"])

    if spec["figure"] == "heat":
        by = ["panel", x, spec["y"]]
        both = points(rows_of({}), by).merge(
            points(rows_of(spec["minus"]), by), on=by, suffixes=("_of_ours", "_of_other")
        )
        return heat_plot(both.assign(mean=both["mean_of_ours"] - both["mean_of_other"]), x, spec["y"], **labels)
    return line_plot(points(rows_of({}), ["panel", "label", x]), x, **labels)


def overview_figure(results: pd.DataFrame) -> Any:
    """Return a plotnine figure of the first task: accuracy by depth, and both diagnostics with one active loop.

    Args:
        results: from `load_results`.
    """
    accuracy = results[results["metric"] == "accuracy"]
    task = accuracy["task"].iloc[0]
    accuracy = accuracy[accuracy["task"] == task]
    panels = {
        "accuracy with K loops": accuracy[accuracy["loop"].isna()].assign(loop=accuracy["num_loops"]),
        "loss reduction, only loop t": results[results["metric"] == "loss_reduction"],
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


def save_table(table: pd.DataFrame, title: str, path: Path, notes: Iterable[str] = ()) -> None:
    """Print a table, and save it as Markdown, LaTeX and CSV. `path` has no ending."""
    print_table(table, title)
    print(*notes, sep="\n")
    texts = {
        "md": "\n\n".join([f"### {title}", table.to_markdown(index=False, disable_numparse=True), *notes, ""]),
        "tex": table.to_latex(index=False, escape=True, caption=title, label=f"tab:{path.name}"),
        "csv": table.to_csv(index=False),
    }
    for ending, text in texts.items():
        Path(f"{path}.{ending}").write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="Folders of runs. All folders below them are read.")
    parser.add_argument("--tables", nargs="+", default=[], help="Names in recipes/tables, YAML files, or `all`.")
    parser.add_argument("--output_dir", default="report", help="Folder of the report (default: report).")
    arguments = parser.parse_args(argv)
    results, output_dir = load_results(*arguments.folders), Path(arguments.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)

    # Tables and figures of YAML files
    known = {path.stem: path for path in sorted(TABLES.glob("*.yaml"))}
    for name in known if arguments.tables == ["all"] else arguments.tables:
        spec = load_recipe(known.get(name, name))
        path = output_dir / Path(name).stem
        if "figure" not in spec:
            table, missing = build_table(spec, results)
            save_table(table, spec["title"], path, [*missing, *(spec["made_by"] if missing else [])])
            continue
        try:
            save_figure(build_figure(spec, results), path)
        except Missing as reason:
            print(f"Missing: {spec['title']}: {reason}.", *spec["made_by"], sep="\n")

    # Summary
    if not arguments.tables:
        save_table(cost_table(results), "Costs of the training", output_dir / "costs")
        if (results["metric"] == "accuracy").any():
            note = "The 95% intervals are over seeds, or over problems if there is one seed."
            save_table(accuracy_table(results), ACCURACY_TITLE, output_dir / "accuracy", [note])
            save_figure(overview_figure(results), output_dir / "overview")


if __name__ == "__main__":
    run_script(main)
