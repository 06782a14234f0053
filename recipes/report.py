"""Make tables and figures from finished runs.

    loopdropout report outputs/quickstart
    loopdropout report outputs/quickstart outputs/quickstart/lora
    loopdropout report outputs/sweeps --tables math_main figure_teaser
    loopdropout report outputs --tables all

Without `--tables` it summarizes all runs below the folders: tables of costs,
held-out losses, accuracies by depth, loss reductions, and losses by depth and by
readout, with differences to LoRA and their 95% intervals, and the figures
`overview` and `losses`. If two or more
folders are those of single runs, each run is also compared with the last one, on
the same problems. A table or figure of the paper is a YAML file in recipes/tables/,
which has the paper's numbers too. Tables are written as Markdown, LaTeX and CSV,
figures as PNG, PDF and SVG, by default to `report` in the folder of the runs.
Missing runs are listed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from loopdropout_trainer.diagnostics import FEWEST_PROBLEMS, Comparison, explain_disagreements
from loopdropout_trainer.errors import UserError, closest_match, docs_page, run_script
from loopdropout_trainer.files import check_links, recipe_names
from loopdropout_trainer.hints import file_hint
from loopdropout_trainer.reports.comparing import compare_folders, explain_missing_runs
from loopdropout_trainer.reports.figure_files import build_figure
from loopdropout_trainer.reports.figures import loss_curves, loss_figure, overview_figure
from loopdropout_trainer.reports.final_results import describe_left_out_runs, final_results
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.reports.labels import name_methods
from loopdropout_trainer.reports.loss_tables import (
    describe_unmeasured,
    make_loss_tables,
    make_reduction_table,
    reduction_numbers,
)
from loopdropout_trainer.reports.missing_base import describe_missing_base, describe_missing_base_loss
from loopdropout_trainer.reports.missing_numbers import LeftOut, Missing, Misspelled, is_found
from loopdropout_trainer.reports.other_settings import describe_other_sweeps
from loopdropout_trainer.reports.printing import making_report, print_notes, shorten_folders
from loopdropout_trainer.reports.progress import leave_out_unmeasured
from loopdropout_trainer.reports.rest import describe_curvature, describe_other_gates, describe_rest
from loopdropout_trainer.reports.saved_tables import (
    TableText,
    describe_sizes,
    explain_accuracies,
    save_layout,
    save_table,
)
from loopdropout_trainer.reports.table_files import build_table
from loopdropout_trainer.reports.tables import (
    ACCURACY_TITLE,
    CHOICE_TITLE,
    COSTS,
    LOSS_TITLE,
    OWN_FAMILY,
    accuracy_numbers,
    accuracy_table,
    choice_numbers,
    cost_numbers,
    explain_choice,
    explain_differences,
    fit_title,
    has_tests,
    loss_numbers,
    loss_table,
    make_cost_table,
    split_reductions,
)
from loopdropout_trainer.reports.training_notes import describe_early_stops, describe_rates, describe_starts
from loopdropout_trainer.reports.unpaired import explain_unpaired
from loopdropout_trainer.results.run_files import (
    is_of_base,
)
from loopdropout_trainer.results.sweep_scores import PER_TOKEN, name_loss_unit
from loopdropout_trainer.settings.arguments import option
from loopdropout_trainer.settings.recipe import load_recipe, name_words, parse
from loopdropout_trainer.terminal import format_fixed, print_sentences


OF_FIGURES = (
    "The summary has its figures without an option. `--tables` also makes figures, such as `--tables figure_teaser` of the "
    "paper, or one of your own YAML file."
)
OF_FORMATS = "Each table is written as Markdown, LaTeX and CSV, and each figure as PNG, PDF and SVG."
OF_SELECTIONS = (
    "The summary has all results. `--tables my_table.yaml` makes a table of your own, which selects some of them "
    f"({docs_page('reports')})."
)
OF_SUMMARY = ("accuracy", "choice", "comparison", "costs", "depth_loss", "held_out_loss", "loss_reduction", "losses")
OF_SUMMARY += ("overview", "readout_loss", "summary")
"""Names of the tables and figures of the summary, which `--tables` does not make."""


YAML_ENDINGS = (".yaml", ".yml")


@dataclass
class ReportArguments:
    """The runs, and the tables and figures to make."""

    first_words = "FOLDER [FOLDER ...]"
    advice = {
        **dict.fromkeys(("figure", "figures", "plot", "plots"), OF_FIGURES),
        **dict.fromkeys(("csv", "format", "formats", "latex", "markdown", "tex"), OF_FORMATS),
        **dict.fromkeys(
            ("baseline", "benchmark", "benchmarks", "filter", "method", "methods", "metric"), OF_SELECTIONS
        ),
        **dict.fromkeys(("metrics", "num_loops", "seed", "seeds", "sweep", "task", "tasks"), OF_SELECTIONS),
    }

    folders: list[str] = option(..., "Folders of runs. All folders below them are read.")
    tables: list[str] = option([], "Names in recipes/tables, YAML files, or `all`. Default: a summary.")
    checkpoints: bool = option(False, "Whether evaluated checkpoints are shown next to the final weights.")
    output_dir: str | None = option(
        None,
        "Folder of the report. Default: `report` in the folder of the runs, or `report_A_B` here for folders A and B.",
    )


ARGUMENTS = (ReportArguments,)


def main(argv: list[str] | None = None) -> None:
    (args,) = parse(ARGUMENTS, name_words(argv, "folders"), __doc__)
    names = args.tables
    if names == ["all"]:
        names = list_tables()
    specs = {name: read_table(name) for name in names}  # before anything is printed
    results, output_dir = load_results(*args.folders), find_output_dir(args)
    # A summary replaces another one. The tables that the user names can be made one after the other.
    with making_report(output_dir, () if specs else OF_SUMMARY):
        final = final_results(results, args.checkpoints, args.folders)
        for name, spec in specs.items():
            make_named(name, spec, final, results, output_dir)
        if not specs:
            summarize(final, output_dir, has_left_out=len(final) < len(results))
            report_comparison(args.folders, output_dir, final)
        remarks = [] if specs else describe_other_sweeps(final)  # a named table compares sweeps on purpose
        remarks += results.attrs["left_out"].splitlines()
        remarks += describe_left_out_runs(results, final, args.folders)
        if remarks:
            print_sentences("", *remarks)  # after the tables, which are the answer


def find_output_dir(args: ReportArguments) -> Path:
    """Return the folder of the report."""
    if args.output_dir is not None:
        return Path(args.output_dir)
    if len(args.folders) == 1:
        folder = Path(args.folders[0], "report")
    else:
        folder = Path(f"report_{name_folders(args.folders)[:100]}")
    check_links(folder)
    return folder


def name_folders(folders: Sequence[str]) -> str:
    """Return the names of folders in one word. Folders of one name, as of one seed, have the folders above it, too."""
    paths = [Path(folder).resolve() for folder in folders]
    names = [path.name for path in paths]
    if len({*names}) < len({*paths}):
        names = [*shorten_folders(pd.Series([*map(str, paths)]))]
    return "_".join(names).replace(os.sep, "_")


def list_tables() -> list[str]:
    """Return the names of the YAML files in recipes/tables, without their ending."""
    return [Path(name).stem for name in recipe_names() if name.startswith("tables/")]


def _is_yaml(name: str) -> bool:
    return name.endswith(YAML_ENDINGS)


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a YAML file of a table or a figure, by its path or its name in recipes/tables."""
    known = list_tables()
    if name.endswith(YAML_ENDINGS):
        if not Path(name).exists() and name.removeprefix("recipes/") not in recipe_names():
            hint = file_hint(Path(name), _is_yaml) or closest_match(Path(name).stem, known)
            raise UserError(
                f"`tables` must be names in recipes/tables, YAML files, or `all`, but there is no file {name}.{hint}"
            )
        return load_recipe(name)
    if name in OF_SUMMARY:
        raise UserError(
            f"`tables` must be names in recipes/tables, YAML files, or `all`, got {name}, which is a part of the summary. "
            "`loopdropout report FOLDER` without `--tables` makes it."
        )
    if name not in known:
        hint = closest_match(name, known) or f" They are {', '.join(known)}."
        raise UserError(f"`tables` must be names in recipes/tables, YAML files, or `all`, got {name}.{hint}")
    return load_recipe(f"tables/{name}.yaml")


