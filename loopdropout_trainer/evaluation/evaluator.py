"""Evaluate a model on a benchmark, over all processes; a killed evaluation continues where it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.evaluation.answer_log import AnswerLog
from loopdropout_trainer.evaluation.benchmark import Benchmark
from loopdropout_trainer.evaluation.processes import all_processes, check_unsharded, from_main_process
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
    """Evaluate a model on a benchmark, under the gates that are in force.

    Args:
        model: looped causal language model, with or without an adapter.
        tokenizer: of the model.
        benchmark: problems.
        batch_size: rows that one process computes together; the answers do not depend on it.
        decoding: see `generate_greedy`.
        log_dir, settings, progress: see `evaluate_subject`.

    Raises:
        SettingsChangedError: if `log_dir` holds answers of other settings.
        ValueError: if the model's weights are sharded over processes.
    """
    return evaluate_subject(Subject(model, tokenizer, batch_size, decoding), benchmark, log_dir, settings, progress)


def evaluate_subject(
    subject: Subject,
    benchmark: Benchmark,
    log_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> BenchmarkResult:
    """Evaluate a model with gates, a readout or a chat template of its own on a benchmark.

    Call it in all processes: each holds the complete model, takes a share of the problems, and returns the result of all.

    Args:
        subject: the model, and how it is run.
        benchmark: problems.
        log_dir: folder that keeps each answer as soon as it is there. Answers found in it are not computed again.
        settings: what the answers depend on beside the benchmark and the subject, such as the model's name; compared with
            those of the answers in `log_dir`.
        progress: show a bar in the first process.

    Raises:
        SettingsChangedError: if `log_dir` holds answers of other settings.
        ValueError: if a file in it is damaged, or the model's weights are sharded over processes.
    """
    check_unsharded(subject.model)
    log = AnswerLog(log_dir, all_processes().process_index)
    if log_dir is not None:
        log.found = from_main_process(lambda: log.read({**(settings or {}), **benchmark.settings(subject)}))
    return benchmark.run(subject, log, progress)
