"""The paper's claims against a study's results: our number with its interval, and a verdict.

A study writes them between the two marks of its document. A claim is a difference that should be positive. Its interval holds
95% of a paired bootstrap over seeds and problems; a quantity without problems of its own, such as a loss, is resampled over
seeds.

- *seen*: the interval lies above zero; *not seen*: the whole interval lies below zero, or within half of a point (or of a
  hundredth of a nat) around it; *undecided*: anything else, and whatever fewer than three seeds say; *not run*.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loopdropout_trainer.evaluation.statistics import summarize


DRAWS = 4000
LEAST_SEEDS = 3

Run = dict[str, Any]
Values = np.ndarray  # [seeds] or [seeds, problems], in percent or nats


class NotRunError(LookupError):
    """The study has not run what a claim is about."""


@dataclass(frozen=True)
class Results:
    """A study's results: each method's measured runs at one rate, by seed.

    Attributes:
        runs: method -> seed -> the run.
        benchmark: name of the first benchmark.
        other_rates: (method, rate) -> seed -> the run, for all rates that were measured.
    """

    runs: dict[str, dict[int, Run]]
    benchmark: str
    other_rates: dict[tuple[str, float], dict[int, Run]] = field(default_factory=dict)

    @classmethod
    def of(cls, collected: dict[str, Any]) -> Results:
        """Take each method at the rate that was chosen for it, or else at the one rate that it was run at."""
        runs: dict[str, dict[int, Run]] = {}
        other_rates: dict[tuple[str, float], dict[int, Run]] = {}
        measured = [run for run in collected["runs"] if "measured" in run]
        for run in measured:
            other_rates.setdefault((run["method"], run["rate"]), {})[run["seed"]] = run
        for method in dict.fromkeys(run["method"] for run in measured):
            mine = [run for run in measured if run["method"] == method]
            rates = {run["rate"] for run in mine}
            rate = collected["chosen_rates"].get(method)
            if rate not in rates:
                rate = max(rates, key=lambda r: (sum(run["rate"] == r for run in mine), -r))
            runs[method] = {run["seed"]: run for run in mine if run["rate"] == rate}
        return cls(runs, collected["measure"]["benchmarks"][0], other_rates)

    def at_rate(self, rate: float) -> Results:
        """Return the results of all methods at one rate."""
        same = {method: runs for (method, other), runs in self.other_rates.items() if other == rate}
        return Results(same, self.benchmark)

    def paired(self, *methods: str) -> list[list[Run]]:
        """Return the runs of the seeds that all methods have, method by method.

        Raises:
            NotRunError: if there is no such seed.
        """
        for method in methods:
            if method not in self.runs:
                raise NotRunError(method)
        seeds = sorted(set.intersection(*(set(self.runs[method]) for method in methods)))
        if not seeds:
            raise NotRunError(" and ".join(methods))
        return [[self.runs[method][seed]["measured"] for seed in seeds] for method in methods]


def bits(counts: dict[str, Any]) -> np.ndarray:
    """Return the verdict on each problem as 0 or 100, [problems]."""
    digits = "".join(f"{int(digit, 16):04b}" for digit in counts["right"])
    return 100.0 * np.array([int(bit) for bit in digits[: counts["total"]]])


def accuracy(runs: Sequence[Run], benchmark: str) -> Values:
    """Return the verdicts of the seeds on a benchmark, [seeds, problems]."""
    try:
        return np.stack([bits(run["benchmarks"][benchmark]) for run in runs])
    except KeyError as error:
        raise NotRunError(benchmark) from error


def accuracy_at(runs: Sequence[Run], depth: int) -> Values:
    """Return the verdicts of the seeds at another depth, [seeds, problems]."""
    try:
        return np.stack([bits(run["by_depth"][str(depth)]) for run in runs])
    except KeyError as error:
        raise NotRunError(f"K = {depth}") from error


def rho(runs: Sequence[Run]) -> np.ndarray:
    """Return the loss reduction by single-loop activation in percent, [seeds, K]."""
    try:
        return np.stack(
            [100 * (1 - np.array(run["single_loop"]["only"]) / run["single_loop"]["frozen"]) for run in runs]
        )
    except KeyError as error:
        raise NotRunError("single-loop activation") from error


def readouts(runs: Sequence[Run]) -> np.ndarray:
    """Return the loss of every loop's readout in nats, [seeds, K]."""
    try:
        return np.stack([np.array(run["readouts"]) for run in runs])
    except KeyError as error:
        raise NotRunError("readouts") from error


