"""Make the tables and figures of docs/replication.md from finished studies.

    python docs/replication/make.py collect outputs/studies/small outputs/studies/map ...   # adds runs to runs.csv.gz
    python docs/replication/make.py write                                                   # runs.csv.gz -> the documents

`collect` keeps one row for each number that a run measured (runs.py), so that all numbers of the documents are in one small
file. `write` tests the claims (claims.py), draws the figures (figures.py), and replaces the text between marks in
replication.md, when.md and README.md.

Intervals and p-values (intervals.py) pair the methods by seed and problem, with seeds and problems as random effects, or by
seed with Student's t if a seed gives one number. Verdicts are corrected for their number (Holm).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from claims import (
    HUGINN,
    LATE,
    LATE_HUGINN,
    LATE_TWO,
    SMALL_LM,
    THREE,
    TWO,
    decide,
    shown_p,
    verdict,
    with_interval,
)
from intervals import estimate, estimate_mean
from runs import METHODS, RUNS, Study, collect, differences, mean_sd, verdicts


HERE = Path(__file__).parent
DOCUMENTS = [HERE.parent / "replication.md", HERE.parent / "when.md", HERE.parents[1] / "README.md"]
BASES = {
    "small": ("base of one layer", 4, 8),
    "two_layers": ("base of two layers", 4, 8),
    "huginn": ("tiny Huginn", 8, 16),
    "small_lm": ("SmolLM2-135M, looped", 4, 8),
}
"""Studies: what their base is, the training depth and twice it."""

# Ouro-1.4B on GSM8K at the rate 1e-4, tables `tab:depth_matrix` and Appendix "Single-Loop Activation".
OF_THE_PAPER = {
    "LoRA": ["-", "79.9 ± 1.0", "75.0 ± 1.0", "70.8 ± 1.9", "11.9", "19.1", "26.5", "32.4"],
    "Loop Dropout": ["-", "81.8 ± 0.5", "78.0 ± 1.7", "75.6 ± 1.3", "30.8", "35.2", "35.9", "35.7"],
}
_COUNTS = ["one", "two", "three", "four", "five"]


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    heads = list(heads)
    lines = [heads, *rows]
    head, *body = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, "|---" * len(heads) + "|", *body])


# What a reader of the paper wants to know first.


def summary(studies: dict[str, Study], claims: pd.DataFrame, cells: pd.DataFrame) -> str:
    """Return some lines on all claims, the bases and the map."""
    by_words = {row.claim.words: row for row in claims.itertuples()}

    def told(words: str) -> str:
        row = by_words.get(words)
        return "no interval" if row is None else f"{with_interval(row.gain, row.claim.digits)}, {row.verdict}"

    def listed(by_itself: str, of_all: str) -> str:
        rows = claims[(claims["alone"] == by_itself) & (claims["verdict"] == of_all)]
        return "; ".join(_lower(claim.words) for claim in rows["claim"]) or "none"

    fresh = {depth: uncorrected(studies["fresh_seeds"].gains("loop_dropout", "lora", depth=depth)) for depth in (4, 8)}
    huginn = studies["huginn"]
    annealed = [f"{base} {studies[name].mean('annealed')}" for name, (base, *_) in BASES.items()]
    words = ("ahead", "level", "behind")
    at_4, at_8 = (_counted(cells.loc[cells["depth"] == depth, "word"], words) for depth in (4, 8))
    words = ("seen", "opposite", "undecided")
    corrected, alone = (_counted(claims[column], words) for column in ("verdict", "alone"))
    lines = [
        f"**{len(claims)} comparisons**, corrected for their number: {corrected}; each alone: {alone}.",
        f"**One layer, five seeds.** LoRA's late bias: {told(LATE)} (points of loss). Loop Dropout at the training depth: "
        f"{told('More accurate at the training depth')}; at twice it: {told('More accurate at twice the training depth')}.",
        f"**Ten fresh seeds** give, alone, {fresh[4]} at K = 4 and {fresh[8]} at K = 8.",
        f"**Three loops with Loop Dropout against four with LoRA** (ten fresh seeds): {told(THREE)}.",
        f"**Two layers, three seeds.** Late bias: {told(LATE_TWO)}; at the training depth: "
        f"{told('More accurate than LoRA' + TWO)}; at twice it: {told('At twice the depth' + TWO)}.",
        f"**Tiny Huginn, three seeds.** Late bias: {told(LATE_HUGINN)}. Loop Dropout {huginn.mean('loop_dropout')}%, LoRA "
        f"{huginn.mean('lora')}%: {told('More accurate than LoRA' + HUGINN)}.",
        f"**Seen alone, and undecided among {len(claims)}:** {listed('seen', 'undecided')}.",
        f"**Opposite alone, and undecided among {len(claims)}:** {listed('opposite', 'undecided')}.",
        f"**Opposite** after correction: {listed('opposite', 'opposite')}.",
        f"**The map**, {len(cells) // 2} cells, each word uncorrected: at the training depth {at_4}; at twice it {at_8}.",
        f"**p annealed from 0.5 to 0** at the training depth: {'; '.join(annealed)}.",
        language_line(studies["small_lm"], told),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _counted(values: pd.Series, words: Iterable[str]) -> str:
    return ", ".join(f"{(values == word).sum()} {word}" for word in words)


def _lower(words: str) -> str:
    return words if words.startswith(("LoRA", "Loop Dropout")) else words[0].lower() + words[1:]


def uncorrected(gains: np.ndarray) -> str:
    """Return a difference that is no row of the claims, with its own p-value."""
    gain = estimate(gains)
    return f"{with_interval(gain)} (p {shown_p(gain.p)})"


def language_line(study: Study, told: Callable[[str], str]) -> str:
    """Return what the language model shows; `told` gives a claim's difference and verdict."""
    rho = [f"{rho_text(study, method)}% with {title}" for method, title in METHODS.items()]
    parts = []
    for place, depth, words in (
        ("at the training depth", 4, "More accurate than LoRA"),
        ("at twice it", 8, "At twice the depth"),
    ):
        scores = [f"{title} {study.mean(method, depth=depth)}%" for method, title in METHODS.items()]
        gains = study.gains("loop_dropout", "lora", depth=depth)
        certainty = told(words + SMALL_LM)
        if len(gains) == 1:
            certainty = f"{with_interval(estimate_mean(gains[0]))} over problems"
        parts.append(f"{place} {', '.join(scores)}: {certainty}")
    base, *_ = BASES["small_lm"]
    return f"**A real language model** ({base}; {seeds_text(study)}). rho_t: {', '.join(rho)}. Accuracy {'; '.join(parts)}."


