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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset, DatasetDict
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from peft import LoraConfig
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from loopdropout_trainer.callbacks import NonFiniteGradientError, newest_checkpoint
from loopdropout_trainer.config import LoopDropoutConfig
from loopdropout_trainer.data import DataArguments, label_example, load_datasets, preview
from loopdropout_trainer.diagnostics import compare_answers, readouts, single_loop
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.evaluation import DEVELOPMENT, LoopedLM, development_task, evaluate_tasks, load_benchmarks
from loopdropout_trainer.hub import (
    load_model,
    merge_and_save,
    push_merged_to_hub,
    read_card_fields,
    write_model_card,
)
from loopdropout_trainer.lora_dropout import LoRADropoutSFTTrainer
from loopdropout_trainer.progress import JobProgressCallback, SampleCompletionsCallback
from loopdropout_trainer.recipe import ModelArguments, build, dump_recipe, load_recipe, override, parse, recipe_dict
from loopdropout_trainer.results import (
    RECIPE_FILE,
    UNCOMPARED,
    compare_recipes,
    is_finished,
    read_results,
    read_run,
    read_samples,
    write_results,
    write_run,
)
from loopdropout_trainer.tokenizers import load_tokenizer
from loopdropout_trainer.tracking import finish_run
from loopdropout_trainer.trainer import LoopDropoutSFTTrainer


@dataclass
class BenchmarkArguments:
    """How tasks are evaluated."""

    benchmark_limit: int | None = field(default=None, metadata={"help": "Number of problems per task. Default: all."})
    benchmark_batch_size: int = field(default=16, metadata={"help": "Problems that a process decodes at a time."})
    own_benchmarks: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Own benchmarks by name, as mappings with files, prompt, target and scorer (JSON)."},
    )
    benchmark_revisions: dict[str, str] | None = field(
        default=None, metadata={"help": "Revisions of the tasks' datasets on the Hub, as a mapping (JSON)."}
    )
    allow_unsafe_code: bool = field(
        default=False, metadata={"help": "Whether to run generated programs without sandbox. Command line only."}
    )


@dataclass
class ScriptArguments(BenchmarkArguments):
    """Steps around the training."""

    help_title = "Evaluation and output"

    compare_with: list[str] | None = field(
        default=None, metadata={"help": "Other rules to train from the same initial adapter, in subfolders."}
    )
    benchmarks: list[str] | None = field(
        default=None, metadata={"help": "Tasks of the package or lm-eval, `own_benchmarks`, or task files (.yaml)."}
    )
    evaluate_base: bool = field(default=True, metadata={"help": "Whether to evaluate the base model, too."})
    depths: list[int] | None = field(
        default=None, metadata={"help": "Recurrence depths at which to evaluate the first task."}
    )
    single_loop_accuracy: bool = field(
        default=False, metadata={"help": "Whether to evaluate the first task with the adapter in one loop only."}
    )
    single_loop_batches: int = field(
        default=0, metadata={"help": "Number of evaluation batches for the loss with the adapter in one loop only."}
    )
    merge: bool = field(default=False, metadata={"help": "Whether to save the merged model in `output_dir`/merged."})
    push_merged_to_hub: bool = field(
        default=False, metadata={"help": "Whether to merge, and to push the merged model to `hub_model_id`."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Print the plan and stop before the training."})
    preview: int | None = field(
        default=None, metadata={"help": "Index of a training example to print, with its trained tokens marked."}
    )

    def __post_init__(self):
        if (self.depths or self.single_loop_accuracy) and not self.benchmarks:
            raise UserError("`benchmarks` must be set if `depths` or `single_loop_accuracy` is set.")
        self.merge = self.merge or self.push_merged_to_hub


@dataclass
class AdapterArguments:
    """The LoRA adapter. The defaults are the paper's."""

    help_title = "Adapter"

    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the update, (alpha / r) B A."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the adapter's input."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Adapted layers. Default: all linear projections of the recurrent block."}
    )
    use_rslora: bool = field(default=False, metadata={"help": "Whether to scale the update by alpha / sqrt(r)."})

    @property
    def peft_config(self) -> LoraConfig:
        """Configuration of the adapter in PEFT."""
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=self.lora_target_modules,
            use_rslora=self.use_rslora,
            task_type="CAUSAL_LM",
        )


