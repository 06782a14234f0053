"""Write docs/replication.md, its appendix and its figures from finished studies.

    python docs/replication/make.py collect outputs/studies/small outputs/studies/map   # adds the runs to runs.csv.gz
    python docs/replication/make.py write                                               # runs.csv.gz -> pages and figures

`collect` keeps one row for each number that a run measured (runs.py), so that one small file holds all numbers of the pages.
`write` tests the claims (claims.py, intervals.py), adds the numbers of all base models (evidence.py), draws the figures
(figures.py), writes comparisons.md, comparisons.csv,
methods.csv and transfer.md (transfer_page.py), and fills the text between marks in the PAGES.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import evidence
import numpy as np
import pandas as pd
import transfer
import transfer_page
from claims import BASES, DEPTHS, decide, format_p, markdown, verdict, with_interval
from intervals import estimate, estimate_mean
from runs import METHODS, RUNS, Study, collect, differences, mean_sd, verdicts


HERE = Path(__file__).parent
_NAMES = ("docs/replication.md", "docs/choosing_a_method.md", "docs/diagnostics.md", "docs/depth.md", "README.md")
PAGES = [HERE.parents[1] / name for name in _NAMES]
APPENDIX = HERE / "comparisons.md"
CSV = HERE / "comparisons.csv"

QUESTIONS = ("bias", "depth", "ablations", "baselines", "settings", "random depth")
MAIN_QUESTIONS = ("late bias", "flatness", "accuracy")
# Ouro-1.4B on GSM8K at learning rate 1e-4, tables `tab:depth_matrix` and Appendix "Single-Loop Activation".
PAPER = {
    "LoRA": ["-", "79.9 ± 1.0", "75.0 ± 1.0", "70.8 ± 1.9", "11.9", "19.1", "26.5", "32.4"],
    "Loop Dropout": ["-", "81.8 ± 0.5", "78.0 ± 1.7", "75.6 ± 1.3", "30.8", "35.2", "35.9", "35.7"],
}
APPENDIX_TEXT = """\
# All comparisons of the replication

If all {number} comparisons of [the replication](../replication.md) are one family of tests, {counts}.
Four of the significant ones are the late bias, which was required when the base models were chosen. One correction over
unrelated questions hides losses and gains, so the replication adjusts within each question, and this appendix has the stricter
verdicts.

Effects are differences in points or nats, with 95% intervals that are not adjusted. The p-values are adjusted together by
Holm's method, once with all seeds and once without the seed that chose the learning rates. The verdicts use the larger one.
[comparisons.csv](comparisons.csv) has the p-values of both families, also unadjusted. `make.py` writes this page.

## Comparisons

{comparisons}

These claims have the same differences as another claim and share its test:

{same}

## Ten fresh seeds

Accuracy in percent by the number of loops at inference. The p-values are not adjusted.

{fresh}

Agreement of earlier readouts with the last one on held-out examples, in percent. *Token* is the share of positions with the
same most probable token. *Overlap* is 1 - TV (total variation).

{agreement}

## Learning rates at the edge of their grids

{rates}

## The map

Cells in which Loop Dropout is ahead, level and behind after equal epochs, without correction for their number, and its
smallest and largest gain in points. With the best number of epochs of each method, the gains with 32, 128, 512, 2,048 and
4,000 examples are {best_gains} points (problems of 1 to 3 steps, K = 4).

{map}

Accuracy in percent with p annealed from 0.5 to 0 after equal epochs, one seed and 500 problems at learning rate 1e-3.

{annealed}

## SmolLM2-135M by the number of steps of a problem

Accuracy in percent.