def seeds_text(study: Study) -> str:
    """Return how many seeds both methods have."""
    number = len(study.gains("loop_dropout", "lora"))
    return f"{_COUNTS[number - 1]} seed{'s' * (number > 1)}"


def rho_text(study: Study, method: str) -> str:
    """Return a method's loss reductions in each loop alone, means over its seeds."""
    loops = range(1, int(study.rows["num_loops"].max()) + 1)
    means = [study.select(method, "loss_reduction", loop=loop)["value"].mean() for loop in loops]
    return " / ".join(f"{mean:.0f}" for mean in means)


# Tables.


def claims_table(claims: pd.DataFrame, left_out: dict[str, list[str]]) -> str:
    """Return the claims as a table, with what has no row below it."""
    rows = []
    for row in claims.itertuples():
        word = row.verdict if row.verdict == "undecided" else f"**{row.verdict}**"
        numbers = [with_interval(row.gain, row.claim.digits), str(row.seeds), shown_p(row.gain.p)]
        rows.append([row.claim.words, row.claim.paper, *numbers, row.alone, shown_p(row.corrected), word])
    heads = ["claim", "paper", "here, 95% interval", "seeds", "p", "alone", "p, Holm", "of all"]
    table = markdown(heads, rows)
    notes = [f"{reason}: {'; '.join(words)}." for reason, words in left_out.items() if words]
    return "\n\n".join([table, *notes])


