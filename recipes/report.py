"""Make tables and figures from finished runs.

    python recipes/report.py outputs/quickstart
    python recipes/report.py outputs/sweeps --tables math_main figure_teaser --output_dir report
    python recipes/report.py outputs --tables all

Without `--tables` it summarizes all runs below the folders: accuracy by depth, differences to LoRA with 95% intervals, costs,
and one figure. A table or figure of the paper is a YAML file in recipes/tables/, which has the paper's numbers too. Tables are
written as Markdown, LaTeX and CSV, figures as PNG, PDF and SVG. Missing runs are listed.
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
from collections.abc import Iterable, Mapping
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from loopdropout_trainer.diagnostics import answer_decomposition
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.gates import Draw, make_rule
from loopdropout_trainer.recipe import load_recipe
from loopdropout_trainer.results import COLUMNS, RECIPE_FILE, UNCOMPARED, compare_recipes, read_results


TABLES = Path(__file__).parent / "tables"

NO_EFFECT = UNCOMPARED | {
    *("seed", "data_seed", "gate_seed", "evaluate_base", "merge", "adapter", "at_depths", "gates"),
    *("benchmarks", "depths", "single_loop_batches", "single_loop_accuracy"),
}
IGNORED = {"value", "seed", "folder", "run", "adapter", "samples", *(f"recipe_{name}" for name in NO_EFFECT)}
"""Columns in which the results of one mean may differ."""

OF_BASE = {f"recipe_{name}" for name in ("model_name_or_path", "model_revision", "chat_template", "benchmark_limit")}
"""Settings that a result of the base model depends on."""

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
        if row.get("adapter") and (training / RECIPE_FILE).exists():
            row |= {f"recipe_{name}": value for name, value in load_recipe(training / RECIPE_FILE).items()}
        for name in row.keys() - OF_BASE if row["method"] == "base model" else ():
            row[name] = row[name] if name[:7] != "recipe_" else None
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


def differences(ours: pd.DataFrame, other: pd.DataFrame, place: str, part: str | None = None) -> pd.Series:
    """Return ours - other by seed, of the seeds that both settings have.

    `part`: part of the difference by `answer_decomposition`, such as `gain_both_answered`.
    """
    gains = (average(ours, place) - average(other, place)).dropna()
    for seed in gains.index if part else ():
        rows = [side.set_index("seed").loc[seed] for side in (ours, other)]
        samples = [pd.read_json(Path(row["folder"], row["samples"]), lines=True).to_dict("records") for row in rows]
        gains[seed] = next(row["value"] for row in answer_decomposition(*samples) if row["metric"] == part)
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
    """Return a table of texts, with the paper's numbers in columns of their own, and a list of the missing numbers.

    Args:
        spec: content of a YAML file (docs/reports.md).
        results: from `load_results`.
    """
    lines, missing = [], []
    for row in spec["rows"]:
        line, wanted = {}, spec.get("filter", {})
        for (title, column), head in zip(spec["heads"].items(), row, strict=False):
            ((line[title], selection),) = (head if isinstance(head, dict) else {str(head): {column: head}}).items()
            wanted = {**wanted, **selection}
        names = ", ".join(line.values())
        for (title, column), paper in zip_longest(spec["columns"].items(), row[len(line) :]):
            try:
                line[title] = fill_cell(results, {**wanted, **column}, f"{spec['label']}, {names}, {title}")
            except Missing as reason:
                line[title] = "–"
                missing.append(f"Missing: {names}, {title}: {reason}.")
            line[f"{title} (paper)"] = paper
        lines.append(line)
    return pd.DataFrame(lines).dropna(axis=1, how="all").fillna("–"), missing


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
    """Return accuracies (%) by task, method and recurrence depth, mean ± SD over seeds, and differences to LoRA.

    A method is compared with the LoRA of the same settings, or with the only LoRA.
    """
    rows = labelled(select(results, {"metric": "accuracy", "num_loops": [*results["num_loops"].unique()]}))
    texts = {}
    for (task, depth), part in rows.sort_values("num_loops").groupby(["task", "num_loops"], sort=False):
        by_label = dict(tuple(part.groupby("label", sort=False)))
        for label, ours in by_label.items():
            method = ours["method"].iloc[0]
            texts[task, label, f"K = {depth:g}"] = mean_sd(average(ours, label))
            lora = by_label.get(label.replace(method, "LoRA", 1), by_label.get("LoRA"))
            if lora is not None and method not in ("LoRA", "base model"):
                texts[task, f"{label} - LoRA", f"K = {depth:g}"] = with_interval(differences(ours, lora, label))
    return pd.Series(texts, dtype=object).unstack(sort=False).fillna("").rename_axis(["task", "method"]).reset_index()


def cost_table(results: pd.DataFrame) -> pd.DataFrame:
    """Return the costs of the trainings, means over seeds, by method."""
    rows = labelled(results[results["metric"].isin(COSTS)])
    return rows.pivot_table("value", "label", "metric").round(2).reset_index()


# Figures (plotnine is imported in the functions, because sweeps do not need it)

COLORS = {"base model": "#7a7a7a", "LoRA": "#E69F00", "Loop Dropout": "#0072B2"}
OTHER_COLORS = ["#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#8c6d1f"]
"""Colors of Okabe and Ito, which color-blind readers can tell apart."""


def points(rows: pd.DataFrame, by: list[str], minus: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return `mean` and `sd` over seeds of the rows, less those of `minus`, for each value of the columns `by`."""
    data = []
    for key, part in rows.groupby(by, sort=False):
        place = str(key)
        if minus is None:
            values = average(part, place)
        else:
            values = differences(part, minus[(minus[by] == list(key)).all(axis=1)], place)
        data.append([*key, values.mean(), values.std()])
    return pd.DataFrame(data, columns=[*by, "mean", "sd"]).fillna({"sd": 0.0})


