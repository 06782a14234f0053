"""What a training run prints and writes: its log, results.json, tables, the chart of single-loop activation."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loopdropout_trainer.diagnostics import SingleLoopActivation
from loopdropout_trainer.evaluation import BenchmarkResult
from loopdropout_trainer.settings.recipe import public_settings
from loopdropout_trainer.settings.versions import library_versions


def show_log() -> None:
    """Write this package's log to standard error: from INFO on in the first process, from WARNING on in the others."""
    log = logging.getLogger("loopdropout_trainer")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


@dataclass
class RunResult:
    """One trained adapter and what was measured of it.

    Attributes:
        rule, p, num_loops: how it was trained.
        trainable_parameters, steps, examples, train_loss, train_seconds: of the training.
        base_benchmarks, benchmarks: results by greedy generation before and after training.
        single_loop: losses with the adapter in one loop at a time, if measured.
        saved: what was saved, by name.
    """

    rule: str
    p: float | list[float] | None
    num_loops: int
    trainable_parameters: int
    steps: int
    examples: int
    train_loss: float
    train_seconds: float
    base_benchmarks: list[BenchmarkResult] = field(default_factory=list)
    benchmarks: list[BenchmarkResult] = field(default_factory=list)
    single_loop: SingleLoopActivation | None = None
    saved: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What people call the method."""
        known = {"loop_dropout": "Loop Dropout", "lora": "LoRA"}
        title = known.get(self.rule, self.rule)
        return title if self.p is None else f"{title} (p={self.p})"

    @property
    def results(self) -> dict[str, float]:
        """Scores by benchmark, in percent."""
        return {result.name: result.score for result in self.benchmarks}


def write_results(outcome: RunResult, settings: Mapping[str, Any], output_dir: str | Path) -> Path:
    """Write `results.json`: what was measured, with which settings and versions."""
    measured: dict[str, Any] = {
        key: value
        for key, value in asdict(outcome).items()
        if key not in ("base_benchmarks", "benchmarks", "single_loop")
    }
    for name in ("base_benchmarks", "benchmarks"):
        measured[name] = {result.name: _counts(result) for result in getattr(outcome, name)}
    if outcome.single_loop is not None:
        measured["single_loop"] = {
            **asdict(outcome.single_loop),
            "reductions_percent": outcome.single_loop.reductions,
        }
    measured["settings"] = public_settings(settings)
    measured["versions"] = library_versions()
    path = Path(output_dir) / "results.json"
    path.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return path


def _counts(result: BenchmarkResult) -> dict[str, Any]:
    return {key: getattr(result, key) for key in ("score", "correct", "total", "missing")}


def print_report(outcomes: Sequence[RunResult], console: Console | None = None) -> None:
    """Print what was trained, the results, and where things were saved."""
    console = console or Console()
    console.print(_training_table(outcomes))
    if outcomes[0].benchmarks:
        console.print(_benchmark_table(outcomes))
    if outcomes[0].single_loop is not None:
        console.print(_single_loop_table(outcomes))
    for outcome in outcomes:
        for what, where in outcome.saved.items():
            console.print(f"{outcome.name}: {what} in {where}", highlight=False, soft_wrap=True)


def _training_table(outcomes: Sequence[RunResult]) -> Table:
    table = Table(title="Training", title_justify="left")
    table.add_column("method")
    for column in ("loops K", "trainable", "examples", "steps", "loss", "seconds"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            str(outcome.num_loops),
            f"{outcome.trainable_parameters:,}",
            f"{outcome.examples:,}",
            f"{outcome.steps:,}",
            f"{outcome.train_loss:.4f}",
            f"{outcome.train_seconds:.0f}",
        )
    return table


def _benchmark_table(outcomes: Sequence[RunResult]) -> Table:
    table = Table(title="Greedy generation, correct answers", title_justify="left")
    table.add_column("method")
    for result in outcomes[0].benchmarks:
        table.add_column(result.name, justify="right")
    rows = [("before training", outcomes[0].base_benchmarks), *((o.name, o.benchmarks) for o in outcomes)]
    for name, results in rows:
        if results:
            table.add_row(name, *(f"{r.correct}/{r.total} = {r.score:.1f}%" for r in results))
    return table


def _single_loop_table(outcomes: Sequence[RunResult]) -> Table:
    table = Table(title="Loss reduction with the adapter in one loop only, rho_t in %", title_justify="left")
    table.add_column("method")
    for loop in range(1, outcomes[0].num_loops + 1):
        table.add_column(f"loop {loop}", justify="right")
    for column in ("all loops", "frozen loss"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        measured = outcome.single_loop
        if measured is not None:
            all_on = 100 * (measured.frozen - measured.all_on) / measured.frozen
            table.add_row(
                outcome.name,
                *(f"{value:.1f}" for value in measured.reductions),
                f"{all_on:.1f}",
                f"{measured.frozen:.4f}",
            )
    return table
