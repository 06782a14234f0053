"""Fine-tune a looped language model with Loop Dropout or another rule.

    loopdropout sft quickstart.yaml
    loopdropout sft gsm8k.yaml --learning_rate 2e-4 --seed 102
    loopdropout sft gsm8k.yaml --dry_run true
    accelerate launch recipes/sft.py recipes/gsm8k.yaml

A recipe sets the fields below, and `--field value` overrides it. The command
trains, evaluates and saves an adapter, and prints its results. The same command
with `--resume_from_checkpoint true` continues an interrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from datasets import DatasetDict
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import TRAINER_STATE_NAME

from loopdropout_trainer.arguments import AdapterArguments, ModelArguments, ScriptArguments
from loopdropout_trainer.data import DataArguments, label_example, load_datasets, preview
from loopdropout_trainer.diagnostics import compare_answers, readouts, single_loop
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.evaluation import DEVELOPMENT, LoopedLM, evaluate_tasks, load_benchmarks
from loopdropout_trainer.progress import JobProgressCallback, SampleCompletionsCallback, finish_run
from loopdropout_trainer.recipe import build, dump_recipe, override, parse, recipe_dict
from loopdropout_trainer.results import (
    RECIPE_FILE,
    UNCOMPARED,
    find_difference,
    is_finished,
    print_table,
    read_run,
    read_samples,
    training_results,
    write_results,
    write_run,
)
from loopdropout_trainer.saving.cards import read_card_fields, write_model_card
from loopdropout_trainer.saving.loading import load_model
from loopdropout_trainer.saving.merging import merge_and_save, push_merged_to_hub
from loopdropout_trainer.tokenizers import load_tokenizer
from loopdropout_trainer.training.config import GateConfig, LoopDropoutConfig
from loopdropout_trainer.training.multipass import LoRADropoutSFTTrainer
from loopdropout_trainer.training.sft import LoopDropoutSFTTrainer
from loopdropout_trainer.training.stopping import NonFiniteGradientError, find_checkpoint, newest_checkpoint


MEASURED = {*ScriptArguments.__dataclass_fields__, "push_to_hub", "hub_model_id", "hub_private_repo"}
"""Settings of the steps after the training. They may change after a run has finished."""

LORA_VARIANTS = {"loraplus_lr_ratio": "LoRA+", "use_rslora": "rsLoRA", "lora_dropout": "Input dropout"}
"""Names of the methods that a setting makes of LoRA."""


class Run(NamedTuple):
    """The training of one rule, with its own arguments and recipe."""

    script_args: ScriptArguments
    args: GateConfig
    recipe: dict
    progress: JobProgressCallback

    @property
    def is_trained(self) -> bool:
        """Whether the training has ended."""
        return read_run(self.args.output_dir).get("status") in ("trained", "finished")

    @property
    def is_complete(self) -> bool:
        """Whether the run has finished with all of its measurements."""
        return is_finished(self.args.output_dir) and not find_difference(self.args.output_dir, self.recipe)

    @property
    def title(self) -> str:
        """Name of the method in tables."""
        rule, title = self.args.rule, self.args.make_rule().title
        if rule == "lora":
            return next((name for field, name in LORA_VARIANTS.items() if self.recipe.get(field)), title)
        return title + " + Loop Dropout" * (rule in ("independent", "learned") and bool(self.args.p))


def main(argv: list[str] | None = None) -> None:
    types = (ScriptArguments, ModelArguments, AdapterArguments, DataArguments, LoopDropoutConfig)
    arguments = script_args, model_args, adapter_args, data_args, training_args = parse(types, argv, __doc__)
    runs = plan_runs(script_args, training_args, recipe_dict(*arguments))

    # Tokenizer and data
    tokenizer = load_tokenizer(
        model_args.model_name_or_path, model_args.model_revision, model_args.chat_template, training_args.eos_token
    )
    dataset = load_datasets(data_args, tokenizer, training_args.max_length)
    tasks = load_tasks(runs[0], dataset)
    if script_args.preview is not None:
        if not 0 <= script_args.preview < len(dataset["train"]):
            raise UserError(f"`preview` must be from 0 to {len(dataset['train']) - 1}, got {script_args.preview}.")
        losses = training_args.completion_only_loss, training_args.assistant_only_loss
        print(preview(label_example(dataset["train"][script_args.preview], tokenizer, *losses), tokenizer))
    if script_args.dry_run:
        return

    for run in runs:
        if run.is_complete:
            continue

        # Training
        trainer_class = LoRADropoutSFTTrainer if run.args.rule == "lora_dropout" else LoopDropoutSFTTrainer
        trainer = trainer_class(
            model=load_base(model_args, run),
            args=run.args,
            train_dataset=dataset["train"],
            eval_dataset=dataset.get("eval"),
            processing_class=tokenizer,
            peft_config=adapter_args.peft_config,
        )
        if "eval" in dataset:
            trainer.add_callback(SampleCompletionsCallback(trainer))
        evaluate_base(trainer, run, tasks)
        train(trainer, run)

        # Evaluation, diagnostics and merging
        evaluate(trainer, run, tasks)
        diagnose(trainer, run)
        save(trainer, run)

    finish(runs)


# Before the training


def plan_runs(script_args: ScriptArguments, training_args: GateConfig, recipe: dict) -> list[Run]:
    """Print the plan, and return the run of each rule.

    Raises:
        UserError: if the folder of a rule holds another run, or settings exclude each other.
    """
    if script_args.push_merged_to_hub and not training_args.hub_model_id:
        raise UserError("`hub_model_id` must be set if `push_merged_to_hub` is set.")
    find_checkpoint(training_args)
    try:
        for tracker in get_reporting_integration_callbacks(training_args.report_to):
            tracker()
    except (ValueError, RuntimeError) as error:  # an unknown tracker, or one that is not installed
        raise UserError(f"`report_to`: {error}") from error
    progress = JobProgressCallback()
    runs = [Run(script_args, training_args, recipe, progress)]
    for rule in script_args.compare_with or ():
        if rule != training_args.rule:
            changes = {
                "rule": rule,
                "output_dir": f"{training_args.output_dir}/{rule}",
                "compare_with": None,
                # Only the first run evaluates the base model, merges and pushes.
                "evaluate_base": False,
                "merge": False,
                "push_merged_to_hub": False,
                "push_to_hub": False,
            }
            if training_args.resume_from_checkpoint:
                changes["resume_from_checkpoint"] = "true"
            own_recipe = override(recipe, changes)
            runs.append(Run(*build([type(script_args), type(training_args)], own_recipe), own_recipe, progress))
    for run in runs:
        if (run.script_args.merge or run.script_args.depths) and not run.args.make_rule().mergeable:
            raise UserError(
                f"`merge` and `depths` must not be set for {run.args.rule!r}, whose update differs between loops."
            )
        folder = run.args.output_dir
        if difference := find_difference(folder, run.recipe, UNCOMPARED | MEASURED):
            raise UserError(
                f"{folder} holds another run: {difference}. Set another `output_dir`, or remove the folder."
            )
        run.args.run_name = f"{run.title}, {run.args.run_name or f'seed {run.args.seed}, {folder}'}"
    progress.trainings = sum(not run.is_trained for run in runs)
    if training_args.process_index == 0:
        print_plan(runs)
    return runs


def print_plan(runs: list[Run]) -> None:
    """Print the model, the rules, the data and the training of a job."""
    _, args, recipe, _ = runs[0]
    get = lambda *names: " ".join(str(recipe[name]) for name in names if recipe.get(name))
    length = f"{args.max_steps:,} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epoch(s)"
    new = [run.args.output_dir for run in runs if not (run.is_trained or run.args.resume_from_checkpoint)]
    unused = ", ".join(filter(None, map(newest_checkpoint, new)))
    plan = {
        "model": get("model_name_or_path", "model_revision"),
        "rules": ", ".join(run.title + (f" (p = {run.args.p})" if run.args.p is not None else "") for run in runs),
        "data": get("preparation", "dataset_name", "train_files"),
        "training": f"{length}, {args.examples_per_step} examples per step, learning rate {args.learning_rate:g}, "
        f"seed {args.seed}",
        "tasks": ", ".join(recipe.get("benchmarks") or ["none"]),
        "output_dir": args.output_dir,
        "trained": ", ".join(run.args.output_dir for run in runs if run.is_trained),
        "not used": unused and f"{unused}. Add `--resume_from_checkpoint true` to continue from there.",
    }
    print("\n".join(f"{name:<12}{text}" for name, text in plan.items() if text), flush=True)


def load_tasks(run: Run, dataset: DatasetDict) -> list[Task | Group]:
    """Print the numbers of examples and steps, and return the tasks to evaluate."""
    options, args, held_out = run.script_args, run.args, dataset.get("eval")
    num_examples = len(dataset["train"])
    steps = math.ceil(args.num_train_epochs * math.ceil(num_examples / args.examples_per_step))
    if args.process_index == 0:
        print(
            f"{'examples':<12}{num_examples:,}, {len(held_out or ()):,} held out, "
            f"{args.max_steps if args.max_steps > 0 else steps:,} optimizer steps",
            flush=True,
        )
    if options.single_loop_batches and held_out is None:
        raise UserError("`num_eval_examples` must be at least 1 if `single_loop_batches` is set.")
    return load_benchmarks(
        options.benchmarks or (),
        options.own_benchmarks,
        options.benchmark_revisions,
        options.benchmark_limit,
        run.recipe.get("preparation"),
        held_out,
    )


# Training


def load_base(model_args: ModelArguments, run: Run) -> PreTrainedModel:
    """Load the base model of a run. Its `model_init_kwargs` override the model's settings."""
    load_kwargs = {**model_args.load_kwargs, **(run.args.model_init_kwargs or {})}
    return load_model(model_args.model_name_or_path, **load_kwargs)