def make_named(
    name: str, spec: dict[str, Any], results: pd.DataFrame, all_results: pd.DataFrame, output_dir: Path
) -> None:
    """Make the table or the figure of a YAML file, or print what is missing for it.

    Args:
        name: Name or path of the file.
        spec: Its content.
        results: From `final_results`.
        all_results: From `load_results`. A number that only these have is left out, and no command measures it.
        output_dir: Folder of the report.
    """
    path = output_dir / Path(name).stem
    try:
        if "figure" in spec:
            draw_figure(build_figure(spec, results), path)
            return
        table, notes = build_table(spec, results, all_results)
        save_layout(spec, table, path, notes)
    except Missing as error:
        reason, commands = error, spec.get("made_by", [])
        if isinstance(error, Misspelled):
            commands = []
        elif is_found(partial(build_figure, spec, all_results)):  # only figures raise it
            reason, commands = LeftOut(error), []
        print_sentences(f"Missing: {spec['title']}: {reason}")
        print(*commands, sep="\n", end="\n" if commands else "")


def summarize(results: pd.DataFrame, output_dir: Path, has_left_out: bool = False) -> None:
    """Make the tables of costs, accuracies, losses and loss reductions, and the figures of all runs.

    Args:
        results: From `final_results`.
        output_dir: Folder of the report.
        has_left_out: Whether `final_results` has left out other results.
    """
    made = [
        report_costs(results, output_dir),
        report_losses(results, output_dir),
        report_accuracy(results, output_dir),
        report_reductions(results, output_dir),
        report_measured_losses(results, output_dir),
    ]
    curves = loss_curves(results)
    if not any(made) and curves.empty:
        print_sentences(describe_rest(results, has_left_out))
    if len(curves):
        draw_figure(loss_figure(curves), output_dir / "losses")
    if any(made):
        print_sentences(*describe_other_gates(results))
    print_sentences(*describe_curvature(results))