MEASURED = {*ScriptArguments.__dataclass_fields__, "push_to_hub", "hub_model_id", "hub_private_repo"}
"""Settings of the steps after the training. They may change after a run has finished."""


def main(argv: list[str] | None = None) -> None:
    types = (ScriptArguments, ModelArguments, AdapterArguments, DataArguments, LoopDropoutConfig)
    arguments = script_args, model_args, adapter_args, data_args, training_args = parse(types, argv, __doc__)
    runs = plan_runs(script_args, training_args, recipe_dict(*arguments))

    # Tokenizer and data
    tokenizer = load_tokenizer(
        model_args.model_name_or_path, model_args.model_revision, model_args.chat_template, training_args.eos_token
    )
    dataset = load_datasets(data_args, tokenizer, training_args.max_length)
    print_data(dataset, training_args)
    if script_args.preview is not None:
        losses = training_args.completion_only_loss, training_args.assistant_only_loss
        print(preview(label_example(dataset["train"][script_args.preview], tokenizer, *losses), tokenizer))
    tasks = load_tasks(script_args, data_args.preparation, dataset.get("eval"))
    if script_args.dry_run:
        return

    progress = JobProgressCallback(sum(not is_trained(args) for args, _ in runs))
    for args, recipe in runs:
        if is_complete(args, recipe):
            continue

        # Training
        load_kwargs = {**model_args.load_kwargs, **(args.model_init_kwargs or {})}
        model = load_model(model_args.model_name_or_path, **load_kwargs)
        trainer_class = LoRADropoutSFTTrainer if args.rule == "lora_dropout" else LoopDropoutSFTTrainer
        trainer = trainer_class(
            model=model,
            args=args,
            train_dataset=dataset["train"],
            eval_dataset=dataset.get("eval"),
            processing_class=tokenizer,
            peft_config=adapter_args.peft_config,
        )
        progress.attach(trainer)
        if "eval" in dataset:
            trainer.add_callback(SampleCompletionsCallback(trainer))
        if script_args.evaluate_base and args is training_args:
            evaluate_base(trainer, script_args, recipe, tasks)
        train(trainer, recipe)

        # Evaluation, diagnostics and merging
        evaluate(trainer, script_args, recipe, tasks)
        diagnose(trainer, script_args, recipe)
        save(trainer, recipe, merge=script_args.merge and args is training_args)

    if training_args.process_index == 0:
        print_results([args.output_dir for args, _ in runs])
        if script_args.depths or script_args.single_loop_accuracy:
            draw_results(training_args.output_dir)

        # Push
        if script_args.push_merged_to_hub:
            folder = Path(training_args.output_dir, "merged")
            print(f"Pushed to {push_merged_to_hub(folder, training_args.hub_model_id, token=training_args.hub_token)}")


# Before the training


