"""Where a gain is: in answers that were missing before, in some subjects or levels, in which problems.

The difference between two methods splits by whether both completions hold an answer (Table "Decomposing the net MATH-500
accuracy difference"); single problems are fixed (only b is correct) or broken (only a is).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopdropout_trainer.diagnostics.compared import BASE
from loopdropout_trainer.diagnostics.depth import counts
from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic
from loopdropout_trainer.evaluation.results import BenchmarkResult, Prediction
from loopdropout_trainer.evaluation.statistics import decompose_difference, sign_test


class AnswerChanges(Diagnostic):
    """Greedy generation with every loop adapted, or what an evaluation's file holds of it."""

    name = "answers"
    title = "Accuracy, %"
    needs = "benchmarks"

    def measure(self, context: Context) -> dict[str, Any]:
        found = {}
        for grouped in context.benchmarks:
            result = context.evaluate(grouped, None, None)
            found[grouped.benchmark.name] = {
                "total": result.total,
                **counts(result),
                "groups": {column: _by_group(result, names) for column, names in grouped.groups.items()},
                "problems": [
                    {"extracted": each.extracted, "correct": each.correct, "completion": each.completion}
                    for each in result.predictions
                ],
            }
        return found

    def compare(self, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        of = {method: [run for run in runs if run["method"] == method] for method in (run["method"] for run in runs)}
        methods = [method for method in of if method != BASE]
        pairs = [(methods[0], other) for other in methods[1:]] + [(BASE, each) for each in methods if BASE in of]
        return {
            name: [{"a": a, "b": b, "pairs": compare_seeds(of[a], of[b], name)} for a, b in pairs]
            for name, measured in runs[0]["measured"].items()
            if measured["correct"] is not None  # else problems give parts of a point, and none is correct or wrong
        }


def _by_group(result: BenchmarkResult, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for group in sorted(set(names)):
        of_group = [each.correct for each, name in zip(result.predictions, names, strict=True) if name == group]
        total, correct = len(of_group), sum(map(bool, of_group))
        found[group] = {"total": total, "correct": correct, "score": 100 * correct / total}
    return found


def compare_seeds(a: Sequence[dict], b: Sequence[dict], name: str) -> list[dict[str, Any]]:
    """Return for each pair of seeds what becomes of the problems of benchmark `name` from runs `a` to runs `b`.

    Runs pair up by their seeds where both sides have the same ones, else in their order; a single run of `a` (such as the
    base model's) pairs with each of `b`.
    """
    of_seed = {run["seed"]: run for run in a}
    if len(a) == 1:
        pairs = [(a[0], run) for run in b]
    elif None not in of_seed and len(of_seed) == len(a) and {run["seed"] for run in b} == set(of_seed):
        pairs = [(of_seed[run["seed"]], run) for run in b]
    else:
        pairs = list(zip(a, b, strict=False))
    return [_compare(one, other, name) for one, other in pairs]


def _compare(a: dict, b: dict, name: str) -> dict[str, Any]:
    before, after = (_result(run, name) for run in (a, b))
    both_extractable, missing_in_either = decompose_difference(before, after)
    flips = [(x.correct, y.correct) for x, y in zip(before.predictions, after.predictions, strict=True)]
    fixed = [place for place, pair in enumerate(flips) if pair == (False, True)]
    broken = [place for place, pair in enumerate(flips) if pair == (True, False)]
    return {
        "seeds": [a["seed"], b["seed"]],
        "difference": both_extractable + missing_in_either,
        "both_extractable": both_extractable,
        "missing_in_either": missing_in_either,
        "fixed": fixed,
        "broken": broken,
        "p_value": sign_test(len(fixed), len(broken)),
    }


def _result(run: dict, name: str) -> BenchmarkResult:
    """Return a run's problems as an evaluation has them."""
    problems = run["measured"][name]["problems"]
    return BenchmarkResult(name, [Prediction("", p["completion"], "", p["extracted"], p["correct"]) for p in problems])
