"""Collect the numbers of finished studies in runs.csv.gz, and select them by study and method.

runs.csv.gz has one row for each number that a run measured:

    study, method, learning_rate, seed     the run
    examples, steps, difficulty            the settings that a map varies
    metric                                 development, accuracy, accuracy_on_larger_numbers, loss_reduction, frozen_loss,
                                           readout_loss, and from an earlier diagnostic same_token and overlap of a
                                           readout and the last one
    depth, loop                            number of loops K at inference, and the only active loop or the readout's loop
    value                                  percent, or nats per token for losses
    verdicts                               one bit for each test problem of an accuracy, as hexadecimal digits
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

import numpy as np
import pandas as pd

from loopdropout_trainer.results.run_files import read_results


RUNS = Path(__file__).with_name("runs.csv.gz")
TEST = "arithmetic_easy_test"
METHODS = {"lora": "LoRA", "loop_dropout": "Loop Dropout"}
FRESH = range(10, 20)
"""Seeds that were trained for one comparison that other seeds had suggested."""

_KEY = ["study", "method", "learning_rate", "seed", "examples", "steps", "metric", "depth", "loop"]


# From runs to rows


def collect(folders: Iterable[str]) -> pd.DataFrame:
    """Return the numbers of the runs of some sweeps, and the numbers of runs.csv.gz that these runs did not measure."""
    new = pd.DataFrame([row for folder in folders for row in rows_of(read_results(folder))])
    new = new.reindex(columns=new.columns.union(_KEY, sort=False)).drop_duplicates(_KEY)
    if RUNS.exists():
        old = pd.read_csv(RUNS)
        is_measured_again = _keys(old).isin(_keys(new))
        new = pd.concat([old[~is_measured_again], new])
    check_bases(new)
    return new


def rows_of(results: list[dict]) -> Iterator[dict]:
    """Yield the rows of the results of a sweep."""
    for folder, rows in itertools.groupby(results, key=itemgetter("folder")):
        rows = list(rows)
        training = {row["metric"]: row for row in rows if row["task"] == "training"}
        if "examples" not in training:
            continue  # not finished
        first = training["examples"]
        sweep, method, *_ = first["recipe_run_name"].split("/")
        study, method = _place(sweep, method, first["seed"])
        easiest, hardest = first.get("recipe_arithmetic_steps") or (3, 5)
        facts = {
            "study": study,
            "method": method,
            "learning_rate": first["recipe_learning_rate"],
            "seed": first["seed"],
            "num_loops": first["num_loops"],
            "examples": first["value"],
            "steps": first["step"],
            "difficulty": f"{easiest} to {hardest}",
        }
        # A run that only chose a learning rate has losses of more batches than the others.
        if not any(row["task"] == TEST for row in rows):
            rows = [row for row in rows if row["metric"] == "accuracy"]
        yield from ({**facts, **_number(row, Path(folder))} for row in rows if _is_kept(row, study))


def _place(study: str, method: str, seed: int) -> tuple[str, str]:
    """Return the study that a run belongs to, and its method there. METHOD@NAME is a method with other settings."""
    if study in ("map", "small_lm_steps"):
        return study, method
    method, _, name = method.partition("@")
    if name == "second_base":
        return "two_layers", method
    if study == "small" and name not in ("", "rates"):  # `rates` adds rates to methods of other sweeps
        method = f"{name}_lora" if method == "lora" else name
    return ("fresh_seeds" if study == "small" and seed in FRESH else study), method


def _is_kept(row: dict, study: str) -> bool:
    if row["metric"] == "accuracy_by_num_steps":
        return study == "small_lm" and row["task"] == TEST and row["gates"] == "unit"
    is_frozen_loss = row["metric"] == "loss" and row["gates"] == "none"
    is_accuracy = row["metric"] == "accuracy" and row["gates"] != "none"
    return is_frozen_loss or is_accuracy or row["metric"] in ("loss_reduction", "readout_loss")


def _number(row: dict, folder: Path) -> dict:
    """Return metric, place and value of a result."""
    metric, value = row["metric"], row["value"]
    if metric == "accuracy_by_num_steps":
        return {"metric": f"accuracy_of_{row['group']}_steps", "depth": row["num_loops"], "value": value}
    if metric == "accuracy" and row["task"] == "development":
        return {"metric": "development", "depth": row["num_loops"], "value": value}
    if metric == "accuracy":
        metric += "_on_larger_numbers" * (row["task"] == "arithmetic_larger")
        counted = _counted(folder / row["samples"])
        return {"metric": metric, "depth": row["num_loops"], "value": value, **counted, "loop": row.get("loop")}
    return {"metric": "frozen_loss" if metric == "loss" else metric, "value": value, "loop": row.get("loop")}


def _counted(samples: Path) -> dict:
    """Return which problems were solved as hexadecimal digits, the first problem in the highest bit."""
    lines = samples.read_text(encoding="utf-8").splitlines()
    bits = "".join(f"{json.loads(line)['correct']:.0f}" for line in lines)
    digits = f"{int(bits + '0' * (-len(bits) % 4), 2):0{-(-len(bits) // 4)}x}"
    return {"problems": len(bits), "verdicts": digits}


def check_bases(rows: pd.DataFrame) -> None:
    """Raise ValueError if the runs of a study have different base models, and so different losses before training."""
    frozen = rows[rows["metric"] == "frozen_loss"]
    for (study, num_loops), losses in frozen.groupby(["study", "num_loops"])["value"]:
        if losses.max() - losses.min() > 1e-6:
            raise ValueError(
                f"The runs of {study} at {num_loops:.0f} loops must have one base model, got losses before training from "
                f"{losses.min():.6f} to {losses.max():.6f}."
            )


def _keys(rows: pd.DataFrame) -> pd.MultiIndex:
    return pd.MultiIndex.from_frame(rows[_KEY].fillna(0))


# From rows to numbers


class Study:
    """The rows of one study, with each method at the learning rate that has the best development accuracy on its first seed.

    `grids` holds this accuracy by method and learning rate. A method without it was trained at one learning rate.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows
        development = rows[rows["metric"] == "development"]
        first = development[development["seed"] == development.groupby("method")["seed"].transform("min")]
        self.grids = {
            method: part.groupby("learning_rate")["value"].first() for method, part in first.groupby("method")
        }
        self.rates = {
            method: grid.idxmax() for method, grid in self.grids.items()
        }  # the smaller one of equal learning rates
        for method, part in rows.groupby("method"):
            if method not in self.rates and part["learning_rate"].nunique() == 1:
                self.rates[method] = part["learning_rate"].iloc[0]

    def without_selection(self) -> Study:
        """Return the study without the seed that chose the learning rates, at the learning rates that it chose."""
        study = copy.copy(self)
        chose = self.rows.loc[self.rows["metric"] == "development", "seed"].min()  # NaN if no seed did
        study.rows = self.rows[self.rows["seed"] != chose]
        return study

    def edge(self, method: str) -> str | None:
        """Return `lowest` or `highest` if the chosen learning rate is at an edge of its grid, else None."""
        rates = list(self.grids.get(method, pd.Series(dtype=float)).index)
        if len(rates) < 2 or self.rates[method] not in (rates[0], rates[-1]):
            return None
        return "lowest" if self.rates[method] == rates[0] else "highest"

    def select(
        self, method: str, metric: str, depth: int | None = None, loop: int | None = None, rate: float | None = None
    ) -> pd.DataFrame:
        """Return the rows of one method and metric by seed, by default at the method's own depth and learning rate."""
        rate = self.rates.get(method) if rate is None else rate
        rows = self.rows[(self.rows["method"] == method) & (self.rows["metric"] == metric)]
        rows = rows[np.isclose(rows["learning_rate"], -1.0 if rate is None else rate)]
        if metric.startswith("accuracy") or metric == "development":
            rows = rows[rows["depth"] == (rows["num_loops"] if depth is None else depth)]
        rows = rows[rows["loop"].isna() if loop is None else rows["loop"] == loop]
        return rows.drop_duplicates("seed").set_index("seed").sort_index()

    def mean(self, method: str, metric: str = "accuracy", **place) -> str:
        """Return `mean ± SD` over seeds."""
        return mean_sd(self.select(method, metric, **place))

    def gains(self, ours: str, other: str, metric: str = "accuracy", **place) -> np.ndarray:
        """Return ours - other on the common seeds: [seeds, problems] for accuracies, [seeds, 1] for other metrics."""
        return differences(self.select(ours, metric, **place), self.select(other, metric, **place))


