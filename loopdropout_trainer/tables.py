"""Results as tables: means over seeds, paired differences, and the summary of all runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from loopdropout_trainer.arguments import names_of
from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.diagnostics import (
    FEWEST_PROBLEMS,
    TOO_FEW,
    answer_decomposition,
    compare_answers,
    describe_gain,
)
from loopdropout_trainer.errors import UserError, count
from loopdropout_trainer.files import checkpoint_step
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.results import (
    COLUMNS,
    DEVELOPMENT,
    RESULTS_FILE,
    read_recipe,
    read_results,
    read_samples,
    split_choices,
    split_repeated,
    split_replaced,
)
from loopdropout_trainer.sweeps import (
    describe_choices,
    describe_progress,
    folder_of_run,
    only_chose_rate,
    read_summary,
)


NO_EFFECT = names_of("never", "repetition", "monitoring", "measurement", "output") | {"adapter", "gates"}
"""Fields of recipes in which the results of one mean may differ. The last two are columns of the results as well."""
IGNORED = {
    "value",
    "seed",
    "step",  # of the last or the best weights of a training. Its other weights have a number of a checkpoint.
    "folder",
    "run",
    "adapter",
    "training",
    "samples",
    *(f"recipe_{name}" for name in NO_EFFECT),
}
"""Columns in which the results of one mean may differ."""

OF_BASE = {f"recipe_{name}" for name in ("model_name_or_path", "model_revision", "chat_template", "benchmark_limit")}
"""Settings that a result of the base model depends on."""

OF_BASE_LOSS = OF_BASE | {
    f"recipe_{name}"
    for name in (
        *DataArguments.__dataclass_fields__,
        "dtype",
        "max_length",
        "completion_only_loss",
        "assistant_only_loss",
    )
}
"""Settings that the held-out loss of the base model depends on."""

REDUCTION_TITLE = "Loss reduction on {}, adapter in one loop only, in %, mean ± SD over seeds"
LOSS_TITLE = "Held-out loss in nats per token, mean ± SD over seeds, and difference to LoRA"
ACCURACY_TITLE = "Accuracy in %, mean ± SD over seeds, and difference to LoRA in points"
OWN_FAMILY = "Each difference is a test of its own, without correction for their number."


def fit_title(title: str, numbers: pd.DataFrame) -> str:
    """Return the title of a table without words about seeds and differences to LoRA if its numbers have none of them.

    Args:
        title: Title of this module.
        numbers: Numbers of the table, with the column `num_seeds`, and `difference` if there are differences.
    """
    if (numbers["num_seeds"] <= 1).all():
        title = title.replace(", mean ± SD over seeds", "")
    if "difference" in numbers and numbers["difference"].isna().all():
        title = re.sub(", and difference to LoRA( in points)?", "", title)
    return title


def load_results(*folders: str | Path) -> pd.DataFrame:
    """Return all results below the folders, with the columns that the comment at the top of recipes/report.py lists.

    Further columns are `trained_loops` (depth of the training), `sweep` and `variant` (name of the method in the sweep), and
    `checkpoint` (its step, if a checkpoint was measured). Three kinds of results are left out: those that repeat a measurement
    of a training itself, losses that only served the choice of a learning rate, and those of weights that a later training
    replaced. `attrs["left_out"]` has a line about each kind, or is "".

    Raises:
        UserError: if there are no results.
    """
    rows = read_results(*folders)
    if not rows:
        raise UserError(f"There are no results below {', '.join(map(str, folders))}. Train or evaluate first.")
    runs = {row["training"]: row["folder"] for row in rows if row["task"] == "training" and row.get("training")}
    for row in rows:
        row["run"] = training_folder(row, runs)
        _set_recipe(row)
    rows, replaced = split_replaced(rows)
    rows, of_choice = split_choices(rows)
    rows, repeated = split_repeated(rows)
    for row in rows:
        row["checkpoint"] = checkpoint_step(row.get("adapter") or row["folder"])
    results = pd.DataFrame(rows).map(lambda value: json.dumps(value) if isinstance(value, (list, dict)) else value)
    columns = [*COLUMNS, "loop", "group", "samples", "recipe_run_name", *results]
    results = results.reindex(columns=list(dict.fromkeys(columns)))
    names = results["recipe_run_name"].astype(str).str.extract("^(?P<sweep>[^/]+)/(?P<variant>[^/]+)/lr_")
    depths = results[results["task"] == "training"].groupby("run")["num_loops"].first()
    results["checkpoint"] = results["checkpoint"].astype("Int64")
    results = results.assign(**names, trained_loops=results["run"].map(depths).fillna(results["num_loops"]))
    results.attrs["left_out"] = describe_left_out({OF_CHOICE: of_choice, REPEATED: repeated, REPLACED: replaced})
    return results


def _set_recipe(row: dict[str, Any]) -> None:
    """Give a result the columns `recipe_*` of its training. A result of the base model keeps those that it depends on."""
    next_to_result = [name for name in row if name.startswith("recipe_")]
    if row.get("adapter"):
        recipe = read_recipe(row["run"])
        if recipe:  # the recipe next to the result may be an evaluation's
            row.update(dict.fromkeys(next_to_result))
            row.update({f"recipe_{name}": value for name, value in recipe.items()})
    if row["method"] == "base model":
        is_held_out_loss = row["metric"] == "eval_loss" or (row["metric"], row["task"]) == ("loss", DEVELOPMENT)
        settings = OF_BASE_LOSS if is_held_out_loss else OF_BASE
        for name in row:
            if name.startswith("recipe_") and name not in settings:
                row[name] = None  # also of the training whose adapter was measured next to the base model


REPEATED = (
    "the trainings measured the same themselves, perhaps on other examples. The numbers are in results.jsonl there."
)
OF_CHOICE = "they only served the choice of a learning rate. `diagnose` has measured all seeds alike."
REPLACED = "later trainings replaced the measured weights. Measure the present ones again."


def describe_left_out(left_out: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line about the results that are left out for each reason, or "" if there are none."""
    lines = []
    for reason, rows in left_out.items():
        if rows:
            folders = [*dict.fromkeys(row["folder"] for row in rows)]
            place = folders[0] if len(folders) == 1 else f"{len(folders):,} folders such as {folders[0]}"
            lines.append(f"Left out: {count(len(rows), 'result')} in {place}, because {reason}")
    return "\n".join(lines)


