"""One self-contained HTML page: tables that sort, figures with values on hover, answers side by side, settings of every run.

It needs no network and no server: data, styles and script are inside. All text goes into the page as JSON and is shown as
text, never as HTML, since completions and recipes may hold anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from loopdropout_trainer.diagnostics.style import method_styles
from loopdropout_trainer.reports import render
from loopdropout_trainer.reports.figures import Figure
from loopdropout_trainer.reports.records import Record
from loopdropout_trainer.reports.tables import FinishedTable


MOST_PROBLEMS = 3000
"""Of one benchmark whose answers the page shows; more would make it slow to open."""

MOST_LETTERS = 1500
"""Of a prompt or a completion."""


def write_page(
    path: Path, title: str, tables: Sequence[FinishedTable], figures: Sequence[Figure], records: Sequence[Record]
) -> None:
    """Write the page.

    Args:
        path: of the HTML file.
        title: of the page.
        tables, figures: of the report.
        records: runs, for their settings and answers.
    """
    methods = sorted({each.name for figure in figures for panel in figure.panels for each in panel.series})
    data = {
        "title": title,
        "tables": [{**render.as_json(table), "grid": render.grid(table)} for table in tables],
        "figures": [asdict(figure) for figure in figures],
        "colors": {name: style.color for name, style in method_styles(methods).items()},
        "answers": _answers(records),
        "runs": [_run(record) for record in records],
    }
    text = json.dumps(data, ensure_ascii=False, default=str).replace("<", "\\u003c")  # nothing closes the script early
    here = files("loopdropout_trainer.reports")
    page = (here / "page.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        page = page.replace(f"/*{name}*/", (here / name).read_text(encoding="utf-8"))
    path.write_text(page.replace("/*data*/", text), encoding="utf-8")


def _run(record: Record) -> dict[str, Any]:
    settings = {key: value for key, value in record.fields.items() if value is not None}
    info = record.info.get("run_info", record.info)
    return {
        "path": record.path,
        "method": record.method,
        "seed": record.fields.get("seed"),
        "settings": settings,
        "cost": {key: value for key, value in record.cost.items() if value is not None},
        "versions": info.get("versions", {}),
        "device": info.get("device"),
    }


def _answers(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return for each benchmark the problems, and for each method the answers of its first seed that has any."""
    benchmarks: dict[tuple, dict[str, Any]] = {}
    for record in records:
        for score in record.scores:
            if score.result is None or score.gates is not None:
                continue
            key = (score.benchmark, score.depth)
            predictions = score.result.predictions[:MOST_PROBLEMS]
            entry = benchmarks.setdefault(
                key,
                {
                    "benchmark": score.benchmark,
                    "depth": score.depth,
                    "total": score.result.total,
                    "problems": [
                        {"id": p.id or str(place), "prompt": p.prompt[-MOST_LETTERS:], "reference": p.reference}
                        for place, p in enumerate(predictions)
                    ],
                    "methods": {},
                },
            )
            name = record.method
            known = entry["methods"].get(name)
            if known is not None:
                if known["path"] == record.path:
                    continue
                name = f"{name} (seed {record.fields.get('seed')}, {Path(record.path).name})"
            same = [p["prompt"] for p in entry["problems"]] == [p.prompt[-MOST_LETTERS:] for p in predictions]
            if name in entry["methods"] or not same:
                continue
            entry["methods"][name] = {
                "path": record.path,
                "seed": record.fields.get("seed"),
                "answers": [
                    [_verdict(p.correct, p.extracted), p.extracted, p.completion[:MOST_LETTERS]] for p in predictions
                ],
            }
    return list(benchmarks.values())


def _verdict(correct: bool | None, extracted: Any) -> str:
    if correct:
        return "right"
    return "missing" if extracted is None else "wrong"
