"""One evaluation: a model (base, merged, or with an adapter), some benchmarks, and one file with everything that came out."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from loopdropout_trainer.adapters import add_gates
from loopdropout_trainer.data import load_tokenizer
from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, Benchmark, load_benchmark
from loopdropout_trainer.evaluation.evaluator import all_processes, evaluate_benchmark
from loopdropout_trainer.evaluation.prediction_log import write_atomically
from loopdropout_trainer.evaluation.results import BenchmarkResult
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.adapter_files import ADAPTER_METADATA, load_adapter
from loopdropout_trainer.settings.arguments import BenchmarkArguments, ModelArguments
from loopdropout_trainer.settings.command import user_supplied
from loopdropout_trainer.settings.ranges import check_folder
from loopdropout_trainer.settings.recipe import RecipeError, public_settings
from loopdropout_trainer.settings.versions import library_versions


RESULTS_FILE = "evaluation.json"
ANSWERS_FOLDER = "answers"


@dataclass
class EvaluationArguments(BenchmarkArguments):
    """Which adapter to evaluate, on what, and where the results go."""

    adapter: str | None = field(
        default=None,
        metadata={"help": "Folder or Hub name of an adapter. Default: the model alone (base or merged)."},
    )
    output_dir: str = field(
        default="outputs/evaluation",
        metadata={"help": f"Folder of {RESULTS_FILE}, and of the answers found so far if the run is interrupted."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_folder("output_dir", self.output_dir)
        if not isinstance(self.benchmarks, list) or not self.benchmarks:
            raise ValueError(
                f"`benchmarks` must name one or more of {', '.join(BENCHMARKS)}; got {self.benchmarks!r}."
            )
        self.benchmark_files = self.benchmark_files or {}
        unused = [name for name in self.benchmark_files if name not in BENCHMARKS]
        if unused:
            raise ValueError(f"`benchmark_files` must name files of {', '.join(BENCHMARKS)}; got `{unused[0]}`.")


def run_evaluation(model_arguments: ModelArguments, arguments: EvaluationArguments) -> list[BenchmarkResult]:
    """Evaluate a model on every benchmark, over all processes, and write the results file.

    Raises:
        RecipeError: if model, adapter or a benchmark cannot be loaded.
        SettingsChangedError: if `output_dir` holds answers of another evaluation.
    """
    state = all_processes(timeout=timedelta(days=7))  # the first process may wait long for the last one
    with state.main_process_first():
        benchmarks = load_benchmarks(arguments)
        model, tokenizer = load_model(model_arguments, arguments.adapter)
    model.to(state.device)
    identity = model_identity(model_arguments, model, arguments.adapter) if state.is_main_process else None

    output_dir = Path(arguments.output_dir)
    report = {
        "settings": public_settings({**asdict(model_arguments), **asdict(arguments)}),
        "num_loops": find_looped_model(model).config.num_loops,
        "model": identity,
        "versions": library_versions(),
        "device": torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else str(state.device),
        "num_processes": state.num_processes,
        "benchmarks": {},
    }
    results = []
    for benchmark in benchmarks:
        began = time.perf_counter()
        answers = output_dir / ANSWERS_FOLDER / benchmark.name
        result = evaluate_benchmark(
            model,
            tokenizer,
            benchmark,
            arguments.benchmark_batch_size,
            log_dir=answers,
            settings=identity,
            decoding=arguments.decoding,
        )
        results.append(result)
        if state.is_main_process:
            report["benchmarks"][benchmark.name] = _measured(benchmark, result, time.perf_counter() - began)
            write_atomically(output_dir / RESULTS_FILE, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return results


def _measured(benchmark: Benchmark, result: BenchmarkResult, seconds: float) -> dict[str, Any]:
    counts = {
        name: getattr(result, name) for name in ("score", "correct", "total", "missing", "missing_rate", "errors")
    }
    return {
        **counts,
        "metric": benchmark.metric,
        "max_new_tokens": benchmark.max_new_tokens,
        "stop_strings": list(benchmark.stop_strings),
        "seconds": round(seconds, 1),
        "predictions": [asdict(prediction) for prediction in result.predictions],
    }


def load_benchmarks(arguments: EvaluationArguments) -> list[Benchmark]:
    """Load the benchmarks, from the Hub or the named files.

    Raises:
        RecipeError: for an unknown name, a file that cannot be read, or a bad row.
    """
    try:
        return [
            load_benchmark(name, arguments.benchmark_files.get(name), arguments.benchmark_limit)
            for name in arguments.benchmarks
        ]
    except (OSError, ValueError) as error:
        raise RecipeError(_one_line(error)) from error


def load_model(model: ModelArguments, adapter: str | None = None) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a looped model at its evaluation depth, with an adapter on it if there is one, and its tokenizer.

    Raises:
        ValueError: if there is no such model or adapter, or the adapter is of another kind of model or method.
    """
    tokenizer = load_tokenizer(model)
    with user_supplied(f"The model {model.model_name_or_path} cannot be loaded"):
        base = AutoModelForCausalLM.from_pretrained(
            model.model_name_or_path, trust_remote_code=False, **model.init_kwargs
        )
    find_looped_model(base)
    if adapter is None:
        return base.eval(), tokenizer
    with user_supplied(f"The adapter {adapter} cannot be loaded"):
        adapted = load_adapter(base, _local_folder(adapter))
    add_gates(adapted, in_activation_dtype=True)  # as in training: the same answers as those that sft.py reports
    return adapted.eval(), tokenizer


def model_identity(arguments: ModelArguments, model: nn.Module, adapter: str | None = None) -> dict[str, Any]:
    """Return what tells one model from another: names, dtype, and the hash of local weights or the Hub's commit."""
    folder = Path(arguments.model_name_or_path)
    commit = None if folder.is_dir() else getattr(find_looped_model(model).config, "_commit_hash", None)
    return {
        "model": arguments.base_name,
        "weights": _sha256(folder.glob("*.safetensors")) if folder.is_dir() else commit,
        "adapter": None if adapter is None else _sha256(_local_folder(adapter).glob("adapter_*")),
        "dtype": arguments.dtype,
        "attn_implementation": arguments.attn_implementation,
    }


def _local_folder(adapter: str) -> Path:
    if Path(adapter).is_dir():
        return Path(adapter)
    return Path(snapshot_download(adapter, allow_patterns=["adapter_*", ADAPTER_METADATA]))


def _sha256(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