def training_folder(row: dict[str, Any], runs: dict[str, str]) -> str:
    """Return the folder of the training of a result.

    A result that was measured elsewhere names its training by an identifier, which finds the run also after it was moved.
    Older results have the path of the adapter only.

    Args:
        row: Result.
        runs: Folders of the loaded runs by the identifier of their training.
    """
    if row.get("training") in runs:
        return str(Path(runs[row["training"]]).resolve())
    return str(Path(row.get("adapter") or row["folder"]).resolve())


def select(results: pd.DataFrame, wanted: dict) -> pd.DataFrame:
    """Return the results whose columns have the wanted values, or one of a list of values.

    Without `gates` and `loop` the gates are one. Without `num_loops` and `loop` the depth is the depth of the training.
    """
    is_wanted = np.full(len(results), True)
    for name, value in wanted.items():
        values = results[name] if name in results else pd.Series(np.nan, results.index)
        is_wanted &= values.isin(pd.Series(value)).to_numpy()
    if not wanted.keys() & {"gates", "loop"}:
        is_wanted &= (results["gates"].isin(["unit", "none"]) & results["loop"].isna()).to_numpy()
    if not wanted.keys() & {"num_loops", "loop"}:
        is_wanted &= (results["num_loops"] == results["trained_loops"]).to_numpy()
    return results[is_wanted]  # once, because a table of results has many columns


def differing(results: pd.DataFrame) -> list[str]:
    """Return the columns in which the results of one mean must not differ, but do."""
    columns = results.columns[~results.columns.isin([*IGNORED])]
    values = results[columns].to_numpy(dtype=object, na_value=None)  # a missing value equals another one
    return sorted(columns[(values != values[:1]).any(axis=0)])


def average(rows: pd.DataFrame) -> pd.Series:
    """Return the values by seed.

    Raises:
        UserError: if the results differ in more than the seed, or a seed has two results.
    """
    for name in differing(rows):
        raise UserError(
            f"`{name}` differs between {describe_results(rows, name)}, so they have no common mean. {ONE_AT_A_TIME}"
        )
    values = rows[["seed", "value"]].drop_duplicates().set_index("seed")["value"].sort_index()
    if values.index.has_duplicates:
        seed = values.index[values.index.duplicated()][0]
        own = rows[rows["seed"].eq(seed) | rows["seed"].isna() & pd.isna(seed)]
        raise UserError(f"One seed has two results, {describe_results(own, 'value')}. {ONE_AT_A_TIME}")
    return values


