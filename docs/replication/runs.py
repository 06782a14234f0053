"""The numbers of finished studies: from the rows of their runs to runs.csv.gz, and from there by study and method.

runs.csv.gz has one row for each number that a run measured:

    study, method, learning_rate, seed     which run
    examples, steps, difficulty            what a map varies
    metric                                 development, accuracy, loss_reduction, frozen_loss, readout_loss, or, of a readout
                                           and the last one, same_token and overlap (the diagnostic `agreement`)
    depth, loop                            loops K at inference; the one loop that has the adapter, or whose readout it is
    value                                  in percent; losses in nats per token
    verdicts                               of an accuracy: one bit for each test problem, as hexadecimal digits
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from loopdropout_trainer.record import measurement
from loopdropout_trainer.record.measurement import BASE, Measurement, read_measurements
from loopdropout_trainer.runs.result import Result
from loopdropout_trainer.runs.summary import load_runs
from loopdropout_trainer.settings.recipe import load_recipe


RUNS = Path(__file__).with_name("runs.csv.gz")
TEST = "arithmetic_easy_test"
METHODS = {"lora": "LoRA", "loop_dropout": "Loop Dropout"}
FRESH = range(10, 20)
"""Seeds that were trained for one comparison, which other seeds had suggested."""

_KEY = ["study", "method", "learning_rate", "seed", "examples", "steps", "metric", "depth", "loop"]


# From runs to rows.


def rows_of(run: dict, folder: Path) -> Iterator[dict]:
    """Yield the rows of one run as `load_runs` gives it; `folder`: of its sweep, with the name of the study."""
    result = Result([row for row in run["result"].rows if row.method != BASE])
    num_loops = result.training.depth
    study, method = _place(run, folder.name)
    easiest, hardest = load_recipe(folder / run["folder"] / "recipe.yaml").get("arithmetic_steps") or (3, 5)
    facts = {
        "study": study,
        "method": method,
        "learning_rate": run["learning_rate"],
        "seed": run["seed"],
        "num_loops": num_loops,
        "examples": result.value("examples"),
        "steps": result.training.steps,
        "difficulty": f"{easiest} to {hardest}",
    }
    if run["selection_score"] is not None:
        yield {**facts, "metric": "development", "depth": num_loops, "value": run["selection_score"]}
    if not run["final"]:
        return
    frozen_loss = result.value("frozen_loss")
    for row in result.rows:
        if row.family == "accuracy" and row.benchmark == "development":  # of a rate more than a sweep had
            yield {**facts, "metric": "development", "depth": row.depth, "value": row.value}
        elif row.family == "accuracy":
            yield {**facts, "metric": "accuracy", "depth": row.depth, **_counted(row), "loop": row.loop}
        elif row.metric == "by_num_steps" and study == "small_lm" and row.benchmark == TEST and row.loop is None:
            yield {**facts, "metric": f"accuracy_of_{row.group}_steps", "depth": row.depth, "value": row.value}
        elif row.metric == "frozen_loss":
            yield {**facts, "metric": "frozen_loss", "value": frozen_loss}
        elif row.metric == "loss" and row.step is None:  # with the adapter in one loop, or in all
            reduction = 100 * (1 - row.value / frozen_loss)
            yield {**facts, "metric": "loss_reduction", "loop": row.loop, "value": reduction}
        elif row.metric == "readout_loss":
            yield {**facts, "metric": "readout_loss", "loop": row.loop, "value": row.value}


def _place(run: dict, study: str) -> tuple[str, str]:
    """Return the study that a run belongs to, and its method there; METHOD@PART is of a part with settings of its own."""
    method, _, part = run["method"].partition("@")
    if study == "map":
        return study, run["method"]
    if part == "second_base":
        return "two_layers", method
    if study == "small" and part not in ("", "rates"):  # `rates` adds rates to methods that other parts have
        method = f"{part}_lora" if method == "lora" else part
    if study == "small" and run["seed"] in FRESH:
        study = "fresh_seeds"
    return study, method


def _counted(row: Measurement) -> dict:
    """Return accuracy in percent, and the verdicts as hexadecimal digits, the first problem in the highest bit."""
    bits = "".join(map(str, row.verdicts))
    digits = f"{int(bits + '0' * (-len(bits) % 4), 2):0{-(-len(bits) // 4)}x}"
    return {"value": row.value, "problems": len(bits), "verdicts": digits}


def rows_of_agreement(folder: Path) -> Iterator[dict]:
    """Yield the rows of the diagnostic `agreement` in a folder of diagnoses, of the adapters of `fresh_seeds`."""
    measured, identities, _ = read_measurements(folder)
    metrics = {"same_tokens": "same_token", "overlap": "overlap"}
    for row in measured:
        if row.family == "agreement" and row.run is not None:
            training = identities[row.run]
            yield {
                "study": "fresh_seeds",
                "method": training["settings"]["rule"],
                "learning_rate": 1e-3,
                "seed": row.seed,
                "num_loops": training["loops"]["num_loops"],
                "examples": 256,
                "steps": 150,
                "difficulty": "1 to 3",
                "depth": row.depth,
                "metric": metrics[row.metric],
                "loop": row.loop,
                "value": row.value,
            }


def collect(folders: Iterable[str]) -> pd.DataFrame:
    """Return the numbers of all finished runs of some sweeps, and those of runs.csv.gz that these did not measure."""
    rows: list[dict] = []
    for folder in map(Path, folders):
        if folder.name == "diagnostics":
            rows += rows_of_agreement(folder)
            continue
        runs = {run["folder"]: run for run in load_runs(folder) if not run["diverged"]}  # some are in several parts
        for run in runs.values():
            rows += rows_of(run, folder)
    new = pd.DataFrame(rows)
    new = new.reindex(columns=new.columns.union(_KEY, sort=False)).drop_duplicates(_KEY)
    if RUNS.exists():
        old = pd.read_csv(RUNS)
        is_measured_again = _keys(old).isin(_keys(new))
        new = pd.concat([old[~is_measured_again], new])
    check_bases(new)
    return new


def check_bases(rows: pd.DataFrame) -> None:
    """Raise ValueError if the runs of a study do not begin with one base: its loss before training is theirs, too."""
    frozen = rows[rows["metric"] == "frozen_loss"]
    for (study, num_loops), losses in frozen.groupby(["study", "num_loops"])["value"]:
        if losses.max() - losses.min() > 1e-6:
            raise ValueError(
                f"The runs of {study} at {num_loops:.0f} loops have other bases: their losses before training lie between "
                f"{losses.min():.6f} and {losses.max():.6f}."
            )


def _keys(rows: pd.DataFrame) -> pd.MultiIndex:
    return pd.MultiIndex.from_frame(rows[_KEY].fillna(0))


# From rows to numbers.


class Study:
    """The rows of one study, each method at the learning rate that its development accuracy on the first seed chooses.

    `grids` holds that accuracy by method and rate. A method without any was trained at one rate.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows
        development = rows[rows["metric"] == "development"]
        first = development[development["seed"] == development.groupby("method")["seed"].transform("min")]
        self.grids = {
            method: part.groupby("learning_rate")["value"].first() for method, part in first.groupby("method")
        }
        self.rates = {method: grid.idxmax() for method, grid in self.grids.items()}  # the smaller rate of equals
        for method, part in rows.groupby("method"):
            if method not in self.rates and part["learning_rate"].nunique() == 1:
                self.rates[method] = part["learning_rate"].iloc[0]

    def edge(self, method: str) -> str | None:
        """Return `lowest` or `highest` if the chosen rate is so in its grid; None if it lies inside, or was not chosen."""
        rates = list(self.grids.get(method, pd.Series(dtype=float)).index)
        if len(rates) < 2 or self.rates[method] not in (rates[0], rates[-1]):
            return None
        return "lowest" if self.rates[method] == rates[0] else "highest"

    def select(
        self, method: str, metric: str, depth: int | None = None, loop: int | None = None, rate: float | None = None
    ) -> pd.DataFrame:
        """Return the rows of one method and metric, by seed; `depth` None: the method's own."""
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
        """Return ours - other, [seeds, problems] for accuracies, [seeds, 1] for other metrics; only seeds that both have."""
        return differences(self.select(ours, metric, **place), self.select(other, metric, **place))


def verdicts(row: pd.Series) -> np.ndarray:
    """Return which problems were solved, [problems]."""
    bits = bin(int("1" + row["verdicts"], 16))[3:]
    return np.array([bit == "1" for bit in bits[: int(row["problems"])]], dtype=float)


def differences(ours: pd.DataFrame, others: pd.DataFrame) -> np.ndarray:
    """Return the differences of two rows by seed, [seeds, problems] of accuracies, else [seeds, 1]."""
    pairs = [(ours.loc[seed], others.loc[seed]) for seed in ours.index.intersection(others.index)]
    if not pairs:
        return np.empty((0, 1))
    if pairs[0][0]["metric"] != "accuracy":
        return np.array([one["value"] - two["value"] for one, two in pairs])[:, None]
    answers = [(verdicts(one), verdicts(two)) for one, two in pairs]
    common = min(map(len, sum(answers, ())))  # a study may have asked fewer of the same problems
    return 100 * np.array([one[:common] - two[:common] for one, two in answers])


def mean_sd(rows: pd.DataFrame) -> str:
    """Return `mean ± SD` of a metric over seeds; `-` if there is none."""
    return measurement.mean_sd(rows["value"], 1) if len(rows) else "-"
