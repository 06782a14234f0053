"""The results of runs as a data frame: loading, selection, names and means over seeds."""

# Columns of results.jsonl that the tables, figures, the summary, sweep.py and docs/replication filter on. Every result has
#   metric, value, unit, task, method, seed, step, num_loops, gates, n
# with these values:
#   method     title of the rule ("LoRA", "Loop Dropout", "LoRA+", "rsLoRA", "CoTo", "Input dropout", ...) or "base model"
#   num_loops  loops that ran in the measurement (results of the training itself: the depth of the training)
#   gates      "unit", "none" (no adapter), "loop 1" ... "loop K" (only this loop has the adapter), else "1-1-0-0";
#              train_loss: "drawn" (those of the rule) if the rule draws gates
#   loop       (optional) the only active loop of gates "loop t", or the loop that is read out
#   group      (optional) subset of a task, for metric "accuracy_by_<column>": "Algebra", "1", ...
#   samples    (optional) file in the folder of the result with one line per problem, in the order of the problems, with the
#              columns `correct` (0 to 1) and `answered` (1 if an answer was extracted), for paired intervals
#   adapter    (optional) folder of the training, if the result is stored elsewhere; its recipe.yaml gives `recipe_*`
#
#   task                               metric
#   metamath_gsm8k, metamath_math500   accuracy (%), missing (% of completions without an answer), accuracy_by_subject,
#                                      accuracy_by_level
#   gsm8k, gsm8k_platinum, gsm_plus_mini, arithmetic_*, development, mmlu, bbh, truthfulqa_mc2, humaneval, humaneval_plus,
#   mbpp, mbpp_plus, ifeval_strict, ifeval_loose, ...     accuracy (%): one task name for each headline number
#                                      (arithmetic_*: also accuracy_by_num_steps)
#   training                           train_loss and eval_loss (nats), examples, packed_rows, trainable_parameters,
#                                      num_tokens, train_seconds, step_seconds, tokens_per_second, peak_memory_gb, and of
#                                      GRPO reward_first, reward_last
#   of the diagnostics (task: "development" for held-out examples, or the name of a task):
#     single loop                      loss (nats) and loss_reduction (%) with gates "loop t" and loop t, or with gates
#                                      "unit"; frozen loss: metric loss, gates "none", method "base model"
#     readouts                         readout_loss (nats) and readout_token_accuracy, loop t
#     depth matrix                     depth_loss (nats) and depth_token_accuracy, of each num_loops
#     curvature                        curvature (nats), loop t, and curvature_term (nats)
#
# From recipe.yaml: recipe_learning_rate, recipe_lora_r, recipe_num_loops, recipe_model_name_or_path, recipe_rule, recipe_p,
# recipe_run_name ("SWEEP/METHOD/lr_X/seed_S" for a run of a sweep, which gives the columns `sweep` and `variant`).

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from loopdropout_trainer.errors import UserError, count
from loopdropout_trainer.files import checkpoint_step, is_checkpoint
from loopdropout_trainer.reports.base_names import NAME as BASE_NAME
from loopdropout_trainer.reports.base_names import unify_base_names, unify_base_settings
from loopdropout_trainer.reports.other_problems import (
    HELD_OUT_FIELDS,
    OTHER_DATA,
    OTHER_FILE,
    OTHER_LIMIT,
    OTHER_SIZE,
    find_other_problems,
    name_problem_sets,
)
from loopdropout_trainer.reports.progress import advise_measuring
from loopdropout_trainer.reports.recipe_columns import read_column
from loopdropout_trainer.reports.result_choice import (
    describe_choice_reason,
    split_choices,
    split_copies,
    split_repeated,
    split_replaced,
)
from loopdropout_trainer.reports.result_codes import number_codes
from loopdropout_trainer.reports.unfinished import read_unfinished
from loopdropout_trainer.results.run_files import (
    COLUMNS,
    DEVELOPMENT,
    DRAWN,
    RESULTS_FILE,
    is_of_base,
    is_of_training,
    read_recipe,
    read_results,
)
from loopdropout_trainer.results.sweep_folder import RUN_NAME, find_choosing_task, read_summaries
from loopdropout_trainer.settings.arguments import names_of


