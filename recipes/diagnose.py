"""Measure the effect of adapters loop by loop, at other depths and by readouts.

    loopdropout diagnose outputs/quickstart outputs/quickstart/lora
    loopdropout diagnose gsm8k.yaml outputs/gsm8k --task gsm8k \\
        --diagnostics single_loop

The recipe is the recipe of the training, by default of the first adapter's
training. Losses are measured on its held-out examples, or on the reference
solutions of a task. The results are added to `results.jsonl` in `output_dir`.
The loss reductions with the adapter in one loop only are printed, with advice
for a LoRA adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
from sft import AdapterArguments, ScriptArguments, print_table, saved_recipe
from torch import nn
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.config import LoopDropoutConfig
from loopdropout_trainer.data import DataArguments, load_datasets
from loopdropout_trainer.diagnostics import (
    Batch,
    depth_matrix,
    label_batches,
    readouts,
    recommend_method,
    reference_examples,
    single_loop,
)
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.evaluation import DEVELOPMENT, load_benchmarks
from loopdropout_trainer.hub import adapter_folder, load_model, read_card_fields
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.recipe import ModelArguments, name_folders, parse, recipe_dict
from loopdropout_trainer.results import compare_recipes, write_results
from loopdropout_trainer.tokenizers import load_tokenizer


DIAGNOSTICS = ("single_loop", "readouts", "depth_matrix")


@dataclass
class DiagnoseArguments:
    """The adapters, the diagnostics and the examples."""

    first_words = "[RECIPE.yaml] [ADAPTER ...]"

    adapters: list[str] = field(default_factory=list, metadata={"help": "Folders or Hub names of adapters."})
    diagnostics: list[str] = field(
        default_factory=lambda: [*DIAGNOSTICS], metadata={"help": "Diagnostics to run.", "choices": DIAGNOSTICS}
    )
    task: str = field(
        default=DEVELOPMENT,
        metadata={"help": "Task whose reference solutions are scored, or `development` for held-out examples."},
    )
    num_examples: int = field(default=500, metadata={"help": "Maximum number of examples."})
    depths: list[int] | None = field(
        default=None,
        metadata={"help": "Recurrence depths of depth_matrix. Default: 1 to twice the model's own depth."},
    )
    own_benchmarks: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Own benchmarks by name, as mappings with files, prompt, target and scorer (JSON)."},
    )
    benchmark_revisions: dict[str, str] | None = field(
        default=None, metadata={"help": "Revisions of the tasks' datasets on the Hub, as a mapping (JSON)."}
    )


def main(argv: list[str] | None = None) -> None:
    types = (DiagnoseArguments, ModelArguments, DataArguments, LoopDropoutConfig)
    args, model_args, data_args, training_args = parse(
        types, name_folders(argv, "adapters"), __doc__, (ScriptArguments, AdapterArguments)
    )

    # Tokenizer and data
    tokenizer = load_tokenizer(
        model_args.model_name_or_path, model_args.model_revision, chat_template=model_args.chat_template
    )
    with training_args.main_process_first():
        adapters = [find_adapter(name) for name in args.adapters]
        examples = load_examples(args, data_args, tokenizer, training_args.max_length)
    batches = label_batches(
        examples,
        tokenizer,
        training_args.per_device_eval_batch_size,
        training_args.completion_only_loss,
        training_args.assistant_only_loss,
    )
    for folder, _ in adapters if args.task == DEVELOPMENT else ():
        check_data(folder, recipe_dict(data_args))

    # Measurement
    rows = []
    for folder, facts in [(None, {"method": "base model"}), *adapters]:
        model = load_model(
            model_args.model_name_or_path, adapter=folder, device=training_args.device, **model_args.load_kwargs
        )
        measured = [{**facts, "task": args.task, **row} for row in measure(model, batches, args)]
        if training_args.process_index == 0:
            write_results(training_args.output_dir, measured)
        rows += measured
        del model

    # Tables
    if training_args.process_index == 0:
        print_results(rows)
        print(f"The results are in {training_args.output_dir}")


def find_adapter(name: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder of an adapter, and the columns of its results."""
    folder = adapter_folder(name)
    facts = {"method": name, "adapter": name}
    for row in read_card_fields(folder)["results"]:
        if row["task"] == "training":
            facts |= {column: row[column] for column in ("method", "seed", "step")}
    return folder, facts


def load_examples(
    args: DiagnoseArguments, data_args: DataArguments, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> list[dict[str, Any]]:
    """Return the held-out examples of the training, or the prompts of a task with their reference solutions."""
    if args.task != DEVELOPMENT:
        (task,) = load_benchmarks([args.task], args.own_benchmarks, args.benchmark_revisions)
        return reference_examples(task, args.num_examples)
    datasets = load_datasets(data_args, tokenizer, max_length)
    if "eval" not in datasets:
        raise UserError("`num_eval_examples`, `eval_files` or `task` must be set, because no example is held out.")
    return list(islice(datasets["eval"], args.num_examples))


def check_data(folder: Path, data: Mapping[str, Any]) -> None:
    """Raise `UserError` if the held-out examples may have been part of an adapter's training."""
    saved = saved_recipe(folder)
    others = {*saved} - DataArguments.__dataclass_fields__.keys()
    if saved and (difference := compare_recipes(saved, data, others)):
        raise UserError(f"The recipe must have the data of the adapter in {folder}, but {difference}.")


def measure(model: nn.Module, batches: list[Batch], args: DiagnoseArguments) -> Iterator[dict[str, Any]]:
    """Yield the results of the diagnostics that apply to a model."""
    if "single_loop" in args.diagnostics and hasattr(model, "peft_config"):
        yield from single_loop(model, batches)
    if "readouts" in args.diagnostics:
        yield from readouts(model, batches)
    if "depth_matrix" in args.diagnostics:
        yield from depth_matrix(model, batches, args.depths or range(1, 2 * find_looped_model(model).num_loops + 1))


def print_results(rows: list[dict[str, Any]]) -> None:
    """Print the loss reductions with advice for LoRA, or the first metric if they were not measured."""
    results = pd.DataFrame(rows)
    reductions = results[results["metric"] == "loss_reduction"]
    if reductions.empty:
        metric, unit = results[["metric", "unit"]].iloc[0]
        column = "num_loops" if metric == "depth_loss" else "loop"
        numbers = results[results["metric"] == metric]
        print_table(f"{metric} ({unit}) by {column}", numbers, numbers[column].convert_dtypes(), "{:.4g}")
        return
    columns = reductions["gates"].replace("unit", "all loops")
    print_table("rho_t, loss reduction with the adapter in one loop only, in %", reductions, columns)
    for method, own in reductions.dropna(subset="loop").groupby("method", sort=False):
        if method == "LoRA" or own["seed"].isna().any():  # LoRA, or an adapter without a recipe
            print(f"\n{method}: {recommend_method(own.groupby('loop')['value'].mean())}")


if __name__ == "__main__":
    run_script(main)
