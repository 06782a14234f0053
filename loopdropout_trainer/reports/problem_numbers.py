"""Accuracies of one method on several numbers of problems, as after an evaluation with another `benchmark_limit`.

A mean over seeds, and a difference between methods, need the same problems.
"""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from loopdropout_trainer.results.run_files import DIAGNOSTIC_METRICS


def find_other_numbers(results: pd.DataFrame, ignored: Collection[str]) -> pd.Series:
    """Return whether each result is left out of means, because it is on another number of problems than the other seeds.

    The results stay whose number of problems most results of the task have, also those of other methods, so that methods can
    be compared. Of equally many, those on more problems stay.

    Args:
        results: Results of a frame of `load_results`.
        ignored: Columns in which the results of one mean may differ.
    """
    is_other = pd.Series(False, results.index)
    # The results of diagnostics have a table for each number of tokens.
    counted = results[~results["metric"].isin(DIAGNOSTIC_METRICS) & results["n"].notna()]
    # Only few methods have several numbers, if any, so that the comparison of all columns is short.
    by_method = counted.groupby(["task", "metric", "method"], dropna=False)["n"]
    several = counted[by_method.transform("nunique") > 1]
    if several.empty:
        return is_other
    num_results = counted.groupby(["task", "metric", "group", "n"], dropna=False)["value"].transform("size")
    columns = [name for name in several if name not in ignored and name != "n" and several[name].notna().any()]
    for _, rows in several.groupby(columns, dropna=False):
        if rows["n"].nunique() == 1:
            continue
        ranks = pd.DataFrame({"num_results": num_results[rows.index], "n": rows["n"]})
        kept = ranks.sort_values(["num_results", "n"])["n"].iloc[-1]
        is_other[rows.index] = rows["n"] != kept
    return is_other