def report_costs(results: pd.DataFrame, output_dir: Path) -> bool:
    """Make the table of the costs of trainings, and return whether there are any."""
    costs = results[results["metric"].isin(COSTS)]
    if costs.empty:
        return False
    numbers = cost_numbers(costs)
    folders = costs["folder"].unique()
    title, texts = make_cost_table(numbers)
    text = TableText(title, notes=[*describe_early_stops(folders), *describe_starts(folders)])
    save_table(numbers, texts, text, output_dir / "costs")
    return True


def report_losses(results: pd.DataFrame, output_dir: Path) -> bool:
    """Make the table of held-out losses, and return whether there are any."""
    numbers = loss_numbers(results)
    if numbers.empty:
        return False
    about = [
        "The loss of the held-out examples at the end of the training, or of its best checkpoint. Lower is better.",
        *explain_differences(numbers),
        *explain_unpaired(numbers, numbers.index),
        *describe_rates(results),
    ]
    if numbers["chose"].any():
        about.append(explain_choice("losses", has_tests(results)))
    title = LOSS_TITLE
    if name_loss_unit(results.loc[results["metric"] == "eval_loss", "run"].unique()) != PER_TOKEN:
        title = title.replace(f"in {PER_TOKEN}", "per pair")
    text = TableText(fit_title(title, numbers), about, describe_missing_base_loss(leave_out_unmeasured(results)))
    save_table(numbers, loss_table(numbers), text, output_dir / "held_out_loss")
    return True


def report_accuracy(results: pd.DataFrame, output_dir: Path) -> bool:
    """Make the tables of accuracies and the overview figure, and return whether there are any.

    Accuracies on the problems that chose a learning rate have a table of their own.
    """
    if "accuracy" not in {*results["metric"]}:
        return False
    numbers = accuracy_numbers(results)
    if len(numbers):
        about = [*explain_accuracies(numbers), *describe_rates(results)]
        text = TableText(fit_title(ACCURACY_TITLE, numbers), about, describe_missing_base(results))
        save_table(numbers, accuracy_table(numbers), text, output_dir / "accuracy")
    of_choice = choice_numbers(results)
    if len(of_choice):
        about = [*describe_sizes(of_choice), explain_choice("accuracies", has_tests(results))]
        text = TableText(fit_title(CHOICE_TITLE, of_choice), [*about, "They are not in the other tables."])
        save_table(of_choice, accuracy_table(of_choice), text, output_dir / "choice")
    figure = overview_figure(results)
    if figure is not None:
        draw_figure(figure, output_dir / "overview")
    return figure is not None


