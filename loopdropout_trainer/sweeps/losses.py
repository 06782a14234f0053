"""The losses of a sweep: its adapters, means of `diagnose` over seeds, and losses that the trainings measured themselves."""

from __future__ import annotations

from pathlib import Path

from loopdropout_trainer.errors import join_command
from loopdropout_trainer.reports.final_results import describe_left_out_runs, final_results
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.reports.loss_tables import make_loss_tables, make_reduction_table, reduction_numbers
from loopdropout_trainer.reports.printing import print_table
from loopdropout_trainer.reports.tables import split_reductions
from loopdropout_trainer.results.run_files import DIAGNOSTICS_FOLDER, is_of_base, read_results, read_run
from loopdropout_trainer.saving.facts import ALL_KINDS
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.terminal import print_sentences


def find_missing(run: Path) -> str | None:
    """Return why a run of a sweep has no trained adapter, as the end of a sentence, or None."""
    status = read_run(run).get("status")
    if status == "non-finite":
        return "its training stopped at a gradient or a weight that was not finite"
    if status is None:
        return "its training has not begun, or has failed"
    source = find_source(run, accept=ALL_KINDS)
    if source.is_adapter:
        return None
    return f"it has no adapter, and its training has the status {status!r}"


def find_own_reductions(sweep: Path, task: str) -> set[str]:
    """Return the runs whose trainings measured loss reductions on a task, which a report of the sweep shows.

    The report leaves out what `diagnose` has measured for these runs.
    """
    if not read_results(sweep):  # for which `load_results` would raise an error
        return set()
    shown = final_results(load_results(sweep)).reindex(columns=["metric", "task", "adapter", "run"])
    is_own = shown["adapter"].isna()  # `diagnose` names the adapter that it has measured
    return {*shown[is_own].query("metric == 'loss_reduction' and task == @task")["run"]}


def print_means(sweep: Path, folders: list[str], has_own_reductions: bool) -> None:
    """Print the losses and the loss reductions of a sweep as means over seeds, and the command for afterwards.

    Args:
        sweep: Folder of the sweep.
        folders: Folders of the results.
        has_own_reductions: Whether `find_own_reductions` finds runs.
    """
    results = load_results(*folders)
    final = final_results(results)
    has_method = not is_of_base(final).all()  # with a chosen learning rate
    losses = make_loss_tables(final) if has_method else []
    for loss in losses:
        print_table(loss.title, loss.texts)
    groups = split_reductions(final)
    for examples, rows in groups.items():
        print_table(*make_reduction_table(examples, reduction_numbers(rows)))
    print_sentences(*describe_left_out_runs(results, final))
    if not has_method:
        print_sentences("There is no table, because the sweep has not chosen the learning rate of any method yet.")
    print_sentences("", f"All results are in {DIAGNOSTICS_FOLDER}/results.jsonl of each run.")
    if groups and has_own_reductions:
        print_sentences(
            f"`{join_command('report', sweep)}` shows the loss reductions that the trainings themselves measured instead."
        )
    elif groups or losses:
        print(f"\nNext:\n  {join_command('report', sweep)}   # these tables as files, next to costs and accuracies")
