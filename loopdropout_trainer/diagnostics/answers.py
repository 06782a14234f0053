"""Where a gain is: in answers that were missing before, in some subjects or levels, in which problems.

The difference between two methods splits by whether both completions hold an answer (Table "Decomposing the net MATH-500
accuracy difference"); single problems are fixed (only b has them right) or broken (only a has).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopdropout_trainer.diagnostics.depth import counts
from loopdropout_trainer.diagnostics.diagnostic import BASE, Context, Diagnostic, Problems, Report, shown
from loopdropout_trainer.diagnostics.plots import draw_bars, new_figure, percent_axis, save_figure
from loopdropout_trainer.evaluation.results import BenchmarkResult, Prediction, load_result_rows
from loopdropout_trainer.evaluation.statistics import decompose_difference, mean_and_sd, sign_test
from loopdropout_trainer.saving.files import sha256
from loopdropout_trainer.settings.recipe import RecipeError


class Answers(Diagnostic):
    """Greedy answers with every loop adapted, generated or taken from an evaluation's file."""

    name = "answers"
    title = "Correct answers, %"
    needs = "problems"

    def settings(self, context: Context) -> dict[str, Any]:
        file = context.subject.evaluation
        if file is None or not Path(file).is_file():
            return {}
        return {"evaluation_sha256": sha256(Path(file))}

    def passes(self, context: Context) -> int:
        return 0

    def measure(self, context: Context) -> dict[str, Any]:
        found = {}
        for problems in context.problems:
            if context.subject.evaluation is None:
                result = context.answer(problems, None, None)
            else:
                result = from_evaluation(context.subject.evaluation, context.subject.method, problems)
            found[problems.benchmark.name] = {
                "total": result.total,
                **counts(result),
                "groups": {column: _by_group(result, names) for column, names in problems.groups.items()},
                "problems": [
                    {"extracted": each.extracted, "correct": each.correct, "completion": each.completion}
                    for each in result.predictions
                ],
            }
        return found

    def compare(self, report: Report) -> dict[str, Any]:
        methods = [method for method in report.methods if method != BASE]
        found = {}
        for name, measured in report.runs[0]["measured"].items():
            if measured["correct"] is None:  # parts of points: no problem is right or wrong
                continue
            pairs = [(methods[0], other) for other in methods[1:]] + [(BASE, each) for each in methods]
            found[name] = [
                {"a": a, "b": b, "pairs": compare_seeds(report.of(a), report.of(b), name)}
                for a, b in pairs
                if report.of(a) and report.of(b)
            ]
        return found

    def table(self, report: Report):
        rows = {}
        for name, measured in report.runs[0]["measured"].items():
            rows[name] = (name, "score")
            for column, groups in measured["groups"].items():
                for group in groups:
                    rows[f"{name}, {column} {group}"] = (name, "groups", column, group, "score")
        table = report.table(rows, ".2f")
        for name, compared in (report.content["comparison"] or {}).items():
            for each in compared:
                table.add_section()
                table.add_row(f"{name}: {each['b']} - {each['a']}, points")
                for key in ("difference", "both_extractable", "missing_in_either"):
                    mean, sd = mean_and_sd([pair[key] for pair in each["pairs"]])
                    cells = [shown(mean, sd, "+.2f") if m == each["b"] else "" for m in report.methods]
                    table.add_row(f"  {key.replace('_', ' ')}", *cells)
                flips = [f"{sum(len(pair[key]) for pair in each['pairs'])}" for key in ("fixed", "broken")]
                cells = [" / ".join(flips) if m == each["b"] else "" for m in report.methods]
                table.add_row("  problems fixed / broken", *cells)
        return table

    def draw(self, report: Report, path):
        files = []
        for name, measured in report.runs[0]["measured"].items():
            for column, groups in measured["groups"].items():
                columns = 1 if len(groups) <= 5 else 2
                with new_figure(width=3.3 * columns, height=2.4) as (figure, axes):
                    points = {group: report.series(name, "groups", column, group, "score") for group in groups}
                    series = {}
                    for method in report.methods:
                        mean, sd = zip(*(point[method] for point in points.values()), strict=True)
                        series[method] = (mean, None if sd[0] is None else sd)
                    draw_bars(axes, series, range(len(groups)))
                    axes.set_xticks(range(len(groups)), [group.replace(" ", "\n") for group in groups])
                    axes.set(ylabel=f"{name} (%)", xlabel=column.replace("_", " ").capitalize())
                    percent_axis(axes)
                    files += save_figure(figure, f"{path}_{name}_{column}", legend_of=axes)
        return files


def _by_group(result: BenchmarkResult, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for group in sorted(set(names)):
        verdicts = [each.correct for each, name in zip(result.predictions, names, strict=True) if name == group]
        total, correct = len(verdicts), sum(map(bool, verdicts))
        found[group] = {"total": total, "correct": correct, "score": 100 * correct / total}
    return found


def from_evaluation(file: str, method: str, problems: Problems) -> BenchmarkResult:
    """Return the answers to a benchmark that an evaluation left: its only row's, or those of the row named `method`.

    Raises:
        RecipeError: if there are none, or they are to other problems; it names the field that differs.
    """
    name = problems.benchmark.name
    try:
        rows = load_result_rows(file)
        result = (next(iter(rows.values())) if len(rows) == 1 else rows.get(method, {})).get(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"`evaluations` names {file}, which cannot be read: {error!r}.") from error
    if result is None:
        raise RecipeError(f"`evaluations` names {file}, which holds no answers of `{method}` to `{name}`.")
    found = {"prompts": [each.prompt for each in result.predictions]}
    found["references"] = [each.reference for each in result.predictions]
    for field in ("prompts", "references"):
        if found[field] != list(getattr(problems.benchmark, field, found[field])):
            raise RecipeError(
                f"The answers in {file} cannot be compared: the `{field}` of `{name}` differ from those of this run."
            )
    return result


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
    split = decompose_difference([before], [after])
    verdicts = [(x.correct, y.correct) for x, y in zip(before.predictions, after.predictions, strict=True)]
    fixed = [index for index, pair in enumerate(verdicts) if pair == (False, True)]
    broken = [index for index, pair in enumerate(verdicts) if pair == (True, False)]
    return {
        "seeds": [a["seed"], b["seed"]],
        "difference": split.total[0],
        "both_extractable": split.both_extractable[0],
        "missing_in_either": split.missing_in_either[0],
        "fixed": fixed,
        "broken": broken,
        "p_value": sign_test(len(fixed), len(broken)),
    }


def _result(run: dict, name: str) -> BenchmarkResult:
    """Return a run's verdicts as the evaluation has them."""
    return BenchmarkResult(
        name,
        [
            Prediction("", each["completion"], "", each["extracted"], each["correct"])
            for each in run["measured"][name]["problems"]
        ],
    )