NO_EFFECT = names_of("never", "repetition", "monitoring", "measurement", "output") | {
    "adapter",
    "gates",
    "benchmark_limit",
}
"""Fields of recipes in which the results of one mean may differ. The column `n` of the results tells the effect of the last
one, and the two before it are columns of the results as well."""
IGNORED = {
    "value",
    "seed",
    "step",  # of the last or the best weights of a training. Its other weights have a number of a checkpoint.
    "folder",
    "run",
    "adapter",
    "training",
    "trained_loops",  # `recipe_num_loops` tells two depths of training apart (`_name_depths`). The base model has none.
    "samples",
    "limit",
    "chose",
    "num_sweeps",
    "label_fields",
    "problems",
    "other_problems",
    *(f"recipe_{name}" for name in NO_EFFECT),
}
"""Columns in which the results of one mean may differ."""

OF_BASE = {f"recipe_{name}" for name in ("model_name_or_path", "model_revision", "chat_template", "benchmark_limit")}
"""Settings that a result of the base model depends on."""

OF_BASE_LOSS = OF_BASE | {f"recipe_{name}" for name in (*HELD_OUT_FIELDS, "num_train_examples", "dtype")}
"""Settings that the held-out loss of the base model depends on."""


def load_results(*folders: str | Path) -> pd.DataFrame:
    """Return all results below the folders, with the columns that the comment at the top of this file lists.

    Further columns are `trained_loops` (depth of the training), `sweep` and `variant` (name of the method in the sweep),
    `checkpoint` (its step, if a checkpoint was measured), `code` (`number_codes`), `chose` (`_find_choosing`), `num_sweeps`
    (number of sweeps of all results), `problem_set` (`name_problem_sets`), and `other_problems` (`find_other_problems`), why
    `select` leaves a result out, or "".

    Four kinds of results are left out: those that a copy of a run's folder has again, those that repeat a measurement of a
    training itself, losses that only served the choice of a learning rate, and those of weights that a later training
    replaced. `attrs["left_out"]` has a line about each kind, or is "".

    If no training has results, those that have not ended have one result each, `unfinished_at`, for their losses. A line of
    `attrs["left_out"]` says so.

    Raises:
        UserError: if there are no results.
    """
    rows, copied = split_copies(read_results(*folders))
    unfinished = []
    if not any(map(is_of_training, rows)):
        further, unfinished = read_unfinished(folders)
        rows += further
    if not rows:
        raise UserError(f"There are no results below {', '.join(map(str, folders))}. {advise_measuring(folders)}")
    _set_runs(rows)
    rows, replaced = split_replaced(rows)
    rows, of_choice = split_choices(rows)
    rows, repeated = split_repeated(rows)
    results = _make_frame(rows)
    others = {reason: rows.to_dict("records") for reason, rows in results.groupby("other_problems")}
    because_of_choice = describe_choice_reason(of_choice, rows)
    left_out = describe_left_out_results(
        {
            COPIED: copied,
            because_of_choice: of_choice,
            REPEATED: repeated,
            REPLACED: replaced,
            OTHER_LIMIT: others.get(OTHER_LIMIT, []),
            OTHER_SIZE: others.get(OTHER_SIZE, []),
            OTHER_FILE: others.get(OTHER_FILE, []),
            OTHER_DATA: others.get(OTHER_DATA, []),
        }
    )
    results.attrs["left_out"] = "\n".join(filter(None, [*unfinished, left_out]))
    return results


def _set_runs(rows: Sequence[dict[str, Any]]) -> None:
    """Give each result the column `run`, the folder of its training, and the columns `recipe_*` of that training."""
    runs = {}
    for row in rows:
        if row["task"] == "training" and row.get("training"):
            runs[row["training"]] = row["folder"]
    read_once, resolve_once = cache(read_recipe), cache(_resolve)  # a run can have thousands of results
    for row in rows:
        row["run"] = resolve_once(training_folder(row, runs))
        _move_checkpoint(row, runs)
        _set_recipe(row, read_once)
    unify_base_names(rows)
    unify_base_settings(rows, OF_BASE_LOSS - OF_BASE - {"recipe_dtype"})


def _move_checkpoint(row: dict[str, Any], runs: dict[str, str]) -> None:
    """Let a result of a checkpoint name its place in the folder of its run, which may have been moved or copied since.

    Args:
        row: Result with the column `run`.
        runs: Folders of the loaded runs by the identifier of their training.
    """
    adapter = row.get("adapter")
    if adapter and row.get("training") in runs and is_checkpoint(adapter):
        row["adapter"] = str(Path(row["run"], Path(adapter).name))


