"""The runs of a sweep that were trained with another code of `--import` than the present one.

Other code may give other gates, so the sweep does not count such runs, until the user removes or accepts them. Its tables keep
them while all runs of their method have the same code.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import count
from loopdropout_trainer.own_code import IMPORTED
from loopdropout_trainer.results.imported_code import (
    accept_other_code,
    can_accept_other_code,
    code_of,
    digest_imports,
    find_acceptable_changes,
    find_other_code,
    list_imported_files,
)
from loopdropout_trainer.results.run_files import has_trained, read_used_imports
from loopdropout_trainer.results.run_states import is_running
from loopdropout_trainer.results.sweep_folder import ACCEPT, describe_other_code_fix, read_summary
from loopdropout_trainer.settings.recipe_folders import list_runs
from loopdropout_trainer.sweeps.own_runs import list_own_folders


class PresentCode:
    """The present files of `--import`. Their content is read again only after one of them has changed."""

    def __init__(self) -> None:
        self.known: tuple[list[Any], list[Path], dict[str, str]] = ([], [], {})  # stamps, files and digests

    def digests(self) -> dict[str, str]:
        """Return the digests of `digest_imports`, or the former ones while a file cannot be read, as during an edit."""
        stamps, files, digests = self.known
        if stamps == _stamp(files):
            return digests
        try:
            files = list_imported_files()
            stamps = _stamp(files)  # before the digests, so that a later edit is seen
            digests = digest_imports()
        except (OSError, SyntaxError):
            return digests
        self.known = (stamps, files, digests)
        return digests


def _stamp(files: Iterable[Path]) -> list[Any]:
    """Return the names of `--import`, and the time and the size of each file, of which None says that it is missing."""
    stamps: list[Any] = [*IMPORTED]
    for file in files:
        try:
            status = file.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_size))
    return stamps


def find_uncounted_code(sweep: Any, folder: Path) -> str | None:
    """Return a clause about the file of `--import` because of which the results in a folder do not count, or None.

    A sweep with `ACCEPT` first writes the accepted changes into its folders. Its dry run writes nothing, and looks at the
    folders as they are afterwards.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        folder: Folder of a run.
    """
    return find_other_code(folder, accepts_changes=sweep.dry_run and sweep.accept_changed_imports)


def has_other_results(sweep: Any, folder: Path) -> bool:
    """Return whether a folder has results of other imported code. A training without results begins again."""
    return has_trained(folder) and find_uncounted_code(sweep, folder) is not None


def find_other_results(sweep: Any) -> list[Path]:
    """Return the folders of a sweep's runs that have results of other imported code.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    return [folder for folder in _list_trained(sweep) if has_other_results(sweep, folder)]


def name_other_results(sweep: Any) -> dict[str, list[str]]:
    """Return the names METHOD/lr_X/seed_S of `find_other_results` by method."""
    names: dict[str, list[str]] = {method: [] for method in sweep.recipes}
    for folder in find_other_results(sweep):
        names[_method_of(folder)].append(folder.relative_to(sweep.output_dir).as_posix())
    return names


def find_incomparable(sweep: Any) -> list[Path]:
    """Return those of `find_other_results` that tables leave out, because their method has runs of several codes."""
    mixed = _find_mixed(sweep)
    return [folder for folder in find_other_results(sweep) if _method_of(folder) in mixed]


def _find_mixed(sweep: Any) -> set[str]:
    """Return the methods whose runs have several codes."""
    codes: dict[str, set[tuple[str, ...]]] = {}
    for folder in _list_trained(sweep):
        codes.setdefault(_method_of(folder), set()).add(code_of(folder))
    return {method for method, of_runs in codes.items() if len(of_runs) > 1}


