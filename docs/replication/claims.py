"""The comparisons of docs/replication.md: claims of the paper and of this project, with the differences that test them.

The claims on one question are one family of tests, and a p-value is adjusted by Holm's method within its family. The appendix
also has the p-values that are adjusted for all claims together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from intervals import Estimate, estimate, holm
from runs import Study, differences


Gains = Callable[[Study], np.ndarray]

BASES = {
    "small": "one layer",
    "two_layers": "two layers",
    "huginn": "tiny Huginn",
    "small_lm": "SmolLM2-135M, looped",
    "fresh_seeds": "one layer, ten fresh seeds",
}
"""Names of the base models, by study."""
DEPTHS = {"small": (4, 8), "two_layers": (4, 8), "huginn": (8, 16), "small_lm": (4, 8)}
"""The training depth K and 2K, by study."""


@dataclass(frozen=True)
class Claim:
    """A claim that holds if its differences are positive.

    Args:
        question: Question of the page. Its claims are one family of tests.
        words: The claim as a complete sentence.
        gains: Function from a study to the differences [seeds, problems], in points or nats.
        paper: Effect in the paper.
        study: Study whose runs test the claim.
        digits: Number of printed decimals.
        chooses_rates: Whether the learning rates were chosen by a seed that is also compared.
    """

    question: str
    words: str
    gains: Gains
    paper: str = "-"
    study: str = "small"
    digits: int = 1
    chooses_rates: bool = True

    @property
    def title(self) -> str:
        """The claim with its base model."""
        return self.words if self.study == "small" else f"{self.words} ({BASES[self.study]})"


def verdict(mean: float, p: float) -> str:
    """Return the word for a difference with this p-value."""
    if p >= 0.05:
        return "not significant"
    return "significant" if mean > 0 else "significant in the opposite direction"


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    heads = list(heads)
    head, *body = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([head, "|---" * len(heads) + "|", *body])


def with_interval(gain: Estimate, digits: int = 1) -> str:
    return f"{gain.mean:+.{digits}f} [{gain.low:+.{digits}f}, {gain.high:+.{digits}f}]"


def format_p(p: float) -> str:
    if p < 0.001:
        return "<0.001"
    text = f"{p:.3f}"
    return f"{p:.4f}" if text == "0.050" else text


def against(other: str, ours: str = "loop_dropout", **place) -> Gains:
    """The gain of one method over another."""
    return lambda study: study.gains(ours, other, **place)


def late_bias(study: Study) -> np.ndarray:
    """rho_K - rho_1 of LoRA."""
    loops = int(study.rows.loc[study.rows["method"] == "lora", "num_loops"].max())
    last, first = (study.select("lora", "loss_reduction", loop=loop)["value"] for loop in (loops, 1))
    return (last - first).to_numpy(dtype=float)[:, None]


def flatness(study: Study) -> np.ndarray:
    """max rho_t - min rho_t of LoRA minus the same of Loop Dropout."""
    spreads = []
    for method in ("lora", "loop_dropout"):
        loops = sorted(study.rows.loc[study.rows["method"] == method, "loop"].dropna().unique())
        rho = pd.concat([study.select(method, "loss_reduction", loop=int(loop))["value"] for loop in loops], axis=1)
        spreads.append(rho.max(axis=1) - rho.min(axis=1))
    return (spreads[0] - spreads[1]).dropna().to_numpy(dtype=float)[:, None]


def smaller_loss_of_accuracy(study: Study) -> np.ndarray:
    """The gain at K = 8 minus the gain at K = 4."""
    return study.gains("loop_dropout", "lora", depth=8) - study.gains("loop_dropout", "lora")


def three_loops_against_four(study: Study) -> np.ndarray:
    return differences(study.select("loop_dropout", "accuracy", depth=3), study.select("lora", "accuracy", depth=4))


def shared_against_independent(rank: int) -> Gains:
    """The gain by masks on a shared update minus the gain on independent updates, over the seeds that both have."""

    def gains(study: Study) -> np.ndarray:
        shared = study.gains("loop_dropout", "lora")
        independent = study.gains(f"independent_rank_{rank}_masked", f"independent_rank_{rank}")
        seeds = min(len(shared), len(independent))
        return shared[:seeds] - independent[:seeds]

    return gains


def main_claims() -> Iterator[Claim]:
    """Yield the four claims of the first table for each base model, with the paper's numbers where they apply."""
    for study, (trained, deeper) in DEPTHS.items():
        paper = iter(("-",) * 4 if study == "huginn" else ("+20.5", "+15.4", "+1.90", "+4.75"))
        yield Claim("late bias", "LoRA's update has a late bias, rho_K - rho_1 > 0", late_bias, next(paper), study)
        yield Claim(
            "flatness", "Loop Dropout has a smaller max - min of rho_t than LoRA", flatness, next(paper), study
        )
        better = "Loop Dropout is more accurate than LoRA at"
        yield Claim("accuracy", f"{better} K = {trained}", against("lora"), next(paper), study)
        yield Claim("accuracy", f"{better} K = {deeper}", against("lora", depth=deeper), next(paper), study)