def interval(values: Values, draws: int = DRAWS) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the mean, over seeds and, if there are any, problems."""
    rng = np.random.default_rng(0)
    seeds = values.shape[0]
    means = []
    for _ in range(draws):
        drawn = values[rng.integers(0, seeds, seeds)]
        if drawn.ndim == 2:
            drawn = drawn[:, rng.integers(0, drawn.shape[1], drawn.shape[1])]
        means.append(drawn.mean())
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class Claim:
    """A difference that the paper says is positive.

    Attributes:
        words: the claim in one line.
        paper: the paper's number.
        values: the same difference in a study's results; raises NotRunError.
        unit: of the number; `points` of percent, or `nats`.
    """

    words: str
    paper: str
    values: Callable[[Results], Values]
    unit: str = "points"

    def row(self, results: Results) -> str:
        """Return the claim's row of the document's table."""
        try:
            values = self.values(results)
        except NotRunError:
            return f"| {self.words} | {self.paper} | - | - | not run |"
        low, high = interval(values)
        digits = 3 if self.unit == "nats" else 2
        ours = f"{values.mean():+.{digits}f} {self.unit}"
        if values.ndim == 2 or len(values) > 1:  # one seed's loss has nothing to resample
            ours = f"{values.mean():+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}] {self.unit}"
        sd = summarize(values if values.ndim == 1 else values.mean(axis=1)).sd
        spread = "-" if sd is None else f"{sd:.{digits}f}"
        cells = (self.words, self.paper, ours, f"{len(values)}, {spread}", verdict(low, high, len(values), self.unit))
        return f"| {' | '.join(cells)} |"


def verdict(low: float, high: float, seeds: int, unit: str = "points") -> str:
    """Say what an interval [low, high] of a difference that should be positive shows."""
    nothing = 0.01 if unit == "nats" else 0.5
    if seeds < LEAST_SEEDS:
        return "undecided"
    if low > 0:
        return "seen"
    return "not seen" if high < 0 or (-nothing < low and high < nothing) else "undecided"


def _gain(ours: str, other: str, benchmark: str | None = None) -> Callable[[Results], Values]:
    """The accuracy of one method minus another's."""

    def values(results: Results) -> Values:
        a, b = results.paired(ours, other)
        name = benchmark or results.benchmark
        return accuracy(a, name) - accuracy(b, name)

    return values


def _gain_at_rate(rate: float) -> Callable[[Results], Values]:
    """Loop Dropout's accuracy minus LoRA's, both at one rate."""
    return lambda results: _gain("loop_dropout", "lora")(results.at_rate(rate))


def _gain_at(depth: int, ours: str = "loop_dropout", other: str = "lora") -> Callable[[Results], Values]:
    """The accuracy of one method minus another's at another depth."""

    def values(results: Results) -> Values:
        a, b = results.paired(ours, other)
        return accuracy_at(a, depth) - accuracy_at(b, depth)

    return values


def _gain_grows(deeper: int, own: int) -> Callable[[Results], Values]:
    return lambda results: _gain_at(deeper)(results) - _gain_at(own)(results)


def _of_rho(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Results], Values]:
    """A function of LoRA's and Loop Dropout's rho, both [seeds, K]."""

    def values(results: Results) -> Values:
        lora, ours = results.paired("lora", "loop_dropout")
        return function(rho(lora), rho(ours))

    return values


def _readout_gain(loop: int) -> Callable[[Results], Values]:
    def values(results: Results) -> Values:
        lora, ours = map(readouts, results.paired("lora", "loop_dropout"))
        if loop >= lora.shape[1]:
            raise NotRunError(f"loop {loop + 1}")
        return lora[:, loop] - ours[:, loop]

    return values


def _catches_up(results: Results) -> Values:
    names = ("longer", "longer_lora", "loop_dropout", "lora")
    longer, longer_lora, ours, lora = (accuracy(runs, results.benchmark) for runs in results.paired(*names))
    return (longer - longer_lora) - (ours - lora)


def _masking_helps_sharing_more(rank: int) -> Callable[[Results], Values]:
    def values(results: Results) -> Values:
        names = ("loop_dropout", "lora", f"independent_rank_{rank}_masked", f"independent_rank_{rank}")
        shared, plain, masked, independent = (accuracy(runs, results.benchmark) for runs in results.paired(*names))
        return (shared - plain) - (masked - independent)

    return values


def _single_loop_gain(loop: int) -> Callable[[Results], Values]:
    """Loop Dropout's accuracy minus LoRA's with the update in one loop only."""

    def values(results: Results) -> Values:
        lora, ours = results.paired("lora", "loop_dropout")
        try:
            only = [np.stack([bits(run["single_loop_answers"][loop]) for run in runs]) for runs in (ours, lora)]
        except (KeyError, IndexError) as error:
            raise NotRunError("answers with the update in one loop") from error
        return only[0] - only[1]

    return values


