"""The end of a sweep: its chosen learning rates, its accuracies or held-out losses, and the commands for afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from loopdropout_trainer.errors import join_command
from loopdropout_trainer.reports.final_results import final_results
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.reports.labels import has_seeds
from loopdropout_trainer.reports.printing import print_table
from loopdropout_trainer.reports.saved_tables import describe_sizes, explain_accuracies
from loopdropout_trainer.reports.tables import (
    ACCURACY_TITLE,
    CHOICE_TITLE,
    accuracy_numbers,
    accuracy_table,
    choice_numbers,
    explain_choice,
    fit_title,
    has_tests,
    loss_numbers,
)
from loopdropout_trainer.results.failures import FAILED, name_log
from loopdropout_trainer.results.run_files import has_trained, is_of_base
from loopdropout_trainer.results.run_states import is_running
from loopdropout_trainer.results.sweep_folder import (
    SweepRun,
    describe_choice,
    split_remarks,
    update_summary,
)
from loopdropout_trainer.results.sweep_scores import PER_TOKEN, name_loss_unit, name_score, read_score
from loopdropout_trainer.sweeps.code import find_incomparable, find_kept_choices, find_other_results, has_other_results
from loopdropout_trainer.sweeps.counts import describe_other_runs, find_other_runs
from loopdropout_trainer.terminal import print_sentences


def print_summary(sweep: Any) -> None:
    """Print the chosen learning rates, and the accuracies as mean ± SD over seeds or the lowest held-out loss.

    The table of accuracies is also written to `summary.json`.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    if not sweep.full_grid:
        _print_choices(sweep)
    num_ended, _ = sweep.count()
    if num_ended == 0 and not find_other_results(sweep):
        return
    sweep.save_progress()
    results = load_results(sweep.output_dir)
    # Other methods stay, because sweeps of several methods can share a folder to compare them.
    former = [folder for folder in find_other_runs(sweep) if folder.parents[1].name in sweep.recipes]
    for folder in [*find_incomparable(sweep), *former]:
        results = results[~results["folder"].map(lambda name, run=folder: Path(name).is_relative_to(run))]
    final = final_results(results)
    trained = final[~is_of_base(final)]
    numbers = accuracy_numbers(final)
    table = accuracy_table(numbers)
    if len(table):
        print_table(fit_title(ACCURACY_TITLE, numbers), table)
        print_sentences(*explain_accuracies(numbers))
    of_choice = choice_numbers(final)
    if len(of_choice):
        print_table(fit_title(CHOICE_TITLE, of_choice), accuracy_table(of_choice))
        print_sentences(*describe_sizes(of_choice), explain_choice("accuracies", has_tests(final)))
    if sweep.loss_chooses_by_default or not (len(table) or len(of_choice)):
        print_lowest(loss_numbers(trained), name_loss_unit(trained["run"].unique()), has_tests(final))
    if len(sweep.seeds) == 1 and len(sweep.recipes) > 1:
        print_sentences(
            "With one seed, the spread over seeds is not known, so the order of the methods can be chance."
        )
    _print_other_runs(sweep)
    update_summary(sweep.output_dir, accuracy=table.reset_index().to_dict("records"))
    print("\nNext:")
    if sweep.pending() and sweep.command_line:
        print(f"  {sweep.command_line}   # completes the sweep, after you have fixed the cause of the failures")
    print(f"  {join_command('report', sweep.output_dir)}   # tables of losses, accuracies and costs")
    run = find_best_run(sweep)
    if run is not None:
        command = join_command("chat", sweep.folder(run))
        print(f"  {command}   # ask the best adapter of seed {run.seed}: {sweep.describe_score(run)}")


def _print_other_runs(sweep: Any) -> None:
    """Print the runs in the folder that the sweep does not have, because a report can show them."""
    others = describe_other_runs(sweep)
    if others:
        print_sentences(f"The folder has {others}")