def describe_other_results(sweep: Any) -> str:
    """Return sentences about the runs that keep results of other imported code, with the fixes, or "" without any."""
    folders = find_other_results(sweep)
    if not folders:
        return ""
    changes = [*dict.fromkeys(find_uncounted_code(sweep, folder) for folder in folders)]
    if len(folders) > 1:
        changes = [change.replace("its", "their", 1) for change in changes]
    reason = " and ".join(changes)
    fix = describe_other_code_fix(can_accept_other_results(sweep))
    working = [folder for folder in folders if is_running(folder)]
    if working:
        fix += f" Do not remove a folder in which a process works now: {', '.join(map(str, working))}."
    return (
        f"{count(len(folders), 'run')} cannot be compared with new ones, because {reason}: {', '.join(map(str, folders))}. "
        f"{fix}"
    )


def can_accept_other_results(sweep: Any) -> bool:
    """Return whether there are runs with results of other imported code, and the option `ACCEPT` would count all of them."""
    folders = find_other_results(sweep)
    return bool(folders) and all(can_accept_other_code(folder) for folder in folders)


def accept_other_results(sweep: Any) -> str:
    """Let results of other imported code count as those of the present code. Return a sentence about it."""
    accepted = _list_acceptable(sweep)
    for folder in accepted:
        accept_other_code(folder)
    return _describe_acceptance(accepted, "which `run.json` records, from now on count")


def describe_planned_acceptance(sweep: Any) -> str:
    """Return the sentence of a dry run about the results that `accept_other_results` will accept, or "" without `ACCEPT`."""
    if not sweep.accept_changed_imports:
        return ""
    return _describe_acceptance(_list_acceptable(sweep), "which the sweep accepts, then count")


def _list_acceptable(sweep: Any) -> list[Path]:
    """Return the folders of a sweep's runs that have results of other imported code which `ACCEPT` accepts."""
    return [folder for folder in _list_trained(sweep) if find_acceptable_changes(folder)]


def _describe_acceptance(accepted: list[Path], predicate: str) -> str:
    """Return a sentence about accepted results. `predicate`: its words between the number of runs and "as results"."""
    if not accepted:
        return "No run has results of other `--import` code, so `accept_changed_imports` accepts nothing."
    return (
        f"{count(len(accepted), 'run')} of other `--import` code, {predicate} as results of the present code: "
        f"{', '.join(map(str, accepted))}."
    )


def find_kept_choices(sweep: Any) -> dict[str, dict[str, Any]]:
    """Return the former choice of each method whose results are all of one other code, as `summary.json` has it."""
    others = {_method_of(folder) for folder in find_other_results(sweep)}
    former = read_summary(sweep.output_dir).get("choices", {})
    kept = {}
    for method in sorted(others - _find_mixed(sweep)):
        if method in former and former[method]["best"] is not None:
            kept[method] = former[method]
    return kept


def describe_failures(sweep: Any) -> str:
    """Return sentences about the failed runs of a sweep, of which some may only lack their measurement, and the fix."""
    failures = sweep.pool.failures
    trained = [run for run in failures if has_trained(sweep.folder(run))]
    text = f"{count(len(failures), 'run')} failed"
    if len(trained) == len(failures):
        text += " after the training, in the measurement"
    elif trained:
        text += f", {len(trained)} of them after the training, in the measurement"
    return f"{text}. {describe_fix(sweep)}"


def describe_fix(sweep: Any) -> str:
    """Return how a sweep goes on after a failure, with a warning if finished runs depend on a file of `--import`."""
    are_trained = [has_trained(sweep.folder(run)) for run in sweep.pending()]
    verbs = []
    if not are_trained or not all(are_trained):
        verbs.append("trains")
    if any(are_trained):
        verbs.append("measures")
    text = f"Fix the cause. The same command then {' and '.join(verbs)} what is missing."
    if any(read_used_imports(folder) for folder in _list_trained(sweep)):
        text += (
            f" If you change a file of `--import`, its finished runs then count only after `{ACCEPT}`, because other code may "
            "give other gates."
        )
    return text


def _list_trained(sweep: Any) -> Iterable[Path]:
    """Return the folders of the sweep's own runs that are trained. Those of other seeds or methods do not concern it."""
    own = list_own_folders(sweep)
    return [run for run in list_runs(sweep.output_dir) if run in own and has_trained(run)]


def _method_of(run: Path) -> str:
    return run.parent.parent.name