def _make_frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the results that are not left out as a data frame, with the columns that follow from several results."""
    results = _keep_texts_together(pd.DataFrame(rows).map(_as_cell))
    named = ("loop", "group", "readout", "samples", "limit", "recipe_run_name")  # which may be missing
    columns = [*COLUMNS, *named, *results]
    results = results.reindex(columns=list(dict.fromkeys(columns)))
    names = results["recipe_run_name"].astype(str).str.extract(RUN_NAME)  # `sweep` and `variant`
    depths = results[results["task"] == "training"].groupby("run")["num_loops"].first()  # K of each training
    results = results.assign(**names, trained_loops=_find_trained_loops(results, depths))
    results["checkpoint"] = pd.array([_find_checkpoint(row) for row in rows], dtype="Int64")
    results["recipe_num_loops"] = _name_depths(results, depths)
    results["chose"] = _find_choosing(results)
    results["code"] = number_codes(results)
    results["num_sweeps"] = results["sweep"].nunique()
    results["problem_set"] = name_problem_sets(results)
    results["other_problems"] = find_other_problems(results, IGNORED)
    return _keep_texts_together(results)


def _keep_texts_together(results: pd.DataFrame) -> pd.DataFrame:
    """Return the same table with its columns of texts in one block of memory, as the numbers are.

    Reports select rows thousands of times. pandas 3 has a block for each column of texts, with which they take twice as long.
    """
    texts = [name for name, dtype in results.dtypes.items() if pd.api.types.is_string_dtype(dtype)]
    return results.astype(dict.fromkeys(texts, object)).copy()  # `copy` joins the blocks


def _find_checkpoint(row: dict[str, Any]) -> int | None:
    """Return the step of the checkpoint that a result was measured on, or None for final weights and for the base model.

    The column `adapter` of a base model's result is the checkpoint that `evaluate` has measured next to it.
    """
    if is_of_base(row):
        return None
    return checkpoint_step(row.get("adapter") or row["folder"])


def _find_trained_loops(results: pd.DataFrame, depths: pd.Series) -> pd.Series:
    """Return the depth of the training of each result, or that of the measurement if the training is not loaded.

    The base model is measured before the training, which may have failed since, or not have begun. So its results in a folder
    without a training have the depth of the other trainings over it. If these have several depths, a result at one of them
    has its own.

    Args:
        results: Results with the column `run`.
        depths: Depth of each loaded training, by its folder.
    """
    trained_loops = results["run"].map(depths)
    is_alone = is_of_base(results) & trained_loops.isna()
    bases = results.reindex(columns=[BASE_NAME])[BASE_NAME]
    for _, own_loops in trained_loops.groupby(bases, dropna=False):
        known = own_loops.dropna().unique()
        if len(known):
            alone = results.loc[own_loops.index[is_alone[own_loops.index]], "num_loops"]
            trained_loops[alone.index] = alone.where(alone.isin(known), known[0])
    return trained_loops.fillna(results["num_loops"])


def _name_depths(results: pd.DataFrame, depths: pd.Series) -> pd.Series:
    """Return `recipe_num_loops` of each result, or the depth of its training if the recipes of the trainings do not agree.

    A recipe without `num_loops` trains at the model's own depth, which can be equal to the one that another recipe names.

    Args:
        results: Results with the column `trained_loops`.
        depths: Depth of each loaded training, by its folder.
    """
    in_recipes = results.reindex(columns=["recipe_num_loops"])["recipe_num_loops"]
    is_trained = results["run"].isin(depths.index) & ~is_of_base(results)
    if depths.nunique() <= 1 and in_recipes[is_trained].nunique(dropna=False) <= 1:
        return in_recipes  # as well of results whose training is not loaded, so that its depth is not known
    return results["trained_loops"].where(is_trained)


def _as_cell(value: Any) -> Any:
    """Return a value of a result as a cell of a data frame. Lists and mappings become texts, which pandas can compare."""
    if isinstance(value, list | dict):
        return json.dumps(value)
    return value


def _find_choosing(results: pd.DataFrame) -> pd.Series:
    """Return whether each result is an accuracy or a held-out loss that the learning rates of a sweep were chosen by.

    The best of several candidates on these problems is partly chance, so their numbers are not a test.
    """
    runs = results[["run", "variant"]].dropna().drop_duplicates("run")
    summaries = read_summaries(runs["run"])
    choosing = {}  # `select_on` of the sweep of each run
    for run, variant in runs.itertuples(index=False):
        choosing[run] = find_choosing_task(summaries[run], variant)
    # The value of `select_on` that names each result: the task of an accuracy, or `eval_loss`. Others have none.
    names = pd.Series(None, results.index, dtype=object)
    is_accuracy = results["metric"] == "accuracy"
    is_held_out_loss = (results["metric"] == "eval_loss") & (results["task"] == "training")
    names[is_accuracy] = results["task"][is_accuracy]
    names[is_held_out_loss] = "eval_loss"
    of_own_sweep = names.notna() & (names == results["run"].map(choosing)) & results["variant"].notna()
    # Results of the base model are next to those of any run, so that they count for all sweeps.
    of_any_sweep = is_of_base(results) & names.isin([*filter(None, choosing.values())])
    return of_own_sweep | of_any_sweep


def _set_recipe(row: dict[str, Any], read_once: Callable[[str], dict[str, Any]]) -> None:
    """Give a result the columns `recipe_*` of its training. A result of the base model keeps those that it depends on.

    A result of `evaluate` has the `benchmark_limit` that it was measured with.

    Args:
        row: Result with the column `run`.
        read_once: `read_recipe` with a memory.
    """
    if row.get("adapter"):
        recipe = read_once(row["run"])
        if recipe:
            # The columns that the result has come from the recipe next to it, which is that of `evaluate` or `diagnose`.
            _empty_recipe(row)
            row.update({f"recipe_{name}": value for name, value in recipe.items()})
    if is_of_base(row):
        # The same result lies next to each training that it was measured with, so it must not have their settings.
        is_held_out_loss = row["metric"] == "eval_loss"
        if row["task"] == DEVELOPMENT:
            is_held_out_loss = row["metric"] in ("loss", "depth_loss", "readout_loss")
        _empty_recipe(row, kept=OF_BASE_LOSS if is_held_out_loss else OF_BASE)
    if "limit" in row:  # of `evaluate`, whose recipe in the folder has the limit of the first evaluation there
        row["recipe_benchmark_limit"] = row["limit"]


def _empty_recipe(row: dict[str, Any], kept: Collection[str] = ()) -> None:
    """Set the columns `recipe_*` of a result to None, except for some."""
    for name in row:
        if name.startswith("recipe_") and name not in kept:
            row[name] = None


COPIED = (
    "they are those of the same trainings in another folder, of which this is a copy, so that each result counts once."
)
REPEATED = (
    "the trainings measured the same themselves, perhaps on other examples, so that the tables compare all trainings on the "
    "same ones. The numbers are in results.jsonl there."
)
REPLACED = "later trainings replaced the measured weights. Measure the present ones again."


def describe_left_out_results(left_out: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line about the results that are left out for each reason, or "" if there are none."""
    lines = []
    for reason, rows in left_out.items():
        if rows:
            folders = [*dict.fromkeys(row["folder"] for row in rows)]
            place = folders[0] if len(folders) == 1 else f"{len(folders):,} folders such as {folders[0]}"
            lines.append(f"Left out: {count(len(rows), 'result')} in {place}, because {reason}")
    return "\n".join(lines)