def train(trainer: Trainer, run: Run) -> None:
    """Train an adapter, save it and write the results of the training. A trained adapter is loaded instead."""
    args, folder = trainer.args, Path(trainer.args.output_dir)
    is_main = trainer.is_world_process_zero()
    run.progress.attach(trainer, run.title)
    if run.is_trained:
        load_trained(trainer, folder)
        return
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        dump_recipe(run.recipe, folder / RECIPE_FILE)
    checkpoint = find_checkpoint(args)
    state = load_state(checkpoint) if checkpoint else TrainerState(max_steps=1)
    try:
        if state.global_step < state.max_steps:
            trainer.train(checkpoint)
        else:  # transformers would take one more step
            load_trained(trainer, checkpoint)
    except NonFiniteGradientError:
        if is_main:
            write_run(folder, status="non-finite")
        raise
    trainer.save_model()
    trainer.save_state()
    record(trainer, run, training_results(trainer, state.global_step), task="training")
    if is_main:
        write_run(
            folder,
            status="trained",
            model_revision=getattr(trainer.model.config, "_commit_hash", None),
            dataset_fingerprint=trainer.train_dataset._fingerprint,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            num_processes=args.world_size,
        )


def load_state(folder: str | Path) -> TrainerState:
    """Return the state of a training, or of its checkpoint."""
    return TrainerState.load_from_json(str(Path(folder, TRAINER_STATE_NAME)))