ONE_AT_A_TIME = "Report their folders one at a time, or move one of them away."


def describe_results(rows: pd.DataFrame, column: str) -> str:
    """Return the metric, the method and the task of results, and one file for each value of a column."""
    first = rows.iloc[0]
    places = []
    for value, own in rows.groupby(column, sort=False, dropna=False):
        text = f"{value:g}" if isinstance(value, float) else str(value)
        files = [*dict.fromkeys(own["folder"])]
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        places.append(f"{files[0]}/{RESULTS_FILE}{more} ({text})")
    return f"the results `{first['metric']}` of {first['method']} on {first['task']} in {' and '.join(places)}"


def mean_sd(values: pd.Series, decimals: int = 2) -> str:
    """Return `mean ± SD` with the sample standard deviation, or the value of a single seed."""
    return format_mean(values.mean(), values.std(), decimals)


def format_mean(mean: float, sd: float, decimals: int = 2) -> str:
    """Return `mean ± SD`, or the mean alone if the SD is NaN."""
    spread = "" if math.isnan(sd) else f" ± {sd:.{decimals}f}"
    return f"{mean:.{decimals}f}{spread}"


def paired_samples(ours: pd.DataFrame, other: pd.DataFrame, seed: float) -> list[list[dict]]:
    """Return the samples of both settings with one seed."""
    return [read_samples(side.drop_duplicates("seed").set_index("seed").loc[seed]) for side in (ours, other)]


def paired_gains(ours: pd.DataFrame, other: pd.DataFrame, part: str | None = None) -> pd.Series:
    """Return the differences between two settings by seed, or a part of each by `answer_decomposition`."""
    gains = (average(ours) - average(other)).dropna()
    if part is None:
        return gains
    for seed in gains.index:
        rows = answer_decomposition(*paired_samples(ours, other, seed))
        gains[seed] = next(row["value"] for row in rows if row["metric"] == part)
    return gains


EQUAL = "the same for each seed"
"""Text in place of the interval of a difference whose spread over seeds is not known, because all seeds have the same one."""

NO_INTERVAL = (TOO_FEW, EQUAL)
"""Reasons why a difference has no interval and no test."""


class Gain(NamedTuple):
    """A difference between two settings.

    Attributes:
        difference: Mean difference.
        low, high: Its 95% interval, or NaN for a single seed without answers to problems.
        p: Two-sided p-value, or NaN without an interval.
        test: "t test over seeds" or "McNemar over problems", or without an interval one of `NO_INTERVAL` or "".
    """

    difference: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    test: str = ""

    def text(self, decimals: int = 1) -> str:
        """Return the difference with its interval, and whether it is not significant."""
        gain = f"{self.difference:+.{decimals}f}"
        if not self.test:
            return gain
        if self.test in NO_INTERVAL:
            return f"{gain}, {self.test}"
        return describe_gain(self.difference, self.low, self.high, self.p, decimals)


def compare(ours: pd.DataFrame, other: pd.DataFrame, part: str | None = None) -> Gain | None:
    """Return the difference between two settings, paired by seed, with its 95% interval (Student's t).

    The interval of a single seed is over problems. If all seeds have the same difference, there is no interval: Student's t
    would give one of width zero, as if the difference was certain. `part`: as in `paired_gains`.

    Returns:
        The difference, or None if the settings have no common seed or are the same.
    """
    if ours.equals(other):
        return None
    gains = paired_gains(ours, other, part)
    if len(gains) == 1 and not part and pd.concat([ours, other])["samples"].notna().all():
        found = compare_answers(*paired_samples(ours, other, gains.index[0]))
        if found.n < FEWEST_PROBLEMS:
            return Gain(found.gain, test=TOO_FEW)
        return Gain(found.gain, found.low, found.high, found.p, "McNemar over problems")
    if len(gains) == 0:
        return None
    if len(gains) == 1:
        return Gain(gains.iloc[0])
    if np.allclose(gains, gains.iloc[0], rtol=1e-9, atol=1e-9):  # apart from rounding
        return Gain(gains.mean(), test=EQUAL)
    test = stats.ttest_1samp(gains, 0)
    interval = test.confidence_interval()
    return Gain(gains.mean(), interval.low, interval.high, test.pvalue, "t test over seeds")


def explain_equal(numbers: pd.DataFrame) -> list[str]:
    """Return a sentence about the differences without an interval that are the same for each seed, if there are any.

    Args:
        numbers: Table with the columns `NUMBERS`.
    """
    if not numbers["test"].eq(EQUAL).any():
        return []
    return [f"A difference that is {EQUAL} has no interval, because its spread over seeds is not known."]


