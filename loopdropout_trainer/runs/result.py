"""The result of a training run, and its results.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from loopdropout_trainer.diagnostics import SingleLoopActivation
from loopdropout_trainer.evaluation import BenchmarkResult
from loopdropout_trainer.saving.files import sha256, staged_files
from loopdropout_trainer.settings.arguments import RunArguments
from loopdropout_trainer.settings.methods import method_title
from loopdropout_trainer.settings.recipe import public_settings, settings_yaml
from loopdropout_trainer.settings.versions import library_versions
from loopdropout_trainer.training.checkpoints import differences
from loopdropout_trainer.training.memory import device_name


RESULTS_FILE = "results.json"
DIVERGED_FILE = "diverged.json"
_TRAINING = (
    *("rule", "p", "num_loops", "steps", "examples", "num_tokens", "train_loss", "train_seconds", "step_seconds"),
    *("peak_memory_gb", "trainable_parameters", "rewards"),
)
_ASKED_FOR = {f.name for f in fields(RunArguments)} - {
    *("compare_with", "benchmark_batch_size", "dry_run", "live_diagnostics_steps", "live_diagnostics_rows")
}
"""The settings that say what is to be measured and made of a trained adapter."""


@dataclass
class RunResult:
    """One trained adapter and what was measured of it.

    Attributes:
        trainable_parameters, steps, examples, train_loss, train_seconds: of the training, over all its legs.
        step_seconds: of `train_seconds`, in training steps; num_tokens: trained on in them.
        peak_memory_gb: most memory that the first process held, of the GPU if there is one, in 10^9 bytes.
        base_benchmarks, benchmarks: results by greedy generation before and after training.
        single_loop: losses with the adapter in one loop at a time; readout_losses: of each loop's readout with the adapter in
            all loops, in nats per token.
        single_loop_benchmarks, by_depth: results on the first benchmark with the adapter in loop 1, 2, ... K only, and by the
            number of loops at inference.
        adapter: its other fields (`r`, `lora_alpha`, ...); model: the base's; saved: what was saved, by name.
        rewards: of a training by reward: its mean over the first and over the last tenth of the log.
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


def write_results(
    outcome: RunResult, settings: Mapping[str, Any], output_dir: str | Path, run: Mapping[str, Any], processes: int = 1
) -> Path:
    """Write `results.json` (docs/runs.md) and `recipe.yaml`: what was measured, of what, and the settings that repeat it.

    `run` is the run's identity, by which it is known again; `processes` trained it.

    Raises:
        WriteError: if the disk refuses; what was there before is untouched.
    """
    speed = outcome.num_tokens / outcome.step_seconds if outcome.step_seconds else None
    training = {name: getattr(outcome, name) for name in _TRAINING if name != "rewards" or outcome.rewards}
    run_info = {"settings": public_settings(settings), "versions": library_versions(), "device": device_name()}
    weights = [folder for name, folder in outcome.saved.items() if name in ("adapter", "merged model")]
    files = [file for folder in weights for file in sorted(Path(folder).glob("*.safetensors"))]
    report: dict[str, Any] = {
        "meta_info": {**outcome.model, "num_loops": outcome.num_loops, "adapter_path": str(output_dir)},
        "train_info": {**training, "tokens_per_second": speed, **outcome.adapter},
        "run_info": {**run_info, "num_processes": processes},
        "run": dict(run),
        "base_benchmarks": {result.name: result.as_json() for result in outcome.base_benchmarks},
        "benchmarks": {result.name: result.as_json() for result in outcome.benchmarks},
        "by_depth": {depth: result.as_json() for depth, result in outcome.by_depth.items()},
        "single_loop_benchmarks": [result.as_json() for result in outcome.single_loop_benchmarks],
        "readout_losses": outcome.readout_losses,
        "saved": outcome.saved,
        "files": {file.relative_to(output_dir).as_posix(): sha256(file) for file in files},
    }
    if (losses := outcome.single_loop) is not None:
        report["single_loop"] = {**asdict(losses), "reductions_percent": losses.reductions}
    text = json.dumps(_json(report), indent=1, ensure_ascii=False, allow_nan=False)
    with staged_files(output_dir, "The results", "The adapter is safe there; free some space and resume.") as folder:
        (folder / "recipe.yaml").write_text(settings_yaml(settings), encoding="utf-8")
        (folder / RESULTS_FILE).write_text(f"{text}\n", encoding="utf-8")
    return Path(output_dir) / RESULTS_FILE


def read_results(settings: Mapping[str, Any], output_dir: str | Path, run: Mapping[str, Any]) -> RunResult | None:
    """Return what a finished run has written, if it is this run with these benchmarks and nothing is left to do; or None."""
    try:
        report = json.loads((Path(output_dir) / RESULTS_FILE).read_text(encoding="utf-8"))
        before = report["run_info"]["settings"]
        if differences(report["run"], run) or _asked_for(before) != _asked_for(public_settings(settings)):
            return None
        if any(sha256(Path(output_dir, name)) != digest for name, digest in report["files"].items()):
            return None
        if not all(Path(each).exists() for each in report["saved"].values()):
            return None
        first, read = next(iter(report["benchmarks"]), ""), BenchmarkResult.from_json
        single_loop = dict(report.get("single_loop") or {})
        single_loop.pop("reductions_percent", None)
        return RunResult(
            **{name: report["train_info"].get(name) for name in _TRAINING},
            base_benchmarks=[read(*each) for each in report["base_benchmarks"].items()],
            benchmarks=[read(*each) for each in report["benchmarks"].items()],
            single_loop=SingleLoopActivation(**single_loop) if single_loop else None,
            by_depth={int(depth): read(first, each) for depth, each in report["by_depth"].items()},
            readout_losses=report["readout_losses"],
            single_loop_benchmarks=[read(first, each) for each in report["single_loop_benchmarks"]],
            saved=report["saved"],
        )
    except (OSError, ValueError, KeyError, TypeError):  # not there, or of another version
        return None


def _json(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no infinity: null in their place."""
    if isinstance(value, Mapping):
        return {key: _json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _asked_for(settings: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in settings.items() if name in _ASKED_FOR and value is not None}
    return json.loads(json.dumps(given, default=str))
