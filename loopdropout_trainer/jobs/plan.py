"""The plan of a training script: the lines that it prints before it trains, and the commands for afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loopdropout_trainer.costs.evaluations import add_answers, count_answers, count_own_problems
from loopdropout_trainer.costs.paper import describe_paper_costs
from loopdropout_trainer.costs.trainings import (
    Training,
    count_step_rows,
    count_steps,
    describe_costs,
    name_epochs,
    name_trainings,
)
from loopdropout_trainer.data.arguments import has_held_out
from loopdropout_trainer.data.sources import describe_data
from loopdropout_trainer.errors import count, docs_page, join_command
from loopdropout_trainer.jobs.plan_settings import describe_depths, describe_other_settings, describe_rule_fields
from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.jobs.starts import describe_gates
from loopdropout_trainer.results.run_files import DEVELOPMENT
from loopdropout_trainer.saving.pushing import LOG_IN, find_repository, has_token
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, ScriptArguments
from loopdropout_trainer.terminal import titled
from loopdropout_trainer.training.evaluation_fields import word_of


if TYPE_CHECKING:
    from loopdropout_trainer.training.config import GateConfig


def describe_plan(
    runs: Sequence[Run], model: ModelArguments, adapter: AdapterArguments, trainings: Sequence[Training]
) -> dict[str, str]:
    """Return the texts about the model, the trainings, the data, the costs, the steps afterwards, and the checkpoint in use.

    Texts of titles that are left out are "". `describe_loaded` tells those that the data decide.

    Args:
        runs: Runs of the job. The first one is the rule of the recipe.
        model: Base model.
        adapter: New adapter, or the adapter that the training starts from.
        trainings: The runs, from `read_trainings`.
    """
    args, recipe = runs[0].args, runs[0].recipe
    return {
        "model": describe_model(model, trainings[0].depth),
        "depth": describe_depths(trainings[0]),
        "trainings": "\n".join(describe_training(run) for run in runs),
        "adapter": describe_adapter(trainings[0], adapter),
        "data": describe_data(recipe),
        "examples": "",
        "left out": "",
        "gates": describe_all_gates(trainings) if runs[0].script_args.dry_run else "",  # else a training logs it
        "training": describe_settings(args, recipe.get("num_train_examples")),  # exact after the data are loaded
        "settings": describe_other_settings(trainings[0]),
        "device": describe_device(runs[0]),
        **describe_costs([(training, 1) for training in trainings], name_trainings(len(runs))),
        "paper": describe_paper_costs([(training, 1) for training in trainings]),
        "samples": describe_samples(runs[0]),
        "afterwards": describe_steps_afterwards(runs[0]),
        "answers": _describe_answers(runs, trainings[0].depth),
        "trained": describe_trained(runs),
        "continues": "" if runs[0].is_trained else args.resume_from_checkpoint,
    }


def write_plan(plan: Mapping[str, str]) -> list[str]:
    """Return the lines of a plan, without titles that have no text."""
    return [titled(title, text.splitlines()) for title, text in plan.items() if text]


def describe_model(model: ModelArguments, depth: int | None) -> str:
    """Return the name of a model, its revision and the recurrence depth K, which may not be known."""
    name = model.model_name_or_path
    if model.model_revision != "main":
        name += f" {model.model_revision}"
    if not depth:
        return f"{name}, at its own depth K"
    return f"{name}, K = {depth} loops"


def describe_training(run: Run) -> str:
    """Return the method of a run with the fields of its rule, and the folder of its adapter."""
    return f"{run.title}{describe_rule_fields(run.args.make_rule())} in {run.args.output_dir}"


def describe_adapter(training: Training, adapter: AdapterArguments) -> str:
    """Return the rank, the scale and the number of trained parameters of an adapter, as far as they are known."""
    rank, sizes = training.rank, training.sizes
    if adapter.adapter_name_or_path is not None:
        text = f"starts from {adapter.adapter_name_or_path}"
        if rank is not None:
            text += f", rank {rank}"
        return f"{text}{_describe_parameters(training)}"
    from loopdropout_trainer.lora.compatibility import describe_high_rank

    if adapter.lora_target_modules:
        modules = ", ".join(adapter.lora_target_modules)
    else:
        modules = "all linear projections of the looped layers"
    text = f"new, rank {rank}, alpha {adapter.lora_alpha}, on {modules}"
    if sizes.num_parameters is None:  # then the smallest projection is not known either
        return text
    text += _describe_parameters(training)
    return f"{text}\n{describe_high_rank([rank], sizes.smallest_projection)}".rstrip()


def _describe_parameters(training: Training) -> str:
    """Return the number of parameters of an adapter, if it is known. The kinds of some rules add others to it."""
    from loopdropout_trainer.lora import ADAPTER_KINDS

    number = training.sizes.num_parameters
    if number is None or ADAPTER_KINDS[training.args.make_rule().lora_kind].adds_parameters():
        return ""
    return f", {number:,} parameters"


def describe_all_gates(trainings: Sequence[Training]) -> str:
    """Return the warnings about gates of users' rules, each once."""
    return "\n".join(dict.fromkeys(filter(None, map(describe_gates, trainings))))