def _resolve(folder: str) -> str:
    """Return the absolute path of a folder, without links."""
    return str(Path(folder).resolve())


def training_folder(row: dict[str, Any], runs: dict[str, str]) -> str:
    """Return the folder of the training of a result, as the results name it.

    A result that was measured elsewhere names its training by an identifier, which finds the run also after it was moved.
    Older results have the path of the adapter only.

    Args:
        row: Result.
        runs: Folders of the loaded runs by the identifier of their training.
    """
    if row.get("training") in runs:
        return runs[row["training"]]
    return row.get("adapter") or row["folder"]


def select(results: pd.DataFrame, wanted: dict) -> pd.DataFrame:
    """Return the results whose columns have the wanted values, or one of a list of values (`read_column`).

    Without `gates` and `loop` the gates are one, or those of a training loss. Without `num_loops` and `loop` the depth is the
    depth of the training. Without `checkpoint` the weights are the final ones, and without `readout` the last loop is read
    out. Without `task`, accuracies on problems that chose a learning rate are left out, and without `n` or `problem_set`,
    those on other problems than the other seeds (`find_other_problems`). A `method` is named as in `has_method`.
    """
    is_wanted = np.full(len(results), True)
    for name, value in wanted.items():
        is_wanted &= _has_value(results, name, value)
    if not wanted.keys() & {"gates", "loop"}:
        # Only training losses have drawn gates, and they have no others.
        is_wanted &= (results["gates"].isin(["unit", "none", DRAWN]) & results["loop"].isna()).to_numpy()
    if not wanted.keys() & {"num_loops", "loop"}:
        is_wanted &= (results["num_loops"] == results["trained_loops"]).to_numpy()
    for name in ("checkpoint", "readout"):
        if name not in wanted:
            is_wanted &= results[name].isna().to_numpy()
    if "task" not in wanted:
        is_wanted &= ~(results["chose"] & (results["metric"] == "accuracy")).to_numpy()
    if not wanted.keys() & {"n", "problem_set"}:
        is_wanted &= (results["other_problems"] == "").to_numpy()
    return results[is_wanted]  # once, because a table of results has many columns


