"""The results that reports show: those of final weights and of chosen learning rates, and sentences about the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from loopdropout_trainer.errors import count
from loopdropout_trainer.means import name_means
from loopdropout_trainer.reports.labels import find_label_fields, name_methods
from loopdropout_trainer.reports.progress import describe_runs, find_sweeps
from loopdropout_trainer.reports.result_codes import describe_codes
from loopdropout_trainer.reports.unfinished import UNFINISHED
from loopdropout_trainer.results.imported_code import find_edited
from loopdropout_trainer.results.run_files import (
    DEVELOPMENT,
    GATE_MEAN,
    is_of_base,
    read_accepted_imports,
    read_version,
)
from loopdropout_trainer.results.run_states import name_runs
from loopdropout_trainer.results.sweep_folder import (
    ACCEPT,
    describe_choices,
    describe_progress,
    describe_unchosen,
    find_choosing_task,
    find_chosen_rate,
    folder_of_run,
    name_in_sweep,
    only_chose_rate,
    read_summaries,
    read_summary,
)
from loopdropout_trainer.results.sweep_scores import name_score, read_score
from loopdropout_trainer.settings.recipe_folders import list_runs, sort_folders


def final_results(results: pd.DataFrame, with_checkpoints: bool = False, named: Collection[str] = ()) -> pd.DataFrame:
    """Return the results without checkpoints, and without the runs of a sweep that only chose a learning rate.

    The column `label_fields` says to all tables which settings the label of a result has.

    The summary of the sweep says which learning rate it has chosen. Before the choice, all runs of a method are left out. In a
    folder without a summary, the runs that only chose were evaluated on the held-out examples alone, and another run of the
    same method on other tasks. Without tasks, they have a learning rate with fewer seeds than another one of the same method.

    Args:
        results: From `load_results`.
        with_checkpoints: Whether results of checkpoints stay.
        named: Folders that the user has named. The results of a run among them stay, also if it only chose a learning rate,
            as do those of each run of a learning rate whose folder is among them. Those of a run outside of all of them stay,
            too, because they are of an evaluation whose models the user has named.
    """
    accuracy = results[(results["metric"] == "accuracy") & results["sweep"].notna()]
    is_test = accuracy["task"] != DEVELOPMENT
    methods = pd.MultiIndex.from_frame(results[["sweep", "variant"]])
    is_measured = methods.isin(pd.MultiIndex.from_frame(accuracy.loc[is_test, ["sweep", "variant"]]))
    seems_rejected = is_measured & ~results["run"].isin(accuracy.loc[is_test, "run"])
    seems_rejected |= ~is_measured & _has_fewer_seeds(results)
    is_rejected = results["run"].map(_read_rejected(results))
    is_rejected = is_rejected.where(is_rejected.notna(), seems_rejected).astype(bool)
    is_final = ~is_rejected | _is_named(results, named) | is_of_base(results)
    if not with_checkpoints:
        is_final &= results["checkpoint"].isna()
    final = results[is_final]
    return final.assign(label_fields=find_label_fields(final))


def _is_named(results: pd.DataFrame, folders: Collection[str]) -> pd.Series:
    """Return whether the user has named the run of each result: as one of some folders, or in an evaluation that is there.

    The folder `lr_X` of a sweep names its runs. The folder of a method or of the whole sweep does not, because it has the
    runs of all learning rates. The run of an evaluation is in another place than the folders.
    """
    paths = {Path(folder).resolve() for folder in folders}
    named = {}
    for run in results["run"].unique():
        names = {Path(run)}
        if folder_of_run(run) is not None:
            names.add(Path(run).parent)
        is_outside = bool(paths) and paths.isdisjoint([Path(run), *Path(run).parents])
        named[run] = is_outside or not paths.isdisjoint(names)
    return results["run"].map(named)


def _read_rejected(results: pd.DataFrame) -> dict[str, bool]:
    """Return whether each run of a sweep only chose a learning rate, for the runs whose sweep has a summary."""
    columns = ["run", "variant", "recipe_learning_rate"]
    runs = results.reindex(columns=columns).dropna().drop_duplicates("run")
    summaries = read_summaries(runs["run"])
    rejected = {}
    for run, variant, rate in runs.itertuples(index=False):
        only_chose = only_chose_rate(summaries[run], variant, rate)
        if only_chose is not None:
            rejected[run] = only_chose
    return rejected


def describe_left_out_runs(
    results: pd.DataFrame, final: pd.DataFrame, named: Collection[str | Path] = ()
) -> list[str]:
    """Return sentences about the results that `final_results` leaves out, choices, unfinished runs, and changed code.

    Args:
        results: From `load_results`.
        final: From `final_results`.
        named: Folders that the user has named, whose runs and sweeps may have no results yet.
    """
    trained = results[results["sweep"].notna()]
    kept = final[~is_of_base(final)]  # `final` also keeps the base model's results of rejected runs
    is_final = trained["checkpoint"].isna()  # checkpoints have a sentence of their own
    left_out = {*trained.loc[is_final, "run"]} - {*kept["run"]}
    folders = sort_folders({folder_of_run(run) for run in trained["run"]}.union(find_sweeps(named)) - {None})
    lines = []
    for folder in folders:
        for method, reason in describe_unchosen(folder).items():
            own = {run for run in left_out if Path(run).is_relative_to(folder / method)}
            left_out -= own
            if own:
                runs = f"{count(len(own), 'run')} of {method} in {folder}"
                lines.append(f"Left out: {runs}, because no learning rate is chosen. {reason}".rstrip())
                lines += _describe_scores(folder, method, own)
    if left_out:
        lines.append(_describe_rejected(len(left_out)))
    lines += _describe_checkpoints(results, final)
    for folder in folders:
        is_whole = not named or any(folder.is_relative_to(Path(place).resolve()) for place in named)
        lines += _describe_choices(folder, final, is_whole)
        lines += filter(None, [describe_progress(folder), _describe_accepted(folder)])
    is_unfinished = results["metric"] == UNFINISHED  # of which `load_results` has made a sentence
    lines += describe_runs(named, {*results.loc[is_unfinished, "folder"]})
    lines += [*describe_codes(final), *_describe_edits(final), *_describe_versions(final)]
    return [*lines, *_describe_mean_gates(final)]


def _describe_choices(folder: Path, final: pd.DataFrame, is_whole: bool) -> list[str]:
    """Return lines about the learning rates that a sweep has chosen, and about shown runs of other rates.

    These runs are shown because the user has named them, or an evaluation of them.

    Args:
        folder: Folder of the sweep.
        final: Results that the report shows.
        is_whole: Whether the report is about the whole sweep. Else only the methods of its runs have a line.
    """
    summary, rejected = read_summary(folder), _read_rejected(final)
    shown, unchosen = set(), {}
    for run in map(Path, final.loc[~is_of_base(final), "run"].unique()):
        if folder_of_run(run) != folder:
            continue
        method = run.parent.parent.name
        shown.add(method)
        if rejected.get(str(run)):
            unchosen.setdefault(method, []).append(name_in_sweep(run))
    choices = describe_choices(folder, None if is_whole else shown)
    lines = []
    if choices:
        lines = [f"The sweep in {folder} has chosen:", *(f"  {choice}" for choice in choices)]
    for method, runs in unchosen.items():
        if find_chosen_rate(summary, method) is not None:
            lines.append(f"The results of {name_runs(runs)} are of a learning rate that this sweep has not chosen.")
    return lines


def _describe_rejected(number: int) -> str:
    """Return the sentences about a number of runs that only chose a learning rate."""
    scores, results = "its score", "Name its folder, too, to show its results."
    if number > 1:
        scores, results = "their scores", "Name their folders, too, to show their results."
    return f"Left out: {count(number, 'run')} that only chose a learning rate. The sweep prints {scores}. {results}"


def _describe_scores(folder: Path, method: str, runs: Collection[str]) -> list[str]:
    """Return a line with the score of each run of a method whose learning rate is not chosen, as far as they are measured."""
    select_on = find_choosing_task(read_summary(folder), method)
    if select_on is None:
        return []
    lines = []
    for run in sort_folders(map(Path, runs)):
        score = name_score(read_score(run, select_on), select_on, run)
        if score:
            lines.append(f"  {run.relative_to(folder).as_posix()}: {score}")
    return lines


def _describe_accepted(folder: Path) -> str:
    """Return a sentence about the runs of a sweep whose `--import` files changed, and which the user accepted, or ""."""
    accepted = [run.relative_to(folder).as_posix() for run in list_runs(folder) if read_accepted_imports(run)]
    if not accepted:
        return ""
    return (
        f"{count(len(accepted), 'run')} of the sweep in {folder} had other `--import` files in training, and count because of "
        f"`--accept_changed_imports`: {', '.join(accepted)}."
    )


def _describe_edits(results: pd.DataFrame) -> list[str]:
    """Return a sentence about each file of `--import` that has changed since the trainings of some results."""
    sentences = []
    for path, own in sorted(_group_by_fact(results, find_edited).items()):
        whose, folders = "their", "folders"
        if own["run"].nunique() == 1:
            whose, folders = "its", "folder"
        fix = "Train again if the change concerns them."
        if own["sweep"].notna().any():
            fix = f"The sweep counts them only with `{ACCEPT}`, or trains them again after you have removed {whose} {folders}."
        sentences.append(
            f"{path} has changed since the training of {_name_trainings(own)}, so {whose} results are those of the earlier "
            f"file. {fix}"
        )
    return sentences


def _describe_versions(results: pd.DataFrame) -> list[str]:
    """Return a sentence about trainings by several versions of this package, whose results can differ because of them."""
    trainings = _group_by_fact(results, lambda run: filter(None, [read_version(run)]))
    if len(trainings) < 2:
        return []
    places = [f"{version} trained {_name_trainings(own)}" for version, own in sorted(trainings.items())]
    return [
        f"The results are of {len(trainings)} versions of loopdropout-trainer: {'; '.join(places)}. A difference between them "
        "can come from the versions. Train again with one version if a change between them concerns the results."
    ]


def _group_by_fact(results: pd.DataFrame, read_facts: Callable[[str], Iterable[str]]) -> dict[str, pd.DataFrame]:
    """Return the results of trained models by each text that `read_facts` reads in the folders of their runs."""
    trained = results[~is_of_base(results)]
    runs_by_fact: dict[str, set[str]] = {}
    for run in trained["run"].unique():
        for fact in read_facts(run):
            runs_by_fact.setdefault(fact, set()).add(run)
    return {fact: trained[trained["run"].isin(runs)] for fact, runs in runs_by_fact.items()}


def _name_trainings(results: pd.DataFrame) -> str:
    """Return the number of runs of some results with their methods, such as "2 runs (lora)"."""
    methods = ", ".join(name_methods(results).unique())
    return f"{count(results['run'].nunique(), 'run')} ({methods})"


def _describe_mean_gates(results: pd.DataFrame) -> list[str]:
    """Return a sentence about each method whose gates have another mean than 1, of which its trainings have warned."""
    lines = []
    measured = results[results["metric"] == GATE_MEAN]
    for method, own in measured.groupby(name_methods(measured), sort=False):
        means = own.groupby("loop")["value"].mean()
        lines.append(
            f"The gates of {method} do not have the mean 1 in training (it is {name_means(means)}), but all gates are 1 in "
            "these results. So its update has another scale in them than in training."
        )
    return lines


def _describe_checkpoints(results: pd.DataFrame, final: pd.DataFrame) -> list[str]:
    """Return a sentence about the results of checkpoints that are left out, or nothing without any."""
    left_out = results[results["checkpoint"].notna() & ~results.index.isin(final.index)]
    if left_out.empty:
        return []
    adapters = left_out.reindex(columns=["adapter"])["adapter"].fillna(left_out["folder"]).unique()
    place = adapters[0] if len(adapters) == 1 else f"{len(adapters)} checkpoints such as {adapters[0]}"
    return [
        f"Left out: {count(len(left_out), 'result')} of {place}, because a checkpoint does not have the final weights. Add "
        "`--checkpoints true` to include them."
    ]


def _has_fewer_seeds(results: pd.DataFrame) -> np.ndarray:
    """Return whether each result is of a sweep and has a learning rate with fewer seeds than another one of its method."""
    keys = ["sweep", "variant", "recipe_learning_rate"]
    trained = results.reindex(columns=[*keys, "seed"]).dropna()
    num_seeds = trained.groupby(keys)["seed"].nunique()
    fewer = num_seeds[num_seeds < num_seeds.groupby(["sweep", "variant"]).transform("max")]
    return pd.MultiIndex.from_frame(results.reindex(columns=keys)).isin(fewer.index)
