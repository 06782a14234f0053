"""Measure the effect of adapters loop by loop, by readouts and at other depths.

    loopdropout diagnose outputs/quickstart outputs/quickstart/lora
    loopdropout diagnose gsm8k.yaml outputs/gsm8k --task gsm8k \\
        --diagnostics single_loop
    loopdropout diagnose outputs/sweep --dry_run true
    loopdropout diagnose outputs/sweep

The recipe is the recipe of the training, by default of the first adapter's
training. Its other fields are ignored. Losses are measured on its held-out
examples, or on the reference solutions of a task. The results are added to
`results.jsonl` in `output_dir`, or in its subfolder `diagnostics` if it is the
folder of a training. A table of each diagnostic is printed, and for LoRA a
sentence on its loss reductions with the adapter in one loop only.

The folder of a sweep stands for all of its trained adapters. The results of each
one are added to its own run, with the data of its own recipe, and the tables
have means over seeds. The same command continues.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedModel

from loopdropout_trainer.data import SFTDataArguments
from loopdropout_trainer.diagnostics import (
    Batch,
    check_curvature,
    curvature,
    depth_matrix,
    describe_passes,
    readouts,
    single_loop,
)
from loopdropout_trainer.errors import UserError, count, join_command, run_script
from loopdropout_trainer.files import read_json_object, write_file
from loopdropout_trainer.jobs.diagnosed_data import DiagnosedData, check_data
from loopdropout_trainer.jobs.runs import TRAINING_TYPES
from loopdropout_trainer.results.run_files import (
    BASE_MODEL,
    DEVELOPMENT,
    DIAGNOSTICS_FOLDER,
    measurement_folder,
    write_results,
)
from loopdropout_trainer.saving.command_line import name_sources
from loopdropout_trainer.saving.facts import ALL_KINDS, MODELS, Source
from loopdropout_trainer.saving.loading import ModelLoader
from loopdropout_trainer.saving.source import find_base, find_source
from loopdropout_trainer.settings.arguments import (
    DEPTH_BOUNDS,
    DepthArguments,
    SourceArguments,
    TaskArguments,
    option,
)
from loopdropout_trainer.settings.library_fields import LIBRARY_FIELDS
from loopdropout_trainer.settings.recipe import build, read_settings
from loopdropout_trainer.settings.recipe_folders import list_runs
from loopdropout_trainer.terminal import print_sentences
from loopdropout_trainer.training.config import LoopDropoutConfig


DIAGNOSTICS = ("single_loop", "readouts", "depth_matrix", "curvature")


@dataclass
class DiagnoseArguments(TaskArguments, DepthArguments):
    """The adapters, the diagnostics and the examples."""

    first_words = "[RECIPE.yaml] [ADAPTER ...]"
    advice = dict.fromkeys(("benchmark_limit", "limit", "max_samples"), "Did you mean 'num_examples'?")

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
    dry_run: bool = option(False, "Print the models, the examples and the forward passes, and stop.")


ARGUMENTS = (DiagnoseArguments, SourceArguments, SFTDataArguments)


def main(argv: list[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    sweep = find_sweep(argv)
    if sweep is not None:
        diagnose_sweep(sweep, argv[1:])
        return
    diagnosis = Diagnosis(argv)
    rows = diagnosis.run(diagnosis.make_shared())
    if diagnosis.state.is_main_process and not diagnosis.args.dry_run:
        from loopdropout_trainer.reports.printing import print_diagnostics

        print_diagnostics(rows)
        folder = diagnosis.args.output_dir
        print_sentences(f"All results, also those without a table here, are in {folder}/results.jsonl")


@dataclass
class Shared:
    """Work that the measurements of one command share, which have the same options.

    Attributes:
        loader: Loader, which keeps the base model.
        described: Texts of `describe_setup` that were printed, and are not printed again.
        of_models: Results of models without an adapter by `key_of_model`.
        batches: Examples by the digest of everything that they depend on.
    """

    loader: ModelLoader
    described: set[str] = field(default_factory=set)
    batches: dict[str, list[Batch]] = field(default_factory=dict)
    of_models: dict[tuple, list[dict[str, Any]]] = field(default_factory=dict)


class Diagnosis:
    """The measurement of some models with one recipe.

    Args:
        argv: Command line without the script.
    """

    def __init__(self, argv: list[str]) -> None:
        argv = name_sources(argv, "adapters")
        settings = read_settings(ARGUMENTS, argv, __doc__, TRAINING_TYPES)
        args, model_args, data_args = build(ARGUMENTS, settings)
        if args.task != DEVELOPMENT:  # it has its own data, so that options of other data are a mistake
            read_settings((DiagnoseArguments, SourceArguments), argv, __doc__, (*TRAINING_TYPES, SFTDataArguments))
        args.output_dir = measurement_folder(args.output_dir, DIAGNOSTICS_FOLDER)
        self.settings, self.args, self.model_args, self.data_args = settings, args, model_args, data_args
        self.state = PartialState(cpu=args.use_cpu or not torch.accelerator.is_available())
        with self.state.main_process_first():
            self.sources = find_sources(args.adapters, model_args)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that a measurement depends on, and the trainings of the models, as JSON returns them."""
        facts = {
            name: value for name, value in self.settings.items() if name not in ("adapters", "output_dir", "dry_run")
        }
        facts["trainings"] = [[source.training_id, source.columns.get("step")] for source in self.sources]
        return json.loads(json.dumps(facts, default=str))

    @property
    def is_done(self) -> bool:
        """Whether the same was measured before to its end."""
        try:
            return read_json_object(Path(self.args.output_dir, FACTS_FILE)) == self.facts
        except (OSError, ValueError):
            return False

    def make_shared(self) -> Shared:
        """Return the argument of `run`, also for further measurements with the same options."""
        return Shared(ModelLoader(self.state.device, self.model_args.attn_implementation))

    def run(self, shared: Shared) -> list[dict[str, Any]]:
        """Measure the models, write the results, and return them. A dry run prints the work instead."""
        args, state = self.args, self.state
        dtypes = {source.name: self.model_args.dtype or source.dtype or "bfloat16" for source in self.sources}
        with state.main_process_first():
            check_curvature(args.diagnostics, dtypes)
            check_depths(args, self.sources)
            check_data(args, self.sources, self.settings)
            data = DiagnosedData(args, self.data_args, self.model_args.chat_template, self.sources, shared.batches)
        rows = []
        for source in self.sources:
            setup = source.describe_setup()
            if state.is_main_process and setup not in shared.described:
                print_sentences(source.describe())
            shared.described.add(setup)
            measured = self._measure_once(shared, source, dtypes[source.name], data.batches(source))
            if state.is_main_process and not args.dry_run:
                write_results(args.output_dir, measured)
            rows += measured
        if state.is_main_process and not args.dry_run:
            write_file(Path(args.output_dir, FACTS_FILE), json.dumps(self.facts, indent=1) + "\n")
        return rows

    def _measure_once(self, shared: Shared, source: Source, dtype: str, batches: list[Batch]) -> list[dict[str, Any]]:
        """Return the results of a model. One without an adapter is measured once for all runs with the same batches."""
        key = None
        if not source.is_adapter:
            key = key_of_model(self.args, source, dtype, self.model_args.num_loops, batches)
        if key in shared.of_models:
            return shared.of_models[key]
        rows: list[dict[str, Any]] = []
        if self.args.dry_run:
            self._print_passes(source, batches)
        else:
            model = shared.loader.load(source, dtype, self.model_args.num_loops)
            rows = measure(self.args, source, model, batches)
        if key is not None:
            shared.of_models[key] = rows
        return rows

    def _print_passes(self, source: Source, batches: list[Batch]) -> None:
        """Print the number of examples and the forward passes of a model."""
        args, depth = self.args, self.model_args.num_loops or source.num_loops
        passes = describe_passes(args.diagnostics, source.is_adapter, depth, args.eval_num_loops)
        if self.state.is_main_process:
            num_examples = sum(len(batch["labels"]) for batch in batches)
            print_sentences(f"  {source.kind}, {count(num_examples, 'example')}: {passes}")