{steps}
"""


# Tables of claims


def main_table(claims: pd.DataFrame) -> str:
    """Return the main claims of each base model. An accuracy or flatness is bold if it is significant in its family."""
    rows = []
    for study, base in BASES.items():
        part = claims[[c.study == study and c.question in MAIN_QUESTIONS for c in claims["claim"]]]
        if len(part):
            cells = [_main_cell(row) for row in part.itertuples()]
            cells += ["same answers as at K"] * (4 - len(cells))
            rows.append([base, str(part["n"].iloc[0]), *cells])
    return markdown(["base model", "n", "late bias", "flatness", "accuracy at K", "accuracy at 2K"], rows)


def _main_cell(row) -> str:
    if row.question == "late bias":  # required when the base models were chosen
        return with_interval(row.gain)
    stars = "" if row.family_verdict == "not significant" else "**"
    return f"{stars}{with_interval(row.gain)}{stars}<br>p {_relation(row.family_p)} ({format_p(row.family_p_without)})"


def _relation(p: float) -> str:
    text = format_p(p)
    return text.replace("<", "< ") if text.startswith("<") else f"= {text}"


def claims_table(claims: pd.DataFrame, question: str | None = None) -> str:
    """Return the claims on a question, as one family of tests, or all claims as one family."""
    names = ["adjusted", "adjusted_without", "verdict"]
    if question:
        claims = claims[claims["question"] == question]
        names = ["family_p", "family_p_without", "family_verdict"]
    rows = []
    for row in claims.itertuples():
        p_value, p_without, word = (getattr(row, name) for name in names)
        effect = with_interval(row.gain, row.claim.digits)
        rows.append(
            [row.claim.title, row.claim.paper, effect, str(row.n), format_p(p_value), format_p(p_without), word]
        )
    family = f"among {len(claims)} tests"
    heads = ["claim", "paper", "effect, 95% interval", "n", f"p {family}", "without the selection seed"]
    return markdown([*heads, f"verdict {family}"], rows)


def claims_csv(claims: pd.DataFrame) -> pd.DataFrame:
    """Return all claims with unrounded numbers."""
    rows = []
    for row in claims.itertuples():
        claim, gain = row.claim, row.gain
        start = {
            "question": claim.question,
            "base_model": BASES[claim.study],
            "claim": claim.words,
            "paper": claim.paper,
        }
        effect = {"effect": gain.mean, "low": gain.low, "high": gain.high, "n": row.n, "p": gain.p}
        without = {
            "effect_without_selection_seed": row.gain_without.mean,
            "p_without_selection_seed": row.gain_without.p,
        }
        adjusted = {"adjusted_p": row.adjusted, "adjusted_p_without_selection_seed": row.adjusted_without}
        family = {"family_p": row.family_p, "family_p_without_selection_seed": row.family_p_without}
        verdicts = {"verdict": row.verdict, "family_verdict": row.family_verdict}
        rows.append({**start, **effect, **without, **adjusted, **family, **verdicts})
    return pd.DataFrame(rows)


def annealed_table(claims: pd.DataFrame) -> str:
    """Return the gains of annealed p over LoRA and over constant p for each base model."""
    rows = []
    for study, base in BASES.items():
        part = [row for row in claims.itertuples() if (row.claim.question, row.claim.study) == ("annealing", study)]
        cells = {}
        for row in part:
            stars = "**" if row.family_verdict.startswith("significant") else ""
            cells[row.claim.words.split(" than ")[1]] = f"{stars}{with_interval(row.gain)}{stars}"
        if cells:
            names = [f"{other} at K = {depth}" for other in ("LoRA", "p = 0.5 throughout") for depth in DEPTHS[study]]
            rows.append([base, *(cells.get(name, "as at K") for name in names)])
    heads = [f"over {other}, {depth}" for other in ("LoRA", "p = 0.5") for depth in ("K", "2K")]
    return markdown(["base model", *heads], rows)


# Other tables


def accuracy_table(studies: dict[str, Study]) -> str:
    """Return the accuracies of LoRA, constant p and annealed p at K and 2K."""
    rows = []
    for study, depths in DEPTHS.items():
        methods = ("lora", "loop_dropout", "annealed")
        rows.append(
            [BASES[study], *(studies[study].mean(method, depth=depth) for depth in depths for method in methods)]
        )
    heads = [f"{method}, {depth}" for depth in ("K", "2K") for method in ("LoRA", "p = 0.5", "annealed")]
    return markdown(["base model", *heads], rows)


def language_model_table(study: Study) -> str:
    """Return accuracies by depth and loss reductions by loop of SmolLM2-135M, next to the paper's."""
    depths, loops = (2, 4, 6, 8), (1, 2, 3, 4)
    rows = []
    for method, title in {**METHODS, "annealed": "annealed"}.items():
        cells = [study.mean(method, depth=depth) for depth in depths]
        cells += [study.mean(method, "loss_reduction", loop=loop) for loop in loops]
        rows.append(["SmolLM2", title, *cells])
    rows += [["paper, Ouro-1.4B", method, *cells] for method, cells in PAPER.items()]
    heads = [*(f"K = {depth}" for depth in depths), *(f"rho_{loop}" for loop in loops)]
    return markdown(["model", "method", *heads], rows)


