"""Results of trainings with several versions of the user's code: a file of `--import` that changed between two runs.

Another code can give other gates or other data, so such results have no common mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from loopdropout_trainer.results.imported_code import code_of
from loopdropout_trainer.results.run_files import is_of_base, read_run
from loopdropout_trainer.results.sweep_folder import ACCEPT
from loopdropout_trainer.settings.recipe_folders import sort_folders


def number_codes(results: pd.DataFrame) -> pd.Series:
    """Return the number of the code of each result's training, in the order of their runs, from 1.

    Only the methods whose trainings have several codes have numbers, which are the same for all methods. The code of a run
    without `imports` in its `run.json`, such as a training in Python, is not known, so it has no number.

    Args:
        results: Results with the columns `run` and `method`.
    """
    trained = results[~is_of_base(results)]
    pairs = []
    for folder in sort_folders(map(Path, trained["run"].unique())):
        run = str(folder)
        methods = trained.loc[trained["run"] == run, "method"].unique()
        pairs += [(run, method) for method in sorted(methods)]
    code_of_run = {run: _read_code(run) for run in trained["run"].unique()}
    codes_of_method: dict[str, set[tuple[str, ...]]] = {}
    for run, method in pairs:
        if code_of_run[run] is not None:
            codes_of_method.setdefault(method, set()).add(code_of_run[run])
    numbers: dict[tuple[str, ...], int] = {}  # by code
    numbered: dict[tuple[str, str], int] = {}  # by run and method
    for run, method in pairs:
        code = code_of_run[run]
        if code is not None and len(codes_of_method[method]) > 1:
            numbered[run, method] = numbers.setdefault(code, len(numbers) + 1)
    places = zip(results["run"], results["method"], strict=True)
    return pd.Series(pd.array([numbered.get(place) for place in places], dtype="Int64"), results.index)


def _read_code(run: str) -> tuple[str, ...] | None:
    """Return the code of a run, or None if its `run.json` is missing or does not tell it."""
    return code_of(run) if isinstance(read_run(run).get("imports"), dict) else None


def describe_codes(results: pd.DataFrame) -> list[str]:
    """Return a sentence about each method whose results have several codes, with the runs of each code.

    Args:
        results: From `load_results`, perhaps without some of them.
    """
    sentences = []
    for method, own in results[~is_of_base(results)].groupby("method", sort=False):
        if own["code"].nunique(dropna=False) == 1:
            continue
        places = [f"code {code}: {_name_runs(rows['run'].unique())}" for code, rows in own.groupby("code")]
        unknown = own.loc[own["code"].isna(), "run"].unique()
        if len(unknown):
            places.append(f"without a code, because `imports` is missing in `run.json`: {_name_runs(unknown)}")
        fix = "Train the runs of one code again."
        if own["sweep"].notna().any():
            fix += f" If the change does not concern them, the sweep counts them by `{ACCEPT}`."
        sentences.append(
            f"A file of `--import` changed between the trainings of {method}, so their results have no common mean "
            f"({'; '.join(places)}). {fix}"
        )
    return sentences


def _name_runs(runs: Iterable[str]) -> str:
    """Return the folders of runs, as seen from the present folder if they are below it."""
    names = []
    for path in sort_folders(map(Path, runs)):
        names.append(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
    return ", ".join(names)
