"""The numbers of the pages that compare all base models: the forest plot, serving at other depths, and the best epochs."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pandas as pd
import serving_depth
import transfer
from claims import BASES, DEPTHS, format_p, markdown, with_interval
from intervals import Estimate, estimate, estimate_mean
from runs import Study
from tiny_study import Design


PLACES = {"K": "at the trained depth K", "2K": "at 2K loops"}
GROUPS = {"four": "four base models", "A": "study A", "C": "study C"}
MEAN = "mean of 15"
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
"""Learning rates that a grid of study A or C may have."""


class Pair(NamedTuple):
    """Accuracies of LoRA and Loop Dropout in percent, and Loop Dropout minus LoRA in points."""

    lora: np.ndarray
    ours: np.ndarray

    @property
    def gain(self) -> Estimate:
        return estimate_mean(self.ours - self.lora)


# From the files of studies A and C


def solved(line: dict, place: str) -> np.ndarray:
    """Return which problems a run solved at a place such as `in_distribution@4`, [problems]."""
    return np.array([bit == "1" for bit in bin(int(line["solved"][place], 16))[3:]], dtype=float)


def gains_of_base(lines: list[dict], design: Design, base: str, depth: int) -> np.ndarray:
    """Return the gains of p = 0.5 over LoRA in points on a base model, [seeds, problems]."""
    runs = {(line["method"], line["seed"]): line for line in lines if line["base"] == base and "seed" in line}
    place = f"in_distribution@{depth}"
    sides = [np.array([solved(runs[method, seed], place) for seed in design.seeds]) for method in ("p_0.5", "lora")]
    return 100 * (sides[0] - sides[1])


def mean_pair(lines: list[dict], design: Design, lora_depth: int, depth: int) -> Pair:
    """Return the accuracies of LoRA and p = 0.5 at their numbers of loops: means over the seeds of each base model."""
    sides = []
    for method, loops in (("lora", lora_depth), ("p_0.5", depth)):
        runs = [line for line in lines if line.get("method") == method and line["seed"] in design.seeds]
        accuracy = [line["accuracy"][f"in_distribution@{loops}"] for line in runs]
        means = pd.Series(accuracy, index=[line["base"] for line in runs]).groupby(level=0).mean()
        sides.append(means.reindex(design.bases).to_numpy())
    return Pair(*sides)


def chosen_rates(lines: list[dict], design: Design, method: str) -> dict[str, float]:
    """Return the chosen learning rate of a method by base model."""
    seed = design.seeds[0]
    return {
        line["base"]: line["learning_rate"] for line in lines if line.get("method") == method and line["seed"] == seed
    }


def rates_table() -> str:
    """Return on how many base models each method chose each learning rate, in studies A and C."""
    rows = []
    for name, design in (("A", transfer.DESIGN), ("C", serving_depth.DESIGN)):
        lines = design.read_lines()
        for method, title in {"lora": "LoRA", "p_0.5": "Loop Dropout"}.items():
            counts = Counter(chosen_rates(lines, design, method).values())
            tried = {line["learning_rate"] for line in lines if line.get("method") == method}
            rows.append([name, title, *(str(counts[rate]) if rate in tried else "-" for rate in RATES)])
    return markdown(["study", "method", *(f"{rate:g}" for rate in RATES)], rows)


# The forest plot


def forest_table(claims: pd.DataFrame) -> pd.DataFrame:
    """Return the gain of Loop Dropout over LoRA on every base model and the means of studies A and C, with 95% intervals.

    The columns are `group`, `base`, `place`, and the fields of `Estimate`. The intervals of a base model are over seeds and
    problems, and the intervals of a mean are over base models.
    """
    rows = []
    part = claims[claims["question"] == "accuracy"]
    for study, depths in DEPTHS.items():
        for row in part[[claim.study == study for claim in part["claim"]]].itertuples():
            place = "K" if row.claim.words.endswith(f"K = {depths[0]}") else "2K"
            rows.append((GROUPS["four"], BASES[study], PLACES[place], *row.gain))
    for name, design in (("A", transfer.DESIGN), ("C", serving_depth.DESIGN)):
        lines = design.read_lines()
        for depth, place in ((4, "K"), (8, "2K")):
            gains = [estimate(gains_of_base(lines, design, base, depth)) for base in design.bases]
            rows += [
                (GROUPS[name], base, PLACES[place], *gain) for base, gain in zip(design.bases, gains, strict=True)
            ]
            rows.append((GROUPS[name], MEAN, PLACES[place], *mean_pair(lines, design, depth, depth).gain))
    return pd.DataFrame(rows, columns=["group", "base", "place", *Estimate._fields])


# Tables


def pair_cells(pair: Pair) -> list[str]:
    return [f"{pair.lora.mean():.1f}", f"{pair.ours.mean():.1f}", with_interval(pair.gain)]


def depths_table() -> str:
    """Return the accuracies of study C by the number of loops at inference, and the two comparisons across depths."""
    lines, rows = serving_depth.DESIGN.read_lines(), []
    for lora_depth, depth in ((2, 2), (3, 3), (4, 4), (8, 8), (4, 3), (4, 8)):
        pair = mean_pair(lines, serving_depth.DESIGN, lora_depth, depth)
        rows.append([str(lora_depth), str(depth), *pair_cells(pair)])
    heads = ["loops, LoRA", "loops, Loop Dropout", "LoRA", "Loop Dropout", "difference, 95% interval"]
    return markdown(heads, rows)


def serving_table() -> str:
    """Return the registered tests of study C."""
    texts = {
        "deeper": "*deeper*: Loop Dropout minus LoRA, both at 8 loops, against 0",
        "shallower": "*shallower*: Loop Dropout at 3 loops minus LoRA at 4 loops, against -2",
    }
    tests = serving_depth.registered_tests(serving_depth.mean_accuracies(serving_depth.DESIGN.read_lines()))
    rows = []
    for name, (*effect, p) in tests.items():
        rows.append([texts[name], with_interval(Estimate(*effect, p)), format_p(p)])
    return markdown(["registered test", "estimate in points, 95% interval", "adjusted p (of 2)"], rows)


def best_epochs_table(cells: pd.DataFrame) -> str:
    """Return the accuracies with each method's best number of epochs at K = 4, for problems of 1 to 3 steps."""
    rows = []
    for examples, part in solvable_cells(cells).groupby("examples"):
        best = [part.loc[part[method].idxmax()] for method in ("lora", "loop_dropout")]
        numbers = [best[0]["lora"], best[1]["loop_dropout"]]
        epochs = [f"{own['epochs']:.0f}" for own in best]
        tried = ", ".join(f"{number:.0f}" for number in sorted(part["epochs"]))
        values = [f"{numbers[0]:.1f}", f"{numbers[1]:.1f}", f"{numbers[1] - numbers[0]:+.1f}"]
        rows.append([f"{examples:,}", tried, *epochs, *values])
    heads = ["examples", "epochs tried", "best, LoRA", "best, Loop Dropout", "LoRA", "Loop Dropout", "difference"]
    return markdown(heads, rows)