FACTS_FILE = "diagnosed.json"
"""File next to the results with the `facts` of the last measurement that has ended."""


def find_sweep(argv: list[str]) -> Path | None:
    """Return the folder of the sweep that the first word of a command line names, or None."""
    if not argv or argv[0].startswith("-") or argv[0].endswith((".yaml", ".yml")) or argv[0] == "none":
        return None
    source = find_source(argv[0], accept=ALL_KINDS)
    return source.folder if source.kind == "sweep" else None


def diagnose_sweep(sweep: Path, options: list[str]) -> None:
    """Measure each trained adapter of a sweep, write its results into the folder of its run, and print tables over seeds.

    Args:
        sweep: Folder of the sweep.
        options: Command line without the folder.
    """
    from loopdropout_trainer.sweeps.losses import find_missing, find_own_reductions, print_means

    check_sweep_options(options)
    reasons = {run: find_missing(run) for run in list_runs(sweep)}  # why a run is skipped, or None
    # All of them first, so that a wrong option is found before the first measurement.
    diagnoses = {run: Diagnosis([str(run), *options]) for run, reason in reasons.items() if reason is None}
    if not diagnoses:
        raise UserError(f"The sweep in {sweep} has no trained adapter yet.")
    is_main_process = PartialState().is_main_process
    first = next(iter(diagnoses.values()))
    if is_main_process:
        own = find_own_reductions(sweep, first.args.task)
        if own and "single_loop" in first.args.diagnostics:
            trainings = count(len(own), "training")
            print_sentences(f"{trainings} measured rho_t already, and `{join_command('report', sweep)}` prints it.")
    shared = first.make_shared()
    for number, run in enumerate(reasons, start=1):
        reason = reasons[run]
        if reason is None and diagnoses[run].is_done:
            reason = "it was measured before"
        line = f"{number} of {len(reasons)}: {run.relative_to(sweep)}"
        if reason is not None:
            line += f" is skipped, because {reason}."
        if is_main_process:
            print_sentences(line)
        if reason is None:
            diagnoses[run].run(shared)
    if is_main_process and not first.args.dry_run:
        print_means(sweep, [diagnosis.args.output_dir for diagnosis in diagnoses.values()], bool(own))


