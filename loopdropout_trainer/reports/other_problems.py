"""Results that do not compare, because they were measured on other problems or on other held-out examples.

A mean over seeds, and a difference between methods, need the same ones. Those of accuracies differ after another
`benchmark_limit` or a change of a benchmark's file, and those of held-out losses after another setting of the data.
"""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.reports.recipe_columns import read_column
from loopdropout_trainer.results.problems import name_problems
from loopdropout_trainer.results.run_files import DIAGNOSTIC_METRICS


OTHER_LIMIT = (
    "other results of the same method are on another number of problems of the task, so they have no common mean. Evaluate "
    "all seeds with the same `benchmark_limit`."
)
OTHER_FILE = (
    "other results of the same method are on other problems of the task, so they have no common mean. The limit is the same, "
    "so the file or data set of the task has changed between the measurements. Measure all seeds again on the same one."
)
"""Reasons why results are left out of a mean."""


HELD_OUT_FIELDS = {
    *DataArguments.__dataclass_fields__,
    "assistant_only_loss",
    "completion_only_loss",
    "max_length",
    "chat_template",
} - {"num_train_examples"}
"""Settings that decide on which held-out tokens a training measures its loss."""

TRAIN_FIELDS = {
    "train_files",
    "datasets",
    "dataset_name",
    "dataset_config",
    "dataset_revision",
    "dataset_split",
    "split_seed",
}
"""Those of `HELD_OUT_FIELDS` that do not matter if the held-out examples have files of their own, `eval_files`."""


def name_problem_sets(results: pd.DataFrame) -> pd.Series:
    """Return a name of the problems of each result, which is the same for the same ones: their number, and what else is known.

    A result whose problems are not known, of an older version, has the most common name of its number. A result of a training
    or of a diagnostic has none: `n` counts examples or tokens.
    """
    counted = results[is_score(results) & results["n"].notna()]
    names = counted["n"].map("{:g}".format).astype(object)
    columns = counted.reindex(columns=["n", "problems", "samples", "folder"])
    for _, rows in columns.groupby([counted["task"], counted["metric"], "n"], dropna=False):
        known = pd.Series(name_problems(rows.to_dict("records")), rows.index, dtype=object)
        if known.notna().any():
            names[rows.index] += " " + known.fillna(known.mode()[0])
    return names.reindex(results.index)


def is_score(results: pd.DataFrame) -> pd.Series:
    """Return whether each result is a score on the problems of a task."""
    return (results["task"] != "training") & ~results["metric"].isin(DIAGNOSTIC_METRICS)


def find_other_problems(results: pd.DataFrame, ignored: Collection[str]) -> pd.Series:
    """Return the reason why each result is left out of means, because it is on other problems than the other seeds, or "".

    The results stay whose problems most results of the task have, also those of other methods, so that methods can be
    compared. Of equally many, those on more problems stay, and then the last ones.

    Args:
        results: Results of a frame of `load_results`, with the column `problem_set`.
        ignored: Columns in which the results of one mean may differ.
    """
    reasons = pd.Series("", results.index, dtype=object)
    counted = results[results["problem_set"].notna()]
    # Only few methods have several sets of problems, if any, so that the comparison of all columns is short.
    by_method = counted.groupby(["task", "metric", "method"], dropna=False)["problem_set"]
    several = counted[by_method.transform("nunique") > 1]
    if several.empty:
        return reasons
    num_results = counted.groupby(["task", "metric", "group", "problem_set"], dropna=False)["value"].transform("size")
    ignored = {*ignored, "n", "problem_set"}
    columns = [name for name in several if name not in ignored and several[name].notna().any()]
    for _, rows in several.groupby(columns, dropna=False):
        if rows["problem_set"].nunique() == 1:
            continue
        ranks = pd.DataFrame({"num_results": num_results[rows.index], "n": rows["n"]})
        kept = rows.loc[ranks.sort_values(["num_results", "n"], kind="stable").index[-1]]
        others = rows[rows["problem_set"] != kept["problem_set"]]
        reasons[others.index] = OTHER_FILE
        is_limited = (others["n"] != kept["n"]) & _have_other_limit(others, kept)
        reasons[others.index[is_limited]] = OTHER_LIMIT
    return reasons


def _have_other_limit(results: pd.DataFrame, kept: pd.Series) -> pd.Series:
    """Return whether the `benchmark_limit` of each result is not that of the kept one."""
    limits = results.reindex(columns=["recipe_benchmark_limit"])["recipe_benchmark_limit"].fillna(0)
    limit = kept.get("recipe_benchmark_limit")
    return limits != (0 if pd.isna(limit) else limit)


def are_on_other_held_out_examples(losses: pd.DataFrame) -> bool:
    """Return whether held-out losses of trainings are known to be of different examples, or of other tokens of them.

    The number of the examples tells it, or the settings that decide which tokens count. A result without a number, as of a
    stream, or without a recipe does not count.
    """
    if losses["n"].nunique() > 1:
        return True
    fields = HELD_OUT_FIELDS
    if read_column(losses, "recipe_eval_files").notna().all():
        fields = HELD_OUT_FIELDS - TRAIN_FIELDS
    given = [f"recipe_{field}" for field in sorted(fields) if f"recipe_{field}" in losses]
    with_recipe = losses[losses.filter(regex="^recipe_").notna().any(axis=1)]
    return any(read_column(with_recipe, name).nunique(dropna=False) > 1 for name in given)