def verdicts(row: pd.Series) -> np.ndarray:
    """Return which problems were solved, [problems]."""
    bits = bin(int("1" + row["verdicts"], 16))[3:]
    return np.array([bit == "1" for bit in bits[: int(row["problems"])]], dtype=float)


def differences(ours: pd.DataFrame, others: pd.DataFrame) -> np.ndarray:
    """Return the differences of two rows by seed, [seeds, problems] for accuracies, else [seeds, 1]."""
    pairs = [(ours.loc[seed], others.loc[seed]) for seed in ours.index.intersection(others.index)]
    if not pairs:
        return np.empty((0, 1))
    if pairs[0][0]["metric"] not in ("accuracy", "accuracy_on_larger_numbers"):
        return np.array([one["value"] - two["value"] for one, two in pairs])[:, None]
    answers = [(verdicts(one), verdicts(two)) for one, two in pairs]
    common = min(map(len, sum(answers, ())))  # a study may have asked fewer of the same problems
    return 100 * np.array([one[:common] - two[:common] for one, two in answers])


def mean_sd(rows: pd.DataFrame) -> str:
    """Return `mean ± SD` of a metric over seeds, or `-` without a seed."""
    spread = f" ± {rows['value'].std():.1f}" if len(rows) > 1 else ""
    return f"{rows['value'].mean():.1f}{spread}" if len(rows) else "-"