def describe_step(args: GateConfig, num_rows: int | None = None) -> str:
    """Return the number of rows of an optimizer step: its examples, packed rows, or prompts and their completions.

    Args:
        args: Settings of the training.
        num_rows: Number of rows of the data, or None before they are loaded.
    """
    if args.command == "grpo":
        num_prompts = args.examples_per_step // args.num_generations
        return f"{count(num_prompts, 'prompt')} with {count(args.num_generations, 'completion')} each per step"
    row = "packed row" if getattr(args, "packing", False) else "example"
    return f"{count(count_step_rows(args, num_rows), row)} per step"


def describe_settings(args: GateConfig, num_examples: int | None = None, num_rows: int | None = None) -> str:
    """Return the length of a training on at most `num_examples`, its batch, learning rate and seed.

    Args:
        args: Settings of the training.
        num_examples: Largest number of examples that the recipe names, or None.
        num_rows: Number of rows of the data, or None before they are loaded.
    """
    parts = [
        describe_length(args, num_examples),
        describe_step(args, num_rows),
        f"learning rate {args.learning_rate:g}",
        f"seed {args.seed}",
    ]
    return ", ".join([*parts, *describe_early_stop(args)])


def describe_early_stop(args: GateConfig) -> list[str]:
    """Return the part of a line about the early stop of a training, if it has one."""
    if args.early_stopping_patience is None:
        return []
    return [f"early stop after {count(args.early_stopping_patience, 'evaluation')} without a better one"]


def describe_length(args: GateConfig, num_examples: int | None = None) -> str:
    """Return the length of a training, with its steps if its largest number of examples is known before they are loaded."""
    if args.max_steps > 0:
        return count(args.max_steps, "step")
    epochs = name_epochs(args.num_train_epochs)
    num_steps = count_steps(args, num_examples)
    if num_steps is None:
        return epochs
    return f"{epochs} (at most {count(num_steps, 'step')})"


def describe_device(run: Run) -> str:
    """Return the device of a training, such as "the CPU, no GPU found"."""
    import torch

    args = run.args
    if run.recipe.get("use_cpu"):  # transformers sets the field of `args` also if it finds no GPU
        return "the CPU, as `use_cpu` says"
    if args.device.type == "cpu":
        return "the CPU, no GPU found"
    name = args.device.type
    if name == "cuda":
        name = torch.cuda.get_device_name()
    if args.world_size == 1:
        return name
    return f"{args.world_size} processes, the first one on {name}"


def describe_samples(run: Run) -> str:
    """Return which completions are printed during the training, or "" without held-out examples or for DPO and GRPO."""
    number = getattr(run.script_args, "num_sample_completions", 0)  # only `sft` has the field
    if not number or not has_held_out(run.recipe):
        return ""
    when = "after the last step"
    if word_of(run.args.eval_strategy) != "no":
        when = f"at each evaluation and {when}"
    return f"completions of {count(number, 'held-out prompt')} {when} (`num_sample_completions`)"