def line_plot(data: pd.DataFrame, x: str, y_label: str, title: str = "") -> Any:
    """Return lines of the mean by `label`, with a band of one SD, and one panel for each value of `panel`.

    Args:
        data: columns `panel`, `label`, `mean`, `sd` and the column named `x`.
    """
    import plotnine as p9

    colors = COLORS | dict(zip(sorted({*data["label"]} - {*COLORS}), cycle(OTHER_COLORS), strict=False))
    ticks = sorted(data[x].unique())
    scale = p9.scale_x_log10 if ticks[-1] >= 16 * ticks[0] > 0 else p9.scale_x_continuous
    return (
        p9.ggplot(data, p9.aes(x, "mean", color="label", fill="label", shape="label"))
        + p9.geom_ribbon(p9.aes(ymin="mean - sd", ymax="mean + sd"), alpha=0.2, color="none")
        + p9.geom_line(size=1.1)
        + p9.geom_point()
        + p9.facet_wrap("panel", scales="free")
        + p9.scale_color_manual(colors)
        + p9.scale_fill_manual(colors)
        + scale(breaks=ticks)
        + p9.labs(y=y_label, title=title)
        + p9.theme_minimal()
        + p9.theme(legend_position="top", legend_title=p9.element_blank())
    )


def heat_plot(data: pd.DataFrame, x: str, y: str, title: str) -> Any:
    """Return a matrix of the means with their numbers, the first row on top."""
    import plotnine as p9

    data = data.assign(**{name: data[name].astype(int).astype(str) for name in (x, y)})
    return (
        p9.ggplot(data, p9.aes(x, y))
        + p9.geom_tile(p9.aes(fill="mean"))
        + p9.geom_text(p9.aes(label="mean"), format_string="{:.1f}")
        + p9.scale_fill_gradient2("#E69F00", "#f7f7f7", "#0072B2")
        + p9.scale_y_discrete(limits=sorted(data[y].unique(), reverse=True))
        + p9.facet_wrap("panel")
        + p9.labs(fill="", title=title)
        + p9.theme_minimal()
    )


