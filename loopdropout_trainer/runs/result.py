"""What a training run prints and writes: its log, results.json, tables, the chart of single-loop activation."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loopdropout_trainer.diagnostics import SingleLoopActivation
from loopdropout_trainer.evaluation import BenchmarkResult
from loopdropout_trainer.evaluation.results import Prediction
from loopdropout_trainer.saving.files import written_whole
from loopdropout_trainer.settings.arguments import RunArguments
from loopdropout_trainer.settings.recipe import public_settings, settings_yaml
from loopdropout_trainer.settings.versions import library_versions
from loopdropout_trainer.training.identity import differences
from loopdropout_trainer.training.resources import device_name


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
        trainable_parameters, steps, examples, train_loss, train_seconds: of the training, over all its legs.
        step_seconds: of `train_seconds`, in training steps; num_tokens: trained on in them.
        peak_memory_bytes: most memory that the first process held, of the GPU if there is one.
        base_benchmarks, benchmarks: results by greedy generation before and after training.
        single_loop: losses with the adapter in one loop at a time, if measured.
        adapter: its other fields (`r`, `lora_alpha`, ...); model: the base's (`model`, `dtype`, ...).
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
    step_seconds: float = 0.0
    num_tokens: int = 0
    peak_memory_bytes: int | None = None
    base_benchmarks: list[BenchmarkResult] = field(default_factory=list)
    benchmarks: list[BenchmarkResult] = field(default_factory=list)
    single_loop: SingleLoopActivation | None = None
    adapter: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
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


RESULTS_FILE = "results.json"
DIVERGED_FILE = "diverged.json"
_TRAINING = (
    *("rule", "p", "steps", "examples", "num_tokens", "train_loss", "train_seconds", "step_seconds"),
    *("peak_memory_bytes", "trainable_parameters"),
)


def write_results(
    outcome: RunResult, settings: Mapping[str, Any], output_dir: str | Path, run: Mapping[str, Any], processes: int = 1
) -> Path:
    """Write `results.json` (docs/runs.md) and `recipe.yaml`: what was measured, of what, and the settings that repeat it.

    Args:
        outcome: of the run.
        settings: as given.
        output_dir: of the run.
        run: its identity, by which it is known again.
        processes: that trained it.

    Raises:
        WriteError: if the disk refuses; what was there before is untouched.
    """
    speed = outcome.num_tokens / outcome.step_seconds if outcome.step_seconds else None
    report: dict[str, Any] = {
        "meta_info": {**outcome.model, "num_loops": outcome.num_loops, "adapter_path": str(output_dir)},
        "train_info": {
            **{name: getattr(outcome, name) for name in _TRAINING},
            "tokens_per_second": speed,
            **outcome.adapter,
        },
        "run_info": {
            "settings": public_settings(settings),
            "versions": library_versions(),
            "device": device_name(),
            "num_processes": processes,
        },
        "run": dict(run),
    }
    for name in ("base_benchmarks", "benchmarks"):
        report[name] = {result.name: _benchmark_json(result) for result in getattr(outcome, name)}
    if outcome.single_loop is not None:
        reductions = {"reductions_percent": outcome.single_loop.reductions}
        report["single_loop"] = {**asdict(outcome.single_loop), **reductions}
    report["saved"] = outcome.saved
    with written_whole(output_dir, "The results", "The adapter is safe there; free some space and resume.") as folder:
        (folder / "recipe.yaml").write_text(settings_yaml(settings), encoding="utf-8")
        (folder / RESULTS_FILE).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return Path(output_dir) / RESULTS_FILE


def read_results(settings: Mapping[str, Any], output_dir: str | Path, run: Mapping[str, Any]) -> RunResult | None:
    """Return what a finished run has written, if it is this run with these benchmarks and nothing is left to do; or None."""
    try:
        report = json.loads((Path(output_dir) / RESULTS_FILE).read_text(encoding="utf-8"))
        training, model = dict(report["train_info"]), dict(report["meta_info"])
        before = report["run_info"]["settings"]
        if differences(report["run"], run) or _asked_for(before) != _asked_for(public_settings(settings)):
            return None
        if not all(Path(each).exists() for each in report["saved"].values()):
            return None
        known = {name: training.pop(name) for name in _TRAINING}
        benchmarks = {
            name: [_benchmark_of(each, measured) for each, measured in report[name].items()]
            for name in ("base_benchmarks", "benchmarks")
        }
        single_loop = dict(report.get("single_loop") or {})
        single_loop.pop("reductions_percent", None)
        return RunResult(
            **known,
            num_loops=model["num_loops"],
            **benchmarks,
            single_loop=SingleLoopActivation(**single_loop) if single_loop else None,
            saved=report["saved"],
        )
    except (OSError, ValueError, KeyError, TypeError):  # not there, or of another version
        return None


def _asked_for(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say what is to be measured and made of a trained adapter."""
    names = {f.name for f in fields(RunArguments)} - {"compare_with", "benchmark_batch_size", "dry_run"}
    given = {name: settings[name] for name in sorted(names & set(settings)) if settings[name] is not None}
    return json.loads(json.dumps(given, default=str))


def _benchmark_json(result: BenchmarkResult) -> dict[str, Any]:
    counts = ("score", "correct", "total", "missing", "missing_rate", "errors")
    predictions = [asdict(prediction) for prediction in result.predictions]
    return {**{name: getattr(result, name) for name in counts}, "predictions": predictions}


def _benchmark_of(name: str, measured: Mapping[str, Any]) -> BenchmarkResult:
    return BenchmarkResult(name, [Prediction(**prediction) for prediction in measured["predictions"]])


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