def annealing_claims() -> Iterator[Claim]:
    for study, depths in DEPTHS.items():
        for other, name in (("lora", "LoRA"), ("loop_dropout", "p = 0.5 throughout")):
            for depth in depths:
                words = f"p annealed from 0.5 to 0 is more accurate than {name} at K = {depth}"
                yield Claim("annealing", words, against(other, "annealed", depth=depth), study=study)


RHO, READOUT = {"metric": "loss_reduction"}, {"metric": "readout_loss"}
BETTER = "Loop Dropout is more accurate"

CLAIMS = [
    *main_claims(),
    *(Claim("bias", "Alone in loop 1, Loop Dropout's update reduces the loss more than LoRA's",
            against("lora", **RHO, loop=1), "+18.9", study) for study in ("small", "small_lm")),
    *(Claim("bias", f"{BETTER} than LoRA with the update in loop {loop} only", against("lora", loop=loop), paper)
      for loop, paper in enumerate(("+1.29", "+64.42", "+83.60", "+80.11"), 1)),
    *(Claim("bias", f"Loop Dropout has a lower loss than LoRA at the readout of loop {loop}, in nats",
            against("loop_dropout", "lora", **READOUT, loop=loop), paper, digits=3)
      for loop, paper in enumerate(("+0.193", "+0.071", "+0.025", "+0.036"), 1)),
    *(Claim("depth", f"{BETTER} than LoRA at K = 2, half the training depth", against("lora", depth=2), study=study)
      for study in ("small", "small_lm")),
    Claim("depth", "Loop Dropout loses less accuracy than LoRA from K = 4 to K = 8", smaller_loss_of_accuracy, "+2.85"),
    Claim("depth", "Loop Dropout with three loops is more accurate than LoRA with four", three_loops_against_four,
          study="fresh_seeds"),
    *(Claim("depth", f"{BETTER} than LoRA when trained and evaluated at K = {depth}",
            against(f"depth_{depth}_lora", f"depth_{depth}"), paper)
      for depth, paper in ((2, "+2.17"), (6, "+1.59"), (8, "+0.51"))),
    Claim("ablations", f"{BETTER} than unscaled masks", against("unscaled"), "+2.86"),
    Claim("ablations", f"{BETTER} than the dose control", against("dose_control"), "+2.00"),
    Claim("ablations", f"{BETTER} than module-wise masks", against("module_wise"), "+2.05"),
    Claim("ablations", f"{BETTER} than low-rank weight noise", against("weight_noise"), "+1.87"),
    Claim("ablations", f"{BETTER} than parallel noise of the same mean and variance", against("parallel_noise"), "+1.95"),
    *(Claim("ablations", f"p = 0.5 is more accurate than p = {p}", against(f"p_{p}"), paper)
      for p, paper in ((0.25, "+0.6"), (0.75, "+0.1"), (0.1, "-"))),
    *(Claim("ablations", f"Masks help a shared update more than independent updates of rank {rank}",
            shared_against_independent(rank), paper) for rank, paper in ((4, "-1.14, +6.60"), (16, "+0.45, +7.00"))),
    Claim("baselines", f"{BETTER} than LoRA+", against("lora_plus"), "+0.99"),
    Claim("baselines", f"{BETTER} than rsLoRA", against("rslora"), "+2.0"),
    Claim("baselines", f"{BETTER} than LoRA with input dropout", against("input_dropout"), "+2.2"),
    Claim("baselines", f"{BETTER} than LoRA Dropout, alpha 32 as in the paper", against("lora_dropout_32"), "+0.76"),
    Claim("baselines", f"{BETTER} than LoRA Dropout, alpha 8, a quarter of the paper's", against("lora_dropout")),
    Claim("baselines", f"{BETTER} than CoTo", against("coto"), "+0.94", "two_layers"),
    Claim("settings", f"{BETTER} than LoRA at rank 4", against("rank_4_lora", "rank_4"), "+0.56"),
    Claim("settings", f"{BETTER} than LoRA at rank 64", against("rank_64_lora", "rank_64"), "+0.43"),
    *(Claim("settings", f"{BETTER} than LoRA when both train at learning rate {rate:g}", against("lora", rate=rate),
            "+0.56 to +2.62", chooses_rates=False) for rate in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)),
    *annealing_claims(),
    Claim("random depth", "LoRA at random depth is more accurate at K = 8 than LoRA at fixed depth",
          against("lora", "random_depth_lora", depth=8)),
    Claim("random depth", "At random depth, Loop Dropout is more accurate than LoRA at K = 4",
          against("random_depth_lora", "random_depth")),
    Claim("random depth", "At random depth, Loop Dropout is more accurate than LoRA at K = 8",
          against("random_depth_lora", "random_depth", depth=8)),
]  # fmt: skip