def rates_text(studies: dict[str, Study]) -> str:
    """Return which chosen rates are the lowest or highest of their grids, and how many lie inside."""
    rows, inside = [], 0
    for name, study in studies.items():
        for method, rate in study.rates.items():
            edge = study.edge(method)
            inside += edge is None and len(study.grids.get(method, ())) > 1
            if edge:
                grid = ", ".join(f"{value:.1f}% at {tried:g}" for tried, value in study.grids[method].items())
                rows.append([name, method, f"{rate:g}, {edge}", grid])
    table = markdown(["study", "method", "rate", "held-out accuracy by rate"], rows)
    return f"{inside} chosen rates lie inside their grids, {len(rows)} at an edge:\n\n{table}"


def same_rates(studies: dict[str, Study]) -> str:
    """Return in how many comparisons LoRA and Loop Dropout chose the same rate."""
    pairs = [(studies[name].rates["lora"], studies[name].rates["loop_dropout"]) for name in BASES]
    small = studies["small"].rates
    names = ("rank_4", "rank_64", "depth_2", "depth_6", "depth_8", "random_depth")
    pairs += [(small[f"{name}_lora"], small[name]) for name in names]
    same = sum(lora == ours for lora, ours in pairs)
    larger = sum(lora < ours for lora, ours in pairs)
    words = f"Of {len(pairs)} pairs here {same} had the same best rate"
    return f"{words}; Loop Dropout's was larger in {larger}, smaller in {len(pairs) - same - larger}."


def fresh_table(study: Study) -> str:
    """Return the accuracies of the fresh seeds by depth, and differences."""
    rows = []
    for depth_of_lora, depth in ((2, 2), (3, 3), (4, 4), (8, 8), (4, 3)):
        lora = study.select("lora", "accuracy", depth=depth_of_lora)
        ours = study.select("loop_dropout", "accuracy", depth=depth)
        gain = estimate(differences(ours, lora))
        if gain is not None:
            same = depth == depth_of_lora
            depths = f"{depth}" if same else f"{depth_of_lora} with LoRA, {depth} with Loop Dropout"
            rows.append([depths, mean_sd(lora), mean_sd(ours), with_interval(gain), shown_p(gain.p)])
    return markdown(["loops at inference", "LoRA", "Loop Dropout", "difference, 95% interval", "p"], rows)


def agreement_table(rows: pd.DataFrame) -> str:
    """Return how often a readout has the last one's most probable token, and their overlap, by loop: mean over seeds."""
    columns = [(metric, method) for metric in ("same_token", "overlap") for method in METHODS]
    lines = []
    agreement = rows[rows["metric"].isin(("same_token", "overlap"))]
    for (depth, loop), part in agreement.groupby(["depth", "loop"]):
        if loop < depth:
            groups = [part[(part["metric"] == metric) & (part["method"] == method)] for metric, method in columns]
            lines.append([f"{loop:.0f}", f"{depth:.0f}", *map(mean_sd, groups)])
    heads = ["same most probable token, LoRA", "Loop Dropout", "1 - TV, LoRA", "Loop Dropout"]
    return markdown(["readout after loop", "K", *heads], lines)


def choices_table(studies: dict[str, Study], cells: pd.DataFrame) -> str:
    """Return the accuracies of the three candidates for a user who does not know, at the training depth and twice it."""
    rows = []
    for name, (words, *depths) in BASES.items():
        methods = ("lora", "loop_dropout", "annealed")
        rows.append([words, *(studies[name].mean(method, depth=depth) for depth in depths for method in methods)])
    place = ["difficulty", "examples", "epochs", "depth"]
    cells = cells[cells["seed"].isin(cells.loc[cells["method"].str.startswith("annealed"), "seed"])]
    constant = map_table(cells).set_index(place)
    annealed = map_table(cells, "annealed").set_index(place)
    for difficulty, examples, epochs in dict.fromkeys(key[:3] for key in annealed.index):
        numbers = []
        for depth in (4, 8):
            key = (difficulty, examples, epochs, depth)
            row = annealed.loc[key]
            numbers += [row["lora"], constant.loc[key, "loop_dropout"], row["annealed"]]
        words = f"{difficulty} steps, {examples:,} examples, {epochs} epochs"
        rows.append([words, *(f"{number:.1f}" for number in numbers)])
    heads = ["where", "LoRA", "p = 0.5", "p from 0.5 to 0", "LoRA, twice the depth", "p = 0.5", "p from 0.5 to 0"]
    return markdown(heads, rows)