def _late_bias(lora: np.ndarray, ours: np.ndarray) -> np.ndarray:
    return lora[:, -1] - lora[:, 0]


def _levelling(lora: np.ndarray, ours: np.ndarray) -> np.ndarray:
    return np.ptp(lora, axis=1) - np.ptp(ours, axis=1)


CORE_CLAIMS = (
    Claim("LoRA's update does more in the last loop than in the first: rho_K - rho_1", "+20.5", _of_rho(_late_bias)),
    Claim("Loop Dropout levels it: LoRA's max - min of rho_t, less its own", "+15.4", _of_rho(_levelling)),
    Claim("Loop Dropout's update does more alone in loop 1", "+18.9", _of_rho(lambda lora, ours: ours[:, 0] - lora[:, 0])),
    Claim("Loop Dropout answers more at the training depth", "+1.90", _gain("loop_dropout", "lora")),
    Claim("It loses less than LoRA from the training depth to twice it (4 to 8 loops)", "+2.85", _gain_grows(8, 4)),
    Claim("It answers more at twice the training depth", "+4.75", _gain_at(8)),
    Claim("It answers more with half the loops (K = 2)", "none", _gain_at(2)),
    Claim("It answers more with three quarters of the loops (K = 3)", "none", _gain_at(3)),
)  # fmt: skip

SMALL_P_CLAIMS = (
    Claim("With p = 0.1 it answers more at the training depth", "none", _gain("p_0.1", "lora")),
    Claim("With p = 0.1 it answers more at twice the training depth", "none", _gain_at(8, "p_0.1", "lora")),
    Claim("With p = 0.1 it answers more with half the loops (K = 2)", "none", _gain_at(2, "p_0.1", "lora")),
)

READOUT_CLAIMS = tuple(
    Claim(f"The readout of loop {loop + 1} has less loss", paper, _readout_gain(loop), "nats")
    for loop, paper in enumerate(("+0.193", "+0.071", "+0.025", "+0.037"))
)

PAPER_CLAIMS = (
    *CORE_CLAIMS,
    Claim("Rescaling matters: against unscaled masks", "+2.86", _gain("loop_dropout", "unscaled")),
    Claim("Which loops matters: against the dose control", "+2.00", _gain("loop_dropout", "dose_control")),
    Claim("Whole applications matter: against module-wise masks", "+2.05", _gain("loop_dropout", "module_wise")),
    Claim("Against low-rank weight noise", "+1.87", _gain("loop_dropout", "weight_noise")),
    Claim("Against parallel noise of the same two moments", "+1.95", _gain("loop_dropout", "parallel_noise")),
    Claim("It answers more after three times as many steps", "none", _gain("longer", "longer_lora")),
    Claim("Three times as many steps bring it closer to LoRA", "none", _catches_up),
    Claim("Against LoRA+", "+0.99", _gain("loop_dropout", "lora_plus")),
    Claim("Against rsLoRA", "+2.0", _gain("loop_dropout", "rslora")),
    Claim("Against CoTo", "+0.94", _gain("loop_dropout", "coto")),
    Claim("Against LoRA Dropout", "+0.76", _gain("loop_dropout", "lora_dropout")),
    Claim("Against dropout on the adapter's input", "+2.2", _gain("loop_dropout", "input_dropout")),
    Claim("p = 0.5 answers more than p = 0.25", "+0.6", _gain("loop_dropout", "p_0.25")),
    Claim("p = 0.5 answers more than p = 0.75", "+0.1", _gain("loop_dropout", "p_0.75")),
    *SMALL_P_CLAIMS,
    Claim("Masking helps a shared update more than rank 4 in each loop", "-1.14, +6.60", _masking_helps_sharing_more(4)),
    Claim("Masking helps a shared update more than rank 16 in each loop", "+0.45, +7.00", _masking_helps_sharing_more(16)),
    Claim("It answers more at rank 4", "+0.56", _gain("rank_4", "rank_4_lora")),
    Claim("It answers more at rank 64", "+0.43", _gain("rank_64", "rank_64_lora")),
    *(
        Claim(f"It answers more when both train at the rate {rate:g}", "+0.56 to +2.62", _gain_at_rate(rate))
        for rate in (0.002, 0.004, 0.008, 0.016)
    ),
    Claim("It answers more when trained and asked at K = 2", "+2.17", _gain("depth_2", "depth_2_lora")),
    Claim("It answers more when trained and asked at K = 6", "+1.59", _gain("depth_6", "depth_6_lora")),
    Claim("It answers more when trained and asked at K = 8", "+0.51", _gain("depth_8", "depth_8_lora")),
    *(
        Claim(f"Uniform p answers more than {words}", paper, _gain("loop_dropout", variant))
        for words, variant, paper in (
            ("masks of early loops", "early_heavy", "-0.4"),
            ("masks of late loops", "late_heavy", "+1.7"),
            ("exactly two loops", "exactly_two_loops", "+0.1"),
            ("exactly one loop", "exactly_one_loop", "+0.7"),
            ("a random prefix of the loops", "random_prefix", "+1.8"),
            ("a random suffix of the loops", "random_suffix", "+1.8"),
        )
    ),
    Claim("It answers more in another wording", "+1.14", _gain("loop_dropout", "lora", "arithmetic_wording")),
    Claim("It answers more with larger numbers", "none", _gain("loop_dropout", "lora", "arithmetic_larger")),
    Claim("It answers more with more steps", "none", _gain("loop_dropout", "lora", "arithmetic_hard")),
    *READOUT_CLAIMS,
    *(
        Claim(f"It answers more with its update in loop {loop + 1} only", paper, _single_loop_gain(loop))
        for loop, paper in enumerate(("+1.28", "+64.42", "+83.60", "+80.11"))
    ),
)  # fmt: skip
"""The paper's numbers, Ouro-1.4B: GSM8K; sharing: GSM8K, MATH-500; another wording: GSM-Plus mini; readouts: MATH-500;
rates: the least and the most of its five; variants: each at the better of two rates."""

