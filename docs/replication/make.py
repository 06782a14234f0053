"""Make the tables and figures of docs/replication.md from finished studies.

    python docs/replication/make.py collect outputs/studies/small outputs/studies/map ...   # adds runs to runs.csv.gz
    python docs/replication/make.py collect outputs/agreement/diagnostics                   # of adapters of fresh_seeds
    python docs/replication/make.py write                                                   # runs.csv.gz -> the document

`collect` keeps one row for each number that a run measured, so that every number of the document is in one small file:

    study, method, learning_rate, seed     which run
    examples, steps, epochs, min_steps ... what a map varies
    metric                                 development, accuracy, loss_reduction, frozen_loss, readout_loss, or, of a readout
                                           and the last one, same_token and overlap (the diagnostic `agreement`)
    depth, loop                            loops K at inference; the one loop that has the adapter, or whose readout it is
    value                                  in percent; losses in nats per token
    verdicts                               of an accuracy: one bit for each test problem, as hexadecimal digits

Intervals and p-values are of loopdropout_trainer/reports/statistics.py: methods are paired by seed and problem, and both are
drawn from more of their kind; where a seed gives one number, Student's t. Verdicts are corrected for their number (Holm).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from statsmodels.stats.multitest import multipletests

from loopdropout_trainer.record.measurement import BASE, Measurement, read_measurements
from loopdropout_trainer.reports.statistics import Estimate, estimate, of_numbers
from loopdropout_trainer.runs.result import Result
from loopdropout_trainer.runs.summary import load_runs
from loopdropout_trainer.settings.recipe import load_recipe


HERE = Path(__file__).parent
RUNS = HERE / "runs.csv.gz"
DOCUMENT, WHEN, README = HERE.parent / "replication.md", HERE.parent / "when.md", HERE.parents[1] / "README.md"
TEST = "arithmetic_easy_test"
FRESH = range(10, 20)
"""Seeds that were trained for one comparison, which other seeds had suggested."""


# From runs to rows.


def rows_of(run: dict, folder: Path) -> Iterator[dict]:
    """Yield the rows of one run as `load_runs` gives it; `folder`: of its sweep, with the name of the study."""
    study = folder.name
    method, _, part = run["method"].partition("@")  # a part with settings of its own: METHOD@PART
    if part == "second_base":
        study = "two_layers"
    elif study == "small" and part not in (
        "",
        "rates",
    ):  # `rates` adds learning rates to methods that other parts have
        method = f"{part}_lora" if method == "lora" else part
    elif study == "map":
        method = run["method"]
    if study == "small" and run["seed"] in FRESH:
        study = "fresh_seeds"
    result = Result([row for row in run["result"].rows if row.method != BASE])
    num_loops = result.training.depth
    easiest, hardest = load_recipe(folder / run["folder"] / "recipe.yaml").get("arithmetic_steps") or (3, 5)
    known = {
        "study": study, "method": method, "learning_rate": run["learning_rate"], "seed": run["seed"],
        "num_loops": num_loops, "examples": result.value("examples"), "steps": result.training.steps,
        "difficulty": f"{easiest} to {hardest}",
    }  # fmt: skip
    if run["selection_score"] is not None:
        yield {**known, "metric": "development", "depth": num_loops, "value": run["selection_score"]}
    if not run["final"]:
        return
    frozen = result.value("frozen_loss")
    for row in result.rows:
        if row.family == "accuracy" and row.benchmark == "development":  # of a rate more than a sweep had
            yield {**known, "metric": "development", "depth": row.depth, "value": row.value}
        elif row.family == "accuracy":
            yield {**known, "metric": "accuracy", "depth": row.depth, **counted(row), "loop": row.loop}
        elif row.metric == "by_num_steps" and study == "small_lm" and row.benchmark == TEST and row.loop is None:
            yield {**known, "metric": f"accuracy_of_{row.group}_steps", "depth": row.depth, "value": row.value}
        elif row.metric == "frozen_loss":
            yield {**known, "metric": "frozen_loss", "value": frozen}
        elif row.metric == "loss" and row.step is None:  # with the adapter in one loop, or in all
            reduction = 100 * (1 - row.value / frozen)
            yield {**known, "metric": "loss_reduction", "loop": row.loop, "value": reduction}
        elif row.metric == "readout_loss":
            yield {**known, "metric": "readout_loss", "loop": row.loop, "value": row.value}


def counted(row: Measurement) -> dict:
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
            run = identities[row.run]
            yield {"study": "fresh_seeds", "method": run["settings"]["rule"], "learning_rate": 1e-3, "seed": row.seed,
                   "num_loops": run["loops"]["num_loops"], "examples": 256, "steps": 150, "difficulty": "1 to 3",
                   "depth": row.depth, "metric": metrics[row.metric], "loop": row.loop, "value": row.value}  # fmt: skip


def collect(folders: Iterable[str]) -> pd.DataFrame:
    """Return the numbers of all finished runs of some sweeps, and those of the file that these did not measure."""
    rows = []
    for folder in map(Path, folders):
        if folder.name == "diagnostics":
            rows += rows_of_agreement(folder)
            continue
        runs = {run["folder"]: run for run in load_runs(folder) if not run["diverged"]}  # some are in several parts
        for run in runs.values():
            rows += rows_of(run, folder)
    key = ["study", "method", "learning_rate", "seed", "examples", "steps", "metric", "depth", "loop"]
    table = pd.DataFrame(rows)
    table = table.reindex(columns=table.columns.union(key, sort=False)).drop_duplicates(key)
    if RUNS.exists():
        known = pd.read_csv(RUNS)
        old, new = (pd.MultiIndex.from_frame(each[key].fillna(0)) for each in (known, table))
        is_new = old.isin(new)
        table = pd.concat([known[~is_new], table])
    return table


# From rows to numbers.


def verdicts(row: pd.Series) -> np.ndarray:
    """Return which problems were solved, [problems]."""
    bits = bin(int("1" + row["verdicts"], 16))[3:]
    return np.array([bit == "1" for bit in bits[: int(row["problems"])]], dtype=float)


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

    def of(
        self, method: str, metric: str, depth: int | None = None, loop: int | None = None, rate: float | None = None
    ):
        """Return the rows of one method and metric, by seed; `depth` None: the method's own."""
        rate = self.rates.get(method) if rate is None else rate
        rows = self.rows[(self.rows["method"] == method) & (self.rows["metric"] == metric)]
        rows = rows[np.isclose(rows["learning_rate"], -1.0 if rate is None else rate)]
        if metric.startswith("accuracy") or metric == "development":
            rows = rows[rows["depth"] == (rows["num_loops"] if depth is None else depth)]
        rows = rows[rows["loop"].isna() if loop is None else rows["loop"] == loop]
        return rows.drop_duplicates("seed").set_index("seed").sort_index()

    def gains(self, ours: str, other: str, metric: str = "accuracy", **where) -> np.ndarray:
        """Return ours - other, [seeds, problems] for accuracies, [seeds, 1] for other metrics; only seeds that both have."""
        return differences(self.of(ours, metric, **where), self.of(other, metric, **where))


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


