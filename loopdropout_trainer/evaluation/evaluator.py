"""Put a benchmark to a model, over all processes; a killed evaluation continues where it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.evaluation.answer_log import AnswerLog, Answers, SettingsChangedError
from loopdropout_trainer.evaluation.benchmark import Benchmark
from loopdropout_trainer.evaluation.processes import all_processes, check_whole
from loopdropout_trainer.evaluation.results import BenchmarkResult
from loopdropout_trainer.evaluation.subject import Subject


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
    """Answer every problem, and score the answers.

    Call it in all processes: each holds the whole model, takes a share of the problems, and returns the whole result.

    Args:
        model: looped causal language model, with or without an adapter; gates that are in force apply.
        tokenizer: of the model.
        benchmark: problems.
        batch_size: rows that one process computes together; the answers do not depend on it.
        log_dir: folder that keeps each answer as soon as it is there. Answers found in it are not asked for again.
        settings: what the answers depend on beside the benchmark and the depth, such as the model's name; compared with
            those of the answers in `log_dir`.
        progress: show a bar in the first process.
        decoding: see `generate_greedy`.

    Raises:
        SettingsChangedError: if `log_dir` holds answers of other settings.
        ValueError: if the model's weights are sharded over processes.
    """
    return put_to(Subject(model, tokenizer, batch_size, decoding), benchmark, log_dir, settings, progress)


def put_to(
    subject: Subject,
    benchmark: Benchmark,
    log_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> BenchmarkResult:
    """Do the same as `evaluate_benchmark` for a model with gates, a readout or turns of its own."""
    check_whole(subject.model)
    if log_dir is None:
        return benchmark.run(subject, Answers(), progress)
    state = all_processes()
    log = AnswerLog(log_dir, state.process_index)
    found: list[Any] = [None]
    if state.is_main_process:
        try:
            found = [log.begin({**(settings or {}), **benchmark.settings(subject)})]
        except SettingsChangedError as error:
            found = [error]
    (found,) = broadcast_object_list(found)
    if isinstance(found, SettingsChangedError):
        raise found
    return benchmark.run(subject, Answers(found, log), progress)
