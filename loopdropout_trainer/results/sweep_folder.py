"""The folder of a sweep: its runs, and the file that says which learning rates it has chosen and how far it is.

A run is in `METHOD/lr_X/seed_S` of the folder. Several sweeps can share a folder.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from loopdropout_trainer.errors import count, join_command
from loopdropout_trainer.files import lock_file, read_json_object, write_file
from loopdropout_trainer.results.failures import describe_failures
from loopdropout_trainer.results.imported_code import has_code_of_run
from loopdropout_trainer.results.run_commands import name_sweep_command
from loopdropout_trainer.results.run_files import has_trained
from loopdropout_trainer.results.run_states import describe_running, is_measured, is_running, name_runs
from loopdropout_trainer.results.sweep_processes import describe_processes, find_processes
from loopdropout_trainer.results.sweep_scores import NON_FINITE, read_score
from loopdropout_trainer.settings.recipe import load_recipe
from loopdropout_trainer.settings.recipe_folders import SETTINGS_FILE, list_runs


SUMMARY_FILE = "summary.json"
"""File in the folder of a sweep with `choices`, `select_on`, `full_grid`, `trainings`, `finished`, `failed`,
`waiting`, `ended`, `other_code`, `measure` (the fields of the measurements of final runs) and `run_seconds` (by the kind of a
run) by method, the table `accuracy`, and the methods of each sweep in the folder, `sweeps`.

If all `trainings` have ended, the method may still not be `finished`, because measurements are missing.
"""

RUN_NAME = r"^(?P<sweep>[^/]+)/(?P<variant>[^/]+)/lr_"
"""Beginning of the `run_name` of a sweep's run, "SWEEP/METHOD/lr_X/seed_S": the sweep, and its name of the method."""


ACCEPT = "--accept_changed_imports true"
"""Option of a sweep that counts the results of other imported code."""


class SweepRun(NamedTuple):
    """One start of the training script. If `selects` is true, it only serves the choice of the learning rate."""

    method: str
    learning_rate: float
    seed: int
    selects: bool

    @property
    def name(self) -> str:
        return f"{self.method}/lr_{self.learning_rate:.6g}/seed_{self.seed}"


def folder_of_run(run: str | Path) -> Path | None:
    """Return the folder of the sweep of a run, or None for a run in another place, such as a copy."""
    run = Path(run)
    if not (run.name.startswith("seed_") and run.parent.name.startswith("lr_")):
        return None
    return run.parent.parent.parent


def name_in_sweep(folder: str | Path) -> str | None:
    """Return the name METHOD/lr_X/seed_S of the folder of a sweep's run, with a folder in it, or None in another place."""
    folder = Path(folder)
    for run in (folder, folder.parent):  # of a checkpoint or a merged model
        sweep = folder_of_run(run)
        if sweep is not None:
            return folder.relative_to(sweep).as_posix()
    return None