def fresh_table(study: Study) -> str:
    """Return the accuracies of the fresh seeds by depth."""
    rows = []
    for lora_depth, depth in ((2, 2), (3, 3), (4, 4), (8, 8), (4, 3)):
        lora = study.select("lora", "accuracy", depth=lora_depth)
        ours = study.select("loop_dropout", "accuracy", depth=depth)
        gain = estimate(differences(ours, lora))
        loops = f"{depth}" if depth == lora_depth else f"{lora_depth} with LoRA, {depth} with Loop Dropout"
        rows.append([loops, mean_sd(lora), mean_sd(ours), with_interval(gain), format_p(gain.p)])
    return markdown(["loops", "LoRA", "Loop Dropout", "effect, 95% interval", "p"], rows)


def agreement_table(rows: pd.DataFrame) -> str:
    """Return the agreement of each readout with the last one, by method."""
    columns = [(metric, method) for metric in ("same_token", "overlap") for method in METHODS]
    agreement = rows[rows["metric"].isin(("same_token", "overlap"))]
    lines = []
    for (depth, loop), part in agreement.groupby(["depth", "loop"]):
        if loop < depth:
            groups = [part[(part["metric"] == metric) & (part["method"] == method)] for metric, method in columns]
            lines.append([f"{depth:.0f}", f"{loop:.0f}", *map(mean_sd, groups)])
    heads = ["token, LoRA", "token, Loop Dropout", "overlap, LoRA", "overlap, Loop Dropout"]
    return markdown(["K", "readout after loop", *heads], lines)


def rates_table(studies: dict[str, Study]) -> tuple[str, int, int]:
    """Return the chosen learning rates at an edge of their grids, the number inside, and the number of grids."""
    rows, inside = [], 0
    for name, study in studies.items():
        for method, rate in study.rates.items():
            edge = study.edge(method)
            inside += edge is None and len(study.grids.get(method, ())) > 1
            if edge:
                grid = ", ".join(f"{value:.1f}% at {tried:g}" for tried, value in study.grids[method].items())
                rows.append([name, method, f"{rate:g}, {edge}", grid])
    table = markdown(["study", "method", "learning rate", "held-out accuracy by learning rate"], rows)
    return table, inside, inside + len(rows)


def steps_table(study: Study) -> str:
    """Return accuracies by depth and by the number of steps of a problem."""
    metrics = sorted({name for name in study.rows["metric"] if name.startswith("accuracy_of_")})
    rows = []
    for method, title in {**METHODS, "annealed": "annealed"}.items():
        for depth in (2, 4, 6, 8):
            rows.append([title, str(depth), *(study.mean(method, metric, depth=depth) for metric in metrics)])
    return markdown(
        ["method", "K", *(metric.removeprefix("accuracy_of_").replace("_", " ") for metric in metrics)], rows
    )


# The map


