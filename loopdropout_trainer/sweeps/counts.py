"""The numbers of a sweep's trainings: how many there are, and how many have ended."""

from __future__ import annotations

from typing import Any

from loopdropout_trainer.results.run_files import has_trained
from loopdropout_trainer.results.sweep_folder import SweepRun
from loopdropout_trainer.sweeps.code import has_other_results


def count_by_method(sweep: Any) -> dict[str, tuple[int, int]]:
    """Return the number of trainings of each method that have ended, and of all of its trainings.

    A training counts as soon as it has ended, also if it must still be measured. A run that another worker here trains counts
    from the line about its end on, so that each line counts one training more.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    unreported = {run.name for run in sweep.pool.unreported.copy()}
    numbers = {}
    for method in sweep.recipes:
        ended = {run.name for run in sweep.runs(method) if _has_ended(sweep, run)} - unreported
        numbers[method] = (len(ended), sweep.num_trainings(method))
    return numbers


def _has_ended(sweep: Any, run: SweepRun) -> bool:
    """Return whether the training of a run has ended with its settings. A run that is not done must still be measured."""
    if sweep.is_done(run):
        return True
    folder = sweep.folder(run)
    return has_trained(folder) and not has_other_results(folder)
