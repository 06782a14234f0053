"""Sentences about runs and sweeps below some folders that are not finished, also about those without any result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pandas as pd

from loopdropout_trainer.errors import join_command
from loopdropout_trainer.files import is_checkpoint, lock_path
from loopdropout_trainer.results.run_commands import find_copy_command
from loopdropout_trainer.results.run_files import RUN_FILE, has_trained, read_run
from loopdropout_trainer.results.run_states import is_running, name_start
from loopdropout_trainer.results.sweep_folder import (
    SUMMARY_FILE,
    describe_progress,
    folder_of_run,
    lacks_measurements,
    list_sweeps,
    read_summary,
)
from loopdropout_trainer.settings.recipe_folders import SETTINGS_FILE, sort_folders


def find_sweeps(folders: Iterable[str | Path]) -> list[Path]:
    """Return the folders of the sweeps below some folders, and of the sweeps that these are runs of."""
    sweeps = set()
    for folder in map(Path, folders):
        sweeps.update(path.parent.resolve() for path in folder.rglob(SUMMARY_FILE))
        sweeps.update(filter(None, (folder_of_run(run.resolve()) for run in _list_runs(folder))))
    return sort_folders(sweep for sweep in sweeps if list_sweeps(read_summary(sweep)))


def _list_runs(folder: Path) -> list[Path]:
    """Return the folders below a folder that a training or an evaluation has been started in, also before its first result."""
    runs = set()
    for name in (RUN_FILE, SETTINGS_FILE):
        runs.update(path.parent for path in folder.rglob(name))
    lock = lock_path(Path(), "folder")
    for path in folder.rglob(str(lock)):
        runs.add(path.parents[len(lock.parts) - 1])
    return sort_folders(runs)


def describe_runs(folders: Iterable[str | Path], described: Collection[str] = ()) -> list[str]:
    """Return a sentence about each run below some folders that is not finished, and that is of no sweep with a summary.

    Args:
        folders: Folders.
        described: Runs of which another sentence says that their training has not ended.
    """
    sentences = []
    for run in dict.fromkeys(run for folder in folders for run in _list_runs(Path(folder))):
        sweep = folder_of_run(run.resolve())
        if sweep is None or not list_sweeps(read_summary(sweep)):
            sentences.append(_describe_run(run, str(run) in described))
    return [*filter(None, sentences)]


def _describe_run(run: Path, is_described: bool) -> str:
    """Return a sentence about a run that is running, or that has stopped before its end, or ""."""
    if is_running(run):
        start = name_start(run)
        since = f", since {start}" if start else ""
        return f"A process trains or measures in {run} now{since}."
    command = find_copy_command(run)
    if lacks_measurements(run):
        fix = "The same command adds them" if command is None else f"`{command}` adds them"
        return f"The training in {run} has ended, but measurements are missing. {fix}, without training again."
    status = read_run(run).get("status")
    if status == "non-finite":
        return f"The training in {run} has stopped, because a gradient was not finite."
    if status is None or has_trained(run) or is_described:
        return ""
    fix = "The same command with `--resume_from_checkpoint true`" if command is None else f"`{command}`"
    return f"The training in {run} has not ended. {fix} continues it."


def leave_out_unmeasured(results: pd.DataFrame) -> pd.DataFrame:
    """Return the results of runs whose measurements are all there. The others may still measure the base model, too."""
    unmeasured = [run for run in results["run"].unique() if lacks_measurements(run)]
    return results[~results["run"].isin(unmeasured)]


def advise_measuring(folders: Sequence[str | Path]) -> str:
    """Return sentences about how some folders without results get some. Those of a checkpoint are in the folder of its run."""
    for folder in map(Path, folders):
        if is_checkpoint(folder):
            command = join_command("report", folder.parent, "--checkpoints", "true")
            return f"The results of an evaluated checkpoint are in the folder of its run: `{command}`."
        if any(folder.rglob("cache/answers_*.jsonl")):
            return (
                "An evaluation there was stopped before its first result. The same `loopdropout evaluate` command continues "
                "it with the answers that it has kept."
            )
    states = [*describe_runs(folders), *filter(None, map(describe_progress, find_sweeps(folders)))]
    if not states:
        return "Train or evaluate first."
    if any(is_running(run) for folder in folders for run in _list_runs(Path(folder))):
        states.append("Make the report again when the first training has ended.")
    return " ".join(states)