def language_model_table(study: Study) -> str:
    """Return accuracies by depth and loss reductions by loop of the language model's methods, and the paper's beside."""
    depths, loops = (2, 4, 6, 8), (1, 2, 3, 4)
    rows = []
    for method, rate in study.rates.items():
        seeds = len(study.select(method, "accuracy"))
        if seeds:
            cells = [study.mean(method, depth=depth) for depth in depths]
            cells += [study.mean(method, "loss_reduction", loop=loop) for loop in loops]
            rows.append(["here", METHODS.get(method, method), f"{rate:g}", str(seeds), *cells])
    for method, cells in OF_THE_PAPER.items():
        rows.append(["paper, Ouro-1.4B on GSM8K", method, "0.0001", "3 (rho: 1)", *cells])
    heads = ["where", "method", "rate", "seeds", *(f"K = {depth}" for depth in depths)]
    return markdown([*heads, *(f"rho_{loop}" for loop in loops)], rows)


def by_steps_table(study: Study) -> str:
    """Return the language model's accuracies by depth and by how many steps a problem takes."""
    metrics = sorted({name for name in study.rows["metric"] if name.startswith("accuracy_of_")})
    rows = []
    for method in study.rates:
        for depth in (2, 4, 6, 8):
            cells = [study.mean(method, metric, depth=depth) for metric in metrics]
            if set(cells) != {"-"}:
                rows.append([METHODS.get(method, method), str(depth), *cells])
    names = [metric.removeprefix("accuracy_of_").replace("_", " ") for metric in metrics]
    return markdown(["method", "K", *names], rows)


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
            gain = estimate_mean(100 * (answers[0] - answers[1]).mean(axis=0))
            word = {"seen": "ahead", "opposite": "behind", "undecided": "level"}[verdict(gain.mean, gain.p)]
            means = [100 * of_side.mean() for of_side in answers]
            table.append((*place, *means, gain.mean, len(seeds), word))
    names = ["difficulty", "examples", "epochs", "depth", ours, "lora", "gain", "seeds", "word"]
    return pd.DataFrame(table, columns=names)


def map_counts(cells: pd.DataFrame) -> str:
    """Return in how many cells a method is ahead, level and behind, by difficulty, examples and depth."""
    sizes = ["32 to 128", "512", "2,048 and 4,000"]
    cells = cells.assign(size=pd.cut(cells["examples"], [0, 128, 512, np.inf], labels=sizes))
    rows = []
    for (depth, difficulty, size), part in cells.groupby(["depth", "difficulty", "size"], observed=True):
        counts = [str((part["word"] == word).sum()) for word in ("ahead", "level", "behind")]
        span = f"{part['gain'].min():+.1f} to {part['gain'].max():+.1f}"
        depths = f"K = {depth:.0f}" + ", twice the training depth" * (depth == 8)
        rows.append([f"{difficulty} steps", size, depths, str(len(part)), *counts, span])
    return markdown(["problems", "examples", "depth", "cells", "ahead", "level", "behind", "gain"], rows)


def methods_table(studies: dict[str, Study]) -> pd.DataFrame:
    """Return each method's accuracies (%) by depth and loss reductions (%), mean ± SD over its seeds."""
    rows = []
    for name, study in studies.items():
        for method, rate in study.rates.items():
            own = study.select(method, "accuracy")
            if own.empty:
                continue
            row = {"study": name, "method": method, "learning_rate": rate, "seeds": len(own), "trained": mean_sd(own)}
            for depth in (1, 2, 4, 8, 12, 16):
                row[f"K = {depth}"] = study.mean(method, depth=depth)
            row["rho_1"] = study.mean(method, "loss_reduction", loop=1)
            row["rho_K"] = study.mean(method, "loss_reduction", loop=int(own["num_loops"].iloc[0]))
            rows.append(row)
    return pd.DataFrame(rows)


