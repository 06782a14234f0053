"""Measure the effect of adapters loop by loop, by readouts and at other depths.

    loopdropout diagnose outputs/quickstart outputs/quickstart/lora
    loopdropout diagnose gsm8k.yaml outputs/gsm8k --task gsm8k \\
        --diagnostics single_loop

The recipe is the recipe of the training, by default of the first adapter's
training. Its other fields are ignored. Losses are measured on its held-out
examples, or on the reference solutions of a task. The results are added to
`results.jsonl` in `output_dir`. The loss reductions with the adapter in one loop
only are printed, with advice for a LoRA adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import pandas as pd
import torch
from accelerate import PartialState

from loopdropout_trainer.arguments import (
    AdapterArguments,
    DepthArguments,
    ModelArguments,
    SFTArguments,
    TaskArguments,
    option,
)
from loopdropout_trainer.data import DataArguments, load_datasets
from loopdropout_trainer.diagnostics import (
    curvature,
    depth_matrix,
    describe_profile,
    label_batches,
    readouts,
    reference_examples,
    single_loop,
)
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.evaluation import load_benchmarks
from loopdropout_trainer.recipe import TRAINING_HELP, name_folders, parse, recipe_dict
from loopdropout_trainer.results import DEVELOPMENT, find_difference, write_results
from loopdropout_trainer.saving.cards import find_adapter
from loopdropout_trainer.saving.loading import adapter_folder, load_model
from loopdropout_trainer.tokenizers import load_tokenizer
from loopdropout_trainer.training.config import LoopDropoutConfig


DIAGNOSTICS = ("single_loop", "readouts", "depth_matrix", "curvature")


@dataclass
class DiagnoseArguments(TaskArguments, DepthArguments):
    """The adapters, the diagnostics and the examples."""

    first_words = "[RECIPE.yaml] [ADAPTER ...]"

    adapters: list[str] = option([], "Folders or Hub names of adapters.")
    diagnostics: list[str] = option([*DIAGNOSTICS[:3]], "Diagnostics to run.", choices=DIAGNOSTICS)
    task: str = option(
        DEVELOPMENT, "Task whose reference solutions are scored, or `development` for held-out examples."
    )
    num_examples: int = option(500, "Maximum number of examples.")
    eval_num_loops: list[int] | None = option(
        None, "Recurrence depths of depth_matrix. Default: 1 to twice the model's own depth."
    )
    max_length: int | None = option(LoopDropoutConfig.max_length, TRAINING_HELP["max_length"])
    completion_only_loss: bool | None = option(None, "Whether only completions are scored. Default: as in TRL.")
    assistant_only_loss: bool = option(False, "Whether only turns of the assistant are scored.")
    per_device_eval_batch_size: int = option(8, "Number of examples that a process scores at a time.")
    output_dir: str = option("outputs/diagnostics", "Folder of the results.")
    use_cpu: bool = option(False, "Whether to run on the CPU only.")


def main(argv: list[str] | None = None) -> None:
    argv = name_folders(argv, "adapters")
    if argv[:1] == ["--adapters"]:
        adapter_folder(argv[1])  # a misspelled folder is not a missing `--model_name_or_path`
    types, unread = (DiagnoseArguments, ModelArguments), (SFTArguments, AdapterArguments, LoopDropoutConfig)
    args, model_args, data_args = parse((*types, DataArguments), argv, __doc__, unread)
    if args.task != DEVELOPMENT:
        parse(types, argv, __doc__, (*unread, DataArguments))  # a task has its own data
    if "curvature" in args.diagnostics and model_args.dtype != "float32":
        raise UserError(
            f"`dtype` must be float32 for `curvature`, got {model_args.dtype}, which rounds the differences of logits away. "
            "Add `--dtype float32`."
        )
    state = PartialState(cpu=args.use_cpu or not torch.accelerator.is_available())

    # Tokenizer and data
    tokenizer = load_tokenizer(model_args.model_name_or_path, model_args.model_revision, model_args.chat_template)
    with state.main_process_first():
        adapters = [find_adapter(name, name) for name in args.adapters]
        if args.task == DEVELOPMENT:
            examples = load_datasets(data_args, tokenizer, args.max_length).get("eval")
        else:
            (task,) = load_benchmarks([args.task], args.own_benchmarks, args.benchmark_revisions)
            examples = reference_examples(task, args.num_examples)
    if examples is None:
        raise UserError("`num_eval_examples`, `eval_files` or `task` must be set, because no example is held out.")
    for folder, _ in adapters if args.task == DEVELOPMENT else ():
        if difference := find_difference(folder, recipe_dict(data_args), fields=DataArguments.__dataclass_fields__):
            raise UserError(f"The recipe must have the data of the adapter in {folder}, but {difference}.")
    batches = label_batches(
        islice(examples, args.num_examples),
        tokenizer,
        args.per_device_eval_batch_size,
        args.completion_only_loss,
        args.assistant_only_loss,
    )

    # Measurement
    rows = []
    for folder, facts in [(None, {"method": "base model"}), *adapters]:
        model = load_model(
            model_args.model_name_or_path, adapter=folder, device=state.device, **model_args.load_kwargs
        )
        measured = []
        if folder and "single_loop" in args.diagnostics:
            measured += single_loop(model, batches)
        if "readouts" in args.diagnostics:
            measured += readouts(model, batches)
        if "depth_matrix" in args.diagnostics:
            measured += depth_matrix(model, batches, args.eval_num_loops)
        if folder and "curvature" in args.diagnostics:
            measured += curvature(model, batches)
        measured = [{**facts, "task": args.task, **row} for row in measured]
        if state.is_main_process:
            write_results(args.output_dir, measured)
        rows += measured
        del model

    # Tables
    if state.is_main_process:
        print_results(rows)
        print(f"The results are in {args.output_dir}")


def print_results(rows: list[dict]) -> None:
    """Print the curvature, and the loss reductions with the profile of LoRA, or the other losses instead of them."""
    from _tables import print_by_method

    results = pd.DataFrame(rows)
    if "adapter" in results:
        is_shared = results.groupby("method")["adapter"].transform("nunique") > 1
        results.loc[is_shared, "method"] += ", " + results["adapter"]
    curvatures = results.query("metric == 'curvature'")
    print_by_method("curvature (nats per token) by loop", curvatures, "loop", "{:.4g}")
    reductions = results.query("metric == 'loss_reduction'").replace({"gates": {"unit": "all loops"}})
    if reductions.empty:
        for metric, column in {"readout_loss": "loop", "depth_loss": "num_loops"}.items():
            if len(losses := results.query("metric == @metric")):
                print_by_method(f"{metric} (nats) by {column}", losses, losses[column].astype(int), "{:.4g}")
    print_by_method("rho_t, loss reduction with the adapter in one loop only, in %", reductions, "gates")
    for method, own in reductions.query("gates != 'all loops'").groupby("method", sort=False):
        if "LoRA" in method.split(", ") or own["seed"].isna().any():  # LoRA, or an adapter without a recipe
            print(f"\n{method}: {describe_profile(own.groupby('loop')['value'].mean())}")


if __name__ == "__main__":
    run_script(main)
