"""Write transfer.md, the page of study A of plan.md, and its figures."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pandas as pd
import transfer
from claims import format_p, markdown, with_interval
from intervals import Estimate, estimate_mean
from scipy import stats


PAGE = Path(__file__).with_name("transfer.md")
METHODS = {"p_0.5": "p = 0.5", "p_0.25": "p = 0.25", "dose_control": "dose control"}
PROBLEMS = {task: task.replace("_", " ") for task in ("training", transfer.TEST, *transfer.SHIFTED)}
KINDS = {
    "late": "mostly late readouts",
    "uniform": "all readouts equally",
    "last": "last readout",
    "early": "mostly early readouts",
    "random": "one random readout",
}
"""Losses in pretraining by the kind of base model."""
TESTS = {
    "slope": ("gain in distribution for each 10 points of late bias", 10),
    "shift": ("gain with larger numbers and other wording, minus gain in distribution", 1),
}
"""Text of each registered test, and the factor on its estimate."""
TEXT = """\
# Study A: transfer and cause

{state}

`make.py` writes this page from [transfer.jsonl.gz](transfer.jsonl.gz). [The plan](plan.md) is older than every
run. Only its two registered tests decide, and all other numbers on this page explore.

15 tiny base models, which differ in the loss and the seed of their pretraining, are fine-tuned on 256 word problems of 1 to 3
steps at K = 4. The methods are LoRA, Loop Dropout with p = 0.5 and p = 0.25, and the *dose control*, which multiplies the
update of an example by the same random factor in all loops. Each method has the best of three learning rates on each base
model. The grids were not extended, although
[the highest one was often the best](../replication.md#serving-depth). There are 300 test problems of each kind: like the
training problems (*in distribution*), with larger numbers, with another wording, and with 4 or 5 steps.

- A *gain* is the accuracy minus LoRA's accuracy in points, on average over the seeds of a base model.
- The *late bias* is rho_4 - rho_1 of LoRA in points ([rho_t](../concepts.md)).
- Intervals are over base models, by Student's t.

## Registered tests

{tests}

{results}"""
CONCLUSION = """\
**Neither of the two registered tests, which are one family, is significant.** Loop Dropout's gain at the trained depth does
not follow LoRA's late bias, and it is not larger on shifted problems. These nulls do not exclude an effect: over the observed
range of {span:.0f} points of late bias, the interval of the slope allows a change of the gain by {low:+.1f} to {high:+.1f}
points, and with larger numbers alone the gain is {larger} points.

The outcome fits none of the plan's two readings on rho. The slope is not significantly positive, and the gain does not follow
LoRA's gap between training and test problems."""
RESULTS = """\
## Gain by kind of problem

![Gains of three methods over LoRA by kind of problem, at K = 4 and K = 8](transfer_gains.png)

Accuracy of LoRA in percent, and gains in points with 95% intervals (last column: 90%).

{problems}

## Gain by base model

![Gain of Loop Dropout over LoRA against LoRA's late bias](transfer_bias.png)

LoRA's accuracies in percent at K = 4, and gains of Loop Dropout with p = 0.5 in points, at K = 4 unless K = 8 is named. A seed
counts if all four methods are finished.{missing}

{bases}

Means of the same numbers by the loss in pretraining:

{kinds}

## Rank correlations

Spearman's correlation over base models between a possible cause and the gain of Loop Dropout with p = 0.5. The p-values
are not adjusted.

{correlations}
"""


def usable_results(lines: list[dict]) -> transfer.Results | None:
    """Return the results of the base models and seeds with all four methods, or None without any."""
    runs = Counter((line["base"], line["seed"]) for line in lines if line.get("seed") in transfer.DESIGN.seeds)
    return transfer.Results(lines) if len(transfer.DESIGN.methods) in runs.values() else None


def describe_state(lines: list[dict]) -> str:
    """Return `interim, n of 300 runs`, or an empty text if all runs are finished."""
    number = sum(line.get("seed") in transfer.DESIGN.seeds for line in lines)
    planned = len(transfer.DESIGN.bases) * len(transfer.DESIGN.methods) * len(transfer.DESIGN.seeds)
    return "" if number == planned else f"interim, {number} of {planned} runs"


def tests_table(lines: list[dict]) -> str:
    """Return the registered tests, which wait until all runs are finished."""
    results = usable_results(lines)
    tests = transfer.registered_tests(results) if results and results.is_complete else {}
    rows = []
    for name, (text, scale) in TESTS.items():
        row = ["after all runs", "-"]
        if name in tests:
            *effect, p = tests[name]
            row = [with_interval(Estimate(*(scale * value for value in effect), p)), format_p(p)]
        rows.append([text, *row])
    return markdown(["registered test", "estimate in points, 95% interval", "adjusted p"], rows)


def mean_gains(lines: list[dict]) -> dict[str, str]:
    """Return the mean gain of p = 0.5 in distribution by depth, as a text with its interval, for the marks of other pages."""
    results = transfer.Results(lines)
    gains = {depth: estimate_mean(results.gain(f"{transfer.TEST}@{depth}")) for depth in transfer.DESIGN.depths}
    return {f"transfer_{depth}": with_interval(gain) for depth, gain in gains.items()}


def conclusion_numbers(results: transfer.Results) -> dict[str, object]:
    """Return the observed range of the late bias, the interval of the slope over it, and the gain with larger numbers."""
    span = results.bias.max() - results.bias.min()
    _, low, high, _ = transfer.registered_tests(results)["slope"]
    larger = with_interval(estimate_mean(results.gain("larger_numbers@4")))
    return {"span": span, "low": span * low, "high": span * high, "larger": larger}


def gains_by_problem(results: transfer.Results) -> pd.DataFrame:
    """Return LoRA's mean accuracies in percent, and for each method an `Estimate` of its gain, by problems and depth."""
    rows = []
    for depth, task in product(transfer.DESIGN.depths, PROBLEMS):
        place = f"{task}@{depth}"
        gains = {title: estimate_mean(results.gain(place, method)) for method, title in METHODS.items()}
        over = estimate_mean(results.gain(place) - results.gain(place, "dose_control"), 0.9)
        lora = results.lora[place].mean()
        rows.append(
            {"problems": PROBLEMS[task], "K": depth, "LoRA": lora, **gains, "p = 0.5 minus dose control": over}
        )
    return pd.DataFrame(rows)


def gains_by_base(results: transfer.Results) -> pd.DataFrame:
    """Return the late bias, LoRA's accuracies and the gains of p = 0.5, with one row for each base model that has results."""
    columns = {"late bias": results.bias}
    columns |= {f"LoRA, {PROBLEMS[task]}": results.lora[f"{task}@4"] for task in ("training", transfer.TEST)}
    columns |= {f"gain, {PROBLEMS[task]}": results.gain(f"{task}@4") for task in (transfer.TEST, *transfer.SHIFTED)}
    columns[f"gain, {PROBLEMS[transfer.TEST]}, K = 8"] = results.gain(f"{transfer.TEST}@8")
    table = pd.DataFrame(columns).reindex([base for base in transfer.DESIGN.bases if base in results.num_seeds])
    kinds = [KINDS[base.split("_")[0]] for base in table.index]
    return table.assign(kind=pd.Categorical(kinds, KINDS.values())).set_index("kind", append=True)


def correlations_table(results: transfer.Results) -> str:
    """Return Spearman's correlations of LoRA's late bias and its gap between training and test problems with the gains."""
    gap = results.lora["training@4"] - results.lora[f"{transfer.TEST}@4"]
    places = [f"{transfer.TEST}@4", "shifted@4", f"{transfer.TEST}@8"]
    rows = []
    for name, cause in {"late bias": results.bias, "accuracy on training minus test problems": gap}.items():
        tests = [stats.spearmanr(cause[results.lora.index], results.gain(place)) for place in places]
        rows.append([name, *(f"{test.statistic:+.2f} (p {format_p(test.pvalue)})" for test in tests)])
    heads = ["in distribution", "larger numbers and other wording", "in distribution, K = 8"]
    return markdown(["of LoRA", *(f"gain, {head}" for head in heads)], rows)


def number_cells(row: pd.Series) -> list[str]:
    """Return numbers with one decimal, and with a sign if they are not accuracies."""
    return [f"{value:{'.1f' if head.startswith('LoRA') else '+.1f'}}" for head, value in row.items()]


def make_results(results: transfer.Results) -> str:
    """Return the tables and figures of the base models and seeds with all four methods."""
    problems, bases = gains_by_problem(results), gains_by_base(results)
    rows = []
    for name, depth, lora, *gains in problems.itertuples(index=False):
        rows.append([name, f"{depth}", f"{lora:.1f}", *(with_interval(gain).split(" [+nan")[0] for gain in gains)])
    by_base = [
        [base, kind, f"{results.num_seeds[base]}", *number_cells(row)] for (base, kind), row in bases.iterrows()
    ]
    by_kind = bases.groupby("kind", observed=True)
    means = [[kind, f"{len(own)}", *number_cells(own.mean())] for kind, own in by_kind]
    missing = ", ".join(base for base in transfer.DESIGN.bases if base not in results.num_seeds)
    return RESULTS.format(
        problems=markdown(problems, rows),
        bases=markdown(["base model", "loss in pretraining", "seeds", *bases], by_base),
        missing=f" Without results: {missing}." if missing else "",
        kinds=markdown(["loss in pretraining", "base models", *bases], means),
        correlations=correlations_table(results) if results.is_complete else "They follow after all runs.",
    )


def make_page(lines: list[dict]) -> str:
    """Return the text of transfer.md."""
    results, state = usable_results(lines), describe_state(lines)
    interim = f"**{state.capitalize()}.** No conclusion follows before all runs are finished."
    return TEXT.format(
        state=interim if state else CONCLUSION.format(**conclusion_numbers(results)),
        tests=tests_table(lines),
        results=make_results(results) if results else "No base model has a seed with all four methods yet.\n",
    )


def make_summary(lines: list[dict]) -> str:
    """Return the registered tests for replication.md, with the figures if there are results."""
    state = describe_state(lines)
    figures = """
![Gains of three methods over LoRA by kind of problem, at K = 4 and K = 8](replication/transfer_gains.png)

![Gain of Loop Dropout over LoRA against LoRA's late bias](replication/transfer_bias.png)"""
    interim = [f"State: {state}.", ""] * bool(state)
    return "\n".join([*interim, tests_table(lines), *[figures] * bool(usable_results(lines))])


def write(lines: list[dict]) -> None:
    """Write the page, and draw its figures if there are results."""
    from figures import transfer_figures  # slow to import

    PAGE.write_text(make_page(lines), encoding="utf-8")
    if results := usable_results(lines):
        transfer_figures(gains_by_problem(results), gains_by_base(results).reset_index("kind"), describe_state(lines))
