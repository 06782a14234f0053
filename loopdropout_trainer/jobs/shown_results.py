"""What a job prints when its runs have ended: their results in tables, and the folders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.reports.figures import overview_figure
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.reports.labels import order_labels
from loopdropout_trainer.reports.printing import print_by_method, print_differences, print_loss_reductions
from loopdropout_trainer.results.run_files import BASE_MODEL
from loopdropout_trainer.saving.cards import describe_kept_checkpoint, read_card_fields
from loopdropout_trainer.saving.trainings import describe_old_merge
from loopdropout_trainer.terminal import format_value, print_sentences


def show_results(runs: Sequence[Run]) -> None:
    """Print tables of the results of a job's runs, and draw them if they have other depths or single loops.

    The methods are in the order of reports. Figures need plotnine.
    """
    rows = _read_rows(runs)
    training = rows.query("task == 'training'")
    depth = training["num_loops"].iloc[0]
    print_by_method(f"Training at K = {depth}", training, "metric", partial(format_value, digits=5))
    for run in runs:
        kept = describe_kept_checkpoint(run.args.output_dir)
        if kept is not None:
            print_sentences(f"{run.title}: Kept {kept}")
    print_sentences(*describe_losses_above_base(training, runs))
    _print_scores(rows, depth, runs)
    print_loss_reductions(rows)
    folders = [run.args.output_dir for run in runs]
    old_merges = [describe_old_merge(folder, is_command=True) for folder in folders]
    print_sentences("", f"Everything is in {', '.join(folders)}", *filter(None, old_merges))
    _draw_first_run(runs[0])


def _read_rows(runs: Sequence[Run]) -> pd.DataFrame:
    """Return the results of all runs, with the methods in the order of reports."""
    rows = []
    for run in runs:
        rows += read_card_fields(run.args.output_dir).results
    rows = pd.DataFrame(rows)
    places = order_labels(rows.assign(label=rows["method"], run=None, variant=None))
    return rows.sort_values("method", key=lambda methods: methods.map(places), kind="stable")


def _print_scores(rows: pd.DataFrame, depth: int, runs: Sequence[Run]) -> None:
    """Print the accuracies at the training depth, their differences, and those at other depths and in single loops."""
    scores = rows.query("metric in ['accuracy', 'last_number'] and gates in ['unit', 'none'] and num_loops == @depth")
    columns = scores["task"].where(scores["metric"] == "accuracy", scores["metric"])
    print_by_method(f"Accuracy at the training depth K = {depth}, in %", scores, columns)
    accuracy = rows.query("metric == 'accuracy'").sort_values("num_loops", kind="stable")
    has_lora = any(run.title == "LoRA" for run in runs)
    print_differences(accuracy.query("gates == 'unit'"), "LoRA" if has_lora else runs[-1].title)
    for task, own in accuracy.groupby("task", sort=False):
        by_depth = own.query("gates == 'unit'")
        if by_depth["num_loops"].nunique() > 1:
            columns = "K=" + by_depth["num_loops"].astype(str)
            print_by_method(f"Accuracy on {task} with K loops at inference, in %", by_depth, columns)
        alone = own.query("gates not in ['unit', 'none']")
        print_by_method(f"Accuracy on {task} with the adapter in one loop only, in %", alone, "gates")


def _draw_first_run(run: Run) -> None:
    """Draw the results of the first run, which has those of all runs in its folder, if they are about depths or loops."""
    options, folder = run.script_args, Path(run.args.output_dir)
    is_informative = options.eval_num_loops or options.single_loop_accuracy
    if not is_informative or not find_spec("plotnine"):
        return
    from loopdropout_trainer.reports.plots import save_figure

    results = load_results(folder)
    figure = overview_figure(results[results["checkpoint"].isna()])
    if figure is not None:
        save_figure(figure, folder / "figure")


def describe_losses_above_base(training: pd.DataFrame, runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each run whose held-out loss is above that of the base model, which was measured, too.

    Args:
        training: Results of the trainings.
        runs: The runs.
    """
    losses = training[training["metric"] == "eval_loss"].groupby("method")["value"].last().to_dict()
    of_base = losses.get(BASE_MODEL, math.inf)
    lines = []
    for run in runs:
        loss = losses.get(run.title, 0.0)
        if loss > of_base:
            lines.append(
                f"{run.title}: The held-out loss, {loss:.4g}, is above the base model's, {of_base:.4g}. Train with a lower "
                f"`learning_rate` than {run.args.learning_rate:g}."
            )
    return lines