def map_table(rows: pd.DataFrame, ours: str = "loop_dropout") -> pd.DataFrame:
    """Return accuracies and a method's gain over LoRA in each cell of the map, means over its seeds.

    The word is `ahead` or `behind` if the 95% interval over the test problems, with the trained seeds fixed, excludes zero,
    and `level` otherwise.
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
            word = {"significant": "ahead", "not significant": "level"}.get(verdict(gain.mean, gain.p), "behind")
            means = [100 * side.mean() for side in answers]
            table.append((*place, *means, gain.mean, len(seeds), word))
    names = ["difficulty", "examples", "epochs", "depth", ours, "lora", "gain", "seeds", "word"]
    return pd.DataFrame(table, columns=names)


def map_counts(cells: pd.DataFrame, by_examples: bool) -> str:
    """Return in how many cells Loop Dropout is ahead, level and behind, by difficulty, depth and number of examples."""
    sizes = ["32 to 128", "512", "2,048 and 4,000"] if by_examples else ["all"]
    edges = [0, 128, 512, np.inf] if by_examples else [0, np.inf]
    cells = cells.assign(size=pd.cut(cells["examples"], edges, labels=sizes))
    rows = []
    for (difficulty, depth, size), part in cells.groupby(["difficulty", "depth", "size"], observed=True):
        counts = [str((part["word"] == word).sum()) for word in ("ahead", "level", "behind")]
        span = f"{part['gain'].min():+.1f} to {part['gain'].max():+.1f}"
        rows.append([f"{difficulty} steps", f"{depth:.0f}", *[size] * by_examples, *counts, span])
    return markdown(["problems", "K", *["examples"] * by_examples, "ahead", "level", "behind", "gain, points"], rows)


def ahead_of(cells: pd.DataFrame) -> str:
    """Return in how many cells Loop Dropout is ahead, with its smallest and largest gain in all of them."""
    span = f"{cells['gain'].min():+.1f} to {cells['gain'].max():+.1f} points"
    return f"{(cells['word'] == 'ahead').sum()} of {len(cells)} ({span})"


def annealed_map(rows: pd.DataFrame) -> str:
    """Return the accuracies in the cells of the map that were also trained with annealed p."""
    place = ["difficulty", "examples", "epochs", "depth"]
    rows = rows[rows["seed"].isin(rows.loc[rows["method"].str.startswith("annealed"), "seed"])]
    constant, annealed = (map_table(rows, ours).set_index(place) for ours in ("loop_dropout", "annealed"))
    lines = []
    for difficulty, examples, epochs in dict.fromkeys(key[:3] for key in annealed.index):
        keys = [(difficulty, examples, epochs, depth) for depth in (4, 8)]
        numbers = [
            number
            for key in keys
            for number in (annealed.loc[key, "lora"], constant.loc[key, "loop_dropout"], annealed.loc[key, "annealed"])
        ]
        lines.append([f"{difficulty} steps", f"{examples:,}", str(epochs), *(f"{number:.1f}" for number in numbers)])
    heads = [f"{method}, K = {depth}" for depth in (4, 8) for method in ("LoRA", "p = 0.5", "annealed")]
    return markdown(["problems", "examples", "epochs", *heads], lines)


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


# The pages


def unadjusted(gains: np.ndarray) -> str:
    """Return a difference that is not among the claims, with its own p-value."""
    gain = estimate(gains)
    return f"{with_interval(gain)}, unadjusted p {_relation(gain.p)}"


def numbers(studies: dict[str, Study], claims: pd.DataFrame, cells: pd.DataFrame) -> dict[str, str]:
    """Return the numbers in sentences, by the names of their marks."""
    small, two, before = (studies[name] for name in ("small", "two_layers", "two_layers_before"))
    gains = {row.claim.title: f"{row.gain.mean:+.1f}" for row in claims.itertuples()}
    words = ("ahead", "level", "behind")
    _, inside, grids = rates_table(studies)
    accuracies = {f"two_{method}_8": f"{two.mean(method, depth=8)}%" for method in ("coto", "module_wise")}
    huginn = studies["huginn"]
    return {
        **accuracies,
        "comparisons": str(len(claims)),
        "gain_at_high_rate": gains["Loop Dropout is more accurate than LoRA when both train at learning rate 0.008"],
        "huginn": f"LoRA {huginn.mean('lora')}%, Loop Dropout {huginn.mean('loop_dropout')}%",
        "huginn_best": f"LoRA {huginn.grids['lora'].max():.1f}%, Loop Dropout {huginn.grids['loop_dropout'].max():.1f}%",
        **{
            f"map_{k}": ", ".join(f"{(cells.loc[cells['depth'] == k, 'word'] == w).sum()} {w}" for w in words)
            for k in (4, 8)
        },
        "map_cells": str(len(cells) // 2),
        "rates_inside": f"{inside} of {grids}",
        "before_8": unadjusted(before.gains("loop_dropout", "lora", depth=8)),
        **{f"fresh_{k}": unadjusted(studies["fresh_seeds"].gains("loop_dropout", "lora", depth=k)) for k in (4, 8)},
        "deep_at_4": f"LoRA {small.mean('depth_8_lora', depth=4)}%, Loop Dropout {small.mean('depth_8', depth=4)}%",
        "deep_gain_4": unadjusted(small.gains("depth_8", "depth_8_lora", depth=4)),
        "random_depth_over": unadjusted(small.gains("random_depth_lora", "loop_dropout", depth=8)),
    }


def count_verdicts(claims: pd.DataFrame) -> str:
    """Return the number of claims by their verdict in the one family of all claims."""
    counts = claims["verdict"].value_counts()
    opposite = counts["significant in the opposite direction"]
    return (
        f"{counts['significant']} are significant, {opposite} is significant in the opposite direction and "
        f"{counts['not significant']} are not significant"
    )


def parts(rows: pd.DataFrame) -> tuple[dict[str, Study], pd.DataFrame]:
    """Return the studies, and the rows of the map."""
    own_pages = ("map", "small_lm_steps")  # training_steps.py tests the second one
    studies = {name: Study(part) for name, part in rows.groupby("study") if name not in own_pages}
    return studies, rows[rows["study"] == "map"]


def make_texts(studies: dict[str, Study], map_rows: pd.DataFrame) -> tuple[dict[str, str], dict[str, str], str]:
    """Return the tables of the page, the numbers in its sentences, and the appendix."""
    claims, same = decide(studies)
    cells, lines = map_table(map_rows), transfer.DESIGN.read_lines()
    tables = {
        "main": main_table(claims),
        "accuracy": accuracy_table(studies),
        "language model": language_model_table(studies["small_lm"]),
        "map": map_counts(cells, by_examples=False),
        "annealing": annealed_table(claims),
        **{name: claims_table(claims, name) for name in QUESTIONS},
        "transfer": transfer_page.make_summary(lines),
        "serving": evidence.serving_table(),
        "depths": evidence.depths_table(),
        "rates": evidence.rates_table(),
        "best epochs": evidence.best_epochs_table(cells),
        "random accuracy": evidence.random_depth_table(studies["small"]),
    }
    appendix = APPENDIX_TEXT.format(
        number=len(claims),
        counts=count_verdicts(claims),
        comparisons=claims_table(claims),
        same="\n".join(f"- {title}: {other}" for title, other in same.items()),
        fresh=fresh_table(studies["fresh_seeds"]),
        agreement=agreement_table(studies["fresh_seeds"].rows),
        rates=rates_table(studies)[0],
        map=map_counts(cells, by_examples=True),
        best_gains=evidence.best_gains(cells),
        annealed=annealed_map(map_rows),
        steps=steps_table(studies["small_lm"]),
    )
    found = numbers(studies, claims, cells) | evidence.make_numbers(studies, claims, cells)
    return tables, found | transfer_page.mean_gains(lines), appendix


def fill(text: str, tables: dict[str, str], numbers: dict[str, str]) -> str:
    """Return a page with the text between each pair of marks replaced."""
    for name, words in numbers.items():
        text = re.sub(rf"<!--{name}-->.*?<!--/-->", f"<!--{name}-->{words}<!--/-->", text, flags=re.DOTALL)
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return text


def write(rows: pd.DataFrame) -> None:
    """Write all files."""
    from figures import effect_figure, forest_figure, map_figure

    studies, map_rows = parts(rows)
    effect_figure(studies["small"])
    map_figure(map_table(map_rows))
    methods_table(studies).to_csv(HERE / "methods.csv", index=False)
    claims = decide(studies)[0]
    claims_csv(claims).to_csv(CSV, index=False)
    forest_figure(evidence.forest_table(claims))
    tables, numbers, appendix = make_texts(studies, map_rows)
    APPENDIX.write_text(appendix, encoding="utf-8")
    transfer_page.write(transfer.DESIGN.read_lines())
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), tables, numbers), encoding="utf-8")


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