def read_summary(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return the content of a sweep's summary, or an empty dict if there is no readable one, as in older folders."""
    try:
        return read_json_object(Path(folder, SUMMARY_FILE))
    except (OSError, ValueError):
        return {}


def read_summaries(runs: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the summary of the sweep of each run, as `read_summary` does. It is empty for a run in another place."""
    by_folder: dict[Path | None, dict[str, dict[str, Any]]] = {None: {}}  # a sweep has many runs
    summaries = {}
    for run in runs:
        folder = folder_of_run(run)
        if folder not in by_folder:
            by_folder[folder] = read_summary(folder)
        summaries[run] = by_folder[folder]
    return summaries


def methods_of(summary: dict[str, dict[str, Any]]) -> list[str]:
    """Return the methods of a summary in the order of the sweep's recipe."""
    return [*dict.fromkeys([*summary.get("full_grid", {}), *summary.get("choices", {})])]


def list_sweeps(summary: dict[str, Any]) -> list[list[str]]:
    """Return the methods of each sweep in a folder, from its summary. In an older one, all methods are of one sweep."""
    sweeps = summary.get("sweeps")
    if sweeps is None:
        methods = [*summary.get("trainings", {})]
        sweeps = [methods] if methods else []
    return sweeps


def _replace_sweep(sweeps: list[list[str]], methods: Collection[str]) -> list[list[str]]:
    """Return the methods of each sweep in a folder after one of them has begun with its present methods.

    A former sweep that has a method in common with it is an earlier state of it. Its methods that are no longer there do not
    count, because no command would train them.
    """
    others = [former for former in sweeps if not set(former) & set(methods)]
    return [*others, [*methods]]


def update_summary(folder: str | Path, methods: Collection[str] = (), **facts: Any) -> None:
    """Write a sweep's summary. The facts of the methods of other sweeps in the folder stay.

    Args:
        folder: Folder of the sweep.
        methods: All methods of the sweep. Without them, the sweeps in the folder stay as they are.
        **facts: Mappings by method, or other values, which replace the former ones.
    """
    path = Path(folder, SUMMARY_FILE)
    with lock_file(path):
        summary = read_summary(folder)
        if methods:
            summary["sweeps"] = _replace_sweep(list_sweeps(summary), methods)
        for name, value in facts.items():
            if isinstance(value, dict):
                summary[name] = {**summary.get(name, {}), **value}
            else:
                summary[name] = value
        write_file(path, json.dumps(summary, indent=1) + "\n")


def only_chose_rate(summary: dict[str, dict[str, Any]], method: str, learning_rate: float) -> bool | None:
    """Return whether the run of a method with a learning rate only served the choice of another one.

    Args:
        summary: From `read_summary`.
        method: Name of the method in the sweep.
        learning_rate: Learning rate of the run.

    Returns:
        The answer, or None if the sweep has left no summary about the method.
    """
    if summary.get("full_grid", {}).get(method):
        return False
    if method not in summary.get("choices", {}):
        return None
    return learning_rate != find_chosen_rate(summary, method)  # before the choice, all runs only serve it


def find_chosen_rate(summary: dict[str, dict[str, Any]], method: str) -> float | None:
    """Return the learning rate that a sweep has chosen for a method. None: it has chosen none (yet), as in a full grid.

    Args:
        summary: From `read_summary`.
        method: Name of the method in the sweep.
    """
    if summary.get("full_grid", {}).get(method):
        return None
    return summary.get("choices", {}).get(method, {}).get("best")


def find_choosing_task(summary: dict[str, dict[str, Any]], method: str) -> str | None:
    """Return what chooses the learning rate of a method: a task, by its accuracy, or `eval_loss`. None: nothing is chosen.

    Args:
        summary: From `read_summary`. An older one does not name the task.
        method: Name of the method in the sweep.
    """
    if summary.get("full_grid", {}).get(method):
        return None
    return summary.get("select_on", {}).get(method, "development")


def find_choosing_task_of(run: Path) -> str | None:
    """Return what chose the learning rate of a run, as `find_choosing_task` does, or None for a run of no sweep."""
    sweep = folder_of_run(run)
    if sweep is None:
        return None
    return find_choosing_task(read_summary(sweep), run.parent.parent.name)


def describe_unchosen(folder: str | Path) -> dict[str, str]:
    """Return the reason, if it is known, why each method of the sweep in a folder has no learning rate yet."""
    summary = read_summary(folder)
    reasons = {}
    for method, choice in summary.get("choices", {}).items():
        if choice["best"] is not None:
            continue
        reasons[method] = choice.get("remark") or ""
        if choice.get("rates") and _is_scored_since(folder, summary, method):
            reasons[method] = (
                f"Every learning rate has a score now, and the {name_sweep_command(folder)} compares them."
            )
    return reasons


def _is_scored_since(folder: str | Path, summary: dict[str, dict[str, Any]], method: str) -> bool:
    """Return whether every learning rate of a method has a score that counts, also after the last word of its sweep.

    The last run can outlive a sweep that is killed.
    """
    if _list_other_code(folder, summary, [method]):
        return False
    select_on = find_choosing_task(summary, method)
    runs = [Path(folder, name) for name in summary.get("waiting", {}).get(method, ())]
    for rate in summary["choices"][method]["rates"]:
        of_rate = [*Path(folder, method).glob(f"lr_{rate:.6g}/seed_*")]
        if not of_rate:
            return False
        runs += of_rate
    scores = [read_score(run, select_on) for run in runs]
    return None not in scores and max(scores) > NON_FINITE


def describe_choice(method: str, best: float, remark: str = "") -> str:
    """Return a line about the learning rate that a sweep has chosen for a method, with the remark of its `Choice`."""
    return f"{method}: learning rate {best}. {remark}".rstrip()


def describe_choices(folder: str | Path, methods: Collection[str] | None = None) -> list[str]:
    """Return a line about the learning rate of each method, or of each of `methods`, that the sweep in a folder has chosen.

    A remark that several methods share has one line below them, which names the methods.
    """
    summary = read_summary(folder)
    chosen = {}
    for method, choice in summary.get("choices", {}).items():
        is_wanted = methods is None or method in methods
        if is_wanted and find_chosen_rate(summary, method) is not None:
            chosen[method] = choice
    remarks, shared = split_remarks({method: choice.get("remark") or "" for method, choice in chosen.items()})
    lines = [describe_choice(method, choice["best"], remarks[method]) for method, choice in chosen.items()]
    return [*lines, *shared]


def split_remarks(remarks: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the remark of each method, "" if others share it, and a line for each shared remark, which names the methods.

    Args:
        remarks: Remark of the `Choice` of each method, or "".
    """
    methods: dict[str, list[str]] = {}  # by their remark
    for method, remark in remarks.items():
        methods.setdefault(remark, []).append(method)
    own, shared = dict(remarks), []
    for remark, names in methods.items():
        if remark and len(names) > 1:
            own.update(dict.fromkeys(names, ""))
            shared.append(f"{', '.join(names)}: {remark}")
    return own, shared


def describe_progress(folder: str | Path) -> str:
    """Return sentences about each unfinished sweep in a folder, or "" if all are finished and without a summary.

    The sentences have the causes and the logs of its failed runs.
    """
    summary = read_summary(folder)
    sweeps = list_sweeps(summary)
    sentences = []
    for methods in sweeps:
        running = _describe_work(folder, methods)
        title = "The sweep"
        if len(sweeps) > 1:
            title += f" of {', '.join(methods)}"
        progress = _describe_missing(folder, summary, methods, title, counts_soon=bool(running))
        if not progress:
            continue
        end = f"The sweep is running: {running}." if running else _describe_continuation(folder, summary, methods)
        sentences.append(f"{progress} {end}")
        sentences += describe_failures(folder, _list_failed(folder, summary, methods))
    return " ".join(sentences)


def _describe_work(folder: str | Path, methods: Collection[str]) -> str:
    """Return the words about the runs of some methods that processes train or measure now, or about the processes themselves.

    Between two runs, a process of the sweep trains none. The words are "" if nobody works on the sweep.
    """
    running = describe_running(folder, _list_running(folder, methods))
    if running:
        return running
    processes = describe_processes(find_processes(folder, methods))
    return f"{processes} on it" if processes else ""


def _list_running(folder: str | Path, methods: Collection[str]) -> list[str]:
    """Return the names of the runs of some methods that processes train or measure now."""
    names = []
    for run in list_runs(folder):
        if run.parents[1].name in methods and is_running(run):
            names.append(run.relative_to(folder).as_posix())
    return names


def lacks_measurements(run: str | Path) -> bool:
    """Return whether the training of a run has ended, and its own recipe or that of its sweep asks for further measurements.

    A report, the progress of a sweep and its sentences decide it here. A sweep's plan also knows changed benchmarks.
    """
    run = Path(run)
    if not has_trained(run):
        return False
    sweep, method = folder_of_run(run), run.parent.parent.name
    summary = read_summary(sweep) if sweep is not None else {}
    if method not in summary.get("measure", {}):  # of no sweep, or of one that an older version has started
        return not is_measured(run, {}, {})
    if not _is_final(summary, run):
        is_choosing = summary["choices"][method]["best"] is None
        return is_choosing and read_score(run, find_choosing_task(summary, method)) is None
    path = run / SETTINGS_FILE
    saved = load_recipe(path) if path.is_file() else {}
    return not is_measured(run, saved, summary["measure"][method])


def _is_final(summary: dict[str, dict[str, Any]], run: Path) -> bool:
    """Return whether a run of a sweep has the chosen learning rate, or any of a full grid."""
    method = run.parent.parent.name
    if summary.get("full_grid", {}).get(method):
        return True
    best = find_chosen_rate(summary, method)
    return best is not None and run.parent.name == f"lr_{best:.6g}"


def describe_other_code_fix(can_accept: bool) -> str:
    """Return the ways to go on with runs that keep results of other imported code, whose folders were named before.

    Args:
        can_accept: Whether `ACCEPT` counts them. Else a file of `--import` is missing.
    """
    fix = "Give the missing file by `--import`"
    if can_accept:
        fix = f"Count the results with `{ACCEPT}` if the change does not concern them"
    return (
        f"{fix}, remove these folders to train them again (their results are lost), restore the code, or give the method "
        "another name."
    )


def _describe_continuation(folder: str | Path, summary: dict[str, dict[str, Any]], methods: Collection[str]) -> str:
    """Return how an unfinished sweep goes on. Runs of an earlier `--import` file need a decision of the user first."""
    command = name_sweep_command(folder)
    if _list_other_code(folder, summary, methods):
        return f"{describe_other_code_fix(can_accept=True)} The {command} then continues it."
    return f"The {command} continues it."


def _describe_missing(
    folder: str | Path,
    summary: dict[str, dict[str, Any]],
    methods: Collection[str],
    title: str = "The sweep",
    counts_soon: bool = False,
) -> str:
    """Return sentences about the trainings of an unfinished sweep, or "" for a finished one or without a summary.

    Args:
        folder: Folder of the sweep.
        summary: From `read_summary`.
        methods: Methods of the sweep. Others in the folder are of other sweeps, or were removed from this one.
        title: Words for the sweep, with which the sentence begins.
        counts_soon: Whether the sweep is running, so that it soon counts all trainings that have ended.
    """
    finished = summary.get("finished", {})
    trainings = {method: numbers for method, numbers in summary.get("trainings", {}).items() if method in methods}
    num_removed = sum(_count_removed(folder, summary, method) for method in trainings)
    uncounted = _list_uncounted(folder, summary, methods)
    failed = _list_failed(folder, summary, methods)
    unmeasured = _list_unmeasured(folder, summary, methods)
    # The sweep itself decides it. The summary of an older version has the numbers only.
    are_finished = all(finished.get(method, ended == total) for method, (ended, total) in trainings.items())
    if are_finished and not num_removed and not unmeasured:
        return ""
    num_ended = sum(ended for ended, _ in trainings.values()) + len(uncounted) - num_removed
    total = sum(number for _, number in trainings.values())
    missing = ""
    measured = [name for name in uncounted if name not in unmeasured]
    if measured and not counts_soon:
        missing = f", with {', '.join(measured)}, which the sweep has not counted yet"
    to_measure = [name for name in unmeasured if name not in failed]  # the others are named below
    if to_measure:
        missing += f", but measurements of {name_runs(to_measure)} are missing"
    elif num_ended == total and not missing:
        missing = ", but measurements are missing"
    remarks = f" ({count(num_removed, 'folder')} removed since)" if num_removed else ""
    failed_later = [name for name in failed if has_trained(Path(folder, name))]
    untrained = [name for name in failed if name not in failed_later]
    if untrained:
        remarks += f" (failed: {', '.join(untrained)})"
    if failed_later:
        remarks += f" (trained, and failed in the measurement: {', '.join(failed_later)})"
    sentence = f"{title} in {folder} is not finished: {num_ended} of {total} trainings have ended{missing}{remarks}."
    other_code = _list_other_code(folder, summary, methods)
    if other_code:
        sentence += f" Not counted, because of an earlier `--import` file: {', '.join(other_code)}."
    return sentence


def _list_uncounted(folder: str | Path, summary: dict[str, dict[str, Any]], methods: Collection[str]) -> list[str]:
    """Return the names of the runs that were trained since the last word of their sweep.

    A training goes on after a kill of its sweep, and other machines end theirs. The user can restore the code of a run, too.
    """
    other_code = _list_other_code(folder, summary, methods)
    restored = [name for name in _chain(summary, "other_code", methods) if name not in other_code]
    names = [*_chain(summary, "waiting", methods), *restored]
    return [name for name in dict.fromkeys(names) if has_trained(Path(folder, name))]


def _list_other_code(folder: str | Path, summary: dict[str, dict[str, Any]], methods: Collection[str]) -> list[str]:
    """Return the names of the runs of an earlier `--import` file, without those whose code is there again.

    The files decide it where they are. Elsewhere, as beside a copy of the results, the last word of the sweep does.
    """
    return [name for name in _chain(summary, "other_code", methods) if not has_code_of_run(Path(folder, name))]


def _list_unmeasured(folder: str | Path, summary: dict[str, dict[str, Any]], methods: Collection[str]) -> list[str]:
    """Return the names of the runs of some methods that were trained and lack measurements."""
    trained = [*_chain(summary, "ended", methods), *_list_uncounted(folder, summary, methods)]
    return [name for name in dict.fromkeys(trained) if lacks_measurements(Path(folder, name))]


def _list_failed(folder: str | Path, summary: dict[str, dict[str, Any]], methods: Collection[str]) -> list[str]:
    """Return the names of the runs that have failed since the last start of their sweep, and were not trained since."""
    uncounted = _list_uncounted(folder, summary, methods)
    return [name for name in _chain(summary, "failed", methods) if name not in uncounted]


def _count_removed(folder: str | Path, summary: dict[str, dict[str, Any]], method: str) -> int:
    """Return how many folders of a method's trainings that have ended are no longer there.

    An older summary does not name the trainings, so that folders of other seeds can hide a removed one.
    """
    names = summary.get("ended", {}).get(method)
    if names is not None:
        return sum(not Path(folder, name).is_dir() for name in names)
    num_ended, _ = summary["trainings"][method]
    present = [path for path in Path(folder, method).glob("lr_*/seed_*") if path.is_dir()]
    return max(0, num_ended - len(present))


def _chain(summary: dict[str, dict[str, Any]], name: str, methods: Collection[str]) -> list[str]:
    """Return the names of the runs of some methods in a field of a summary. An older one may lack the field."""
    by_method = summary.get(name, {})
    return [*chain.from_iterable(names for method, names in by_method.items() if method in methods)]


def _describe_others(folder: str | Path, methods: Collection[str], stopping: Collection[str]) -> str:
    """Return sentences about the runs that go on after the stop of a sweep, with a space behind each.

    Args:
        folder: Folder of the sweep.
        methods: Methods of the sweep.
        stopping: Names of the runs that the sweep itself has stopped, and that have not ended yet.
    """
    sentences = ""
    if stopping:
        sentences += f"It still waits for the checkpoint or the end of {name_runs([*stopping])}. "
    others = [name for name in _list_running(folder, methods) if name not in stopping]
    if others:
        sentences += f"Other processes go on: {describe_running(folder, others)}. "
    return sentences


def describe_interruption(folder: str | Path, methods: Collection[str], stopping: Collection[str] = ()) -> str:
    """Return a sentence about a sweep that a signal has stopped: how far it is, or that all of its runs are finished.

    Args:
        folder: Folder of the sweep.
        methods: Methods of the sweep.
        stopping: Names of its runs that have not ended yet, as after a second Ctrl-C.
    """
    summary = read_summary(folder)
    progress = _describe_missing(folder, summary, methods)
    if progress:
        running = _describe_others(folder, methods, stopping)
        return f"{progress} {running}{_describe_continuation(folder, summary, methods)}"
    if not summary.get("trainings"):  # it was stopped before its first line
        return "interrupted."
    command = join_command("report", folder)
    return f"All runs of the sweep in {folder} are finished. Print the results with `{command}`."
