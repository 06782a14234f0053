"""Results that do not compare, because they were measured on other problems or on other held-out examples.

A mean over seeds, and a difference between methods, need the same ones. Those of accuracies differ after another
`benchmark_limit` or a change of a benchmark's file, those of held-out losses after another setting of the data or a change of
its files, and those of diagnostics after another `num_examples`. The column `problem_set` names them for all readers.
"""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.reports.recipe_columns import read_column
from loopdropout_trainer.results.problems import SETTINGS, digest_problems, name_problems
from loopdropout_trainer.results.run_files import DIAGNOSTIC_METRICS


OTHER_LIMIT = (
    "other results of the same method are on another number of problems of the task, so they have no common mean. Evaluate "
    "all seeds with the same `benchmark_limit`."
)
OTHER_FILE = (
    "other results of the same method are on other problems of the task, so they have no common mean. The limit is the same, "
    "so the file or data set of the task has changed between the measurements. Measure all seeds again on the same one."
)
OTHER_SIZE = "the same models are also measured on the number of problems that the tables show."
OTHER_DATA = (
    "other held-out losses of the same method are on other held-out examples, or on other tokens of them, so they have no "
    "common mean. The files or data sets have changed between the trainings. Train all seeds on the same ones."
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
    """Return a name of the problems or examples of each result, which is the same for the same ones.

    It has their number, and what else `name_problems` knows. A result whose problems are not known, of an older version, has
    the most common name of its number. Results of a training have none, apart from the held-out loss.
    """
    is_loss = is_held_out_loss(results)
    counted = results[is_score(results) | results["metric"].isin(DIAGNOSTIC_METRICS) | is_loss]
    columns = counted.reindex(columns=["n", "problems", "samples", "folder", SETTINGS]).astype(object)
    if columns.loc[is_loss[counted.index], "problems"].isna().any():  # of an older version, or of a stream
        columns[SETTINGS] = _describe_settings(counted[is_loss[counted.index]])
    names = columns["n"].map("{:g}".format, na_action="ignore").astype(object)
    kinds = counted["metric"].where(is_score(counted), "loss")  # all diagnostics of a task are on the same examples
    for _, rows in columns.groupby([counted["task"], kinds, "n"], dropna=False):
        known = pd.Series(name_problems(rows.to_dict("records")), rows.index, dtype=object)
        if known.notna().any():
            names[rows.index] = names[rows.index].fillna("?") + " " + known.fillna(known.mode()[0])
    return _count_streams(names, columns).reindex(results.index)


def _describe_settings(losses: pd.DataFrame) -> pd.Series:
    """Return a digest of the settings of each held-out loss that decide about its tokens, or None without any."""
    fields = [field for field in sorted(HELD_OUT_FIELDS) if f"recipe_{field}" in losses]
    settings = losses.filter(regex="^recipe_")  # without the method, so that the base model has defaults, too
    values = pd.DataFrame(index=losses.index)
    for field in fields:
        values[field] = read_column(settings, f"recipe_{field}").astype(object)
    has_own_files = read_column(settings, "recipe_eval_files").notna()
    of_training = [field for field in fields if field in TRAIN_FIELDS]
    values.loc[has_own_files, of_training] = None
    texts = pd.Series(None, losses.index, dtype=object)
    for place in losses.index[settings.notna().any(axis=1)]:
        texts[place] = digest_problems([(values.loc[place].map(str).to_dict(), None)])
    return texts


def _count_streams(names: pd.Series, columns: pd.DataFrame) -> pd.Series:
    """Return the names, where a loss without a number of examples, as of a stream, has the name of one with equal settings."""
    streamed = columns[columns["n"].isna() & columns[SETTINGS].notna()]
    for place, settings in streamed[SETTINGS].items():
        alike = names[(columns[SETTINGS] == settings) & columns["n"].notna()]
        if len(alike):
            names[place] = alike.mode()[0]
    return names


def is_held_out_loss(results: pd.DataFrame) -> pd.Series:
    """Return whether each result is the held-out loss of a training, or that of the base model on the same examples."""
    return (results["task"] == "training") & (results["metric"] == "eval_loss")


def is_score(results: pd.DataFrame) -> pd.Series:
    """Return whether each result is a score on the problems of a task."""
    return (results["task"] != "training") & ~results["metric"].isin(DIAGNOSTIC_METRICS)


def find_other_problems(results: pd.DataFrame, ignored: Collection[str]) -> pd.Series:
    """Return the reason why each result is left out of means, because it is on other problems than the other seeds, or "".

    The results stay whose problems most results of the task have, also those of other methods, so that methods can be
    compared. Of equally many, those on more problems stay, and then the last ones. Diagnostics all stay.

    Args:
        results: Results of a frame of `load_results`, with the column `problem_set`.
        ignored: Columns in which the results of one mean may differ.
    """
    reasons = pd.Series("", results.index, dtype=object)
    # Tables of diagnostics have a part for each set of examples.
    counted = results[(is_score(results) | is_held_out_loss(results)) & results["problem_set"].notna()]
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
        if is_held_out_loss(others).all():
            reasons[others.index] = OTHER_DATA
            continue
        is_limited = (others["n"] != kept["n"]) & _have_other_limit(others, kept)
        reasons[others.index[is_limited]] = OTHER_LIMIT
        has_kept = others["run"].isin(rows.loc[rows["problem_set"] == kept["problem_set"], "run"])
        reasons[others.index[is_limited & has_kept]] = OTHER_SIZE
    return reasons


def _have_other_limit(results: pd.DataFrame, kept: pd.Series) -> pd.Series:
    """Return whether the `benchmark_limit` of each result is not that of the kept one."""
    limits = results.reindex(columns=["recipe_benchmark_limit"])["recipe_benchmark_limit"].fillna(0)
    limit = kept.get("recipe_benchmark_limit")
    return limits != (0 if pd.isna(limit) else limit)


def are_on_other_problems(results: pd.DataFrame) -> bool:
    """Return whether results of one metric are known to be on different problems of a task, or on other held-out examples.

    Results of two tasks or metrics are not compared by their problems, because a difference between them is wanted.
    """
    if results["metric"].nunique() != 1 or results["task"].nunique() != 1:
        return False
    return results["problem_set"].nunique() > 1