def load_trained(trainer: Trainer, folder: str | Path) -> None:
    """Load a trained adapter and the state of its training."""
    trainer.model.load_adapter(str(folder), "default")
    trainer.state = load_state(folder)


# After the training


def record(trainer: Trainer, run: Run, rows: Iterable[dict], **facts: Any) -> None:
    """Write results of a trainer's model, with the columns that they share."""
    facts |= {
        "method": run.title,
        "num_loops": trainer.num_loops,
        "seed": trainer.args.seed,
        "step": trainer.state.global_step,
    }
    of_base = {"method": "base model", "seed": None, "step": None}
    rows = [{**facts, **row, **(of_base if row["gates"] == "none" else {})} for row in rows]
    if trainer.is_world_process_zero():
        write_results(trainer.args.output_dir, rows)


def evaluate_base(trainer: Trainer, run: Run, tasks: list[Task | Group]) -> None:
    """Evaluate the base model on the tasks."""
    if run.script_args.evaluate_base:
        with trainer.model.disable_adapter():
            evaluate_at(trainer, run, tasks)


def evaluate(trainer: Trainer, run: Run, tasks: list[Task | Group]) -> None:
    """Evaluate the trained adapter on the tasks, and on the first task at other depths and in one loop only."""
    evaluate_at(trainer, run, tasks)
    for depth in run.script_args.depths or ():
        if depth != trainer.num_loops:
            evaluate_at(trainer, run, tasks[:1], num_loops=depth)
    if run.script_args.single_loop_accuracy:
        for gates in torch.eye(trainer.num_loops).tolist():
            evaluate_at(trainer, run, tasks[:1], gates=gates)


def evaluate_at(trainer: Trainer, run: Run, tasks: list[Task | Group], **place: Any) -> None:
    """Write the results of tasks. `place`: `num_loops` or `gates` [K] of the evaluation."""
    if not tasks:
        return
    folder, options = Path(trainer.args.output_dir), run.script_args
    lm = LoopedLM(trainer.model, trainer.processing_class, batch_size=options.benchmark_batch_size, **place)
    results = evaluate_tasks(
        lm,
        tasks,
        limit=options.benchmark_limit,
        cache_dir=folder / "cache",
        output_dir=folder,
        allow_unsafe_code=options.allow_unsafe_code,
    )
    record(trainer, run, results)