def plan_runs(
    script_args: ScriptArguments, training_args: TrainingArguments, recipe: Mapping[str, Any]
) -> list[tuple[TrainingArguments, dict[str, Any]]]:
    """Print the plan, and return the arguments and the recipe of each rule.

    Raises:
        UserError: if the folder of a rule holds another run, or settings exclude each other.
    """
    runs = [(training_args, dict(recipe))]
    for rule in script_args.compare_with or ():
        changes = {"rule": rule, "output_dir": f"{training_args.output_dir}/{rule}"}
        changes |= {"compare_with": None, "push_to_hub": False}
        if training_args.resume_from_checkpoint:
            changes["resume_from_checkpoint"] = "true"
        own_recipe = override(recipe, changes)
        (args,) = build([type(training_args)], own_recipe)
        runs.append((args, own_recipe))
    rules = [args.make_rule() for args, _ in runs]
    if len({rule.name for rule in rules}) < len(rules):
        raise UserError(f"`compare_with` must name rules other than {training_args.rule!r}, each once.")
    if script_args.merge and not rules[0].mergeable:
        raise UserError(f"`merge` must be false for the rule {rules[0].name!r}, whose update differs between loops.")
    if script_args.depths and not all(rule.mergeable for rule in rules):
        raise UserError("`depths` must not be set for a rule whose update differs between loops.")
    if script_args.push_merged_to_hub and not training_args.hub_model_id:
        raise UserError("`hub_model_id` must be set if `push_merged_to_hub` is set.")
    for args, own_recipe in runs:
        saved = saved_recipe(args.output_dir)
        if saved and (difference := compare_recipes(saved, own_recipe, UNCOMPARED | MEASURED)):
            raise UserError(
                f"{args.output_dir} holds another run: {difference}. Set another `output_dir`, or remove the folder."
            )
        args.run_name = f"{method_title(args, own_recipe)}, {args.run_name or f'seed {args.seed}, {args.output_dir}'}"
    if training_args.process_index == 0:
        print_plan(runs)
    return runs


def print_plan(runs: list[tuple[TrainingArguments, dict[str, Any]]]) -> None:
    """Print the model, the rules, the data and the training of a recipe."""
    args, recipe = runs[0]
    length = f"{args.max_steps:,} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epoch(s)"
    source = recipe.get("dataset_name") or recipe.get("train_files") or ""
    rules = [method_title(*run) + (f" (p = {run[0].p})" if run[0].p is not None else "") for run in runs]
    plan = {
        "model": f"{recipe['model_name_or_path']} {recipe.get('model_revision', '')}",
        "rules": ", ".join(rules),
        "data": f"{recipe.get('preparation') or ''} {source}",
        "training": f"{length}, {examples_per_step(args)} examples per step, learning rate {args.learning_rate:g}, "
        f"seed {args.seed}",
        "tasks": ", ".join(recipe.get("benchmarks") or ["none"]),
        "output_dir": args.output_dir,
        "trained": ", ".join(args.output_dir for args, _ in runs if is_trained(args)),
    }
    print("\n".join(f"{name:<12}{text.strip()}" for name, text in plan.items() if text), flush=True)


def print_data(dataset: DatasetDict, args: TrainingArguments) -> None:
    """Print the number of examples and of optimizer steps."""
    if args.process_index == 0:
        num_examples = len(dataset["train"])
        steps = math.ceil(args.num_train_epochs * math.ceil(num_examples / examples_per_step(args)))
        held_out = len(dataset["eval"]) if "eval" in dataset else 0
        steps = args.max_steps if args.max_steps > 0 else steps
        print(f"{'examples':<12}{num_examples:,}, {held_out:,} held out, {steps:,} optimizer steps", flush=True)


