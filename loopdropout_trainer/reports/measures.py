"""What a cell of a table can measure: one small function for each measure, found through `MEASURES`.

A measure takes a cell's specification and one run, and returns a number, or None where the run does not have it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loopdropout_trainer.evaluation.statistics import (
    Difference,
    decompose_difference,
    paired_difference,
    summarize,
)
from loopdropout_trainer.reports.records import Record, ReportError, Score
from loopdropout_trainer.settings.recipe import load_recipe


@dataclass(frozen=True)
class CellSpec:
    """What one cell shows.

    Attributes:
        measure: name in `MEASURES`.
        benchmark: that the measure is about; metric: of it, default the first; metrics: of an average.
        where: fields that runs must have.
        seeds: only these; default: all that are there.
        depth: recurrence depth of the evaluation; default: that of the training.
        value: dotted path into a diagnostic, a field of the run, or of `recipe`, a recipe's path.
        minus: fields of the runs to compare with, over `where`: the cell then shows the difference.
        show: "mean" (with SD), "seeds" (each, in order) or "value" (the one that all runs share).
        decimals: of the numbers shown. scale: they are multiplied by it.
    """

    measure: str = "accuracy"
    benchmark: str | None = None
    metric: str | None = None
    metrics: list[str] | None = None
    where: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] | None = None
    depth: int | None = None
    value: str | None = None
    recipe: str | None = None
    minus: dict[str, Any] | None = None
    show: str = "mean"
    decimals: int = 2
    scale: float = 1.0

    @classmethod
    def fields(cls) -> set[str]:
        """Names of all fields."""
        return {f.name for f in dataclasses.fields(cls)}


@dataclass(frozen=True)
class Cell:
    """A number of a table.

    Attributes:
        text: as printed. value: mean, difference or text's number. sd, by_seed: over seeds, in the order of `seeds`.
        low, high: 95% interval of a difference.
        missing: why there is none, else empty.
        basis: what numbers of one column must share: problems, prompts, token budget.
        sources: files.
    """

    text: str = "–"
    value: float | None = None
    sd: float | None = None
    by_seed: tuple[float, ...] = ()
    seeds: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    missing: str = ""
    benchmark: str | None = None
    basis: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()


Measure = Callable[[CellSpec, Record], float | None]
MEASURES: dict[str, Measure | None] = {}


def measure(function: Measure) -> Measure:
    """Register a measure under its function's name."""
    MEASURES[function.__name__] = function
    return function


@measure
def accuracy(spec: CellSpec, record: Record) -> float | None:
    """Return a metric of a benchmark, in percent."""
    score = score_of(spec, record)
    return None if score is None else score.percent(spec.metric)


@measure
def average(spec: CellSpec, record: Record) -> float | None:
    """Return the mean of several metrics of one run, in percent; None if one is missing."""
    values = []
    for name in spec.metrics or []:
        scores = [each for each in _scores(spec, record) if name in each.metrics or each.benchmark == name]
        if not scores:
            return None
        values.append(scores[0].percent(name if name in scores[0].metrics else None))
    return float(np.mean(values)) if values else None


@measure
def missing(spec: CellSpec, record: Record) -> float | None:
    """Return the completions without an answer, in percent."""
    score = score_of(spec, record)
    return None if score is None else score.missing_rate


@measure
def setting(spec: CellSpec, record: Record) -> Any:
    """Return a field of the run, named by `value`, such as `learning_rate`."""
    return record.fields.get(spec.value)


@measure
def cost(spec: CellSpec, record: Record) -> float | None:
    """Return a cost of the training, named by `value`: seconds, peak_memory_gb, tokens_per_second, parameters."""
    return record.cost.get(spec.value)


@measure
def diagnostic(spec: CellSpec, record: Record) -> float | None:
    """Return a number of a diagnostic by its dotted path, such as `single_loop.only.0`; counts become percentages."""
    found: Any = record.diagnostics
    for part in (spec.value or "").split("."):
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, Sequence) and not isinstance(found, str) and part.isdigit():
            found = found[int(part)] if int(part) < len(found) else None
        else:
            return None
    if isinstance(found, Mapping) and found.get("total"):
        return 100 * found["correct"] / found["total"]
    return found


MEASURES["both_extractable"] = MEASURES["missing_in_either"] = None  # of pairs of runs, see `_difference_cell`
MEASURES["recipe"] = None  # of no run, see `_recipe_cell`


def _scores(spec: CellSpec, record: Record) -> list[Score]:
    depth = record.fields.get("num_loops") if spec.depth is None else spec.depth
    return [each for each in record.scores if each.gates is None and each.depth in (depth, None)]