def diagnose(trainer: Trainer, run: Run) -> None:
    """Measure the loss of held-out examples with the adapter in one loop only, and of each loop's readout."""
    loader = DataLoader(
        trainer.eval_dataset or [], trainer.args.per_device_eval_batch_size, collate_fn=trainer.data_collator
    )
    if batches := [*islice(loader, run.script_args.single_loop_batches)]:
        rows = [*single_loop(trainer.model, batches), *readouts(trainer.model, batches)]
        record(trainer, run, rows, task=DEVELOPMENT)


def save(trainer: Trainer, run: Run) -> None:
    """Write the model card and, if `merge` is set, the merged model. Mark the run as finished."""
    folder, hub_model_id = Path(trainer.args.output_dir), trainer.args.hub_model_id
    if not trainer.is_world_process_zero():
        return
    dump_recipe(run.recipe, folder / RECIPE_FILE)
    card = read_card_fields(folder)
    write_model_card(folder, trainer.model, repo_id=hub_model_id, **card)
    if run.script_args.merge:
        merge_and_save(trainer.model, folder / "merged", trainer.processing_class, card, hub_model_id)
    finish_run(trainer, card["results"])
    write_run(folder, **{**read_run(folder), "status": "finished"})


def finish(runs: list[Run]) -> None:
    """Print and draw the results of a job, and push its merged model."""
    script_args, args, *_ = runs[0]
    if args.process_index > 0:
        return
    folder = Path(args.output_dir)
    print_results([run.args.output_dir for run in runs])
    if (script_args.depths or script_args.single_loop_accuracy) and find_spec("plotnine"):
        from report import load_results, overview_figure, save_figure

        save_figure(overview_figure(load_results(folder)), folder / "figure")
    if script_args.push_merged_to_hub:
        print(f"Pushed to {push_merged_to_hub(folder / 'merged', args.hub_model_id, token=args.hub_token)}")


def print_results(folders: list[str]) -> None:
    """Print tables of the results of some folders."""
    rows = pd.DataFrame([row for folder in folders for row in read_card_fields(folder)["results"]])
    rows = rows.sort_values("method", key=lambda method: method != "base model", kind="stable")
    training = rows.query("task == 'training'")
    depth = training["num_loops"].iloc[0]
    print_table(f"Training at K = {depth}", training, "metric", "{:.5g}")
    scores = rows.query("metric in ['accuracy', 'last_number'] and gates in ['unit', 'none'] and num_loops == @depth")
    columns = scores["task"].where(scores["metric"] == "accuracy", scores["metric"])
    print_table(f"Accuracy at the training depth K = {depth}, in %", scores, columns)
    accuracy = rows.query("metric == 'accuracy'").sort_values("num_loops", kind="stable")
    print_differences(accuracy.query("gates == 'unit'"))
    for task, own in accuracy.groupby("task", sort=False):
        by_depth = own.query("gates == 'unit'")
        if by_depth["num_loops"].nunique() > 1:
            columns = "K=" + by_depth["num_loops"].astype(str)
            print_table(f"Accuracy on {task} with K loops at inference, in %", by_depth, columns)
        alone = own.query("gates not in ['unit', 'none']")
        print_table(f"Accuracy on {task} with the adapter in one loop only, in %", alone, "gates")
    reductions = rows.query("metric == 'loss_reduction'").replace({"gates": {"unit": "all loops"}})
    print_table("Loss reduction with the adapter in one loop only, in %", reductions, "gates")
    print(f"\nEverything is in {', '.join(folders)}")


def print_differences(accuracy: pd.DataFrame) -> None:
    """Print the differences in accuracy to LoRA, or to the last method, on the same problems."""
    lines = []
    for (num_loops, task), rows in accuracy.groupby(["num_loops", "task"]):
        samples = {row["method"]: read_samples(row) for row in rows.to_dict("records")}
        baseline = "LoRA" if "LoRA" in samples else [*samples][-1]
        for method in samples:
            if method != baseline:
                difference = compare_answers(samples[method], samples[baseline])
                lines.append([f"{method} - {baseline}", task, num_loops, difference.n, str(difference)])
    if lines:
        table = pd.DataFrame(lines, columns=["", "task", "K", "n", "points [95% interval]"])
        print(f"\nDifference in accuracy on the same n problems\n{table.to_string(index=False)}")
        print("The intervals are over problems. They do not include other training seeds.")


if __name__ == "__main__":
    run_script(main)