def examples_per_step(args: TrainingArguments) -> int:
    """Return the number of examples of an optimizer step in all processes."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size


def method_title(args: TrainingArguments, recipe: Mapping[str, Any]) -> str:
    """Return the name of a method in tables."""
    variants = {"LoRA+": args.loraplus_lr_ratio, "rsLoRA": recipe.get("use_rslora")}
    variants["Input dropout"] = recipe.get("lora_dropout")
    names = [name for name, value in variants.items() if value and args.rule == "lora"]
    names += ["Loop Dropout"] * (args.rule in ("independent", "learned") and bool(args.p))
    return names[0] if args.rule == "lora" and names else " + ".join([args.make_rule().title, *names])


def saved_recipe(output_dir: str) -> dict[str, Any]:
    """Return the recipe of the run in a folder, or an empty dict."""
    path = Path(output_dir, RECIPE_FILE)
    return load_recipe(path) if path.exists() else {}


def is_trained(args: TrainingArguments) -> bool:
    """Return whether the training of a run has ended."""
    return read_run(args.output_dir).get("status") in ("trained", "finished")


def is_complete(args: TrainingArguments, recipe: Mapping[str, Any]) -> bool:
    """Return whether a run has finished with all of its measurements."""
    return is_finished(args.output_dir) and not compare_recipes(saved_recipe(args.output_dir), recipe)


# Training


def train(trainer: Trainer, recipe: Mapping[str, Any]) -> None:
    """Train an adapter, save it and write the results of the training. A trained adapter is loaded instead."""
    args = trainer.args
    folder = Path(args.output_dir)
    is_main = trainer.is_world_process_zero()
    if is_trained(args):
        load_trained(trainer, folder)
        return
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        dump_recipe(recipe, folder / RECIPE_FILE)
    checkpoint = find_checkpoint(args)
    state = load_state(checkpoint) if checkpoint else TrainerState(max_steps=1)
    try:
        if state.global_step < state.max_steps:
            trainer.train(resume_from_checkpoint=checkpoint)
        else:  # transformers would take one more step
            load_trained(trainer, checkpoint)
    except NonFiniteGradientError:
        if is_main:
            write_run(folder, status="non-finite")
        raise
    trainer.save_model()
    trainer.save_state()
    record(trainer, recipe, training_results(trainer, state.global_step), task="training")
    if is_main:
        write_run(folder, status="trained", **run_facts(trainer))


def find_checkpoint(args: TrainingArguments) -> str | None:
    """Return the checkpoint of `resume_from_checkpoint`. "true" means the newest complete one, if there is one."""
    wanted = str(args.resume_from_checkpoint).lower()
    if wanted == "true":
        return newest_checkpoint(args.output_dir)
    return None if wanted in ("false", "none") else args.resume_from_checkpoint


def load_state(folder: str | Path) -> TrainerState:
    """Return the state of a training, or of its checkpoint."""
    return TrainerState.load_from_json(str(Path(folder, TRAINER_STATE_NAME)))


def load_trained(trainer: Trainer, folder: str | Path) -> None:
    """Load a trained adapter and the state of its training."""
    trainer.model.load_adapter(str(folder), "default")
    trainer.state = load_state(folder)


def training_results(trainer: Trainer, first_step: int) -> Iterator[dict[str, Any]]:
    """Yield the results of a training.

    Args:
        trainer: after the training.
        first_step: number of steps before the last interruption, whose time is estimated from the steps after it.
    """
    num_steps = trainer.state.global_step
    logged = lambda name: [log[name] for log in trainer.state.log_history if name in log]
    last = lambda name: (logged(name) or [None])[-1]
    ends = [log["step"] for log in trainer.state.log_history if "loss" in log]
    num_tokens, seconds = last("num_tokens"), last("train_runtime")
    seconds = seconds and seconds * num_steps / (num_steps - first_step)
    results = {
        "train_loss": (float(np.dot(logged("loss"), np.diff(ends, prepend=0))) / num_steps, "nats"),
        "eval_loss": (last("eval_loss"), "nats"),
        "examples": (len(trainer.train_dataset), ""),
        "trainable_parameters": (trainer.model.get_nb_trainable_parameters()[0], ""),
        "num_tokens": (num_tokens, "tokens"),
        "train_seconds": (seconds, "s"),
        "step_seconds": (seconds and seconds / num_steps, "s"),
        "tokens_per_second": (seconds and num_tokens and num_tokens / seconds, "tokens/s"),
    }
    if torch.cuda.is_available():
        results["peak_memory_gb"] = (torch.cuda.max_memory_allocated() / 1e9, "GB")
    if rewards := logged("reward"):
        tenth = max(1, len(rewards) // 10)
        results |= {"reward_first": (mean(rewards[:tenth]), ""), "reward_last": (mean(rewards[-tenth:]), "")}
    for metric, (value, unit) in results.items():
        if value is not None:
            yield {"metric": metric, "value": value, "unit": unit, "gates": "unit"}


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """Return facts of a run for `run.json`."""
    return {
        "model_revision": getattr(trainer.model.config, "_commit_hash", None),
        "dataset_fingerprint": trainer.train_dataset._fingerprint,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "num_processes": trainer.args.world_size,
    }


# After the training


def record(trainer: Trainer, recipe: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], **facts: Any) -> None:
    """Write results of a trainer's model, with the columns that they share."""
    facts |= {"method": method_title(trainer.args, recipe), "num_loops": trainer.num_loops}
    facts |= {"seed": trainer.args.seed, "step": trainer.state.global_step}
    of_base = {"method": "base model", "seed": None, "step": None}
    rows = [{**facts, **row, **(of_base if row["gates"] == "none" else {})} for row in rows]
    if trainer.is_world_process_zero():
        write_results(trainer.args.output_dir, rows)


