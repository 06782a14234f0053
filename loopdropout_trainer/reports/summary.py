"""Tables of any runs, without a specification: methods by benchmarks, each seed, differences, and what they cost."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from loopdropout_trainer.reports.records import Record, ReportError
from loopdropout_trainer.reports.tables import FinishedTable, TableSpec, build_table


GROUPED_BY = ("model", "sweep", "preparation", "num_train_examples", "max_length", "num_train_epochs", "max_steps")
"""Runs that differ in one of these are not rows of one table."""

TOLD_BY = ("method", "rank", "p", "rule_args", "num_loops", "learning_rate", "lora_alpha", "lora_target_modules")
"""What a row's name says where it differs between the rows of a table."""


def summary_tables(records: Sequence[Record]) -> list[FinishedTable]:
    """Return for each group of comparable runs: accuracy, the same by seed, differences to LoRA, and costs."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        key = tuple(repr(record.fields.get(name)) for name in GROUPED_BY)
        groups.setdefault(key, []).append(record)
    tables = []
    for number, runs in enumerate(groups.values(), start=1):
        title = _title(runs[0], len(groups) > 1)
        suffix = f"_{number}" if len(groups) > 1 else ""
        tables += _tables_of(runs, title, suffix)
    return tables


def _title(record: Record, several: bool) -> str:
    parts = [record.fields.get("model") or "unknown model"]
    if several:
        parts += [str(record.fields[name]) for name in ("sweep", "preparation") if record.fields.get(name)]
    return ", ".join(parts)


def _tables_of(runs: Sequence[Record], title: str, suffix: str) -> list[FinishedTable]:
    told = [name for name in TOLD_BY if len({repr(run.fields.get(name)) for run in runs}) > 1 or name == "method"]
    rows: dict[tuple, dict[str, Any]] = {}
    for run in runs:
        where = {name: run.fields.get(name) for name in told}
        rows.setdefault(tuple(map(repr, where.values())), where)
    heads = [_HEADS.get(name, name) for name in told]
    shared = {name: runs[0].fields.get(name) for name in GROUPED_BY}
    spec_rows = [
        {"name": ["–" if value is None else _short(value) for value in where.values()], "where": where}
        for where in rows.values()
    ]
    columns = _benchmark_columns(runs)
    tables = []
    make = lambda label, name, columns, rows=spec_rows: build_table(
        TableSpec(f"{label}{suffix}", f"{name}: {title}", columns, rows, heads, cell={"where": shared}), runs
    )
    if columns:
        tables.append(make("accuracy", "Correct answers, %", columns))
        if any(len(cell.seeds) > 1 for row in tables[0].cells for cell in row):
            by_seed = [{**column, "show": "seeds"} for column in columns]
            tables.append(make("seeds", "Correct answers by seed, %", by_seed))
        reference = next((where for where in rows.values() if where["method"] == "LoRA"), None)
        others = [row for row in spec_rows if row["where"] is not reference]
        if reference is not None and others:
            minus = [{**column, "minus": reference} for column in columns]
            with contextlib.suppress(ReportError):  # no one LoRA run that all are compared with
                tables.append(make("differences", "Difference to LoRA, points", minus, others))
    costs = [
        {"name": "Trainable", "measure": "cost", "value": "parameters", "show": "value", "decimals": 0},
        {"name": "Train (min)", "measure": "cost", "value": "seconds", "scale": 1 / 60, "decimals": 1},
        {"name": "Tokens/s", "measure": "cost", "value": "tokens_per_second", "decimals": 0},
        {"name": "Memory (GB)", "measure": "cost", "value": "peak_memory_gb"},
    ]
    costs = [column for column in costs if any(run.cost.get(column["value"]) is not None for run in runs)]
    if costs:
        tables.append(make("costs", "Cost of training", costs))
    return tables


_HEADS = {
    "method": "Method",
    "rank": "Rank",
    "num_loops": "Trained K",
    "learning_rate": "LR",
    "lora_alpha": "alpha",
    "rule_args": "Fields of the rule",
    "lora_target_modules": "Modules",
}


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _benchmark_columns(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a column for each benchmark, metric and depth at which any run was evaluated."""
    found: dict[tuple, dict[str, Any]] = {}
    for run in runs:
        for score in run.scores:
            if score.gates is not None:
                continue
            own = score.depth in (None, run.fields.get("num_loops"))
            for place, metric in enumerate(score.metrics):
                column = {"name": metric, "measure": "accuracy", "benchmark": score.benchmark}
                if place:
                    column["metric"] = metric
                if not own:
                    column |= {"name": f"{metric}, K = {score.depth}", "depth": score.depth}
                found.setdefault((metric, -1 if own else score.depth), column)
    return [found[key] for key in sorted(found)]