DEPTH_CLAIMS = tuple(
    Claim(f"{words} at K = {depth}", "none", _gain_at(depth, *methods))
    for words, methods in (
        ("LoRA answers more when trained at random depth,", ("random_depth_lora", "lora")),
        ("Loop Dropout answers more when trained at random depth,", ("random_depth", "loop_dropout")),
        ("Loop Dropout answers more than LoRA, both at their own depth,", ("loop_dropout", "lora")),
        ("Loop Dropout answers more than LoRA, both at random depth,", ("random_depth", "random_depth_lora")),
    )
    for depth in (2, 3, 4, 6, 8)
)
"""Of `recipes/studies/depth.yaml`; the paper trains at one depth."""

LARGER_CLAIMS = (*CORE_CLAIMS, *SMALL_P_CLAIMS, *READOUT_CLAIMS)
"""Of `recipes/studies/larger.yaml`: those that three methods decide."""

CLAIMS = {"paper": PAPER_CLAIMS, "depths": DEPTH_CLAIMS, "larger": LARGER_CLAIMS}
"""Sets of claims, by the name that a study gives."""


def claims_table(results: Results, claims: Sequence[Claim] = PAPER_CLAIMS) -> str:
    """Return claims with their verdicts, as Markdown."""
    head = (
        "| claim | paper (Ouro-1.4B) | here, 95% interval | seeds, SD over them | verdict |\n|---|---|---|---|---|\n"
    )
    return head + "\n".join(claim.row(results) for claim in claims)