def load_tasks(script_args: ScriptArguments, preparation: str | None, held_out: Dataset | None) -> list[Task | Group]:
    """Return the tasks to evaluate."""
    if script_args.single_loop_batches and held_out is None:
        raise UserError("`num_eval_examples` must be at least 1 if `single_loop_batches` is set.")
    tasks = []
    for name in script_args.benchmarks or ():
        if name == DEVELOPMENT:
            tasks.append(development_task(preparation, held_out))
        else:
            sources = script_args.own_benchmarks, script_args.benchmark_revisions
            tasks += load_benchmarks([name], *sources, script_args.benchmark_limit)
    return tasks


def evaluate_base(
    trainer: Trainer, script_args: ScriptArguments, recipe: Mapping[str, Any], tasks: list[Task | Group]
) -> None:
    """Evaluate the base model on the tasks."""
    with trainer.model.disable_adapter():
        record(trainer, recipe, evaluate_at(trainer, script_args, tasks))


def evaluate(
    trainer: Trainer, script_args: ScriptArguments, recipe: Mapping[str, Any], tasks: list[Task | Group]
) -> None:
    """Evaluate the trained adapter on the tasks, and on the first task at other depths and in one loop only."""
    num_loops = trainer.num_loops
    record(trainer, recipe, evaluate_at(trainer, script_args, tasks))
    for depth in script_args.depths or ():
        if depth != num_loops:
            record(trainer, recipe, evaluate_at(trainer, script_args, tasks[:1], num_loops=depth))
    for gates in torch.eye(num_loops).tolist() if script_args.single_loop_accuracy else ():
        record(trainer, recipe, evaluate_at(trainer, script_args, tasks[:1], gates=gates))


def evaluate_at(
    trainer: Trainer, script_args: ScriptArguments, tasks: list[Task | Group], **place: Any
) -> list[dict[str, Any]]:
    """Return the results of tasks.

    Args:
        trainer: with the model and the tokenizer.
        script_args: number of problems.
        tasks: from `load_tasks`.
        place: `num_loops` or `gates` [K] of the evaluation.
    """
    if not tasks:
        return []
    folder = Path(trainer.args.output_dir)
    lm = LoopedLM(trainer.model, trainer.processing_class, batch_size=script_args.benchmark_batch_size, **place)
    return evaluate_tasks(
        lm,
        tasks,
        limit=script_args.benchmark_limit,
        cache_dir=folder / "cache",
        output_dir=folder,
        allow_unsafe_code=script_args.allow_unsafe_code,
    )


def diagnose(trainer: Trainer, script_args: ScriptArguments, recipe: Mapping[str, Any]) -> None:
    """Measure the loss of held-out examples with the adapter in one loop only, and of each loop's readout."""
    size = trainer.args.per_device_eval_batch_size
    examples = list(islice(trainer.eval_dataset or (), script_args.single_loop_batches * size))
    batches = [trainer.data_collator(examples[start : start + size]) for start in range(0, len(examples), size)]
    if batches:
        rows = [*single_loop(trainer.model, batches), *readouts(trainer.model, batches)]
        record(trainer, recipe, rows, task="development")