def solvable_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells at K = 4 with problems of the pretraining."""
    return cells[(cells["depth"] == 4) & (cells["difficulty"] == "1 to 3")]


def random_depth_table(small: Study) -> str:
    """Return the accuracies after training at a fixed and at random depth, on the seeds that all four methods have."""
    methods = {
        "lora": ["4 loops", "LoRA"],
        "loop_dropout": ["4 loops", "Loop Dropout"],
        "random_depth_lora": ["2 to 6 loops", "LoRA"],
        "random_depth": ["2 to 6 loops", "Loop Dropout"],
    }
    values = {}
    for depth in (2, 4, 8):
        of_depth = {method: small.select(method, "accuracy", depth=depth)["value"] for method in methods}
        values[depth] = pd.DataFrame(of_depth).dropna().mean()
    rows = [[*heads, *(f"{means[method]:.1f}" for means in values.values())] for method, heads in methods.items()]
    return markdown(["training", "method", *(f"K = {depth}" for depth in values)], rows)


# Numbers in sentences


def pair_marks(name: str, pair: Pair) -> dict[str, str]:
    lora, ours, _ = pair_cells(pair)
    return {f"{name}_lora": lora, f"{name}_ours": ours, f"{name}_gain": f"{pair.gain.mean:+.1f}"}


def best_marks(cells: pd.DataFrame, examples: int) -> dict[str, str]:
    part = solvable_cells(cells)
    best = part[part["examples"] == examples][["lora", "loop_dropout"]].max()
    gain = best["loop_dropout"] - best["lora"]
    values = {"lora": f"{best['lora']:.1f}", "ours": f"{best['loop_dropout']:.1f}", "gain": f"{gain:+.1f}"}
    return {f"best_{examples}_{name}": value for name, value in values.items()}


def best_gains(cells: pd.DataFrame) -> str:
    """Return the differences with each method's best number of epochs, by the number of examples."""
    gains = [best_marks(cells, examples)[f"best_{examples}_gain"] for examples in sorted({*cells["examples"]})]
    return f"{', '.join(gains[:-1])} and {gains[-1]}"