def mean_sd(rows: pd.DataFrame, digits: int = 1) -> str:
    """Return `mean ± SD` of a metric over seeds."""
    values = rows["value"].to_numpy(dtype=float)
    if not len(values):
        return "-"
    spread = f" ± {values.std(ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{spread}"


# The claims.


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, its number there, and its gains [seeds, problems] here, above zero if it holds."""

    words: str
    paper: str
    gains: Callable[[Study], np.ndarray]
    unit: str = "points"
    study: str = "small"

    @property
    def digits(self) -> int:
        return 1 if self.unit == "points" else 3


def verdict(mean: float, p: float) -> str:
    """Return the word for a difference with this p-value."""
    return "undecided" if p >= 0.05 else "seen" if mean > 0 else "opposite"


def with_interval(found: Estimate, digits: int = 1) -> str:
    return f"{found.mean:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"


def shown_p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def against(other: str, ours: str = "loop_dropout", **where) -> Callable[[Study], np.ndarray]:
    return lambda study: study.gains(ours, other, **where)


def late_bias(method: str) -> Callable[[Study], np.ndarray]:
    """rho_K - rho_1 of one method."""

    def gains(study: Study) -> np.ndarray:
        loops = int(study.rows.loc[study.rows["method"] == method, "num_loops"].max())
        last, first = (study.of(method, "loss_reduction", loop=loop)["value"] for loop in (loops, 1))
        return (last - first).to_numpy(dtype=float)[:, None]

    return gains


def flatter(study: Study) -> np.ndarray:
    """max rho_t - min rho_t of LoRA, less Loop Dropout's."""
    spreads = []
    for method in ("lora", "loop_dropout"):
        loops = sorted(study.rows.loc[study.rows["method"] == method, "loop"].dropna().unique())
        if not loops:
            return np.empty((0, 1))
        rho = pd.concat([study.of(method, "loss_reduction", loop=int(loop))["value"] for loop in loops], axis=1)
        spreads.append(rho.max(axis=1) - rho.min(axis=1))
    return (spreads[0] - spreads[1]).dropna().to_numpy(dtype=float)[:, None]


def keeps(depth: int) -> Callable[[Study], np.ndarray]:
    """By how much less accuracy Loop Dropout loses than LoRA from the training depth to another."""
    return lambda study: study.gains("loop_dropout", "lora", depth=depth) - study.gains("loop_dropout", "lora")


def three_loops_against_four(study: Study) -> np.ndarray:
    return differences(study.of("loop_dropout", "accuracy", depth=3), study.of("lora", "accuracy", depth=4))


def minus(gains: Callable[[Study], np.ndarray]) -> Callable[[Study], np.ndarray]:
    return lambda study: -gains(study)


LATE = "LoRA's update reduces the loss more in the last loop than in the first: rho_K - rho_1"
TWO, HUGINN, SMALL_LM = " (base of two layers)", " (tiny Huginn, 8 loops)", " (SmolLM2-135M, looped)"
LATE_TWO, LATE_HUGINN, LATE_SMALL_LM = (f"LoRA's late bias, rho_K - rho_1{base}" for base in (TWO, HUGINN, SMALL_LM))
THREE = "Loop Dropout with three loops is more accurate than LoRA with four (fresh seeds)"

