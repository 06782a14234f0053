"""The claims of the paper, and others that this project's studies suggest, each with the gains that decide it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from intervals import Estimate, estimate
from runs import Study, differences
from statsmodels.stats.multitest import multipletests


Gains = Callable[[Study], np.ndarray]


@dataclass(frozen=True)
class Claim:
    """One sentence, its number in the paper, and its gains [seeds, problems] here, above zero if it holds."""

    words: str
    paper: str
    gains: Gains
    study: str = "small"
    digits: int = 1  # of points; of nats 3


def verdict(mean: float, p: float) -> str:
    """Return the word for a difference with this p-value."""
    if p >= 0.05:
        return "undecided"
    return "seen" if mean > 0 else "opposite"


def with_interval(gain: Estimate, digits: int = 1) -> str:
    return f"{gain.mean:+.{digits}f} [{gain.low:+.{digits}f}, {gain.high:+.{digits}f}]"


def shown_p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def against(other: str, ours: str = "loop_dropout", **place) -> Gains:
    return lambda study: study.gains(ours, other, **place)


def late_bias(method: str) -> Gains:
    """rho_K - rho_1 of one method."""

    def gains(study: Study) -> np.ndarray:
        loops = int(study.rows.loc[study.rows["method"] == method, "num_loops"].max())
        last, first = (study.select(method, "loss_reduction", loop=loop)["value"] for loop in (loops, 1))
        return (last - first).to_numpy(dtype=float)[:, None]

    return gains


def flatter(study: Study) -> np.ndarray:
    """max rho_t - min rho_t of LoRA, less Loop Dropout's."""
    spreads = []
    for method in ("lora", "loop_dropout"):
        loops = sorted(study.rows.loc[study.rows["method"] == method, "loop"].dropna().unique())
        if not loops:
            return np.empty((0, 1))
        rho = pd.concat([study.select(method, "loss_reduction", loop=int(loop))["value"] for loop in loops], axis=1)
        spreads.append(rho.max(axis=1) - rho.min(axis=1))
    return (spreads[0] - spreads[1]).dropna().to_numpy(dtype=float)[:, None]


def keeps(depth: int) -> Gains:
    """By how much less accuracy Loop Dropout loses than LoRA from the training depth to another."""
    return lambda study: study.gains("loop_dropout", "lora", depth=depth) - study.gains("loop_dropout", "lora")


def three_loops_against_four(study: Study) -> np.ndarray:
    return differences(study.select("loop_dropout", "accuracy", depth=3), study.select("lora", "accuracy", depth=4))


def more_than_independent(rank: int) -> Gains:
    """By how much more masking gains on a shared update than on independent ones, over the first seeds that both have."""

    def gains(study: Study) -> np.ndarray:
        shared = study.gains("loop_dropout", "lora")
        independent = study.gains(f"independent_rank_{rank}_masked", f"independent_rank_{rank}")
        seeds = min(len(shared), len(independent))
        return shared[:seeds] - independent[:seeds] if seeds else np.empty((0, 1))

    return gains


LATE = "LoRA's update reduces the loss more in the last loop than in the first: rho_K - rho_1"
TWO, HUGINN, SMALL_LM = " (base of two layers)", " (tiny Huginn, 8 loops)", " (SmolLM2-135M, looped)"
LATE_TWO, LATE_HUGINN = (f"LoRA's late bias, rho_K - rho_1{base}" for base in (TWO, HUGINN))
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
      for loop, paper in enumerate(("+1.29", "+64.42", "+83.60", "+80.11"), 1)),
    *(Claim(f"The readout of loop {loop} has a lower loss", paper,
            against("loop_dropout", "lora", metric="readout_loss", loop=loop), digits=3)
      for loop, paper in enumerate(("+0.193", "+0.071", "+0.025", "+0.036"), 1)),
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
    Claim("Masking helps a shared update more than independent ones of rank 4", "-1.14, +6.60", more_than_independent(4)),
    Claim("Masking helps a shared update more than independent ones of rank 16", "+0.45, +7.00", more_than_independent(16)),
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
    Claim(THREE, "-", three_loops_against_four, "fresh_seeds"),
    *(Claim(f"{words}{base}", "-", gains, study) for study, base, deeper in (
        ("small", "", 8), ("two_layers", TWO, 8), ("huginn", HUGINN, 16), ("small_lm", SMALL_LM, 8))
      for words, gains in (
        ("p annealed from 0.5 to 0 is more accurate than LoRA", against("lora", "annealed")),
        ("Annealed, than LoRA at twice the depth", against("lora", "annealed", depth=deeper)),
        ("Annealed, than p = 0.5 throughout", against("loop_dropout", "annealed")),
        ("Annealed, than p = 0.5 throughout at twice the depth", against("loop_dropout", "annealed", depth=deeper)))),
    *(Claim(f"{words}{TWO}", paper, gains, "two_layers") for words, paper, gains in (
        ("LoRA's late bias, rho_K - rho_1", "+20.5", late_bias("lora")), ("Flatter than LoRA", "+15.4", flatter),
        ("More accurate than LoRA", "+1.90", against("lora")), ("At twice the depth", "+4.75", against("lora", depth=8)),
        ("More accurate than CoTo", "+0.94", against("coto")))),
    *(Claim(f"{words}{HUGINN}", "-", gains, "huginn") for words, gains in (
        ("LoRA's late bias, rho_K - rho_1", late_bias("lora")), ("Flatter than LoRA", flatter),
        ("More accurate than LoRA", against("lora")), ("At twice the depth", against("lora", depth=16)))),
    *(Claim(f"{words}{SMALL_LM}", paper, gains, "small_lm") for words, paper, gains in (
        ("LoRA's late bias, rho_K - rho_1", "+20.5", late_bias("lora")), ("Flatter than LoRA", "+15.4", flatter),
        ("Alone in loop 1, a larger loss reduction than LoRA's", "+18.9", against("lora", metric="loss_reduction", loop=1)),
        ("More accurate than LoRA", "+1.90", against("lora")), ("At half the depth", "-", against("lora", depth=2)),
        ("At twice the depth", "+4.75", against("lora", depth=8)))),
]  # fmt: skip


def decide(studies: dict[str, Study]) -> tuple[pd.DataFrame, dict[str, list[str]]]:
    """Return what the claims come to, and the words of those that have no row: by the reason why.

    A claim whose gains are another's to the last problem is the same comparison, and listed once. `alone` is the verdict by a
    claim's own p-value, `verdict` that after Holm's correction for the number of rows, which makes p `corrected`.
    """
    rows, compared = [], []
    left_out: dict[str, list[str]] = {"Not measured": [], "One seed": [], "The same comparison as a row above": []}
    for claim in CLAIMS:
        gains = claim.gains(studies[claim.study]) if claim.study in studies else np.empty((0, 1))
        gain = estimate(gains)
        if gain is None:
            left_out["One seed" if len(gains) else "Not measured"].append(claim.words)
        elif any(np.array_equal(gains, other) for other in compared):
            left_out["The same comparison as a row above"].append(claim.words)
        else:
            compared.append(gains)
            rows.append({"claim": claim, "gain": gain, "seeds": len(gains), "alone": verdict(gain.mean, gain.p)})
    table = pd.DataFrame(rows)
    table["corrected"] = multipletests([gain.p for gain in table["gain"]], method="holm")[1]
    table["verdict"] = [verdict(gain.mean, p) for gain, p in zip(table["gain"], table["corrected"], strict=True)]
    return table, left_out