def format_p(p: float) -> str:
    """Return a p-value as a text, or "" for NaN."""
    if math.isnan(p):
        return ""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def labelled(results: pd.DataFrame) -> pd.DataFrame:
    """Add `label` and `setting`: a name, and the settings, checkpoints or sweeps in which its results differ.

    The name in `label` is the user's name of the method in a sweep, unless that is the name of a rule, else the method. The
    name in `setting` is the method.
    """
    names = name_methods(results)
    return results.assign(label=_with_settings(names, results), setting=_with_settings(results["method"], results))


def name_methods(results: pd.DataFrame) -> pd.Series:
    """Return the user's name of each result's method in a sweep, unless that is the name of a rule, else the method.

    The rule of a run may be the user's own, whose file is not imported here.
    """
    variants, rules = results["variant"], results.reindex(columns=["recipe_rule"])["recipe_rule"]
    is_rule = variants.isin(RULES) | (variants == rules)
    is_own = variants.notna() & ~is_rule & (results["method"] != "base model")
    return variants.where(is_own, results["method"])


def _with_settings(names: pd.Series, results: pd.DataFrame) -> pd.Series:
    """Return the names of results, and the settings of their recipes or the sweeps in which the results of one name differ."""
    texts = names.copy()
    for _, rows in results.groupby(names):
        fields = differing(rows.filter(regex="^(recipe_|sweep$)"))
        if rows["checkpoint"].notna().any():  # also if all of them are of one, which is not the run's adapter
            fields.append("checkpoint")
        for field in fields:
            values = rows[field].map(str).str.replace(r"^\[([^,]*)\]$", r"\1", regex=True)  # a list of one value
            settings = f", {field.removeprefix('recipe_')} = " + values
            texts.loc[rows.index] += settings.where(rows[field].notna(), "")
    return texts


def find_baseline(setting: str, settings: Iterable[str]) -> str | None:
    """Return the first setting of LoRA that another setting has, too, such as "LoRA, lora_r = 8"."""
    own_parts = {"LoRA", *setting.split(", ")}
    for other in settings:
        parts = {*other.split(", ")}
        if "LoRA" in parts and parts <= own_parts:
            return other
    return None


def final_results(results: pd.DataFrame) -> pd.DataFrame:
    """Return the results without the runs of a sweep that only chose a learning rate.

    The summary of the sweep says which learning rate it has chosen. In a folder without one, these runs were evaluated on the
    held-out examples alone, and another run of the same method on other tasks. Without tasks, they have a learning rate with
    fewer seeds than another one of the same method.
    """
    accuracy = results[(results["metric"] == "accuracy") & results["sweep"].notna()]
    is_final = accuracy["task"] != DEVELOPMENT
    methods = pd.MultiIndex.from_frame(results[["sweep", "variant"]])
    is_measured = methods.isin(pd.MultiIndex.from_frame(accuracy.loc[is_final, ["sweep", "variant"]]))
    seems_rejected = is_measured & ~results["run"].isin(accuracy.loc[is_final, "run"])
    seems_rejected |= ~is_measured & _has_fewer_seeds(results)
    is_rejected = results["run"].map(_read_rejected(results))
    is_rejected = is_rejected.where(is_rejected.notna(), seems_rejected).astype(bool)
    return results[~is_rejected | (results["method"] == "base model")]


def _read_rejected(results: pd.DataFrame) -> dict[str, bool]:
    """Return whether each run of a sweep only chose a learning rate, for the runs whose sweep has a summary."""
    columns = ["run", "variant", "recipe_learning_rate"]
    runs = results.reindex(columns=columns).dropna().drop_duplicates("run")
    read = cache(read_summary)  # of a sweep with many runs
    rejected = {}
    for run, variant, rate in runs.itertuples(index=False):
        folder = folder_of_run(run)
        if folder is None:
            continue
        only_chose = only_chose_rate(read(folder), variant, rate)
        if only_chose is not None:
            rejected[run] = only_chose
    return rejected