def score_of(spec: CellSpec, record: Record) -> Score | None:
    """Return the run's score on the cell's benchmark at its depth and unit gates."""
    for score in _scores(spec, record):
        if score.benchmark == spec.benchmark or (spec.metric is None and spec.benchmark in score.metrics):
            return score
    return None


def evaluate_cell(spec: CellSpec, records: Sequence[Record]) -> Cell:
    """Return the cell's number from the runs that match, or why there is none.

    Raises:
        ReportError: if the runs differ in more than their seed.
    """
    if spec.measure == "recipe":
        return _recipe_cell(spec)
    runs = matching(spec, spec.where, records)
    if not runs:
        return Cell(missing=f"no run with {_conditions(spec)}")
    if spec.minus is not None or spec.measure in ("both_extractable", "missing_in_either"):
        return _difference_cell(spec, runs, matching(spec, {**spec.where, **(spec.minus or {})}, records))
    values = {run.fields.get("seed"): MEASURES[spec.measure](spec, run) for run in runs}
    known = {seed: value for seed, value in values.items() if value is not None}
    if not known:
        return Cell(missing=_what_is_missing(spec))
    lacking = [seed for seed in values if seed not in known]
    if lacking:
        return Cell(missing=f"{_what_is_missing(spec)} for seed {', '.join(map(str, lacking))}")
    return _shown(spec, known, runs)


def _recipe_cell(spec: CellSpec) -> Cell:
    """Return a field of a recipe, or of several fields (`a x b`) their numbers and product."""
    recipe = load_recipe(spec.recipe)
    names = (spec.value or "").split(" x ")
    values = [recipe.get(name) for name in names]
    if None in values:
        return Cell(missing=f"{spec.recipe} has no `{names[values.index(None)]}`")
    if len(values) == 1:
        text = f"{values[0]:,}" if isinstance(values[0], int) else str(values[0])
    else:
        text = f"{' x '.join(map(str, values))} = {math.prod(values)}"
    return Cell(text=text, sources=(spec.recipe,))


def _shown(spec: CellSpec, known: Mapping[Any, Any], runs: Sequence[Record]) -> Cell:
    scores = [score for run in runs if (score := score_of(spec, run)) is not None] if spec.benchmark else []
    common = {
        "seeds": tuple(known),
        "benchmark": spec.benchmark,
        "basis": _basis(scores),
        "sources": tuple(score.source for score in scores) or tuple(run.path for run in runs),
    }
    if spec.show == "value":
        distinct = list(dict.fromkeys(map(str, known.values())))
        if len(distinct) > 1:
            return Cell(missing=f"the runs differ in `{spec.value}`: {', '.join(distinct)}")
        only = next(iter(known.values()))
        number = only if isinstance(only, (int, float)) else None
        text = _number(only * spec.scale, spec.decimals) if number is not None else str(only)
        return Cell(text=text, value=number, **common)
    values = [spec.scale * value for value in known.values()]
    summary = summarize(values)
    if spec.show == "seeds":
        text = " / ".join(f"{value:.{spec.decimals}f}" for value in values)
    else:
        text = summary.text(spec.decimals)
    return Cell(text=text, value=summary.mean, sd=summary.sd, by_seed=tuple(values), **common)


def _number(value: float, decimals: int) -> str:
    return f"{value:g}" if value and abs(value) < 10**-decimals else f"{value:.{decimals}f}".rstrip("0").rstrip(".")


def _difference_cell(spec: CellSpec, runs: Sequence[Record], others: Sequence[Record]) -> Cell:
    """Return the cell of a difference `runs - others`, paired by seed."""
    if not others:
        return Cell(missing=f"no run with {_conditions(spec, spec.minus)} to compare with")
    by_seed = {run.fields.get("seed"): run for run in runs}
    reference = {run.fields.get("seed"): run for run in others}
    seeds = [seed for seed in by_seed if seed in reference]
    if set(by_seed) != set(reference):
        return Cell(missing=f"other seeds: {_list(by_seed)} and {_list(reference)}")
    values = [MEASURES[spec.measure] and MEASURES[spec.measure](spec, by_seed[seed]) for seed in seeds]
    base = [MEASURES[spec.measure] and MEASURES[spec.measure](spec, reference[seed]) for seed in seeds]
    pairs = [(score_of(spec, reference[seed]), score_of(spec, by_seed[seed])) for seed in seeds]
    results = [(a.result, b.result) for a, b in pairs if a and b and a.result and b.result]
    if spec.measure in ("both_extractable", "missing_in_either"):
        if len(results) != len(seeds):
            return Cell(missing=f"no predictions on {spec.benchmark} to decompose")
        parts = getattr(decompose_difference(*map(list, zip(*results, strict=True))), spec.measure)
        difference = Difference(tuple(parts))
    elif None in values or None in base:
        return Cell(missing=_what_is_missing(spec))
    elif len(results) == len(seeds) and spec.measure == "accuracy" and spec.metric is None:
        difference = paired_difference(*map(list, zip(*results, strict=True)))
    else:
        difference = Difference(tuple(spec.scale * (b - a) for a, b in zip(base, values, strict=True)))
    summary = summarize(difference.by_seed)
    return Cell(
        text=difference.text(spec.decimals),
        value=summary.mean,
        sd=summary.sd,
        by_seed=difference.by_seed,
        seeds=tuple(seeds),
        low=difference.low,
        high=difference.high,
        sources=tuple(score.source for pair in pairs for score in pair if score),
    )