def find_best_run(sweep: Any) -> SweepRun | None:
    """Return the best run of the first seed with a chosen learning rate, by the score that chooses the rate.

    There is none if no learning rate is chosen, as in a full grid.
    """
    if sweep.full_grid:
        return None
    choices = {method: sweep.choice(method).best for method in sweep.recipes}
    runs = [SweepRun(method, rate, sweep.seeds[0], True) for method, rate in choices.items() if rate is not None]
    return max(runs, key=sweep.score, default=None)


def _print_choices(sweep: Any) -> None:
    """Print the chosen learning rate of each method, and the former one of a method whose runs are all of other code."""
    if sweep.loss_chooses_by_default:
        print_sentences("The held-out loss chooses the learning rate, because no `benchmarks` are set.")
    kept = find_kept_choices(sweep)
    choices = {method: sweep.choice(method) for method in sweep.recipes}
    made = {method: choice for method, choice in choices.items() if method not in kept and choice.best is not None}
    remarks, shared = split_remarks({method: choice.remark for method, choice in made.items()})
    for method, choice in choices.items():
        if method in kept:
            print_sentences(
                f"{describe_choice(method, kept[method]['best'])} It was chosen before a file of `--import` changed."
            )
        elif choice.best is None:
            print_sentences(f"{method}: no learning rate is chosen. {choice.remark}")
        else:
            print_sentences(describe_choice(method, choice.best, remarks[method]))
        _print_scores(sweep, method, choice.rates, method in kept)
    print_sentences(*shared)


def _print_scores(sweep: Any, method: str, rates: list[float], of_other_code: bool) -> None:
    """Print the scores of a method's candidates, of which those of other imported code do not count."""
    for rate in rates:
        run = SweepRun(method, rate, sweep.seeds[0], True)
        score = sweep.describe_score(run)
        if of_other_code:
            folder = sweep.folder(run)
            score = name_score(read_score(folder, sweep.select_on), sweep.select_on, folder)
        print_sentences(f"  {rate:<10g} {score or _explain_missing_score(sweep, run)}")


def _explain_missing_score(sweep: Any, run: SweepRun) -> str:
    """Return why a run has no score at the end of its sweep."""
    folder = sweep.folder(run)
    if has_other_results(sweep, folder):
        return "no score that counts, because the code of its `--import` has changed"
    if is_running(folder):
        return "no score yet, because another process works on it"
    if Path(folder, FAILED).is_file():
        return f"no score, because the run failed {name_log(folder)}"
    if has_trained(folder):
        return f"no score, because {sweep.select_on} is not measured"
    return "no score, because it is not trained"


def print_lowest(losses: pd.DataFrame, unit: str = PER_TOKEN, has_test: bool = False) -> None:
    """Print the method with the lowest held-out loss, and by how much the losses of the others are higher.

    Methods with other seeds, as after a failed run, are not compared, because seeds differ.

    Args:
        losses: From `loss_numbers`.
        unit: From `name_loss_unit`.
        has_test: From `has_tests`.
    """
    means = losses["mean"].sort_values(kind="stable")
    own = losses[has_seeds(losses.index)]
    if own["seeds"].nunique() > 1:
        seeds = "; ".join(f"{name}: {seeds}" for name, seeds in own["seeds"].items())
        print_sentences(f"The held-out losses are not compared, because the methods have different seeds ({seeds}).")
    elif len(means):
        others = [f"{name}: {mean - means.iloc[0]:+.4f}" for name, mean in means.iloc[1:].items()]
        higher = f" ({', '.join(others)})" if others else ""
        num_seeds = own["num_seeds"].max()  # the same for all of them
        title = "Lowest held-out loss"
        if num_seeds > 1:
            title += f" (mean over {num_seeds:.0f} seeds)"
        print_sentences(f"{title}: {means.index[0]} {means.iloc[0]:.4f} {unit}{higher}")
    if losses["chose"].any():
        print_sentences(explain_choice("losses", has_test))
