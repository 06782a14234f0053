"""Measure the effect of adapters loop by loop, by readouts and at other depths.

    loopdropout diagnose outputs/quickstart outputs/quickstart/lora
    loopdropout diagnose gsm8k.yaml outputs/gsm8k --task gsm8k \\
        --diagnostics single_loop

The recipe is the recipe of the training, by default of the first adapter's
training. Its other fields are ignored. Losses are measured on its held-out
examples, or on the reference solutions of a task. The results are added to
`results.jsonl` in `output_dir`, or in its subfolder `diagnostics` if it is the
folder of a training. A table of each diagnostic is printed, and for LoRA a
sentence on its loss reductions with the adapter in one loop only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import pandas as pd
import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from loopdropout_trainer.arguments import (
    DEPTH_BOUNDS,
    DepthArguments,
    SourceArguments,
    TaskArguments,
    option,
)
from loopdropout_trainer.data import SFTDataArguments, load_datasets
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
from loopdropout_trainer.library_fields import LIBRARY_FIELDS
from loopdropout_trainer.recipe import build, read_settings
from loopdropout_trainer.results import DEVELOPMENT, compare_recipes, measurement_folder, write_results
from loopdropout_trainer.runs import TRAINING_TYPES
from loopdropout_trainer.saving.command_line import name_sources
from loopdropout_trainer.saving.facts import MODELS, Source
from loopdropout_trainer.saving.loading import ModelLoader
from loopdropout_trainer.saving.source import find_base, find_source
from loopdropout_trainer.training.config import LoopDropoutConfig


DIAGNOSTICS = ("single_loop", "readouts", "depth_matrix", "curvature")


@dataclass
class DiagnoseArguments(TaskArguments, DepthArguments):
    """The adapters, the diagnostics and the examples."""

    first_words = "[RECIPE.yaml] [ADAPTER ...]"

    adapters: list[str] = option([], "Folders or Hub names (`user/name@branch`) of adapters and models.")
    diagnostics: list[str] = option([*DIAGNOSTICS[:3]], "Diagnostics to run.", choices=DIAGNOSTICS)
    task: str = option(
        DEVELOPMENT, "Task whose reference solutions are scored, or `development` for held-out examples."
    )
    num_examples: int = option(500, "Maximum number of examples.", at_least=1)
    eval_num_loops: list[int] | None = option(
        None, "Recurrence depths of depth_matrix. Default: 1 to twice the model's own depth.", **DEPTH_BOUNDS
    )
    max_length: int | None = option(LoopDropoutConfig.max_length, LIBRARY_FIELDS["max_length"]["help"], at_least=1)
    completion_only_loss: bool | None = option(None, "Whether only completions are scored. Default: as in TRL.")
    assistant_only_loss: bool = option(False, "Whether only turns of the assistant are scored.")
    per_device_eval_batch_size: int = option(8, "Number of examples that a process scores at a time.", at_least=1)
    output_dir: str = option("outputs/diagnostics", "Folder of the results.")
    use_cpu: bool = option(False, "Whether to run on the CPU only.")


ARGUMENTS = (DiagnoseArguments, SourceArguments, SFTDataArguments)


def main(argv: list[str] | None = None) -> None:
    # Settings
    argv = name_sources(argv, "adapters")
    settings = read_settings(ARGUMENTS, argv, __doc__, TRAINING_TYPES)
    args, model_args, data_args = build(ARGUMENTS, settings)
    if args.task != DEVELOPMENT:  # it has its own data, so that options of other data are a mistake
        read_settings((DiagnoseArguments, SourceArguments), argv, __doc__, (*TRAINING_TYPES, SFTDataArguments))
    args.output_dir = measurement_folder(args.output_dir, "diagnostics")
    state = PartialState(cpu=args.use_cpu or not torch.accelerator.is_available())

    # Models and data
    with state.main_process_first():
        sources = find_sources(args.adapters, model_args)
        dtypes = {source.name: model_args.dtype or source.dtype or "bfloat16" for source in sources}
        check_curvature(args.diagnostics, dtypes)
        check_depths(args, sources)
        check_data(args, sources, settings)
        data = DiagnosedData(args, data_args, model_args.chat_template)

    # Measurement
    loader = ModelLoader(state.device, model_args.attn_implementation)
    rows = []
    for source in sources:
        if state.is_main_process:
            print(source.describe())
        model = loader.load(source, dtypes[source.name], model_args.num_loops)
        measured = measure(args, source, model, data.batches(source))
        if state.is_main_process:
            write_results(args.output_dir, measured)
        rows += measured

    # Tables
    if state.is_main_process:
        print_results(rows)
        print(f"All results, also those without a table here, are in {args.output_dir}/results.jsonl")


def measure(
    args: DiagnoseArguments, source: Source, model: PreTrainedModel | PeftModel, batches: list
) -> list[dict[str, Any]]:
    """Return the results of a model. Only adapters can be active in one loop alone."""
    rows = []
    if source.is_adapter and "single_loop" in args.diagnostics:
        rows += single_loop(model, batches)
    if "readouts" in args.diagnostics:
        rows += readouts(model, batches)
    if "depth_matrix" in args.diagnostics:
        rows += depth_matrix(model, batches, args.eval_num_loops)
    if source.is_adapter and "curvature" in args.diagnostics:
        rows += curvature(model, batches)
    columns = {"method": "base model"} if source.kind == "base model" else source.columns
    return [{**columns, "task": args.task, **row} for row in rows]


def find_sources(names: list[str], model_args: SourceArguments) -> list[Source]:
    """Return the base model of the first adapter, and the named adapters and models."""
    base, revision = model_args.model_name_or_path, model_args.model_revision
    named = [find_source(name) for name in names]
    named = [source.with_base(base, revision) if source.is_adapter else source for source in named]
    adapters = [source for source in named if source.is_adapter]
    if adapters:
        return [find_base(adapters[0]), *named]
    if base is not None:
        return [find_source(base, revision=revision, accept=MODELS), *named]
    if named:
        return named
    raise UserError("`adapters` must name an adapter or a model, or `model_name_or_path` the base model.")


def check_depths(args: DiagnoseArguments, sources: list[Source]) -> None:
    """Raise UserError if a model does not run at a depth that was asked for."""
    if "depth_matrix" not in args.diagnostics:
        return
    for source in sources:
        for num_loops in args.eval_num_loops or ():
            source.check_run(num_loops)


def check_curvature(diagnostics: list[str], dtypes: dict[str, str]) -> None:
    """Raise UserError if curvature would be measured with weights that round the differences of logits away."""
    for dtype in dtypes.values():
        if "curvature" in diagnostics and dtype != "float32":
            raise UserError(
                f"`dtype` must be float32 for `curvature`, got {dtype}, which rounds the differences of logits away. "
                "Add `--dtype float32`."
            )


def check_data(args: DiagnoseArguments, sources: list[Source], settings: dict[str, Any]) -> None:
    """Raise UserError if a model was trained on other data, whose held-out examples are others."""
    if args.task != DEVELOPMENT:
        return
    for source in sources:
        if not source.recipe:
            continue
        difference = compare_recipes(source.recipe, settings, fields=SFTDataArguments.__dataclass_fields__)
        if difference:
            raise UserError(f"The recipe must have the data of the adapter in {source.name}, but {difference}.")


class DiagnosedData:
    """The examples of all models, as each model's own tokenizer reads them.

    Args:
        args: Task and number of examples.
        data_args: Data of the training.
        chat_template: Chat template instead of the trainings'.
    """

    def __init__(self, args: DiagnoseArguments, data_args: SFTDataArguments, chat_template: str | None) -> None:
        self.args, self.data_args, self.chat_template = args, data_args, chat_template
        self._batches: dict[tuple, list] = {}

    def batches(self, source: Source) -> list:
        """Return the batches of a model."""
        key = (source.tokenizer, source.chat_template)
        if key not in self._batches:
            tokenizer = source.load_tokenizer(self.chat_template)
            self._batches[key] = label_batches(
                islice(self._examples(tokenizer), self.args.num_examples),
                tokenizer,
                self.args.per_device_eval_batch_size,
                self.args.completion_only_loss,
                self.args.assistant_only_loss,
            )
        return self._batches[key]

    def _examples(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        args = self.args
        if args.task != DEVELOPMENT:
            (task,) = load_benchmarks([args.task], args.own_benchmarks, args.benchmark_revisions)
            return reference_examples(task, args.num_examples)
        with PartialState().main_process_first():
            examples = load_datasets(self.data_args, tokenizer, args.max_length).get("eval")
        if examples is None:
            raise UserError("`num_eval_examples`, `eval_files` or `task` must be set, because no example is held out.")
        return examples


def print_results(rows: list[dict]) -> None:
    """Print a table of each diagnostic, and the profile of LoRA."""
    from loopdropout_trainer.printing import print_by_method, print_loss_reductions, print_losses

    results = pd.DataFrame(rows)
    if "adapter" in results:
        is_shared = results.groupby("method")["adapter"].transform("nunique") > 1
        is_of_adapter = results["adapter"].notna()  # the base model has results of its own
        results.loc[is_shared & is_of_adapter, "method"] += ", " + results["adapter"]
    curvatures = results.query("metric == 'curvature'")
    print_by_method("curvature (nats per token) by loop", curvatures, "loop", "{:.4g}")
    print_losses(results)
    print_loss_reductions(results)
    reductions = results.query("metric == 'loss_reduction'")
    for method, own in reductions.query("gates != 'unit'").groupby("method", sort=False):
        is_lora = "LoRA" in method.split(", ")
        has_recipe = own["seed"].notna().all()
        if is_lora or not has_recipe:
            print(f"\n{method}: {describe_profile(own.groupby('loop')['value'].mean(), own['n'].iloc[0])}")


if __name__ == "__main__":
    run_script(main)