def describe_steps_afterwards(run: Run) -> str:
    """Return the steps that follow the training, one in a line."""
    options, steps = run.script_args, describe_measurements(run.script_args)
    if options.merge:
        steps.append("merge")
    if run.args.push_to_hub or options.push_merged_to_hub:
        steps.append(describe_push(run.args))
    return "\n".join(steps) or "nothing is evaluated, because `benchmarks` is not set"


def _describe_answers(runs: Sequence[Run], depth: int | None) -> str:
    """Return the lines about the problems and the generated tokens of all evaluations, or "" without any."""
    return add_answers(count_answers(run.script_args, run.recipe, depth) for run in runs).describe()


def describe_push(args: GateConfig) -> str:
    """Return the repository that is pushed to, its branch and its visibility if they are set, and a missing token."""
    text = f"push to {find_repository(args)}"
    if args.hub_model_id is None:
        text += ", the name of `output_dir`, because `hub_model_id` is not set"
    if args.hub_revision is not None:
        text += f", to the branch {args.hub_revision}"
    if args.hub_private_repo is not None:
        visibility = "private" if args.hub_private_repo else "public"
        text += f", {visibility} if the repository is new"
    if not has_token(args.hub_token):
        text += f" (no token was found: {LOG_IN[0].lower()}{LOG_IN[1:]})"
    return text


def describe_measurements(options: ScriptArguments) -> list[str]:
    """Return what is measured after a training."""
    steps = []
    if options.benchmarks:
        numbers = count_own_problems(options)
        names = []
        for name in options.benchmarks:
            names.append(f"{name} ({count(numbers[name], 'problem')})" if name in numbers else name)
        step = f"evaluate {', '.join(names)}"
        if options.benchmark_limit is not None and not {*options.benchmarks} <= {*numbers}:
            step += f", at most {options.benchmark_limit:,} problems each"
        steps.append(step)
    if options.eval_num_loops:
        steps.append(f"evaluate {options.benchmarks[0]} at K = {', '.join(map(str, options.eval_num_loops))}")
    if options.benchmarks and options.evaluate_base:
        step = "evaluate the base model on the same problems"
        if options.eval_num_loops:
            step += f", also at K = {', '.join(map(str, options.eval_num_loops))}"
        steps.append(step)
    if options.single_loop_accuracy:
        steps.append(f"evaluate {options.benchmarks[0]} with the adapter in one loop only")
    if getattr(options, "diagnose_task", None):
        steps.append(f"measure losses on {options.diagnose_task}")
    if getattr(options, "single_loop_batches", 0):
        steps.append(f"measure losses on held-out examples (`single_loop_batches`: {options.single_loop_batches})")
    return steps


def describe_trained(runs: Sequence[Run]) -> str:
    """Return the folders of the runs that are trained already."""
    return ", ".join(run.args.output_dir for run in runs if run.is_trained and run.find_other_recipe() is None)


def print_next_commands(runs: Sequence[Run]) -> None:
    """Print commands that use the adapter of the first run."""
    folder, rule = runs[0].args.output_dir, runs[0].args.make_rule()
    commands = {"chat": "ask it"}
    benchmarks = {*(runs[0].script_args.benchmarks or ())} - {DEVELOPMENT}  # which exists in trainings only
    if benchmarks:  # without one, no task of the package is known to fit the data
        commands["evaluate"] = "measure its tasks again, or others"
    else:
        commands["report"] = (
            f"tables of losses and costs (accuracies: add `own_benchmarks`, {docs_page('evaluation')})"
        )
    commands["serve"] = "answer over HTTP"
    if rule.mergeable and not runs[0].script_args.merge:
        commands["merge"] = "make a model of it"
    if not runs[0].args.push_to_hub:
        commands["push"] = "share it on the Hub"
    print("\nNext:")
    for command, purpose in commands.items():
        words = [command, folder]
        if command == "push":
            words += ["--hub_model_id", "USER/NAME"]
        print(f"  {join_command(*words)}   # {purpose}")
