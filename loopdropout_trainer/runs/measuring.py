"""Everything that a study measures of one trained adapter, in one process and one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.adapters import use_gates
from loopdropout_trainer.diagnostics import readout_losses, single_loop_activation
from loopdropout_trainer.evaluation import Benchmark, BenchmarkResult, evaluate_benchmark, load_benchmark
from loopdropout_trainer.evaluation.run import load_model
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.runs.study import MEASURED, MeasureArguments
from loopdropout_trainer.saving.adapter_files import adapter_metadata
from loopdropout_trainer.saving.files import write_atomically
from loopdropout_trainer.settings.arguments import ModelArguments


def measure_adapter(model_arguments: ModelArguments, adapter: Path, wanted: MeasureArguments) -> dict[str, Any]:
    """Measure an adapter and write `measured.json` beside it.

    Args:
        model_arguments: of the base model, at the depth that the adapter was trained at.
        adapter: folder of the adapter.
        wanted: what to measure.

    Returns:
        `benchmarks`: counts by name, and which problems were right, in order, as hexadecimal digits; `by_depth`: the same
        for the first benchmark, by recurrence depth; `single_loop_answers`: the same with the adapter in one loop only, by
        loop; `by_dose`: the same by the gate of all loops; `single_loop` and `readouts`: losses in nats per token.
    """
    model, tokenizer = load_model(model_arguments, str(adapter))
    config = find_looped_model(model).config
    own = config.num_loops
    measured: dict[str, Any] = {"num_loops": own, "benchmarks": {}, "by_depth": {}}
    for name in wanted.benchmarks:
        benchmark = load_benchmark(name, limit=wanted.limit)
        measured["benchmarks"][name] = verdicts(_answer(model, tokenizer, benchmark, wanted))
    first = load_benchmark(wanted.benchmarks[0], limit=wanted.depth_limit)
    if is_shared(adapter):
        for config.num_loops in wanted.depths:
            measured["by_depth"][str(config.num_loops)] = verdicts(_answer(model, tokenizer, first, wanted))
        config.num_loops = own
    if wanted.single_loop_answers:
        measured["single_loop_answers"] = []
        for gates in torch.eye(own):
            with use_gates(model, gates):
                measured["single_loop_answers"].append(verdicts(_answer(model, tokenizer, first, wanted)))
    if wanted.doses:
        measured["by_dose"] = {}
        for dose in wanted.doses:
            with use_gates(model, torch.full((own,), float(dose))):
                measured["by_dose"][f"{dose:g}"] = verdicts(_answer(model, tokenizer, first, wanted))
    if wanted.diagnostic_problems:
        batches = answer_batches(tokenizer, load_benchmark(first.name, limit=wanted.diagnostic_problems))
        single = single_loop_activation(model, batches)
        measured["single_loop"] = {"frozen": single.frozen, "only": single.only, "all_on": single.all_on}
        measured["readouts"] = readout_losses(model, batches)
    write_atomically(adapter / MEASURED, json.dumps(measured) + "\n")
    return measured


def is_shared(adapter: Path) -> bool:
    """Say whether the adapter is one update for all loops, which runs at any depth."""
    rule = adapter_metadata(adapter).get("rule")
    return rule not in RULES or RULES[rule].mergeable


def _answer(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, benchmark: Benchmark, wanted: MeasureArguments
) -> BenchmarkResult:
    return evaluate_benchmark(model, tokenizer, benchmark, wanted.batch_size, progress=False)


def verdicts(result: BenchmarkResult) -> dict[str, Any]:
    """Return counts, and one bit for each problem, the first problem in the highest bit of the first digit."""
    bits = "".join("1" if prediction.correct else "0" for prediction in result.predictions)
    padded = bits + "0" * (-len(bits) % 4)
    digits = "".join(f"{int(padded[place : place + 4], 2):x}" for place in range(0, len(padded), 4))
    counts = {"score": result.score, "correct": result.correct, "total": result.total, "missing": result.missing}
    return {**counts, "right": digits}


def answer_batches(
    tokenizer: PreTrainedTokenizerBase, benchmark: Benchmark, batch_size: int = 50
) -> list[dict[str, torch.Tensor]]:
    """Return prompts with reference answers as padded batches, with labels on the answers and the end token."""
    rows = []
    for prompt, answer in zip(benchmark.prompts, benchmark.references, strict=True):
        start = tokenizer(prompt)["input_ids"]
        whole = [*tokenizer(f"{prompt} {answer}")["input_ids"], tokenizer.eos_token_id]
        rows.append((whole, [-100] * len(start) + whole[len(start) :]))
    batches = []
    for begin in range(0, len(rows), batch_size):
        batch = rows[begin : begin + batch_size]
        width = max(len(ids) for ids, _ in batch)
        gaps = [width - len(ids) for ids, _ in batch]
        ids = [ids + [tokenizer.pad_token_id] * gap for (ids, _), gap in zip(batch, gaps, strict=True)]
        labels = [labels + [-100] * gap for (_, labels), gap in zip(batch, gaps, strict=True)]
        mask = [[1] * (width - gap) + [0] * gap for gap in gaps]
        names = ("input_ids", "attention_mask", "labels")
        batches.append({name: torch.tensor(values) for name, values in zip(names, (ids, mask, labels), strict=True)})
    return batches