def describe_rejected(results: pd.DataFrame, final: pd.DataFrame) -> list[str]:
    """Return sentences about the runs that `final_results` has left out, the chosen rates, and unfinished sweeps."""
    lines = []
    trained = results[results["sweep"].notna()]
    kept = final[final["method"] != "base model"]  # `final` also keeps the base model's results of rejected runs
    num_rejected = len({*trained["run"]} - {*kept["run"]})
    if num_rejected:
        runs = count(num_rejected, "run")
        lines.append(f"Left out: {runs} that only chose a learning rate. The sweep prints their scores.")
    for folder in sorted({folder_of_run(run) for run in trained["run"]} - {None}):
        choices = describe_choices(folder)
        if choices:
            lines += [f"The sweep in {folder} has chosen:", *(f"  {choice}" for choice in choices)]
        lines += filter(None, [describe_progress(folder)])
    return lines


def _has_fewer_seeds(results: pd.DataFrame) -> np.ndarray:
    """Return whether each result is of a sweep and has a learning rate with fewer seeds than another one of its method."""
    keys = ["sweep", "variant", "recipe_learning_rate"]
    trained = results.reindex(columns=[*keys, "seed"]).dropna()
    num_seeds = trained.groupby(keys)["seed"].nunique()
    fewer = num_seeds[num_seeds < num_seeds.groupby(["sweep", "variant"]).transform("max")]
    return pd.MultiIndex.from_frame(results.reindex(columns=keys)).isin(fewer.index)


def tasks_of(accuracy: pd.DataFrame) -> list[str]:
    """Return the tasks of accuracies, first the tasks with problems of their own, then the held-out examples."""
    return sorted(accuracy["task"].unique(), key=lambda task: task == DEVELOPMENT)


NUMBERS = ["mean", "sd", "num_seeds", *Gain.__annotations__]
"""Columns of numbers in a CSV file. `sd` is empty for a single seed."""


def mean_numbers(values: pd.Series) -> dict[str, float]:
    """Return `mean`, `sd` and `num_seeds` of the values by seed."""
    return {"mean": values.mean(), "sd": values.std(), "num_seeds": len(values)}


def accuracy_numbers(results: pd.DataFrame) -> pd.DataFrame:
    """Return accuracies (%) by task, recurrence depth and method in the columns `NUMBERS`, and differences to LoRA (points).

    The column `num_problems` has the number of problems.
    A method is compared with the LoRA whose settings it has, as far as those of LoRA differ. The 95% intervals are over seeds.
    For a single seed they are over problems.
    """
    all_depths = results["num_loops"]  # without this condition, `select` takes only the trained depth
    accuracy = labelled(select(results, {"metric": "accuracy", "num_loops": all_depths}))
    accuracy["task"] = pd.Categorical(accuracy["task"], tasks_of(accuracy))
    lines = []
    for (task, depth), part in accuracy.groupby(["task", "num_loops"], observed=True):
        lines += [{"task": task, "K": f"{depth:g}", **line} for line in _compare_methods(part)]
    return pd.DataFrame(lines, columns=["task", "K", "method", "num_problems", *NUMBERS]).set_index(
        ["task", "K", "method"]
    )


def _compare_methods(results: pd.DataFrame) -> list[dict[str, Any]]:
    """Return `method` and the columns `NUMBERS` of each method, from results of `labelled` that measure the same."""
    groups = [*results.groupby("label", sort=False)]
    by_setting: dict[str, pd.DataFrame] = {}
    for _, rows in groups:
        by_setting.setdefault(rows["setting"].iloc[0], rows)
    lines = []
    for label, ours in groups:
        gain = None
        baseline = find_baseline(ours["setting"].iloc[0], by_setting)
        if baseline is not None and ours["method"].iloc[0] not in ("LoRA", "base model"):
            gain = compare(ours, by_setting[baseline])
        line = {
            "method": label,
            **mean_numbers(average(ours)),
            "num_problems": ours["n"].iloc[0],  # `average` lets none differ
        }
        lines.append(line | (gain._asdict() if gain else {}))
    return lines


def loss_numbers(results: pd.DataFrame) -> pd.DataFrame:
    """Return the held-out losses of trainings by method in the columns `NUMBERS`, and differences to LoRA, paired by seed."""
    losses = labelled(results[(results["metric"] == "eval_loss") & (results["task"] == "training")])
    # The base model has one loss on the same examples, which batches of another size round in another way.
    of_base = losses["method"] == "base model"
    losses.loc[of_base, "value"] = losses[of_base].groupby("label")["value"].transform("first")
    losses = losses.sort_values("method", key=lambda method: method != "base model", kind="stable")
    return pd.DataFrame(_compare_methods(losses), columns=["method", *NUMBERS]).set_index("method")