# The documents.


def numbers_in_sentences(studies: dict[str, Study], claims: pd.DataFrame) -> dict[str, str]:
    """Return the numbers that stand in sentences, by name."""
    small, language = studies["small"], studies["small_lm"]
    means = {row.claim.words: row.gain.mean for row in claims.itertuples()}
    accuracy = lambda method, depth: small.select(method, "accuracy", depth=depth)["value"].mean()
    kept = {}
    for depth in (4, 8):
        of_annealed, of_constant = (
            accuracy(method, depth) - accuracy("lora", depth) for method in ("annealed", "loop_dropout")
        )
        kept[f"kept_at_{depth}"] = f"{100 * of_annealed / of_constant:.0f}%"
    at_depths = {}
    for prefix, study, methods in (
        ("", small, METHODS),
        ("before_", studies["two_layers_before"], METHODS),
        ("two_", studies["two_layers"], (*METHODS, "coto", "module_wise")),
    ):
        for method in methods:
            for depth in (4, 8):
                at_depths[f"{prefix}{method}_{depth}"] = f"{study.mean(method, depth=depth)}%"
    return {
        **at_depths,
        **kept,
        "before_gain_8": uncorrected(studies["two_layers_before"].gains("loop_dropout", "lora", depth=8)),
        "deep_at_4": f"{small.mean('depth_8', depth=4)}%",
        "deep_lora_at_4": f"{small.mean('depth_8_lora', depth=4)}%",
        "deep_gain_4": uncorrected(small.gains("depth_8", "depth_8_lora", depth=4)),
        "random_depth_over": uncorrected(small.gains("random_depth_lora", "loop_dropout", depth=8)),
        "random_depth_gain": f"{means['LoRA at random depth is more accurate at twice the depth than LoRA']:.0f} points",
        "language_model": f"{language.mean('loop_dropout')}% against {language.mean('lora')}%",
        "language_model_seeds": seeds_text(language),
        "readout_gain": f"{means['The readout of loop 4 has a lower loss']:.3f} nats",
    }


def parts(rows: pd.DataFrame) -> tuple[dict[str, Study], pd.DataFrame, pd.DataFrame]:
    """Return the studies, the rows of the map, and its cells."""
    studies = {name: Study(part) for name, part in rows.groupby("study") if name != "map"}
    of_map = rows[rows["study"] == "map"]
    return studies, of_map, map_table(of_map)


def texts(
    studies: dict[str, Study], of_map: pd.DataFrame, cells: pd.DataFrame
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the tables of the documents, and the numbers in their sentences, by the names of their marks."""
    claims, left_out = decide(studies)
    tables = {
        "summary": summary(studies, claims, cells),
        "claims": claims_table(claims, left_out),
        "rates": rates_text(studies),
        "map": map_counts(cells),
        "fresh": fresh_table(studies["fresh_seeds"]),
        "agreement": agreement_table(studies["fresh_seeds"].rows),
        "choices": choices_table(studies, of_map),
        "same_rates": same_rates(studies),
        "language_model": language_model_table(studies["small_lm"]),
        "by_steps": by_steps_table(studies["small_lm"]),
    }
    return tables, numbers_in_sentences(studies, claims)


def filled(text: str, tables: dict[str, str], numbers: dict[str, str]) -> str:
    """Return a document with what stands between each pair of marks replaced."""
    for name, words in numbers.items():
        text = re.sub(rf"<!--{name}-->.*?<!--/-->", f"<!--{name}-->{words}<!--/-->", text)
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return text


def write(rows: pd.DataFrame) -> None:
    """Draw the figures, and write the documents and methods.csv."""
    from figures import effect_figure, map_figure

    studies, of_map, cells = parts(rows)
    effect_figure(studies["small"])
    map_figure(cells)
    methods_table(studies).to_csv(HERE / "methods.csv", index=False)
    tables, numbers = texts(studies, of_map, cells)
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8"), tables, numbers), encoding="utf-8")


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