def save(trainer: Trainer, recipe: Mapping[str, Any], merge: bool) -> None:
    """Write the model card and, if `merge` is true, the merged model. Mark the run as finished."""
    args = trainer.args
    folder = Path(args.output_dir)
    if not trainer.is_world_process_zero():
        return
    dump_recipe(recipe, folder / RECIPE_FILE)
    card = read_card_fields(folder)
    write_model_card(folder, trainer.model, repo_id=args.hub_model_id, **card)
    if merge:
        merge_and_save(trainer.model, folder / "merged", trainer.processing_class, card, args.hub_model_id)
    finish_run(trainer, own_results(folder))
    write_run(folder, **{**read_run(folder), "status": "finished"})


def own_results(folder: str | Path) -> list[dict[str, Any]]:
    """Return the results of one folder without its subfolders."""
    return [row for row in read_results(folder) if row["folder"] == str(folder)]


def print_results(folders: list[str]) -> None:
    """Print tables of the results of some folders."""
    rows = pd.DataFrame([row for folder in folders for row in own_results(Path(folder))])
    rows = rows.sort_values("method", key=lambda method: method != "base model", kind="stable")
    training = rows[rows["task"] == "training"]
    depth = training["num_loops"].iloc[0]
    print_table(f"Training at K = {depth}", training, "metric", "{:.5g}")
    scores = rows[rows["metric"].isin(["accuracy", "last_number"])]
    at_depth = scores[scores["gates"].isin(["unit", "none"]) & (scores["num_loops"] == depth)]
    columns = at_depth["task"].where(at_depth["metric"] == "accuracy", at_depth["metric"])
    print_table(f"Accuracy at the training depth K = {depth}, in %", at_depth, columns)
    accuracy = rows[rows["metric"] == "accuracy"]
    print_differences(accuracy[accuracy["gates"] == "unit"])
    for task in accuracy["task"].unique()[:1]:
        first = accuracy[accuracy["task"] == task].sort_values("num_loops", kind="stable")
        of_depth = first[first["gates"] == "unit"]
        if of_depth["num_loops"].nunique() > 1:
            columns = "K=" + of_depth["num_loops"].astype(str)
            print_table(f"Accuracy on {task} with K loops at inference, in %", of_depth, columns)
        alone = first[first["gates"].str.startswith("loop")]
        print_table(f"Accuracy on {task} with the adapter in one loop only, in %", alone, "gates")
    reductions = rows[rows["metric"] == "loss_reduction"].replace({"gates": {"unit": "all loops"}})
    print_table("Loss reduction with the adapter in one loop only, in %", reductions, "gates")
    print(f"\nEverything is in {', '.join(folders)}")


def print_differences(accuracy: pd.DataFrame) -> None:
    """Print the differences in accuracy to LoRA, or to the last method, on the same problems."""
    lines = []
    for (task, num_loops), rows in accuracy.groupby(["task", "num_loops"], sort=False):
        samples = {row["method"]: read_samples(row) for row in rows.to_dict("records")}
        baseline = "LoRA" if "LoRA" in samples else [*samples][-1]
        for method in samples.keys() - {baseline}:
            difference = compare_answers(samples[method], samples[baseline])
            lines.append([f"{method} - {baseline}", task, num_loops, str(difference)])
    if lines:
        table = pd.DataFrame(lines, columns=["", "task", "K", "points [95% interval]"]).sort_values("K")
        print(f"\nDifference in accuracy on the same {difference.n} problems\n{table.to_string(index=False)}")
        print("The intervals are over problems. They do not include other training seeds.")


def draw_results(folder: str) -> None:
    """Draw a figure of the results in and below a folder, if plotnine is installed."""
    if find_spec("plotnine"):
        from report import load_results, overview_figure, save_figure

        save_figure(overview_figure(load_results(folder)), Path(folder, "figure"))


def print_table(title: str, rows: pd.DataFrame, columns: Any, number_format: str = "{:.1f}") -> None:
    """Print values with one line for each method."""
    if len(rows):
        table = rows.pivot_table(index="method", columns=columns, values="value", sort=False)
        table = table.rename_axis(index=None, columns="method")
        print(f"\n{title}\n{table.to_string(float_format=number_format.format, na_rep='', line_width=80)}")


if __name__ == "__main__":
    run_script(main)