def loss_table(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of `loss_numbers` as texts."""
    return _format_numbers(numbers, "loss", decimals=4, gain_decimals=4)


def accuracy_table(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of `accuracy_numbers` as texts."""
    return _format_numbers(numbers, "accuracy", decimals=2, gain_decimals=1)


def describe_sizes(numbers: pd.DataFrame) -> str:
    """Return the sentences about the problems of each task, if they are known, and the seeds of each accuracy, or "".

    Args:
        numbers: Columns `num_problems` and `num_seeds`, and `task` if there are several ones.
    """
    numbers = numbers.reset_index().dropna(subset=["num_problems"])
    if numbers.empty:
        return ""
    if "task" not in numbers:
        numbers["task"] = ""
    sizes = []
    for task, own in numbers.groupby("task", sort=False, observed=True):
        problems = " or ".join(f"{n:,.0f}" for n in sorted({*own["num_problems"]}))
        sizes.append(f"{task} {problems}".strip())
    seeds = sorted({*numbers["num_seeds"].dropna()})
    text = f"Problems: {', '.join(sizes)}."
    return f"{text} Seeds: {' or '.join(f'{number:.0f}' for number in seeds)}." if seeds else text


def _format_numbers(numbers: pd.DataFrame, title: str, decimals: int, gain_decimals: int) -> pd.DataFrame:
    """Return numbers as texts: mean ± SD over seeds, the difference to LoRA, its p-value, and different numbers of seeds."""
    gains = [Gain(*row) for row in numbers[[*Gain.__annotations__]].itertuples(index=False)]
    means = zip(numbers["mean"], numbers["sd"], strict=True)
    texts = {
        title: [format_mean(mean, sd, decimals) for mean, sd in means],
        "minus LoRA": [gain.text(gain_decimals) if math.isfinite(gain.difference) else "" for gain in gains],
        "p": numbers["p"].map(format_p),
    }
    if not any(math.isfinite(gain.difference) for gain in gains):
        texts = {title: texts[title]}
    of_base = numbers.index.get_level_values("method").str.startswith("base model")
    if numbers.loc[~of_base, "num_seeds"].nunique() > 1:  # as after a failed run
        texts["seeds"] = numbers["num_seeds"].map("{:.0f}".format).where(~of_base, "")
    return pd.DataFrame(texts, numbers.index)


def split_reductions(results: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the loss reductions with the adapter in one loop only, in groups that were measured on the same examples.

    Returns:
        The results by a description of their examples. The group with the most results is the first one.
    """
    reductions = results[results["metric"] == "loss_reduction"]
    groups = {}
    for (task, _, depth), rows in reductions.groupby(["task", "n", "num_loops"], sort=False, dropna=False):
        groups[f"{describe_examples(task, rows)} at K = {depth:g}"] = rows
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def describe_examples(task: str, rows: pd.DataFrame) -> str:
    """Return the examples that losses were measured on, with their number of target tokens."""
    examples = "held-out examples" if task == DEVELOPMENT else f"reference solutions of {task}"
    sizes = " or ".join(f"{n:,.0f}" for n in sorted({*rows["n"]}))  # tokenizers differ
    return f"{examples} ({sizes} tokens)"


def reduction_numbers(reductions: pd.DataFrame) -> pd.DataFrame:
    """Return the loss reductions (%) by method and active loop in the columns `mean`, `sd` and `num_seeds`.

    Args:
        reductions: A group of `split_reductions`.
    """
    lines = []
    for (label, gates), rows in labelled(reductions).groupby(["label", "gates"], sort=False):
        loops = "all loops" if gates == "unit" else gates
        lines.append({"method": label, "adapter in": loops, **mean_numbers(average(rows))})
    return pd.DataFrame(lines).set_index(["method", "adapter in"])


def reduction_table(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of `reduction_numbers` as texts, mean ± SD with one column for each loop, and the number of seeds."""
    texts = numbers.apply(lambda row: format_mean(row["mean"], row["sd"], 1), axis=1)
    loops = numbers.index.get_level_values("adapter in").unique()
    table = texts.unstack("adapter in").reindex(numbers.index.get_level_values("method").unique())[loops]
    seeds = numbers["num_seeds"].groupby("method", sort=False).agg(["min", "max"]).astype(int).astype(str)
    table["seeds"] = seeds["min"].where(seeds["min"] == seeds["max"], seeds["min"] + " to " + seeds["max"])
    return table.fillna("").rename_axis(columns=None)
