"""results.json: what a finished training has measured, and of what (docs/runs.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from loopdropout_trainer.record.identity import WHOLE_RUN, Identity, differences
from loopdropout_trainer.record.measurement import Measurement
from loopdropout_trainer.saving.files import sha256, staged_files
from loopdropout_trainer.settings.arguments import RunArguments
from loopdropout_trainer.settings.recipe import public_settings, settings_yaml
from loopdropout_trainer.training.checkpoints.sealing import fault_of


WRITER = "training"
"""Of the measurements of a training."""

_COSTS = {
    "trainable_parameters": "",
    "examples": "",
    "num_tokens": "tokens",
    "train_loss": "nats",
    "train_seconds": "s",
    "step_seconds": "s",
    "tokens_per_second": "tokens/s",
    "peak_memory_gb": "GB",
}
"""What a training took, by unit."""

RESULTS_FILE, DIVERGED_FILE = "results.json", "diverged.json"
_ASKED_FOR = {f.name for f in fields(RunArguments)} - {"compare_with", "benchmark_batch_size", "dry_run"}
"""The settings that say what is to be measured and made of a trained adapter."""


def rows_of_training(
    train_info: Mapping[str, Any], log_history: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]
) -> list[Measurement]:
    """Return a row for each number that a training took, and for each number of its log; `facts`: fields that they share."""
    rows = [
        Measurement(**facts, family="cost", metric=name, value=train_info[name], unit=unit)
        for name, unit in _COSTS.items()
        if _is_finite(train_info.get(name))
    ]
    for log in log_history:
        for name, value in log.items():
            if _is_finite(value) and name not in ("step", "epoch", "total_flos") and not name.startswith("train_"):
                family = name.split("/")[0] if "/" in name else "curve"
                rows.append(Measurement(**facts, family=family, metric=name, value=value, step=log["step"]))
    return rows


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def write_results(results: Mapping[str, Any], output_dir: str | Path) -> dict[str, Any]:
    """Write `results.json`, and the `recipe.yaml` that repeats the run; return what `read_results` will.

    Raises:
        WriteError: if the disk refuses; what was there before is untouched.
    """
    kept = {"adapter": "*.safetensors", "merged model": "*"}  # the adapter's other files are in its manifest
    folders = {name: Path(folder) for name, folder in results["saved"].items() if name in kept}
    found = [file for name, folder in folders.items() for file in folder.glob(kept[name])]
    hashes = {file.relative_to(output_dir).as_posix(): sha256(file) for file in found if file.suffix != ".md"}
    # JSON has no NaN and no infinity: null in their place.
    written = json.loads(json.dumps({**results, "files": hashes}), parse_constant=lambda _: None)
    with staged_files(output_dir, "The results", "The adapter is safe there; free some space and resume.") as folder:
        (folder / "recipe.yaml").write_text(settings_yaml(written["run_info"]["settings"]), encoding="utf-8")
        text = json.dumps(written, indent=1, ensure_ascii=False) + "\n"
        (folder / RESULTS_FILE).write_text(text, encoding="utf-8")
    return written


def read_results(settings: Mapping[str, Any], output_dir: str | Path, run: Identity) -> dict[str, Any] | None:
    """Return what a finished run has written, if it is this run with these benchmarks and nothing is left to do; or None."""
    try:
        results = json.loads((Path(output_dir) / RESULTS_FILE).read_text(encoding="utf-8"))
        asked = _asked_for(results["run_info"]["settings"]) == _asked_for(public_settings(settings))
        if differences(results["run"], run, WHOLE_RUN) or not asked:
            return None  # before gigabytes of weights are hashed
        same = (sha256(Path(output_dir, name)) == digest for name, digest in results["files"].items())
        there = (Path(each).exists() for each in results["saved"].values())
        return results if fault_of(output_dir) is None and all(same) and all(there) else None
    except (OSError, ValueError, KeyError, TypeError):  # not there, or of another version
        return None


def _asked_for(settings: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in settings.items() if name in _ASKED_FOR and value is not None}
    return json.loads(json.dumps(given, default=str))
