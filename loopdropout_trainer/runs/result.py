"""The result of a training run: its log and its results.json."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import mean
from typing import Any

from loopdropout_trainer.diagnostics import SingleLoopActivation
from loopdropout_trainer.evaluation import BenchmarkResult
from loopdropout_trainer.runs.progress import LogAboveBars
from loopdropout_trainer.saving.files import sha256, staged_files
from loopdropout_trainer.settings.arguments import RunArguments
from loopdropout_trainer.settings.methods import method_title
from loopdropout_trainer.settings.recipe import public_settings, settings_yaml
from loopdropout_trainer.settings.versions import library_versions
from loopdropout_trainer.training.checkpoints import differences
from loopdropout_trainer.training.memory import device_name


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
        handler = LogAboveBars()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        handler.addFilter(_Once())
        log.addHandler(handler)
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


@dataclass
class RunResult:
    """One trained adapter and what was measured of it.

    Attributes:
        rule, p, num_loops: how it was trained.
        trainable_parameters, steps, examples, train_loss, train_seconds: of the training, over all its legs.
        step_seconds: of `train_seconds`, in training steps; num_tokens: trained on in them.
        peak_memory_gb: most memory that the first process held, of the GPU if there is one, in 10^9 bytes.
        base_benchmarks, benchmarks: results by greedy generation before and after training.
        rewards: of a training by reward: its mean over the first and over the last tenth of the log.
        single_loop: losses with the adapter in one loop at a time, if measured.
        readout_losses: of each loop's readout with the adapter in all loops, in nats per token, if measured.
        single_loop_benchmarks: results on the first benchmark with the adapter in loop 1, 2, ... K only, if measured.
        by_depth: results on the first benchmark by the number of loops at inference, if measured.
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
    peak_memory_gb: float | None = None
    base_benchmarks: list[BenchmarkResult] = field(default_factory=list)
    benchmarks: list[BenchmarkResult] = field(default_factory=list)
    single_loop: SingleLoopActivation | None = None
    readout_losses: list[float] = field(default_factory=list)
    single_loop_benchmarks: list[BenchmarkResult] = field(default_factory=list)
    by_depth: dict[int, BenchmarkResult] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)
    rewards: list[float] | None = None

    @property
    def title(self) -> str:
        """What people call the method."""
        return method_title({"rule": self.rule})

    @property
    def results(self) -> dict[str, float]:
        """Scores by benchmark, in percent."""
        return {result.name: result.score for result in self.benchmarks}


def first_and_last(rewards: Sequence[float]) -> list[float] | None:
    """Return the means of the first and of the last tenth of a log's rewards; None if it has none."""
    tenth = max(1, len(rewards) // 10)
    return [mean(rewards[:tenth]), mean(rewards[-tenth:])] if rewards else None


RESULTS_FILE = "results.json"
DIVERGED_FILE = "diverged.json"
_TRAINING = (
    *("rule", "p", "num_loops", "steps", "examples", "num_tokens", "train_loss", "train_seconds", "step_seconds"),
    *("peak_memory_gb", "trainable_parameters"),
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
        report[name] = {result.name: result.as_json() for result in getattr(outcome, name)}
    report["by_depth"] = {depth: result.as_json() for depth, result in outcome.by_depth.items()}
    report["single_loop_benchmarks"] = [result.as_json() for result in outcome.single_loop_benchmarks]
    report["readout_losses"] = outcome.readout_losses
    if outcome.single_loop is not None:
        reductions = {"reductions_percent": outcome.single_loop.reductions}
        report["single_loop"] = {**asdict(outcome.single_loop), **reductions}
    if outcome.rewards is not None:
        report["train_info"]["rewards"] = outcome.rewards
    report["saved"] = outcome.saved
    report["files"] = {name: sha256(Path(output_dir, name)) for name in _weight_files(output_dir, outcome.saved)}
    text = json.dumps(_json(report), indent=1, ensure_ascii=False, allow_nan=False)
    with staged_files(output_dir, "The results", "The adapter is safe there; free some space and resume.") as folder:
        (folder / "recipe.yaml").write_text(settings_yaml(settings), encoding="utf-8")
        (folder / RESULTS_FILE).write_text(f"{text}\n", encoding="utf-8")
    return Path(output_dir) / RESULTS_FILE


def read_results(settings: Mapping[str, Any], output_dir: str | Path, run: Mapping[str, Any]) -> RunResult | None:
    """Return what a finished run has written, if it is this run with these benchmarks and nothing is left to do; or None."""
    try:
        report = json.loads((Path(output_dir) / RESULTS_FILE).read_text(encoding="utf-8"))
        training, before = report["train_info"], report["run_info"]["settings"]
        if differences(report["run"], run) or _asked_for(before) != _asked_for(public_settings(settings)):
            return None
        if any(sha256(Path(output_dir, name)) != digest for name, digest in report["files"].items()):
            return None
        if not all(Path(each).exists() for each in report["saved"].values()):
            return None
        known = {name: training[name] for name in _TRAINING}
        benchmarks = {
            name: [BenchmarkResult.from_json(each, measured) for each, measured in report[name].items()]
            for name in ("base_benchmarks", "benchmarks")
        }
        depths, first = report["by_depth"], next(iter(report["benchmarks"]), "")
        single_loop = dict(report.get("single_loop") or {})
        single_loop.pop("reductions_percent", None)
        return RunResult(
            **known,
            **benchmarks,
            single_loop=SingleLoopActivation(**single_loop) if single_loop else None,
            by_depth={int(depth): BenchmarkResult.from_json(first, each) for depth, each in depths.items()},
            readout_losses=report["readout_losses"],
            single_loop_benchmarks=[
                BenchmarkResult.from_json(first, each) for each in report["single_loop_benchmarks"]
            ],
            saved=report["saved"],
            rewards=training.get("rewards"),
        )
    except (OSError, ValueError, KeyError, TypeError):  # not there, or of another version
        return None


def _weight_files(output_dir: str | Path, saved: Mapping[str, str]) -> list[str]:
    """Return the names, below `output_dir`, of the weights that the results are about."""
    folders = [folder for name, folder in saved.items() if name in ("adapter", "merged model")]
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.safetensors"))]
    return [file.relative_to(output_dir).as_posix() for file in files]


def _json(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no infinity: null in their place."""
    if isinstance(value, Mapping):
        return {key: _json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_OF_NO_RESULT = {
    *("compare_with", "benchmark_batch_size", "dry_run", "live_diagnostics_steps", "live_diagnostics_rows")
}


def _asked_for(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say what is to be measured and made of a trained adapter."""
    names = {f.name for f in fields(RunArguments)} - _OF_NO_RESULT
    given = {name: settings[name] for name in sorted(names & set(settings)) if settings[name] is not None}
    return json.loads(json.dumps(given, default=str))