def gates_plot(num_loops: int, p: float, seed: int, title: str) -> Any:
    """Return the gates of eight examples, as a training draws them, and the gates of inference."""
    draw = Draw(seed=seed, step=0, example_ids=[(row, 0) for row in range(8)], num_loops=num_loops)
    gates = pd.DataFrame(make_rule("loop_dropout", p=p).sample(draw).tolist())  # [K, 8]
    training = gates.stack().rename_axis(["loop", "example"]).reset_index(name="mean").assign(panel="training")
    training[["loop", "example"]] += 1
    return heat_plot(pd.concat([training, training.assign(panel="inference", mean=1.0)]), "loop", "example", title)


def build_figure(spec: Mapping[str, Any], results: pd.DataFrame) -> Any:
    """Return the figure of a YAML file. Raise `Missing` if there are no results for one of its panels."""
    if spec["figure"] == "gates":
        return gates_plot(**spec["filter"], title=spec["title"])
    titles = {spec["x"]: spec["x_label"], spec.get("y"): spec["y_label"]}
    x_label, y_label = titles.values()

    def rows_of(change: Mapping[str, Any]) -> pd.DataFrame:
        wanted = {spec["x"]: [*results[spec["x"]].dropna().unique()], **spec["filter"], **change}
        panels = [find(results, {**panel, **wanted}).assign(panel=title) for title, panel in spec["panels"].items()]
        return pd.concat(panels).assign(label=lambda rows: rows["method"]).rename(columns=titles)

    if spec["figure"] == "heat":
        gains = points(rows_of({}), ["panel", x_label, y_label], rows_of(spec["minus"]))
        return heat_plot(gains, x_label, y_label, spec["title"])
    return line_plot(points(rows_of({}), ["panel", "label", x_label]), x_label, y_label, spec["title"])


def overview_figure(results: pd.DataFrame) -> Any:
    """Return a plotnine figure of the first task: accuracy by depth, and both diagnostics with one active loop.

    Args:
        results: from `load_results`.
    """
    accuracy = results[results["metric"] == "accuracy"]
    accuracy = accuracy[accuracy["task"] == accuracy["task"].iloc[0]]
    panels = {
        "accuracy (%), K loops": accuracy[accuracy["loop"].isna()].assign(loop=accuracy["num_loops"]),
        "loss reduction (%), only loop t": results[results["metric"] == "loss_reduction"],
        "accuracy (%), only loop t": accuracy,
    }
    rows = pd.concat([rows.assign(panel=panel) for panel, rows in panels.items()]).dropna(subset="loop")
    return line_plot(points(labelled(rows), ["panel", "label", "loop"]), "loop", "")


def save_figure(plot: Any, path: str | Path) -> None:
    """Save a plotnine figure as PNG, PDF and SVG. `path` has no ending."""
    for ending in ("png", "pdf", "svg"):
        plot.save(f"{path}.{ending}", width=9.6, height=3.5, dpi=200, verbose=False)


# The command


def save_table(table: pd.DataFrame, title: str, path: Path, notes: Iterable[str] = ()) -> None:
    """Print a table, and save it as Markdown, LaTeX and CSV. `path` has no ending."""
    style = table.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    texts = {
        "md": "\n\n".join([f"### {title}", table.to_markdown(index=False, disable_numparse=True), *notes, ""]),
        "tex": style.to_latex(hrules=True, caption=title, label=f"tab:{path.name}"),
        "csv": table.to_csv(index=False),
    }
    print(texts["md"])
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
            title = "Accuracy (%), and difference to LoRA (points) with its 95% interval over seeds"
            save_table(accuracy_table(results), title, output_dir / "accuracy")
            save_figure(overview_figure(results), output_dir / "overview")


if __name__ == "__main__":
    run_script(main)
