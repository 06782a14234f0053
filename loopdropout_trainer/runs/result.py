"""What came out of a training run: its log and its results.json."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loopdropout_trainer.diagnostics import SingleLoopActivation
from loopdropout_trainer.evaluation import BenchmarkResult
from loopdropout_trainer.settings.recipe import public_settings
from loopdropout_trainer.settings.versions import library_versions


class _Once(logging.Filter):
    """Lets each message through once: what holds for every evaluation of a run need not be said at each."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self.said
        self.said.add(message)
        return is_new or record.levelno > logging.WARNING


def show_log() -> None:
    """Write this package's log to standard error: from INFO on in the first process, from WARNING on in the others."""
    log = logging.getLogger("loopdropout_trainer")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        handler.addFilter(_Once())
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
        by_depth: results on the first benchmark by the number of loops at inference, if measured.
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
    by_depth: dict[int, BenchmarkResult] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What people call the method."""
        return {"loop_dropout": "Loop Dropout", "lora": "LoRA"}.get(self.rule, self.rule)

    @property
    def results(self) -> dict[str, float]:
        """Scores by benchmark, in percent."""
        return {result.name: result.score for result in self.benchmarks}


def write_results(outcome: RunResult, settings: Mapping[str, Any], output_dir: str | Path) -> Path:
    """Write `results.json`: what was measured, with which settings and versions."""
    measured: dict[str, Any] = {
        key: value
        for key, value in asdict(outcome).items()
        if key not in ("base_benchmarks", "benchmarks", "single_loop", "by_depth")
    }
    for name in ("base_benchmarks", "benchmarks"):
        measured[name] = {result.name: _counts(result) for result in getattr(outcome, name)}
    if outcome.by_depth:
        measured["by_depth"] = {depth: _counts(result) for depth, result in outcome.by_depth.items()}
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