def common_means(study: Study, ours: str, other: str, depth: int) -> Pair:
    """Return the accuracies of two methods by seed, on the seeds that both have."""
    sides = [study.select(method, "accuracy", depth=depth)["value"] for method in (other, ours)]
    seeds = sides[0].index.intersection(sides[1].index)
    return Pair(*(side.loc[seeds].to_numpy() for side in sides))


def make_numbers(studies: dict[str, Study], claims: pd.DataFrame, cells: pd.DataFrame) -> dict[str, str]:
    """Return the numbers in sentences, by the names of their marks."""
    study_a, study_c = transfer.DESIGN.read_lines(), serving_depth.DESIGN.read_lines()
    results = transfer.Results(study_a)
    slope = transfer.registered_tests(results)["slope"]
    span = results.bias.max() - results.bias.min()
    dose = [results.gain("in_distribution@8"), results.gain("in_distribution@8", "dose_control")]
    pairs = {
        "a_4": mean_pair(study_a, transfer.DESIGN, 4, 4),
        "c_4": mean_pair(study_c, serving_depth.DESIGN, 4, 4),
        "c_8": mean_pair(study_c, serving_depth.DESIGN, 8, 8),
        "c_fewer": mean_pair(study_c, serving_depth.DESIGN, 4, 3),
        "c_across": mean_pair(study_c, serving_depth.DESIGN, 4, 8),
        "lm": common_means(studies["small_lm"], "loop_dropout", "lora", 4),
        "one_layer": common_means(studies["small"], "loop_dropout", "lora", 4),
        "random": common_means(studies["small"], "loop_dropout", "random_depth_lora", 8),
    }
    at_random_depth = {}
    for row in claims.itertuples():
        if row.claim.title.startswith("At random depth, Loop Dropout is more accurate"):
            at_random_depth[f"random_both_{row.claim.title[-1]}"] = with_interval(row.gain)
    marks = {}
    for name, pair in pairs.items():
        marks |= pair_marks(name, pair)
    marks |= best_marks(cells, 512)
    part = claims[claims["question"] == "accuracy"]
    for study, name in (("small_lm", "lm_p"), ("small", "one_layer_p")):
        row = part[[c.study == study and c.words.endswith("K = 4") for c in part["claim"]]].iloc[0]
        marks[name] = f"{format_p(row['family_p'])} ({format_p(row['family_p_without'])})"
    return marks | {
        "c_across_interval": with_interval(pairs["c_across"].gain),
        "c_4_interval": with_interval(pairs["c_4"].gain),
        "c_8_interval": with_interval(pairs["c_8"].gain),
        "slope_range": f"{span * slope[1]:+.1f} to {span * slope[2]:+.1f}",
        "bias_range": f"{span:.0f}",
        "larger_numbers": with_interval(estimate_mean(results.gain("larger_numbers@4"))),
        "over_dose_8": with_interval(estimate_mean(dose[0] - dose[1])),
        "deeper_is_worse": f"{count_worse(study_a, transfer.DESIGN)} of 15",
        "c_below": f"{(pairs['c_across'].ours < pairs['c_across'].lora).sum()} of 15",
        "a_rates": compare_rates(study_a, transfer.DESIGN),
        "c_rates": compare_rates(study_c, serving_depth.DESIGN),
        "a_highest": count_high_rates(study_a, transfer.DESIGN, 2e-3),
        "c_higher": count_high_rates(study_c, serving_depth.DESIGN, 4e-3),
        "best_gains": best_gains(cells),
        **at_random_depth,
    }


def count_worse(lines: list[dict], design: Design) -> int:
    """Return on how many base models both methods are less accurate with 8 loops than with 4."""
    four, eight = (mean_pair(lines, design, depth, depth) for depth in (4, 8))
    return int(((eight.lora < four.lora) & (eight.ours < four.ours)).sum())


def compare_rates(lines: list[dict], design: Design) -> str:
    """Return on how many base models the best learning rate of Loop Dropout is higher and lower than LoRA's."""
    lora, ours = (chosen_rates(lines, design, method) for method in ("lora", "p_0.5"))
    higher = sum(ours[base] > lora[base] for base in design.bases)
    lower = sum(ours[base] < lora[base] for base in design.bases)
    return f"higher on {higher} and lower on {lower} of {len(design.bases)}"


def count_high_rates(lines: list[dict], design: Design, least: float) -> str:
    """Return on how many base models each method chose this learning rate or a higher one."""
    counts = [
        sum(rate >= least for rate in chosen_rates(lines, design, method).values()) for method in ("p_0.5", "lora")
    ]
    return f"{counts[0]} of {len(design.bases)} base models, LoRA on {counts[1]}"