def matching(spec: CellSpec, where: Mapping[str, Any], records: Sequence[Record]) -> list[Record]:
    """Return the runs of a cell that have what it measures, ordered by seed.

    Raises:
        ReportError: if two runs of one seed match: the cell then does not say which one it means.
    """
    wanted = dict(where)
    if spec.seeds is not None:
        wanted["seed"] = list(spec.seeds)
    found = [record for record in records if record.matches(wanted)]
    function = MEASURES[spec.measure]
    if spec.benchmark is not None:  # other rates of a grid were never tested
        found = [record for record in found if score_of(spec, record) is not None] or found
    elif function is not None:
        found = [record for record in found if function(spec, record) is not None] or found
    seen: dict[Any, Record] = {}
    for record in sorted(found, key=lambda record: (str(record.fields.get("seed")), record.path)):
        seed = record.fields.get("seed")
        if seed in seen:
            differs = _first_difference(seen[seed].fields, record.fields)
            raise ReportError(
                f"Two runs of seed {seed} fit one cell ({_conditions(spec, where)}): {seen[seed].path} and {record.path} "
                f"differ in {differs}; narrow `where`, or leave one of the folders out."
            )
        seen[seed] = record
    runs = list(seen.values())
    for run in runs[1:]:
        differs = _first_difference(runs[0].fields, run.fields)
        if differs != "nothing but their place":
            raise ReportError(
                f"The seeds of one cell ({_conditions(spec, where)}) are runs of several settings: {runs[0].path}, {run.path} "
                f"differ in {differs}."
            )
    return runs


_PLACE = {"seed", "output_dir", "resume_from_checkpoint", "sweep", "benchmarks", "benchmark_files", "evaluate_base",
          "gate_seed", "hub_model_id", "run_name", "logging_dir", "merge", "dry_run", "report_to", "use_cpu",
          "benchmark_batch_size", "decoding", "single_loop_batches", "logging_steps", "disable_tqdm"}  # fmt: skip


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for key in sorted({*one, *other} - _PLACE):
        if one.get(key) != other.get(key):
            return f"`{key}` ({one.get(key)!r} and {other.get(key)!r})"
    return "nothing but their place"


def _basis(scores: Sequence[Score]) -> dict[str, Any]:
    """Return what all numbers of a column must share; a value that differs between the seeds is an error."""
    keys = ("problems", "problems_sha256", "max_new_tokens", "stop_strings", "metric", "chat_template", "num_fewshot",
            "system", "total")  # fmt: skip
    basis: dict[str, Any] = {}
    for score in scores:
        first = next(iter(score.metrics.values()), {})
        values = {**{key: score.settings.get(key) for key in keys}, "total": first.get("total")}
        for key, value in values.items():
            if value is None:
                continue
            if basis.setdefault(key, value) != value:
                raise ReportError(
                    f"The runs on `{score.benchmark}` cannot be averaged: `{key}` is {basis[key]!r} and, in {score.source}, "
                    f"{value!r}."
                )
    return basis


def _conditions(spec: CellSpec, extra: Mapping[str, Any] | None = None) -> str:
    where = {**spec.where, **(extra or {})}
    if spec.seeds is not None:
        where["seed"] = spec.seeds
    return (
        ", ".join(f"{key} {_list(value) if isinstance(value, list) else value}" for key, value in where.items())
        or "any"
    )


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


def _what_is_missing(spec: CellSpec) -> str:
    depth = "" if spec.depth is None else f" at K = {spec.depth}"
    what = {
        "accuracy": f"no result on {spec.metric or spec.benchmark}{depth}",
        "missing": f"no result on {spec.benchmark}{depth}",
        "average": f"not all of {_list(spec.metrics or [])}",
    }
    return what.get(spec.measure, f"no `{spec.value}`")


__all__ = ["MEASURES", "Cell", "CellSpec", "evaluate_cell", "matching", "measure", "score_of"]