def check_sweep_options(options: list[str]) -> None:
    """Raise UserError for a further name or an option that a whole sweep does not take."""
    if options and not options[0].startswith("-"):
        raise UserError(f"Measure one sweep at a time, without other names, got also {options[0]}.")
    for name in ("output_dir", "adapters"):
        if any(word.split("=")[0] == f"--{name}" for word in options):
            raise UserError(f"`{name}` must be left out for a sweep, because each run has results of its own.")


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
    columns = {"method": BASE_MODEL} if source.kind == "base model" else source.columns
    return [{**columns, "task": args.task, **row} for row in rows]


def key_of_model(
    args: DiagnoseArguments, source: Source, dtype: str, num_loops: int | None, batches: list[Batch]
) -> tuple:
    """Return everything that the results of a model without an adapter depend on, except for the device, which is the same.

    The batches are part of it by their content, so that it does not matter which settings of a recipe they come from.

    Args:
        args: Options of the measurement.
        source: Model without an adapter.
        dtype: Data type of the weights.
        num_loops: Recurrence depth of the command line or the recipe.
        batches: Batches of `DiagnosedData`.
    """
    digest = hashlib.sha256()
    for batch in batches:
        for name, tensor in batch.items():
            digest.update(f"{name} {tensor.dtype} {[*tensor.shape]} ".encode())
            digest.update(tensor.numpy().tobytes())
    model = (source.name, source.kind, source.base, source.revision, source.training_id, source.num_loops)
    measured = (args.task, *args.diagnostics), tuple(args.eval_num_loops or ())
    return model, dtype, num_loops, measured, digest.hexdigest()


def find_sources(names: list[str], model_args: SourceArguments) -> list[Source]:
    """Return the base model of the first adapter, and the named adapters and models.

    The base model is always measured, so its name `none`, as in `evaluate`, adds nothing.
    """
    names = [name for name in names if name != "none"]
    base, revision = model_args.model_name_or_path, model_args.model_revision
    named = []
    for source in map(find_source, names):
        named.append(source.with_base(base, revision) if source.is_adapter else source)
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


if __name__ == "__main__":
    run_script(main)
