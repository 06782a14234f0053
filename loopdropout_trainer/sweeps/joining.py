"""The sentences about other processes that work on a sweep: in its plan, and in place of the plan for a process that joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopdropout_trainer.errors import count
from loopdropout_trainer.results.run_states import describe_running, is_running
from loopdropout_trainer.results.sweep_processes import describe_processes, find_processes
from loopdropout_trainer.sweeps.run_times import describe_left, name_numbers


def find_running(sweep: Any) -> list[str]:
    """Return the names of the runs that other processes train or measure now.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    return [run.name for run in sweep.pending() if is_running(sweep.folder(run))]


def count_workers(sweep: Any) -> int:
    """Return the number of runs at a time, with those of the other processes that work on a sweep now.

    A dry run trains none, so that it has those of the other processes, or without any those that the sweep would have.
    """
    of_others = sum(process.workers for process in find_processes(sweep.output_dir, sweep.recipes))
    if sweep.dry_run and of_others:
        return of_others
    return sweep.workers + of_others


def describe_joining(sweep: Any, running: Sequence[str]) -> str:
    """Return sentences about a sweep that this process joins: who works on it, how far it is, and what is left.

    They are "" if nobody works on it.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        running: From `find_running`.
    """
    others = find_processes(sweep.output_dir, sweep.recipes)
    if not others and not running:
        return ""
    who = describe_processes(others)
    if who:
        who = f", on which {who}"
    num_ended, total = sweep.count()
    progress = f"{num_ended} of {count(total, 'training')} have ended"
    if running:
        progress += f", and {describe_running(sweep.output_dir, running)}"
    numbers, time = name_numbers(sweep.count_left()), describe_left(sweep, count_workers(sweep))
    return (
        f"This process joins the sweep in {sweep.output_dir}{who}: {progress}. Still to do: {numbers}, {time}. "
        "`--dry_run true` prints the plan."
    )


def describe_work(sweep: Any, running: Sequence[str]) -> str:
    """Return the words of a plan about the processes that work on a sweep now, and their runs, or "" without any."""
    who = describe_processes(find_processes(sweep.output_dir, sweep.recipes))
    if who:
        who = f"{who} on this sweep"
    return "\n".join(filter(None, [describe_running(sweep.output_dir, running), who]))