def methods_table(results: Results) -> str:
    """Return each method's rate, accuracy on each benchmark and by depth, mean and SD over seeds, as Markdown."""
    every = [run["measured"] for runs in results.runs.values() for run in runs.values()]
    names, depths = (list(dict.fromkeys(key for run in every for key in run[of])) for of in ("benchmarks", "by_depth"))
    columns = ["method", "rate", "seeds", *names, *(f"K = {depth}" for depth in depths)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for method, runs in results.runs.items():
        measured = [run["measured"] for run in runs.values()]
        cells = [method, f"{next(iter(runs.values()))['rate']:.3g}", str(len(runs))]
        for name in names:  # parts may measure less than others
            cells.append(_mean_sd([r["benchmarks"][name]["score"] for r in measured if name in r["benchmarks"]]))
        for depth in depths:
            scores = [run["by_depth"][depth]["score"] for run in measured if depth in run["by_depth"]]
            cells.append(_mean_sd(scores))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def choices_table(collected: dict[str, Any]) -> str:
    """Return each method's development scores by learning rate, on the first seed, as Markdown; the chosen one in bold."""
    lines = []
    for method, chosen in collected["chosen_rates"].items():
        first = min(run["seed"] for run in collected["runs"] if run["method"] == method)
        cells = []
        for run in sorted(collected["runs"], key=lambda run: run["rate"]):
            if (run["method"], run["seed"]) == (method, first) and "development" in run:
                score = f"{next(iter(run['development'].values()))['score']:.1f}"
                cells.append(f"{run['rate']:g}: {f'**{score}**' if run['rate'] == chosen else score}")
        lines.append(f"| {method} | {', '.join(cells)} |")
    return "| method | right on the development split by learning rate, % |\n|---|---|\n" + "\n".join(lines)


def gates_table(results: Results) -> str:
    """Return the accuracy on the first benchmark with other gates at inference, mean and SD over seeds, as Markdown."""
    every = [run["measured"] for runs in results.runs.values() for run in runs.values()]
    loops = range(max((len(run.get("single_loop_answers", ())) for run in every), default=0))
    doses = list(dict.fromkeys(dose for run in every for dose in run.get("by_dose", ())))
    columns = [f"loop {loop + 1} only" for loop in loops] + [f"{dose} in all loops" for dose in doses]
    lines = [f"| {' | '.join(['method', 'seeds', *columns])} |", "|" + "---|" * (len(columns) + 2)]
    for method, runs in results.runs.items():
        measured = [run["measured"] for run in runs.values()]
        if not any("by_dose" in run or "single_loop_answers" in run for run in measured):
            continue
        only = [run.get("single_loop_answers", ()) for run in measured]
        cells = [_mean_sd([scores[loop]["score"] for scores in only if loop < len(scores)]) for loop in loops]
        cells += [_mean_sd([r["by_dose"][dose]["score"] for r in measured if "by_dose" in r]) for dose in doses]
        lines.append(f"| {' | '.join([method, str(len(runs)), *cells])} |")
    return "\n".join(lines)


def loops_table(results: Results) -> str:
    """Return rho_t and the readouts' losses, means over seeds, as Markdown."""
    lines = []
    for method, runs in results.runs.items():
        measured = [run["measured"] for run in runs.values() if "single_loop" in run["measured"]]
        if measured:
            reductions = " / ".join(f"{value:.1f}" for value in rho(measured).mean(axis=0))
            losses = " / ".join(f"{value:.3f}" for value in readouts(measured).mean(axis=0))
            lines.append(f"| {method} | {len(measured)} | {reductions} | {losses} |")
    return "| method | seeds | rho_t, % | readout losses, nats |\n|---|---|---|---|\n" + "\n".join(lines)


def _mean_sd(scores: Sequence[float]) -> str:
    return summarize(scores).text(1) if scores else "-"


def progress(collected: dict[str, Any]) -> str:
    """Return how much of the study has run, in one sentence for all of it and a few words for each part."""
    runs, planned = collected["runs"], collected.get("planned_trainings", len(collected["runs"]))
    measured = sum("measured" in run for run in runs)
    words = f"{len(runs)} of at most {planned} trainings have run, and {measured} of their adapters are measured"
    parts = {name: part["trainings"] for name, part in collected.get("parts", {}).items() if "trainings" in part}
    by_part = ", ".join(f"`{name}` {count['done']} of {count['planned']}" for name, count in parts.items())
    return f"{words}{f'; by part: {by_part}' if by_part else ''}."


def marks(claims: str) -> tuple[str, str]:
    """Return the comments between which a study with this set of claims writes into a document."""
    return f"<!-- {claims}: begin -->", f"<!-- {claims}: end -->"


def text_around(document: Path, claims: str) -> tuple[str, str]:
    """Return the document's text up to the first of a study's marks, and from the second on; a new one if there is none.

    Raises:
        ValueError: if there is a document without both marks.
    """
    begin, end = marks(claims)
    text = document.read_text(encoding="utf-8") if document.exists() else f"# Results\n\n{begin}\n{end}\n"
    if begin not in text or end not in text:
        raise ValueError(f"{document} must have the marks {begin} and {end}.")
    return text.split(begin)[0] + begin, end + text.split(end)[1]


def write_document(results: Path, document: Path) -> None:
    """Replace what stands between a study's marks in a document by its tables, or begin the document.

    Raises:
        ValueError: if there is a document without both marks.
    """
    collected = json.loads(results.read_text(encoding="utf-8"))
    claims = collected["claims"]
    before, after = text_around(document, claims)
    of_study = Results.of(collected)
    tables = [make(of_study) for make in (methods_table, gates_table, loops_table)]
    filled = [table for table in tables if len(table.splitlines()) > 2]  # more than a head
    parts = [progress(collected), claims_table(of_study, CLAIMS[claims]), *filled, choices_table(collected)]
    document.write_text("\n\n".join([before, *parts, after]), encoding="utf-8")
