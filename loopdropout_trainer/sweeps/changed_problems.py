"""Runs of a sweep that were measured on other problems of an own benchmark than its files have now."""

from __future__ import annotations

from typing import Any

from loopdropout_trainer.errors import count
from loopdropout_trainer.jobs.changed_benchmarks import find_changed_benchmarks
from loopdropout_trainer.results.run_files import is_finished
from loopdropout_trainer.results.run_states import name_runs
from loopdropout_trainer.results.sweep_folder import SweepRun
from loopdropout_trainer.sweeps.code import find_uncounted_code


def find_changed_problems(sweep: Any, run: SweepRun) -> list[str]:
    """Return the own benchmarks whose problems have changed since a run of a sweep was measured on them.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        run: Run, whether it has been measured or not.
    """
    return find_changed_benchmarks(sweep.folder(run), sweep.run_settings(run))


def is_outdated(sweep: Any, run: SweepRun) -> bool:
    """Return whether the results of a run are of other imported code, or on other problems of an own benchmark."""
    return find_uncounted_code(sweep, sweep.folder(run)) is not None or bool(find_changed_problems(sweep, run))


def describe_changed_problems(sweep: Any) -> str:
    """Return lines about the benchmarks that have changed, with the finished runs that are measured again, or ""."""
    runs_of: dict[str, dict[str, None]] = {}  # the chosen run is there twice
    for method in sweep.recipes:
        for run in sweep.runs(method):
            if is_finished(sweep.folder(run)):
                for name in find_changed_problems(sweep, run):
                    runs_of.setdefault(name, {})[run.name] = None
    lines = []
    for name, runs in runs_of.items():
        lines.append(
            f"{count(len(runs), 'run')} on the present problems of {name}, because its files have changed since: "
            f"{name_runs([*runs])}"
        )
    return "\n".join(lines)