def report_reductions(results: pd.DataFrame, output_dir: Path) -> bool:
    """Make the tables of loss reductions, one for each set of examples, and return whether there are any."""
    groups = split_reductions(results)
    for number, (examples, reductions) in enumerate(groups.items(), start=1):
        numbers = reduction_numbers(reductions)
        name = "loss_reduction" if number == 1 else f"loss_reduction_{number}"
        title, texts = make_reduction_table(examples, numbers)
        notes = describe_unmeasured(results) if number == len(groups) else []
        save_table(numbers, texts, TableText(title, notes=notes), output_dir / name)
    return bool(groups)


def report_measured_losses(results: pd.DataFrame, output_dir: Path) -> bool:
    """Make the tables of losses by depth and by readout, and return whether there are any."""
    tables = make_loss_tables(results)
    for loss in tables:
        save_table(loss.numbers, loss.texts, TableText(loss.title), output_dir / loss.name)
    return bool(tables)


def report_comparison(folders: Sequence[str], output_dir: Path, results: pd.DataFrame) -> None:
    """Make the table that compares two or more runs on the same problems, if all folders are runs that answered some.

    Args:
        folders: Folders that the user has named.
        output_dir: Folder of the report.
        results: From `final_results`. They have the names of the methods, as in the other tables.
    """
    folders = [os.path.normpath(folder) for folder in folders]
    compared = compare_folders(folders)
    print_sentences(*explain_missing_runs(folders, compared))
    if compared.empty:
        return
    places = pd.Series([os.path.abspath(folder) for folder in folders])
    names = dict(zip(folders, shorten_folders(places), strict=True))
    comparisons = compared.pop("comparison")
    trained = results[~is_of_base(results)]
    methods = dict(zip(trained["run"], name_methods(trained), strict=True))
    runs = compared.index.get_level_values("run").map(os.path.realpath)
    compared["method"] = pd.Series(runs.map(methods), compared.index).fillna(compared["method"])
    numbers = compared.join(pd.DataFrame([*comparisons.map(as_numbers)], compared.index))
    texts = compared.rename(names, level="run").rename(columns={"num_problems": "n"})
    texts["accuracy"] = texts["accuracy"].map(partial(format_fixed, decimals=2))
    texts["difference"] = ["" if comparison is None else str(comparison) for comparison in comparisons]
    is_other = comparisons.isna() & (compared.index.get_level_values("run") != folders[-1])
    texts.loc[[*is_other], "difference"] = "other problems"
    about = []
    if comparisons.notna().any():
        intervals = numbers.loc[numbers["num_problems"] >= FEWEST_PROBLEMS, ["low", "high", "p"]]
        sentences = [
            "Differences are in points on the same n problems. Their 95% intervals are over problems (McNemar's exact test), "
            "without the spread over seeds.",
            *explain_disagreements(intervals.itertuples(index=False)),
            OWN_FAMILY,
        ]
        about.append(" ".join(sentences))
    text = TableText(f"Accuracy of the runs in %, and difference to {names[folders[-1]]}", about)
    save_table(numbers, texts, text, output_dir / "comparison")


def as_numbers(comparison: Comparison | None) -> dict[str, float]:
    """Return a comparison as columns of a CSV file."""
    if comparison is None:
        return {}
    return {"difference": comparison.gain, "low": comparison.low, "high": comparison.high, "p": comparison.p}


def draw_figure(plot: Any, path: Path) -> None:
    """Save a figure as PNG, PDF and SVG, and print its path and its caption, if it has one. `path` has no ending."""
    from loopdropout_trainer.reports.plots import save_figure

    save_figure(plot, path)
    caption = getattr(plot, "items", [plot])[0].labels.caption
    print_sentences(f"Wrote {path}.png, .pdf and .svg")
    if caption:
        print_notes(" ".join(caption.split()))  # not in the lines that fit the figure


if __name__ == "__main__":
    run_script(main)