CLAIMS = [
    Claim(LATE, "+20.5", late_bias("lora")),
    Claim("Loop Dropout is flatter: LoRA's max - min of rho_t, less Loop Dropout's", "+15.4", flatter),
    Claim("Alone in loop 1, its update reduces the loss more than LoRA's", "+18.9",
          against("lora", metric="loss_reduction", loop=1)),
    Claim("More accurate at the training depth", "+1.90", against("lora")),
    Claim("More accurate at twice the training depth", "+4.75", against("lora", depth=8)),
    Claim("Loses less than LoRA from the training depth to twice it", "+2.85", keeps(8)),
    Claim("More accurate at half the training depth", "-", against("lora", depth=2)),
    *(Claim(f"More accurate with its update in loop {loop} only", paper, against("lora", loop=loop))
      for loop, paper in enumerate(("+1.28", "+64.42", "+83.60", "+80.11"), 1)),
    *(Claim(f"The readout of loop {loop} has a lower loss", paper, minus(against("lora", metric="readout_loss", loop=loop)),
            unit="nats") for loop, paper in enumerate(("+0.193", "+0.071", "+0.025", "+0.037"), 1)),
    Claim("More accurate than LoRA+", "+0.99", against("lora_plus")),
    Claim("More accurate than rsLoRA", "+2.0", against("rslora")),
    Claim("More accurate than dropout on the adapter's input", "+2.2", against("input_dropout")),
    Claim("More accurate than LoRA Dropout, alpha 8", "-", against("lora_dropout")),
    Claim("More accurate than LoRA Dropout, alpha 32 as in the paper", "+0.76", against("lora_dropout_32")),
    Claim("Rescaling matters: than unscaled masks", "+2.86", against("unscaled")),
    Claim("Which loops are masked matters: than the dose control", "+2.00", against("dose_control")),
    Claim("Masking the entire adapter matters: than module-wise masks", "+2.05", against("module_wise")),
    Claim("Than low-rank weight noise", "+1.87", against("weight_noise")),
    Claim("Than parallel noise of the same mean and variance", "+1.95", against("parallel_noise")),
    Claim("p = 0.5 is more accurate than p = 0.25", "+0.6", against("p_0.25")),
    Claim("p = 0.5 is more accurate than p = 0.75", "+0.1", against("p_0.75")),
    Claim("p = 0.5 is more accurate than p = 0.1", "-", against("p_0.1")),
    Claim("Masking helps a shared update more than independent ones of rank 4", "-1.14, +6.60",
          lambda s: paired(s.gains("loop_dropout", "lora"), s.gains("independent_rank_4_masked", "independent_rank_4"))),
    Claim("Masking helps a shared update more than independent ones of rank 16", "+0.45, +7.00",
          lambda s: paired(s.gains("loop_dropout", "lora"), s.gains("independent_rank_16_masked", "independent_rank_16"))),
    Claim("More accurate at rank 4", "+0.56", against("rank_4_lora", "rank_4")),
    Claim("More accurate at rank 64", "+0.43", against("rank_64_lora", "rank_64")),
    *(Claim(f"More accurate when both train at the rate {rate:g}", "+0.56 to +2.62", against("lora", rate=rate))
      for rate in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)),
    *(Claim(f"More accurate when trained and evaluated at K = {depth}", paper,
            against(f"depth_{depth}_lora", f"depth_{depth}")) for depth, paper in ((2, "+2.17"), (6, "+1.59"), (8, "+0.51"))),
    Claim("LoRA at random depth is more accurate at twice the depth than LoRA", "-",
          against("lora", "random_depth_lora", depth=8)),
    Claim("At random depth, Loop Dropout is more accurate than LoRA", "-", against("random_depth_lora", "random_depth")),
    Claim("At random depth, evaluated at twice the depth", "-", against("random_depth_lora", "random_depth", depth=8)),
    Claim(THREE, "-", three_loops_against_four, study="fresh_seeds"),
    *(Claim(f"{words}{where}", paper, gains, study=study) for study, where, deeper in (
        ("small", "", 8), ("two_layers", TWO, 8), ("huginn", HUGINN, 16), ("small_lm", SMALL_LM, 8))
      for words, paper, gains in (
        ("p annealed from 0.5 to 0 is more accurate than LoRA", "-", against("lora", "annealed")),
        ("Annealed, than LoRA at twice the depth", "-", against("lora", "annealed", depth=deeper)),
        ("Annealed, than p = 0.5 throughout", "-", against("loop_dropout", "annealed")),
        ("Annealed, than p = 0.5 throughout at twice the depth", "-", against("loop_dropout", "annealed", depth=deeper)))),
    *(Claim(f"{words}{TWO}", paper, gains, study="two_layers") for words, paper, gains in (
        ("LoRA's late bias, rho_K - rho_1", "+20.5", late_bias("lora")), ("Flatter than LoRA", "+15.4", flatter),
        ("More accurate than LoRA", "+1.90", against("lora")), ("At twice the depth", "+4.75", against("lora", depth=8)),
        ("More accurate than CoTo", "+0.94", against("coto")))),
    *(Claim(f"{words}{HUGINN}", "-", gains, study="huginn") for words, gains in (
        ("LoRA's late bias, rho_K - rho_1", late_bias("lora")), ("Flatter than LoRA", flatter),
        ("More accurate than LoRA", against("lora")), ("At twice the depth", against("lora", depth=16)))),
    *(Claim(f"{words}{SMALL_LM}", paper, gains, study="small_lm") for words, paper, gains in (
        ("LoRA's late bias, rho_K - rho_1", "+20.5", late_bias("lora")), ("Flatter than LoRA", "+15.4", flatter),
        ("Alone in loop 1, a larger loss reduction than LoRA's", "+18.9", against("lora", metric="loss_reduction", loop=1)),
        ("More accurate than LoRA", "+1.90", against("lora")), ("At half the depth", "-", against("lora", depth=2)),
        ("At twice the depth", "+4.75", against("lora", depth=8)))),
]  # fmt: skip


