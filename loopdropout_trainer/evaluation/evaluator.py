"""Generate and score a benchmark's answers, over all processes; a killed evaluation continues where it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.evaluation.benchmarks import Benchmark
from loopdropout_trainer.evaluation.generation import generate_batches
from loopdropout_trainer.evaluation.prediction_log import PredictionLog, SettingsChangedError, settings_of
from loopdropout_trainer.evaluation.results import BenchmarkResult, score_completions
from loopdropout_trainer.looped import find_looped_model


def evaluate_benchmark(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    benchmark: Benchmark,
    batch_size: int = 16,
    log_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
    decoding: str = "eager",
) -> BenchmarkResult:
    """Answer every problem greedily at unit gates and score the answers.

    Call it in all processes: each holds the whole model, takes a share of the problems, and returns the whole result.

    Args:
        model: looped causal language model, with or without an adapter.
        tokenizer: of the model.
        benchmark: problems.
        batch_size: rows that one process generates together; the answers do not depend on it.
        log_dir: folder that keeps each answer as soon as it is there. Answers found in it are not generated again.
        settings: what the answers depend on beside the benchmark and the depth, such as the model's name; compared with
            those of the answers in `log_dir`.
        progress: show a bar in the first process.
        decoding: see `generate_greedy`.

    Raises:
        SettingsChangedError: if `log_dir` holds answers of other settings.
        ValueError: if the model's weights are sharded over processes.
    """
    _check_whole(model)
    state = all_processes()
    answers: dict[int, str] = {}
    log = None
    if log_dir is not None:
        log = PredictionLog(log_dir, state.process_index)
        num_loops = find_looped_model(model).config.num_loops
        answers = _resume(log, {**(settings or {}), "num_loops": num_loops, **settings_of(benchmark)}, state)

    open_problems = [index for index in range(len(benchmark.prompts)) if index not in answers]
    share = open_problems[state.process_index :: state.num_processes]
    new_answers: dict[int, str] = {}
    for batch in generate_batches(
        model,
        tokenizer,
        [benchmark.prompts[index] for index in share],
        benchmark.max_new_tokens,
        batch_size,
        benchmark.stop_strings,
        progress=progress and state.is_main_process and bool(share),
        decoding=decoding,
    ):
        batch = [(share[place], answer) for place, answer in batch]
        if log is not None:
            log.append(batch)
        new_answers.update(batch)
    for part in gather_object([new_answers]):
        answers.update(part)
    return score_completions(benchmark, [answers[index] for index in range(len(benchmark.prompts))])


def _check_whole(model: nn.Module) -> None:
    """Refuse FSDP2's and ZeRO-3's shards: processes that generate texts of different lengths would wait for one another."""
    if any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            "The model's weights are sharded over processes, but each process answers problems of its own: leave "
            "`benchmarks` out of the training, and evaluate the saved adapter with recipes/evaluate.py."
        )


def all_processes(**kwargs: Any) -> PartialState:
    """Return this process's view of all of them, and set up their group if nobody has; kwargs are for that."""
    # Without `cpu`, every process of a group without accelerators takes itself for the only one.
    return PartialState(cpu=not torch.accelerator.is_available(), **kwargs)


def _resume(log: PredictionLog, settings: dict[str, Any], state: PartialState) -> dict[int, str]:
    """Return the answers in the log, the same ones in every process."""
    found: list[Any] = [None]
    if state.is_main_process:
        try:
            found = [log.begin(settings)]
        except SettingsChangedError as error:
            found = [error]
    (found,) = broadcast_object_list(found)
    if isinstance(found, SettingsChangedError):
        raise found
    return found
