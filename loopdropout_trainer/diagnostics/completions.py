"""Accuracy of completions: with the update in one loop, at other depths, and where a gain is.

The difference between two methods splits by whether both completions hold an answer (Table "Decomposing the net MATH-500
accuracy difference"); single problems are fixed (only b is correct) or broken (only a is).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loopdropout_trainer.diagnostics.arguments import BASE
from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic
from loopdropout_trainer.diagnostics.losses import relative_compute
from loopdropout_trainer.evaluation.results import BenchmarkResult, Prediction
from loopdropout_trainer.evaluation.statistics import decompose_difference, sign_test


GROUPS = ("subject", "level", "num_steps")
"""Columns of a benchmark's rows by which accuracies are broken down, where it has them."""


def counts(result: BenchmarkResult) -> dict[str, Any]:
    """Return correct and missing answers of a benchmark result, and its score in percent."""
    return {"correct": result.correct, "missing": result.missing, "score": result.score}


class SingleLoopGeneration(Diagnostic):
    """Accuracy by greedy generation with one adapter application (Table "GSM8K generation with one adapter application")."""

    name = "single_loop_generation"
    title = "Accuracy with the adapter in one loop only, %"
    needs = "benchmarks"
    needs_adapter = True

    def measure(self, context: Context) -> dict[str, Any]:
        found = {}
        for benchmark in context.benchmarks:
            only = [
                counts(context.evaluate(benchmark, gates, None)) for gates in torch.eye(context.num_loops).tolist()
            ]
            all_on = context.evaluate(benchmark, None, None)
            found[benchmark.name] = {"total": all_on.total, "only": only, "all_on": counts(all_on)}
        return found


class DepthGeneration(Diagnostic):
    """Greedy generation at every depth, with every loop adapted (Table "Accuracy across training and evaluation depths")."""

    name = "depth_generation"
    title = "Accuracy by the number of loops that are run, %"
    needs = "benchmarks"
    runs_at_depths = True

    def measure(self, context: Context) -> dict[str, Any]:
        found = {}
        for benchmark in context.benchmarks:
            results = [context.evaluate(benchmark, None, depth) for depth in context.depths]
            found[benchmark.name] = {"total": results[0].total, "results": list(map(counts, results))}
        compute = relative_compute(context.model, context.depths)
        return {"depths": list(context.depths), "relative_compute": compute, "benchmarks": found}


class AnswerChanges(Diagnostic):
    """Greedy generation with every loop adapted, or what an evaluation's file holds of it."""

    name = "answers"
    title = "Accuracy, %"
    needs = "benchmarks"

    def measure(self, context: Context) -> dict[str, Any]:
        found = {}
        for benchmark in context.benchmarks:
            result, rows = context.evaluate(benchmark, None, None), getattr(benchmark, "rows", [])
            columns = [name for name in GROUPS if rows and all(row.get(name) is not None for row in rows)]
            found[benchmark.name] = {
                "total": result.total,
                **counts(result),
                "groups": {name: by_group(result, [str(row[name]) for row in rows]) for name in columns},
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


def by_group(result: BenchmarkResult, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return total, number of correct answers and accuracy in percent of each group of problems."""
    found = {}
    for group in sorted(set(names)):
        verdicts = [bool(p.correct) for p, name in zip(result.predictions, names, strict=True) if name == group]
        total, correct = len(verdicts), sum(verdicts)
        found[group] = {"total": total, "correct": correct, "score": 100 * correct / total}
    return found


def compare_seeds(a: list[dict], b: list[dict], name: str) -> list[dict[str, Any]]:
    """Return for each pair of seeds what becomes of the problems of benchmark `name` from runs `a` to runs `b`.

    Runs pair up by their seeds where both sides have the same ones, else in their order; a single run of `a` (such as the
    base model's) pairs with each of `b`.
    """
    of_seed = {run["seed"]: run for run in a}
    if len(a) == 1:
        a = a * len(b)
    elif len(of_seed) == len(a) and of_seed.keys() == {run["seed"] for run in b}:
        a = [of_seed[run["seed"]] for run in b]
    found = []
    for pair in zip(a, b, strict=False):
        before, after = (_result(run, name) for run in pair)
        split = decompose_difference([before], [after])
        flips = [(x.correct, y.correct) for x, y in zip(before.predictions, after.predictions, strict=True)]
        fixed = [place for place, flip in enumerate(flips) if flip == (False, True)]
        broken = [place for place, flip in enumerate(flips) if flip == (True, False)]
        found.append({
            "seeds": [run["seed"] for run in pair],
            "difference": split.total[0],
            "both_extractable": split.both_extractable[0],
            "missing_in_either": split.missing_in_either[0],
            "fixed": fixed,
            "broken": broken,
            "p_value": sign_test(len(fixed), len(broken)),
        })  # fmt: skip
    return found


def _result(run: dict, name: str) -> BenchmarkResult:
    """Return a run's problems as an evaluation has them."""
    problems = run["measured"][name]["problems"]
    return BenchmarkResult(name, [Prediction("", p["completion"], "", p["extracted"], p["correct"]) for p in problems])
