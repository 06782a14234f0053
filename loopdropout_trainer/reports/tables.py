"""Results as tables: means over seeds, paired differences, and the summary of all runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from loopdropout_trainer.diagnostics import (
    FEWEST_PROBLEMS,
    TOO_FEW,
    answer_decomposition,
    compare_answers,
    describe_gain,
    explain_disagreements,
)
from loopdropout_trainer.reports.comparing import EVALUATE_AGAIN
from loopdropout_trainer.reports.frames import average, select, select_accuracies, tasks_of, values_by_seed
from loopdropout_trainer.reports.labels import find_baseline, has_seeds, labelled
from loopdropout_trainer.reports.other_problems import are_on_other_problems, is_held_out_loss, is_score
from loopdropout_trainer.reports.other_settings import explain_other_settings, find_other_settings
from loopdropout_trainer.results.run_files import BASE_MODEL, DEVELOPMENT, is_of_base, read_samples
from loopdropout_trainer.terminal import format_fixed


LOSS_TITLE = "Held-out loss in nats per token, mean ± SD over seeds, and difference to LoRA"
CHOICE_TITLE = "Accuracy on the problems that chose the learning rates, in %, mean ± SD over seeds"
CHOICE_NOTE = (
    "The best of several learning rates on these problems is partly chance, so these {} are not a test of the methods."
)
CHOICE_STEP = (
    "For a test, train other seeds with one learning rate per method, or evaluate on problems that did not choose."
)
ACCURACY_TITLE = "Accuracy in %, mean ± SD over seeds, and difference to LoRA in points"
OWN_FAMILY = "Each difference is a test of its own, without correction for their number."


def explain_choice(numbers_of: str, has_test: bool) -> str:
    """Return the sentences about numbers that chose the learning rates, with the next step if there is no test yet.

    Args:
        numbers_of: "accuracies" or "losses".
        has_test: Whether trained models have accuracies on other problems.
    """
    note = CHOICE_NOTE.format(numbers_of)
    return note if has_test else f"{note} {CHOICE_STEP}"


def has_tests(results: pd.DataFrame) -> bool:
    """Return whether trained models have accuracies on problems that chose no learning rate."""
    return not is_of_base(select_accuracies(results)).all()


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


def mean_sd(values: pd.Series, decimals: int = 2) -> str:
    """Return `mean ± SD` with the sample standard deviation, or the value of a single seed."""
    return format_mean(values.mean(), values.std(), decimals)


def format_mean(mean: float, sd: float, decimals: int = 2) -> str:
    """Return `mean ± SD`, or the mean alone if the SD is NaN."""
    spread = "" if math.isnan(sd) else f" ± {format_fixed(sd, decimals)}"
    return f"{format_fixed(mean, decimals)}{spread}"


def paired_samples(ours: pd.DataFrame, other: pd.DataFrame, seed: float) -> list[list[dict]]:
    """Return the samples of both settings with one seed."""
    return [read_samples(side) for side in _of_seed(ours, other, seed)]


def _of_seed(ours: pd.DataFrame, other: pd.DataFrame, seed: float) -> list[pd.Series]:
    """Return the result of both settings with one seed."""
    return [side.drop_duplicates("seed").set_index("seed").loc[seed] for side in (ours, other)]


def paired_gains(ours: pd.DataFrame, other: pd.DataFrame, part: str | None = None) -> pd.Series:
    """Return the differences between two settings by seed, or a part of each by `answer_decomposition`."""
    gains = (average(ours) - average(other)).dropna()
    if part is None:
        return gains
    for seed in gains.index:
        rows = answer_decomposition(*paired_samples(ours, other, seed))
        gains[seed] = next(row["value"] for row in rows if row["metric"] == part)
    return gains


OVER_SEEDS, OVER_PROBLEMS = "t test over seeds", "McNemar over problems"
"""Tests of differences."""

EQUAL = "the same for each seed"
"""Text in place of the interval of a difference whose spread over seeds is not known, because all seeds have the same one."""

NOT_A_TEST = "not a test"
"""Text in place of the interval of a difference on problems that chose the learning rates."""

OTHER_PROBLEMS = "other problems"
"""Text in place of a difference between accuracies on different problems of a task, as after another `benchmark_limit`."""

OTHER_EXAMPLES = "other held-out examples"
"""Text in place of a difference between held-out losses on different examples, or on other tokens of them."""

NO_INTERVAL = (TOO_FEW, EQUAL, NOT_A_TEST)
"""Reasons why a difference has no interval and no test."""


class Gain(NamedTuple):
    """A difference between two settings.

    Attributes:
        difference: Mean difference.
        low, high: Its 95% interval, or NaN for a single seed without answers to problems.
        p: Two-sided p-value, or NaN without an interval.
        test: `OVER_SEEDS` or `OVER_PROBLEMS`, or without an interval one of `NO_INTERVAL` or "". `OTHER_PROBLEMS` or
            `OTHER_EXAMPLES` without a difference, which is NaN then.
        num_pairs: Number of seeds of the difference, which both settings have.
        unpaired: Seeds of one setting only, such as "2, 3", which the difference leaves out, or "".
    """

    difference: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    test: str = ""
    num_pairs: int = 0
    unpaired: str = ""

    def text(self, decimals: int = 1) -> str:
        """Return the difference with its interval, and whether it is not significant. "": there is no common seed."""
        if self.test in (OTHER_PROBLEMS, OTHER_EXAMPLES):
            return self.test
        if math.isnan(self.difference):
            return ""
        gain = format_fixed(self.difference, decimals, sign=True)
        if not self.test:
            return gain
        if self.test in NO_INTERVAL:
            return f"{gain}, {self.test}"
        return describe_gain(self.difference, self.low, self.high, self.p, decimals)


def compare(ours: pd.DataFrame, other: pd.DataFrame, part: str | None = None) -> Gain | None:
    """Return the difference between two settings, paired by seed, with its 95% interval (Student's t).

    The interval of a single seed is over problems. If all seeds have the same difference, there is no interval: Student's t
    would give one of width zero, as if the difference was certain. There is none either on problems that chose the learning
    rates. `part`: as in `paired_gains`.

    Returns:
        The difference, or None if the settings are the same. It is NaN if they have no common seed, or if they were measured
        on different problems of a task.
    """
    if ours.equals(other):
        return None
    gains = paired_gains(ours, other)
    unpaired = name_seeds(find_unpaired(ours, other), ", ")
    if are_on_other_problems(pd.concat([ours, other])):
        reason = OTHER_PROBLEMS if is_score(ours).all() else OTHER_EXAMPLES
        return Gain(math.nan, test=reason, num_pairs=len(gains), unpaired=unpaired)
    if part is not None:
        gains = paired_gains(ours, other, part)
    return _compare_gains(gains, ours, other, part)._replace(num_pairs=len(gains), unpaired=unpaired)


def find_unpaired(ours: pd.DataFrame, other: pd.DataFrame) -> list[float]:
    """Return the seeds of one of two settings only, which their difference leaves out."""
    return sorted({*ours["seed"].dropna()} ^ {*other["seed"].dropna()})


def _compare_gains(gains: pd.Series, ours: pd.DataFrame, other: pd.DataFrame, part: str | None) -> Gain:
    """Return the mean of differences by seed, with its interval and test, as `compare` describes them."""
    if len(gains) == 0:
        return Gain(math.nan)
    if ours["chose"].any():
        return Gain(gains.mean(), test=NOT_A_TEST)
    if len(gains) == 1:
        if part is None:
            over_problems = _compare_problems(ours, other, gains.index[0])
            if over_problems is not None:
                return over_problems
        return Gain(gains.iloc[0])
    if np.allclose(gains, gains.iloc[0], rtol=1e-9, atol=1e-9):  # apart from rounding
        return Gain(gains.mean(), test=EQUAL)
    test = stats.ttest_1samp(gains, 0)
    interval = test.confidence_interval()
    return Gain(gains.mean(), interval.low, interval.high, test.pvalue, OVER_SEEDS)


def _compare_problems(ours: pd.DataFrame, other: pd.DataFrame, seed: float) -> Gain | None:
    """Return the difference of one seed, tested over problems, or None if there are no answers to the same problems."""
    if pd.concat([ours, other])["samples"].isna().any():
        return None
    samples, others = paired_samples(ours, other, seed)
    is_of_one_task = {*ours["task"]} == {*other["task"]}
    if not samples or not others or not is_of_one_task:  # a file may be missing
        return None
    found = compare_answers(samples, others)
    if found.n < FEWEST_PROBLEMS:
        return Gain(found.gain, test=TOO_FEW)
    return Gain(found.gain, found.low, found.high, found.p, OVER_PROBLEMS)


def explain_differences(numbers: pd.DataFrame) -> list[str]:
    """Return sentences about the intervals and tests of differences, and about those without an interval, if there are any.

    Args:
        numbers: Table with the columns `NUMBERS`.
    """
    tests = numbers.loc[numbers["difference"].notna(), "test"]
    kinds, is_tested = {*tests}, tests.isin([OVER_SEEDS, OVER_PROBLEMS])
    sentences = []
    if {OVER_SEEDS, OVER_PROBLEMS} <= kinds:
        sentences.append(
            "The 95% intervals and tests are over seeds (t test), or over problems where there is one seed (McNemar's exact "
            "test)."
        )
    elif OVER_SEEDS in kinds:
        sentences.append("The 95% intervals and tests are over seeds (t test).")
    elif OVER_PROBLEMS in kinds:
        sentences.append(
            "The 95% intervals and tests are over the problems of one seed (McNemar's exact test), without the spread over "
            "seeds."
        )
    over_problems = numbers.loc[numbers["test"] == OVER_PROBLEMS, ["low", "high", "p"]]
    sentences += explain_disagreements(over_problems.itertuples(index=False))
    if is_tested.sum() > 1:
        sentences.append(OWN_FAMILY)
    if ((numbers["test"] == OVER_SEEDS) & (numbers["num_pairs"] == 2)).any():
        sentences.append("An interval over two seeds reaches 12.7 standard errors to each side, over three 4.3.")
    if "" in kinds:
        sentences.append("A difference of one seed has no interval, because the spread over seeds is not known.")
    if (numbers["test"] == OTHER_PROBLEMS).any():
        sentences.append(f"Accuracies on other problems than those of LoRA have no difference. {EVALUATE_AGAIN}")
    if (numbers["test"] == OTHER_EXAMPLES).any():
        sentences.append(
            "Losses on other held-out examples than those of LoRA, or on other tokens of them, have no difference. Train both "
            "with the same held-out examples and the same settings of the tokens that count, such as `assistant_only_loss`."
        )
    if EQUAL in kinds:
        sentences.append(f"A difference that is {EQUAL} has no interval, because its spread over seeds is not known.")
    lines = [" ".join(sentences)] if sentences else []
    return [*lines, *explain_other_settings(numbers)]


def format_p(p: float) -> str:
    """Return a p-value as a text, or "" for NaN."""
    if math.isnan(p):
        return ""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


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
    return _accuracy_numbers(select_accuracies(results))


def choice_numbers(results: pd.DataFrame) -> pd.DataFrame:
    """Return the accuracies (%) on the problems that chose the learning rates of sweeps, as `accuracy_numbers` does."""
    own = results[results["chose"] & (results["metric"] == "accuracy")]
    everywhere = {name: own[name] for name in ("task", "num_loops", "checkpoint")}
    return _accuracy_numbers(select(own, everywhere))


def _accuracy_numbers(results: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of accuracies by task, recurrence depth and method."""
    accuracy = labelled(results)
    accuracy["task"] = pd.Categorical(accuracy["task"], tasks_of(accuracy))
    lines = []
    for (task, depth), part in accuracy.groupby(["task", "num_loops"], observed=True):
        lines += [{"task": task, "K": f"{depth:g}", **line} for line in _compare_methods(part)]
    columns = ["task", "K", "method", "num_problems", *NUMBERS, "other_settings"]
    return pd.DataFrame(lines, columns=columns).set_index(["task", "K", "method"])


def _compare_methods(results: pd.DataFrame) -> list[dict[str, Any]]:
    """Return `method`, the columns `NUMBERS` and `other_settings` of each method, from results of `labelled`.

    The results measure the same.

    Results that chose the learning rates have no differences: they would look like tests, but the best of several candidates
    is partly chance.
    """
    lines = []
    for label, ours in results.groupby("label", sort=False):
        line = {
            "method": label,
            **mean_numbers(average(ours)),
            "num_problems": ours["n"].iloc[0],  # `average` lets none differ
        }
        baseline = find_baseline(ours, results)
        is_reference = ours["method"].iloc[0] in ("LoRA", BASE_MODEL)
        if baseline is not None and not is_reference and not ours["chose"].any():
            gain = compare(ours, baseline)
            if gain is not None:
                line.update(gain._asdict(), other_settings=find_other_settings(ours, baseline))
        lines.append(line)
    return lines


COSTS = {
    "trainable_parameters": "trained parameters",
    "train_seconds": "training in s",
    "tokens_per_second": "tokens per s",
    "peak_memory_gb": "peak memory in GB",
}
"""Costs of a training, and their printed heads."""


def cost_numbers(costs: pd.DataFrame) -> pd.DataFrame:
    """Return the mean costs of a training and `num_seeds` by method, from the results with the metrics `COSTS`."""
    rows = labelled(costs)
    lines = []
    for label, own in rows.groupby("label", sort=False):
        line = {"method": label}
        for name in COSTS:
            if name in {*costs["metric"]}:
                line[name] = values_by_seed(own[own["metric"] == name]).mean()
        lines.append({**line, "num_seeds": own["seed"].nunique()})
    return pd.DataFrame(lines).set_index("method")


def make_cost_table(numbers: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return the title and the texts of the numbers of `cost_numbers`."""
    texts = numbers.drop(columns="num_seeds").apply(_format_costs)
    title = "Costs of the training"
    if numbers["num_seeds"].max() > 1:
        title += ", mean over seeds"
    return add_seeds(title, texts.fillna("–").rename(columns=COSTS), numbers["num_seeds"])


def add_seeds(title: str, texts: pd.DataFrame, num_seeds: pd.Series) -> tuple[str, pd.DataFrame]:
    """Return a table with the column `seeds` if its methods have different numbers of seeds, else with it in the title.

    All tables over seeds have them from here. The seeds of the base model count by `has_seeds`.

    Args:
        title: Title, whose words "over seeds" get the number of seeds if it is the same for all methods.
        texts: Texts by line. The index has the level `method`.
        num_seeds: Numbers of seeds, by the index of `texts` and perhaps by further places in each line.
    """
    lines = num_seeds.groupby([*texts.index.names], sort=False, observed=True).agg(["min", "max"])
    counts = []
    for line in texts.index:
        least, most = lines.loc[line, "min"], lines.loc[line, "max"]
        counts.append(f"{least:.0f}" if least == most else f"{least:.0f} to {most:.0f}")
    is_counted = has_seeds(texts.index.get_level_values("method"))
    seeds = pd.Series(counts, texts.index, dtype=object).where(is_counted, "")
    different = seeds[is_counted].unique()
    if len(different) > 1:  # as after a failed run
        return title, texts.assign(seeds=seeds)
    if len(different) == 1:  # none if only the base model has results
        title = title.replace("over seeds", f"over {different[0]} seeds")
    return title, texts


def _format_costs(costs: pd.Series) -> pd.Series:
    """Return the costs of a column with two decimals, or without any if all of them are whole numbers."""
    rounded = costs.round(2)
    decimals = 0 if (rounded.dropna() % 1 == 0).all() else 2
    return rounded.map(f"{{:.{decimals}f}}".format, na_action="ignore")


def loss_numbers(results: pd.DataFrame) -> pd.DataFrame:
    """Return the held-out losses of trainings by method in the columns `NUMBERS`, and differences to LoRA, paired by seed.

    The column `chose` has whether they chose the learning rates, and then they have no differences. `seeds` has the seeds.
    """
    losses = labelled(results[is_held_out_loss(results) & (results["other_problems"] == "")])
    # The base model has one loss on the same examples, which batches of another size round in another way.
    of_base = is_of_base(losses)
    if losses.loc[of_base, "num_loops"].nunique() > 1:  # of trainings at several depths
        losses.loc[of_base, "label"] += losses.loc[of_base, "num_loops"].map(", K = {:g}".format)
    losses.loc[of_base, "value"] = losses[of_base].groupby("label")["value"].transform("first")
    numbers = pd.DataFrame(_compare_methods(losses), columns=["method", *NUMBERS, "other_settings"])
    numbers = numbers.set_index("method")
    by_label = losses.groupby("label")
    seeds = by_label["seed"].agg(partial(name_seeds, separator=", "))
    return numbers.assign(chose=by_label["chose"].any(), seeds=seeds)


def loss_table(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of `loss_numbers` as texts."""
    return _format_numbers(numbers, "loss", decimals=4, gain_decimals=4)


def accuracy_table(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of `accuracy_numbers` as texts."""
    return _format_numbers(numbers, "accuracy", decimals=2, gain_decimals=1)


def name_seeds(numbers: Iterable[float], separator: str = " or ") -> str:
    """Return different seeds, or numbers of them, in ascending order, such as "2 or 3". Missing ones do not count."""
    return separator.join(f"{number:.0f}" for number in sorted({*pd.Series(numbers, dtype=float).dropna()}))


def _format_numbers(numbers: pd.DataFrame, title: str, decimals: int, gain_decimals: int) -> pd.DataFrame:
    """Return numbers as texts: mean ± SD over seeds, the difference to LoRA, its p-value, and different numbers of seeds.

    Different numbers of problems of one task have the column `n`.
    """
    means = zip(numbers["mean"], numbers["sd"], strict=True)
    texts = {}
    if "num_problems" in numbers and numbers.groupby("task", observed=True)["num_problems"].nunique().gt(1).any():
        texts["n"] = numbers["num_problems"].map("{:.0f}".format)
    texts[title] = [format_mean(mean, sd, decimals) for mean, sd in means]
    gains = []
    for row in numbers[[*Gain.__annotations__]].itertuples(index=False):
        gains.append(Gain(*row).text(gain_decimals))
    if any(gains):
        texts["minus LoRA"] = gains
    if numbers["p"].notna().any():  # a difference of one seed, or the same for each seed, has no test
        texts["p"] = numbers["p"].map(format_p)
    _, table = add_seeds("", pd.DataFrame(texts, numbers.index), numbers["num_seeds"])
    return table


def split_reductions(results: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the loss reductions with the adapter in one loop only, in groups that were measured on the same examples.

    Returns:
        The results by a description of their examples. The group with the most results is the first one.
    """
    reductions = results[results["metric"] == "loss_reduction"]
    groups = {}
    for (task, _, depth), rows in reductions.groupby(["task", "problem_set", "num_loops"], sort=False, dropna=False):
        groups[f"{name_examples(task, rows, reductions)} at K = {depth:g}"] = rows
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def name_examples(task: str, rows: pd.DataFrame, all_rows: pd.DataFrame | None = None) -> str:
    """Return the examples that losses were measured on, with their number of target tokens.

    Args:
        task: Task of the losses.
        rows: The losses.
        all_rows: Losses of all tables. Of several sets of equally many tokens, the later ones have a number.
    """
    examples = "held-out examples" if task == DEVELOPMENT else f"reference solutions of {task}"
    sizes = " or ".join(f"{n:,.0f}" for n in sorted({*rows["n"]}))  # tokenizers differ
    if all_rows is not None:
        alike = all_rows[(all_rows["task"] == task) & all_rows["n"].isin(rows["n"])]
        sets = [*alike["problem_set"].dropna().unique(), None]
        number = 1 + sets.index(rows["problem_set"].iloc[0]) if rows["problem_set"].notna().all() else 1
        if number > 1:
            examples += f", set {number}"
    return f"{examples} ({sizes} tokens)"


def spread_places(numbers: pd.DataFrame, decimals: int) -> pd.DataFrame:
    """Return numbers as texts, mean ± SD with one column for each place in ascending order.

    Args:
        numbers: Columns `mean`, `sd` and `num_seeds` by `method` and by a place.
        decimals: Digits after the decimal point.
    """
    texts = numbers.apply(lambda row: format_mean(row["mean"], row["sd"], decimals), axis=1)
    table = texts.unstack().reindex(numbers.index.get_level_values("method").unique())
    return table.fillna("").rename_axis(columns=None)
