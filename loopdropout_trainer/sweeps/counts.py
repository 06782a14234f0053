"""The trainings of a sweep: how many there are, how many have ended, and which runs in its folder are of another sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import count
from loopdropout_trainer.results.failures import FAILED, describe_failures, name_log
from loopdropout_trainer.results.recipe_changes import MEASURED, UNCOMPARED
from loopdropout_trainer.results.run_files import has_trained
from loopdropout_trainer.results.run_states import is_running, name_runs
from loopdropout_trainer.results.sweep_folder import SweepRun
from loopdropout_trainer.settings.recipe_folders import list_runs
from loopdropout_trainer.sweeps.code import find_other_results, has_other_results
from loopdropout_trainer.sweeps.own_runs import list_own_folders


def read_progress(sweep: Any) -> dict[str, dict[str, Any]]:
    """Return the facts of `summary.json` about how far a sweep is, by their name and by method.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    return {
        "trainings": count_by_method(sweep),
        "finished": {method: not sweep.pending_of(method) for method in sweep.recipes},
        "failed": name_failed(sweep),
        "waiting": name_waiting(sweep),
        "ended": name_ended(sweep),
        "measure": {method: _find_measurements(recipes.final) for method, recipes in sweep.recipes.items()},
    }


def _find_measurements(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that say what is measured."""
    return {name: value for name, value in recipe.items() if name in MEASURED - UNCOMPARED}


def count_by_method(sweep: Any) -> dict[str, tuple[int, int]]:
    """Return the number of trainings of each method that have ended, and of all of its trainings.

    A training counts as soon as it has ended, also if it must still be measured. One of other imported code does not count.
    The lines of the sweep, its plan, its summary and thus a report all have these numbers. A run that another worker here
    trains counts from the line about its end on, so that each line counts one training more.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    unreported = {run.name for run in sweep.pool.unreported.copy()}
    numbers = {}
    for method, ended in name_ended(sweep).items():
        numbers[method] = (len(set(ended) - unreported), sweep.num_trainings(method))
    return numbers


def name_ended(sweep: Any) -> dict[str, list[str]]:
    """Return the names of the runs of each method whose training has ended, in the order of the sweep."""
    names = {}
    for method in sweep.recipes:
        ended = [run.name for run in _list_counted(sweep, method) if _has_ended(sweep, run)]
        names[method] = [*dict.fromkeys(ended)]  # the chosen run is there twice
    return names


def _list_counted(sweep: Any, method: str) -> list[SweepRun]:
    """Return the runs of a method, with the later seeds of a choice that depends on results of other imported code.

    Those can be of the present code, as after a change while the sweep ran.
    """
    runs = sweep.runs(method)
    if sweep.full_grid or sweep.choice(method).best is not None:
        return runs
    best = sweep.choice(method, with_other_code=True).best
    if best is not None:
        runs += [SweepRun(method, best, seed, False) for seed in sweep.seeds[1:]]
    return runs


def describe_uncounted(sweep: Any) -> str:
    """Return words about the trainings that `count_by_method` leaves out because of other imported code, or ""."""
    num_others = len(find_other_results(sweep))
    return f"not counting {num_others} of other `--import` code" if num_others else ""


def _has_ended(sweep: Any, run: SweepRun) -> bool:
    """Return whether the training of a run has ended with its settings. A run that is not done must still be measured."""
    if sweep.is_done(run):
        return True
    folder = sweep.folder(run)
    return has_trained(folder) and not has_other_results(sweep, folder)


def name_waiting(sweep: Any) -> dict[str, list[str]]:
    """Return the names of the runs of each method that can start and are not trained yet.

    A chosen run, which only waits for its measurement, is not one of them.
    """
    names: dict[str, list[str]] = {method: [] for method in sweep.recipes}
    for run in sweep.pending():
        if not has_trained(sweep.folder(run)):
            names[run.method].append(run.name)
    return names


def name_failed(sweep: Any) -> dict[str, list[str]]:
    """Return the names of the runs of each method that have failed since the start of the sweep and are still not done."""
    names: dict[str, list[str]] = {method: [] for method in sweep.recipes}
    for run in [*sweep.pool.failures]:  # a copy, because other workers can add a failure
        if not sweep.is_done(run):  # another machine may have trained it since
            names[run.method].append(run.name)
    return names


def list_logs(runs: Iterable[SweepRun], folder: Callable[[SweepRun], Path], other_results: str) -> list[str]:
    """Return lines with each run that failed and its log, which is in its `folder`, and sentences about other results.

    The sentences, if there are any, are apart from the failures, because they have another fix.
    """
    lines = ["", "Failed, with the errors above:"]
    lines += [f"  {run.name} {name_log(folder(run))}" for run in runs]
    if other_results:
        lines += ["", other_results]
    return lines


def describe_earlier_failures(sweep: Any) -> str:
    """Return lines about the runs that failed at a former start of a sweep and that the next start trains or measures again.

    A failed run that another process works on now is not one of them.
    """
    names = []
    for run in sweep.pending():
        folder = sweep.folder(run)
        if Path(folder, FAILED).is_file() and not is_running(folder):
            names.append(run.name)
    if not names:
        return ""
    return "\n".join([*describe_failures(sweep.output_dir, names), "The same command starts failed runs again."])


def count_unmeasured(sweep: Any) -> int:
    """Return the number of trainings that have ended and that the sweep must still measure, or measure again.

    They have no measurement yet, such as the run of a learning rate that was just chosen, or `measure` has changed since.
    """
    names = set()
    for run in sweep.pending():
        if has_trained(sweep.folder(run)):
            names.add(run.name)
    return len(names)


def find_other_runs(sweep: Any) -> list[Path]:
    """Return the folders of runs in a sweep's folder with methods, learning rates or seeds that the sweep does not have.

    They are left from another recipe of the sweep, or another sweep shares the folder.
    """
    own = list_own_folders(sweep)
    return [folder for folder in list_runs(sweep.output_dir) if folder not in own]


def name_existing_runs(sweep: Any) -> tuple[list[str], list[str]]:
    """Return the names of the runs of later seeds that are not among the present runs of a sweep.

    They are left from a start with other learning rates.

    Args:
        sweep: `Sweep` of recipes/sweep.py.

    Returns:
        Those that may still count after the choice of the learning rates, and those of learning rates that are not chosen.
    """
    may_count, are_not_chosen = [], []
    existing = list_runs(sweep.output_dir)
    own = list_own_folders(sweep)
    for method in sweep.recipes:
        has_chosen = sweep.full_grid or sweep.choice(method).best is not None
        counted = {sweep.folder(run) for run in _list_counted(sweep, method)}
        for folder in existing:
            if folder in own - counted and folder.parents[1].name == method:
                names = are_not_chosen if has_chosen else may_count
                names.append(folder.relative_to(sweep.output_dir).as_posix())
    return may_count, are_not_chosen


def describe_existing_runs(sweep: Any) -> str:
    """Return lines about the runs of `name_existing_runs`, or "" without any."""
    may_count, are_not_chosen = name_existing_runs(sweep)
    lines = []
    if may_count:
        lines.append(
            f"{count(len(may_count), 'run')} may count after the choice of the learning rates: {name_runs(may_count)}"
        )
    if are_not_chosen:
        number = count(len(are_not_chosen), "run")
        lines.append(f"{number} of learning rates that are not chosen, without effect: {name_runs(are_not_chosen)}")
    return "\n".join(lines)


def describe_other_runs(sweep: Any) -> str:
    """Return sentences about the runs of `find_other_runs`, or ""."""
    names: dict[bool, list[str]] = {True: [], False: []}  # by whether a process works on the run
    for folder in find_other_runs(sweep):
        names[is_running(folder)].append(folder.relative_to(sweep.output_dir).as_posix())
    working, idle = names[True], names[False]
    others = [*idle, *working]
    if not others:
        return ""
    sentences = (
        f"{count(len(others), 'run')} of other methods, learning rates or seeds, which a report can show, too: "
        f"{name_runs(others)}."
    )
    if working:
        sentences += f" Another sweep or command trains or measures {name_runs(working)} now."
    if idle and working:
        sentences += " Remove the folders of the other runs if you do not need them."
    elif idle:
        sentences += " Remove these folders if you do not need them."
    unknown = {name.partition("/")[0] for name in idle} - sweep.recipes.keys()
    if unknown and any(not Path(sweep.output_dir, method).exists() for method in sweep.recipes):
        sentences += " After renaming a method, rename its folder, so that its runs count."
    return sentences