def adjust(gains: Iterable[Estimate]) -> np.ndarray:
    """Return the p-values of one family of tests, adjusted by Holm's method."""
    return holm([gain.p for gain in gains])


def decide(studies: dict[str, Study]) -> tuple[pd.DataFrame, dict[str, str]]:
    """Test the claims.

    Returns:
        A table with one row for each comparison: the `claim`, its `question`, its `gain`, `n` seeds, and `gain_without`,
        without the seed that chose the learning rates. `family_p` and `family_p_without` are their p-values, adjusted within
        the claims on the question, and `family_verdict` is the verdict by the larger one. `adjusted`, `adjusted_without` and
        `verdict` are the same for all claims together. And the claims without a row, because their differences equal the
        differences of another claim, with that claim.
    """
    rows, gains, same = [], {}, {}
    for claim in CLAIMS:
        values = claim.gains(studies[claim.study])
        equal = [title for title, other in gains.items() if np.array_equal(values, other)]
        if equal:
            same[claim.title] = equal[0]
        else:
            gains[claim.title] = values
            without = claim.gains(studies[claim.study].without_selection()) if claim.chooses_rates else values
            row = {"claim": claim, "question": claim.question, "gain": estimate(values), "n": len(values)}
            rows.append({**row, "gain_without": estimate(without)})
    table = pd.DataFrame(rows)
    families = table.groupby("question")
    for suffix in ("", "_without"):
        table[f"adjusted{suffix}"] = adjust(table[f"gain{suffix}"])
        table[f"family_p{suffix}"] = families[f"gain{suffix}"].transform(adjust)
    for name, p_value in {"verdict": "adjusted", "family_verdict": "family_p"}.items():
        strict = table[[p_value, f"{p_value}_without"]].max(axis=1)
        table[name] = [verdict(gain.mean, p) for gain, p in zip(table["gain"], strict, strict=True)]
    return table, same