def paired(ours: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the difference of two gains [seeds, problems] over the seeds that both have, the first ones."""
    seeds = min(len(ours), len(others))
    return ours[:seeds] - others[:seeds] if seeds else np.empty((0, 1))


def claims_found(studies: dict[str, Study]) -> tuple[pd.DataFrame, dict[str, list[str]]]:
    """Return what the claims come to, and the words of those that have no row: by the reason why.

    A claim whose gains are another's to the last problem is the same comparison, and listed once.
    """
    rows, seen = [], []
    left_out: dict[str, list[str]] = {"Not measured": [], "One seed": [], "The same comparison as a row above": []}
    for claim in CLAIMS:
        gains = claim.gains(studies[claim.study]) if claim.study in studies else np.empty((0, 1))
        found = estimate(gains)
        if found is None:
            left_out["One seed" if len(gains) else "Not measured"].append(claim.words)
        elif any(np.array_equal(gains, other) for other in seen):
            left_out["The same comparison as a row above"].append(claim.words)
        else:
            seen.append(gains)
            rows.append({"claim": claim, "found": found, "seeds": len(gains), "alone": verdict(found.mean, found.p)})
    table = pd.DataFrame(rows)
    corrected = multipletests([found.p for found in table["found"]], method="holm")[1]
    table["verdict"] = [verdict(found.mean, p) for found, p in zip(table["found"], corrected, strict=True)]
    return table, left_out


def summary(studies: dict[str, Study], table: pd.DataFrame, gains: pd.DataFrame) -> str:
    """Return what a reader of the paper wants to know first, in some lines."""
    found = {row.claim.words: row for row in table.itertuples()}

    def told(words: str) -> str:
        row = found.get(words)
        return "no interval" if row is None else f"{with_interval(row.found, row.claim.digits)}, {row.verdict}"

    count = {column: dict(table[column].value_counts()) for column in ("alone", "verdict")}
    counted = lambda column: ", ".join(
        f"{count[column].get(word, 0)} {word}" for word in ("seen", "opposite", "undecided")
    )
    undecided = "; ".join(_lower(words) for words, row in found.items() if row.alone == "seen" != row.verdict)
    opposite = "; ".join(_lower(words) for words, row in found.items() if row.verdict == "opposite")
    huginn = studies["huginn"]
    mean = lambda study, method: mean_sd(study.of(method, "accuracy"))
    words = gains.groupby("depth")["word"].value_counts().unstack(fill_value=0)
    of_map = lambda depth: ", ".join(
        f"{words.loc[depth].get(word, 0)} {word}" for word in ("ahead", "level", "behind")
    )
    annealed = "; ".join(f"{base} {mean(studies[name], 'annealed')}" for name, (base, *_) in BASES.items())
    lines = [
        f"**{len(table)} comparisons**, corrected for their number: {counted('verdict')}; each alone: {counted('alone')}.",
        f"**One layer, five seeds.** LoRA's late bias: {told(LATE)} (points of loss). Loop Dropout at the training depth: "
        f"{told('More accurate at the training depth')}; at twice it: {told('More accurate at twice the training depth')}.",
        f"**Ten fresh seeds** give {fresh_gain(studies, 4)} and {fresh_gain(studies, 8)}.",
        f"**Three loops with Loop Dropout against four with LoRA** (ten fresh seeds): {told(THREE)}.",
        f"**Two layers, three seeds.** Late bias: {told(LATE_TWO)}; at the training depth: "
        f"{told('More accurate than LoRA' + TWO)}; at twice it: {told('At twice the depth' + TWO)}.",
        f"**Tiny Huginn, three seeds.** Late bias: {told(LATE_HUGINN)}. Loop Dropout {mean(huginn, 'loop_dropout')}%, LoRA "
        f"{mean(huginn, 'lora')}%: {told('More accurate than LoRA' + HUGINN)}.",
        f"**Seen alone, and undecided among {len(table)}:** {undecided}.",
        f"**Opposite** after correction: {opposite or 'none'}.",
        f"**The map**, {len(gains) // 2} cells: at the training depth {of_map(4)}; at twice it {of_map(8)}.",
        f"**p annealed from 0.5 to 0** (-: not yet run): {annealed}.",
        language_line(studies["small_lm"], told),
    ]
    return "\n".join(f"- {line}" for line in lines)


def language_line(study: Study, told: Callable[[str], str]) -> str:
    """Return what the language model shows; `told` gives a claim's difference and verdict."""
    rho = [f"{rho_text(study, method)}% with {title}" for method, title in METHODS.items()]
    parts = []
    for place, depth, words in (
        ("at the training depth", 4, "More accurate than LoRA"),
        ("at twice it", 8, "At twice the depth"),
    ):
        scores = [
            f"{title} {mean_sd(study.of(method, 'accuracy', depth=depth))}%" for method, title in METHODS.items()
        ]
        gains = study.gains("loop_dropout", "lora", depth=depth)
        certainty = (
            f"{with_interval(of_numbers(gains[0]))} over problems" if len(gains) == 1 else told(words + SMALL_LM)
        )
        parts.append(f"{place} {', '.join(scores)}: {certainty}")
    words, *_ = BASES["small_lm"]
    return f"**A real language model** ({words}; {seeds_text(study)}). rho_t: {', '.join(rho)}. Accuracy {'; '.join(parts)}."


def seeds_text(study: Study) -> str:
    number = len(study.of("lora", "accuracy").index.intersection(study.of("loop_dropout", "accuracy").index))
    return f"{number} seed{'s' * (number != 1)}"


def rho_text(study: Study, method: str) -> str:
    """Return a method's loss reductions in each loop alone, means over its seeds."""
    loops = range(1, int(study.rows["num_loops"].max()) + 1)
    means = [study.of(method, "loss_reduction", loop=loop)["value"].mean() for loop in loops]
    return " / ".join(f"{mean:.0f}" for mean in means)


def _lower(words: str) -> str:
    return words if words.startswith(("LoRA", "Loop Dropout")) else words[0].lower() + words[1:]


def fresh_gain(studies: dict[str, Study], depth: int) -> str:
    found = estimate(studies["fresh_seeds"].gains("loop_dropout", "lora", depth=depth))
    return f"{with_interval(found)} at K = {depth} (p {shown_p(found.p)})"


def claims_table(table: pd.DataFrame, left_out: dict[str, list[str]]) -> str:
    """Return the claims as a table, with what has no row below it."""
    lines = ["| claim | paper | here, 95% interval | seeds | p | alone | of all |", "|---|---|---|---|---|---|---|"]
    for row in table.itertuples():
        numbers = f"{with_interval(row.found, row.claim.digits)} | {row.seeds} | {shown_p(row.found.p)}"
        word = row.verdict if row.verdict == "undecided" else f"**{row.verdict}**"
        lines.append(f"| {row.claim.words} | {row.claim.paper} | {numbers} | {row.alone} | {word} |")
    for reason, words in left_out.items():
        if words:
            lines += ["", f"{reason}: {'; '.join(words)}."]
    return "\n".join(lines)


def rates_text(studies: dict[str, Study]) -> str:
    """Return which chosen rates are the lowest or highest of their grids, and how many lie inside."""
    lines, inside = [], 0
    for name, study in studies.items():
        for method, rate in study.rates.items():
            inside += len(study.grids.get(method, ())) > 1 and study.edge(method) is None
            if edge := study.edge(method):
                grid = ", ".join(f"{value:.1f}% at {each:g}" for each, value in study.grids[method].items())
                lines.append(f"| {name} | {method} | {rate:g}, {edge} | {grid} |")
    head = "| study | method | rate | held-out accuracy by rate |\n|---|---|---|---|"
    return f"{inside} chosen rates lie inside their grids, {len(lines)} at an edge:\n\n" + "\n".join([head, *lines])


def same_rates(studies: dict[str, Study]) -> str:
    """Return in how many comparisons LoRA and Loop Dropout chose the same rate."""
    pairs = [(studies[name].rates["lora"], studies[name].rates["loop_dropout"]) for name in BASES]
    small = studies["small"].rates
    names = ("rank_4", "rank_64", "depth_2", "depth_6", "depth_8", "random_depth")
    pairs += [(small[f"{name}_lora"], small[name]) for name in names]
    same, larger = sum(a == b for a, b in pairs), sum(a < b for a, b in pairs)
    words = f"Of {len(pairs)} pairs here {same} had the same best rate"
    return f"{words}; Loop Dropout's was larger in {larger}, smaller in {len(pairs) - same - larger}."


def fresh_table(study: Study) -> str:
    """Return the accuracies of the fresh seeds by depth, and differences."""
    lines = ["| loops at inference | LoRA | Loop Dropout | difference, 95% interval | p |", "|---|---|---|---|---|"]
    pairs = [(depth, depth) for depth in (2, 3, 4, 8)] + [(4, 3)]
    for theirs, ours in pairs:
        one, two = study.of("lora", "accuracy", depth=theirs), study.of("loop_dropout", "accuracy", depth=ours)
        if (found := estimate(differences(two, one))) is not None:
            depths = f"{ours}" if ours == theirs else f"{theirs} with LoRA, {ours} with Loop Dropout"
            lines.append(
                f"| {depths} | {mean_sd(one)} | {mean_sd(two)} | {with_interval(found)} | {shown_p(found.p)} |"
            )
    return "\n".join(lines)


def agreement_table(rows: pd.DataFrame) -> str:
    """Return how often a readout has the last one's most probable token, and their overlap, by loop: mean over seeds."""
    lines = ["| readout after loop | K | same most probable token, LoRA | Loop Dropout | 1 - TV, LoRA | Loop Dropout |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    of = rows[rows["metric"].isin(("same_token", "overlap"))]
    for (depth, loop), part in of.groupby(["depth", "loop"]):
        if loop < depth:
            cells = (part[(part["metric"] == metric) & (part["method"] == method)]
                     for metric in ("same_token", "overlap") for method in ("lora", "loop_dropout"))  # fmt: skip
            lines.append(f"| {loop:.0f} | {depth:.0f} | {' | '.join(map(mean_sd, cells))} |")
    return "\n".join(lines)


BASES = {
    "small": ("base of one layer", 4, 8),
    "two_layers": ("base of two layers", 4, 8),
    "huginn": ("tiny Huginn", 8, 16),
    "small_lm": ("SmolLM2-135M, looped", 4, 8),
}
"""Studies: what their base is, the training depth and twice it."""


def choices_table(studies: dict[str, Study], cells: pd.DataFrame) -> str:
    """Return the accuracies of the three candidates for a user who does not know, at the training depth and twice it."""
    methods = ("lora", "loop_dropout", "annealed")
    lines = [
        "| where | LoRA | p = 0.5 | p from 0.5 to 0 | LoRA, twice the depth | p = 0.5 | p from 0.5 to 0 |",
        "|---" * 7 + "|",
    ]
    for name, (words, *depths) in BASES.items():
        numbers = [
            mean_sd(studies[name].of(method, "accuracy", depth=depth)) for depth in depths for method in methods
        ]
        lines.append(f"| {words} | {' | '.join(numbers)} |")
    place = ["difficulty", "examples", "epochs", "depth"]
    cells = cells[cells["seed"].isin(cells.loc[cells["method"].str.startswith("annealed"), "seed"])]
    constant, annealed = (map_table(cells, each).set_index(place) for each in ("loop_dropout", "annealed"))
    for cell in dict.fromkeys(key[:3] for key in annealed.index):
        numbers = []
        for depth in (4, 8):
            row = annealed.loc[(*cell, depth)]
            numbers += [row["lora"], constant.loc[(*cell, depth), "loop_dropout"], row["annealed"]]
        difficulty, examples, epochs = cell
        words = " | ".join(f"{number:.1f}" for number in numbers)
        lines.append(f"| {difficulty} steps, {examples:,} examples, {epochs} epochs | {words} |")
    return "\n".join(lines)


# Ouro-1.4B on GSM8K at the rate 1e-4, tables `tab:depth_matrix` and Appendix "Single-Loop Activation".
OF_THE_PAPER = {
    "LoRA": ["-", "79.9 ± 1.0", "75.0 ± 1.0", "70.8 ± 1.9", "11.9", "19.1", "26.5", "32.4"],
    "Loop Dropout": ["-", "81.8 ± 0.5", "78.0 ± 1.7", "75.6 ± 1.3", "30.8", "35.2", "35.9", "35.7"],
}


def language_model_table(study: Study) -> str:
    """Return accuracies by depth and loss reductions by loop of the language model's methods, and the paper's beside."""
    heads = [
        "where",
        "method",
        "rate",
        "seeds",
        "K = 2",
        "K = 4",
        "K = 6",
        "K = 8",
        "rho_1",
        "rho_2",
        "rho_3",
        "rho_4",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method, rate in study.rates.items():
        own = study.of(method, "accuracy")
        if len(own):
            cells = [mean_sd(study.of(method, "accuracy", depth=depth)) for depth in (2, 4, 6, 8)]
            cells += [mean_sd(study.of(method, "loss_reduction", loop=loop)) for loop in (1, 2, 3, 4)]
            lines.append(f"| here | {METHODS.get(method, method)} | {rate:g} | {len(own)} | {' | '.join(cells)} |")
    for method, cells in OF_THE_PAPER.items():
        lines.append(f"| paper, Ouro-1.4B on GSM8K | {method} | 0.0001 | 3 (rho: 1) | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_steps_table(study: Study) -> str:
    """Return the language model's accuracies by depth and by how many steps a problem takes."""
    steps = sorted({name for name in study.rows["metric"] if name.startswith("accuracy_of_")})
    lines = [f"| method | K | {' | '.join(name.removeprefix('accuracy_of_').replace('_', ' ') for name in steps)} |",
             "|---" * (2 + len(steps)) + "|"]  # fmt: skip
    for method in study.rates:
        for depth in (2, 4, 6, 8):
            cells = [mean_sd(study.of(method, name, depth=depth)) for name in steps]
            if set(cells) != {"-"}:
                lines.append(f"| {METHODS.get(method, method)} | {depth} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prose(studies: dict[str, Study], claims: pd.DataFrame) -> dict[str, str]:
    """Return the numbers that stand in sentences, by name."""
    small, means = studies["small"], {row.claim.words: row.found.mean for row in claims.itertuples()}
    at = lambda method, depth: small.of(method, "accuracy", depth=depth)
    gain = lambda method, depth: at(method, depth)["value"].mean() - at("lora", depth)["value"].mean()
    kept = [100 * gain("annealed", depth) / gain("loop_dropout", depth) for depth in (4, 8)]
    language = [mean_sd(studies["small_lm"].of(method, "accuracy")) for method in ("loop_dropout", "lora")]
    numbers = {f"{method}_{depth}": f"{mean_sd(at(method, depth))}%" for method in METHODS for depth in (4, 8)}
    return numbers | {
        "deep_at_4": f"{mean_sd(at('depth_8', 4))}%",
        "deep_lora_at_4": f"{mean_sd(at('depth_8_lora', 4))}%",
        "kept_at_4": f"{kept[0]:.0f}%",
        "kept_at_8": f"{kept[1]:.0f}%",
        "random_depth_gain": f"{means['LoRA at random depth is more accurate at twice the depth than LoRA']:.0f} points",
        "language_model": f"{language[0]}% against {language[1]}%",
        "readout_gain": f"{means['The readout of loop 4 has a lower loss']:.3f} nats",
    }


def methods_table(studies: dict[str, Study]) -> pd.DataFrame:
    """Return each method's accuracies (%) by depth and loss reductions (%), mean ± SD over its seeds."""
    rows = []
    for name, study in studies.items():
        for method, rate in study.rates.items():
            own = study.of(method, "accuracy")
            if len(own):
                row = {
                    "study": name,
                    "method": method,
                    "learning_rate": rate,
                    "seeds": len(own),
                    "trained": mean_sd(own),
                }
                row |= {
                    f"K = {depth}": mean_sd(study.of(method, "accuracy", depth=depth))
                    for depth in (1, 2, 4, 8, 12, 16)
                }
                last = int(own["num_loops"].iloc[0])
                row |= {f"rho_{place}": mean_sd(study.of(method, "loss_reduction", loop=loop))
                        for place, loop in (("1", 1), ("K", last))}  # fmt: skip
                rows.append(row)
    return pd.DataFrame(rows)


# The figures.


METHODS = {"lora": "LoRA", "loop_dropout": "Loop Dropout"}


def effect_figure(study: Study) -> None:
    """Draw what the main comparison measured, mean ± SD over seeds: by depth, and with the adapter in one loop only."""
    from plotnine import (
        aes,
        facet_wrap,
        geom_line,
        geom_point,
        geom_ribbon,
        geom_vline,
        ggplot,
        labs,
        scale_color_manual,
        scale_fill_manual,
        scale_x_continuous,
    )

    from loopdropout_trainer.reports import save_figure
    from loopdropout_trainer.reports.plots import LOOKS, theme

    panels = {
        "accuracy (%), K loops": ("accuracy", "depth", (1, 2, 3, 4, 6, 8, 10, 12)),
        "accuracy (%), only loop t": ("accuracy", "loop", (1, 2, 3, 4)),
        "loss reduction (%), only loop t": ("loss_reduction", "loop", (1, 2, 3, 4)),
    }
    points = []
    for panel, (metric, column, positions) in panels.items():
        for method, title in METHODS.items():
            for x in positions:
                values = study.of(method, metric, **{column: x})["value"]
                mean, sd = values.mean(), values.std(ddof=1)
                points.append(
                    {"panel": panel, "method": title, "x": x, "mean": mean, "low": mean - sd, "high": mean + sd}
                )
    data = pd.DataFrame(points)
    data["panel"] = pd.Categorical(data["panel"], list(panels))
    colours = {title: LOOKS[title][0] for title in METHODS.values()}
    trained = pd.DataFrame({"panel": pd.Categorical([next(iter(panels))], list(panels)), "x": [4]})
    plot = (
        ggplot(data, aes("x", "mean", color="method", fill="method"))
        + geom_vline(trained, aes(xintercept="x"), linetype="dotted", color="#777777")
        + geom_ribbon(aes(ymin="low", ymax="high"), alpha=0.25, color="none")
        + geom_line(size=1.1)
        + geom_point(size=2)
        + facet_wrap("panel", scales="free", ncol=3)
        + scale_color_manual(values=colours)
        + scale_fill_manual(values=colours)
        + scale_x_continuous(breaks=list(range(13)))
        + labs(x="", y="")
        + theme()
    )
    save_figure(plot, HERE / "effect", width=11, height=3.6)


def map_table(rows: pd.DataFrame, ours: str = "loop_dropout") -> pd.DataFrame:
    """Return accuracies and a method's gain over LoRA of each cell of the map, means over its seeds, and the gain's word.

    `ahead` and `behind`: the 95% interval over the test problems, with the seeds as they are, leaves out zero; else `level`.
    """
    cells = rows[(rows["metric"] == "accuracy") & rows["depth"].isin((4, 8))].copy()
    cells["rule"] = cells["method"].str.replace(r"(@|_\d).*", "", regex=True)
    cells["epochs"] = (cells["steps"] * 16 / cells["examples"]).round().astype(int)
    table = []
    for place, cell in cells.groupby(["difficulty", "examples", "epochs", "depth"]):
        sides = [cell[cell["rule"] == rule].drop_duplicates("seed").set_index("seed") for rule in (ours, "lora")]
        seeds = sides[0].index.intersection(sides[1].index)
        if len(seeds):
            answers = [np.array([verdicts(side.loc[seed]) for seed in seeds]) for side in sides]
            found = of_numbers(100 * (answers[0] - answers[1]).mean(axis=0))
            word = {"seen": "ahead", "opposite": "behind", "undecided": "level"}[verdict(found.mean, found.p)]
            means = [100 * each.mean() for each in answers]
            table.append((*place, *means, found.mean, len(seeds), word))
    names = ["difficulty", "examples", "epochs", "depth", ours, "lora", "gain", "seeds", "word"]
    return pd.DataFrame(table, columns=names)


def map_counts(table: pd.DataFrame) -> str:
    """Return in how many cells a method is ahead, level and behind, by difficulty, examples and depth."""
    lines = [
        "| problems | examples | depth | cells | ahead | level | behind | gain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    size = np.where(
        table["examples"] <= 128, "32 to 128", np.where(table["examples"] == 512, "512", "2,048 and 4,000")
    )
    order = {"32 to 128": 0, "512": 1, "2,048 and 4,000": 2}
    groups = table.assign(size=size, place=[order[each] for each in size]).groupby(
        ["depth", "difficulty", "place", "size"]
    )
    for (depth, difficulty, _, size), cells in groups:
        counts = [int((cells["word"] == word).sum()) for word in ("ahead", "level", "behind")]
        span = f"{cells['gain'].min():+.1f} to {cells['gain'].max():+.1f}"
        where = f"K = {depth:.0f}" + ", twice the training depth" * (depth == 8)
        lines.append(
            f"| {difficulty} steps | {size} | {where} | {len(cells)} | {' | '.join(map(str, counts))} | {span} |"
        )
    return "\n".join(lines)


def map_figure(gains: pd.DataFrame) -> None:
    """Draw by how many points Loop Dropout is more accurate than LoRA, by examples, epochs, difficulty and depth."""
    from plotnine import (
        aes,
        facet_grid,
        geom_text,
        geom_tile,
        ggplot,
        labs,
        scale_color_manual,
        scale_fill_gradient2,
    )

    from loopdropout_trainer.reports import save_figure
    from loopdropout_trainer.reports.plots import BLUE, ORANGE, theme

    table = gains.copy()
    for name in ("examples", "epochs"):
        table[name] = pd.Categorical(table[name].astype(str), [str(each) for each in sorted(table[name].unique())])
    table["shown"] = [f"{gain:+.1f}\n({lora:.0f})" for gain, lora in zip(table["gain"], table["lora"], strict=True)]
    table["difficulty"] = "problems of " + table["difficulty"] + " steps"
    table["depth"] = "K = " + table["depth"].astype(int).astype(str)
    plot = (
        ggplot(table, aes("examples", "epochs", fill="gain.clip(-20, 20)"))
        + geom_tile(color="white", size=1)
        + geom_text(aes(label="shown", color="word"), size=8)
        + scale_color_manual(values={"ahead": "black", "behind": "black", "level": "#909090"}, guide=None)
        + facet_grid("depth", "difficulty")
        + scale_fill_gradient2(low=ORANGE, mid="#f4f4f4", high=BLUE, limits=(-20, 20), guide=None)
        + labs(x="examples", y="epochs", fill="points")
        + theme()
    )
    save_figure(plot, HERE / "map", width=11, height=6)


def write(rows: pd.DataFrame) -> None:
    """Replace what stands between each pair of marks in the documents."""
    studies = {name: Study(part) for name, part in rows.groupby("study") if name != "map"}
    cells = rows[rows["study"] == "map"]
    gains = map_table(cells)
    effect_figure(studies["small"])
    map_figure(gains)
    methods_table(studies).to_csv(HERE / "methods.csv", index=False)
    claims, left_out = claims_found(studies)
    tables = {
        "summary": summary(studies, claims, gains),
        "claims": claims_table(claims, left_out),
        "rates": rates_text(studies),
        "map": map_counts(gains),
        "fresh": fresh_table(studies["fresh_seeds"]),
        "agreement": agreement_table(rows[rows["study"] == "fresh_seeds"]),
        "choices": choices_table(studies, cells),
        "same_rates": same_rates(studies),
        "language_model": language_model_table(studies["small_lm"]),
        "by_steps": by_steps_table(studies["small_lm"]),
    }
    numbers = prose(studies, claims)
    for document in (DOCUMENT, WHEN, README):
        text = document.read_text(encoding="utf-8")
        for name, words in numbers.items():  # within sentences
            text = re.sub(rf"<!--{name}-->.*?<!--/-->", f"<!--{name}-->{words}<!--/-->", text)
        for name, table in tables.items():
            begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
            if begin in text:
                before, rest = text.split(begin)
                text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
        document.write_text(text, encoding="utf-8")


def main() -> None:
    match sys.argv[1:]:
        case ["collect", *folders] if folders:
            collect(folders).to_csv(RUNS, index=False, compression={"method": "gzip", "mtime": 0})
        case ["write"]:
            write(pd.read_csv(RUNS))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