def _has_value(results: pd.DataFrame, name: str, value: Any) -> np.ndarray:
    """Return whether a column of each result has a value, or one of a list of values. `select` describes the arguments."""
    values = read_column(results, name)
    wanted_values = pd.Series(value)
    has_value = values.isin(wanted_values).to_numpy()  # which is read-only
    if name == "method":
        for method in wanted_values:
            has_value = has_value | has_method(results, method).to_numpy()
    if wanted_values.isna().any():  # `isin` finds no missing integer
        as_saved = results.get(name, values)  # without defaults
        has_value = has_value | as_saved.isna().to_numpy()
    return has_value


def select_accuracies(results: pd.DataFrame) -> pd.DataFrame:
    """Return the accuracies of the summary: at all depths, of checkpoints and of readouts of earlier loops, too.

    Those on problems that chose a learning rate are left out, as all results with other gates.
    """
    everywhere = {name: results[name] for name in ("num_loops", "checkpoint", "readout")}
    return select(results, {"metric": "accuracy", **everywhere})


def has_method(results: pd.DataFrame, name: str) -> pd.Series:
    """Return whether each result is of a method, by the title of its rule, its name in a sweep, or the name of its rule.

    Tables print the title, for example "Late half", or the name in the sweep. Recipes have the name of the rule, such as
    `late_half`.
    """
    rules = results.reindex(columns=["recipe_rule"])["recipe_rule"]
    is_of_method = results["method"] == name
    for names in (results["variant"], rules):
        if not is_of_method.any():
            is_of_method = (names == name) & ~is_of_base(results)
    return is_of_method


def differing(results: pd.DataFrame) -> list[str]:
    """Return the columns in which the results of one mean must not differ, but do.

    A recipe that sets a field to its default does not differ from one that leaves it out.
    """
    values = results.to_numpy(dtype=object, na_value=None)  # a missing value equals another one
    is_differing = (values != values[:1]).any(axis=0)
    names = sorted({*results.columns[is_differing]} - IGNORED)
    return [name for name in names if read_column(results, name).nunique(dropna=False) > 1]


def average(rows: pd.DataFrame) -> pd.Series:
    """Return the values by seed.

    Raises:
        UserError: if the results differ in more than the seed, or a seed has two results.
    """
    differences = differing(rows)
    if differences:
        name = differences[0]
        rows = rows.assign(**{name: read_column(rows, name)})
        value = rows[name].dropna().iloc[0]
        raise UserError(
            f"`{name}` differs between {describe_results(rows, name)}, so they have no common mean. {ONE_AT_A_TIME} In a "
            f"table of your own, a cell can also select one value, such as `{name}: {value}`."
        )
    return values_by_seed(rows)


def values_by_seed(rows: pd.DataFrame) -> pd.Series:
    """Return the values by seed. Raise UserError if a seed has two results."""
    by_seed = rows[["seed", "value"]].drop_duplicates().sort_values("seed")  # a seed that is missing comes last
    repeated = by_seed["seed"][by_seed["seed"].duplicated()]
    if len(repeated):
        own = rows[rows["seed"].isin(repeated.head(1))]
        raise UserError(f"One seed has two results, {describe_results(own, 'value')}. {ONE_AT_A_TIME}")
    return by_seed.set_index("seed")["value"]


ONE_AT_A_TIME = "Report their folders one at a time, or move one of them away."


def describe_results(rows: pd.DataFrame, column: str) -> str:
    """Return the metric, the method and the task of results, and one file for each value of a column."""
    first = rows.iloc[0]
    places = []
    for value, own in rows.groupby(column, sort=False, dropna=False):
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if pd.isna(value):
            text = "not set"
        files = [*dict.fromkeys(own["folder"])]
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        places.append(f"{files[0]}/{RESULTS_FILE}{more} ({text})")
    return f"the results `{first['metric']}` of {first['method']} on {first['task']} in {' and '.join(places)}"


def tasks_of(accuracy: pd.DataFrame) -> list[str]:
    """Return the tasks of accuracies: those with own problems, then held-out examples, then those that chose a rate."""
    first = accuracy.drop_duplicates("task").set_index("task")["chose"]
    return sorted(first.index, key=lambda task: (first[task], task == DEVELOPMENT))
