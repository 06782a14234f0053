"""The job of a training script: its plan, and the trainings, measurements and files of its runs.

A job trains the rule of its recipe, and the rules of `compare_with` in subfolders. Each of them is a run. Libraries that only
trainings and measurements need are imported in the functions, so that mistakes in a recipe are found within seconds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loopdropout_trainer.arguments import ScriptArguments, names_of
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import lock_folder, model_path
from loopdropout_trainer.memory import estimate_memory
from loopdropout_trainer.recipe import build, dump_recipe, override, recipe_dict
from loopdropout_trainer.results import (
    LENGTH,
    MEASURED,
    RECIPE_FILE,
    RESUMABLE,
    RUN_FILE,
    UNCOMPARED,
    find_difference,
    is_finished,
    read_run,
    result_columns,
    write_results,
    write_run,
)
from loopdropout_trainer.saving.checkpoints import STATE_FILE, find_checkpoint, newest_checkpoint
from loopdropout_trainer.saving.integrity import adapter_patterns, find_damage
from loopdropout_trainer.saving.integrity import record as record_files
from loopdropout_trainer.training.distributed import check_devices, shards_weights


if TYPE_CHECKING:
    from datasets import DatasetDict
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerState

    from loopdropout_trainer.progress import JobProgressCallback
    from loopdropout_trainer.training.config import GateConfig


logger = logging.getLogger(__name__)

LORA_VARIANTS = {"loraplus_lr_ratio": "LoRA+", "use_rslora": "rsLoRA", "lora_dropout": "Input dropout"}
"""Names of the methods that a setting makes of LoRA."""


class Run(NamedTuple):
    """The training of one rule, with its own arguments and recipe."""

    script_args: ScriptArguments
    args: GateConfig
    recipe: dict

    @property
    def is_trained(self) -> bool:
        """Whether the training has ended, with the length that the recipe asks for, and its adapter is undamaged."""
        is_long_enough = self.has_ended and not find_difference(self.args.output_dir, self.recipe, (), LENGTH)
        return is_long_enough and find_damage(self.args.output_dir) is None

    @property
    def has_ended(self) -> bool:
        """Whether `run.json` says that a training has ended, of the present length or a shorter one."""
        return read_run(self.args.output_dir).get("status") in ("trained", "finished")

    @property
    def is_complete(self) -> bool:
        """Whether the run has finished with all of its measurements."""
        is_measured = is_finished(self.args.output_dir) and not find_difference(self.args.output_dir, self.recipe)
        return is_measured and self.is_trained

    @property
    def title(self) -> str:
        """Name of the method in tables."""
        rule, title = self.args.rule, self.args.make_rule().title
        if rule == "lora":
            return next((name for field, name in LORA_VARIANTS.items() if self.recipe.get(field)), title)
        return title + " + Loop Dropout" * (rule in ("independent", "learned") and bool(self.args.p))

    def check(self) -> None:
        """Raise UserError if settings exclude each other, or the folder holds another run."""
        if (self.script_args.merge or self.script_args.eval_num_loops) and not self.args.make_rule().mergeable:
            raise UserError(
                f"`merge` and `eval_num_loops` must not be set for {self.args.rule!r}, whose update differs between loops."
            )
        if self.script_args.merge and shards_weights(self.args):
            raise UserError(
                "`merge` must be false under ZeRO-3 and FSDP, because no process has all weights. Merge the saved adapter by "
                "`loopdropout merge` afterwards."
            )
        folder = self.args.output_dir
        ignored = RESUMABLE if self.args.resume_from_checkpoint else UNCOMPARED | MEASURED
        if difference := find_difference(folder, self.recipe, ignored):
            longer = (
                " or add `--resume_from_checkpoint true` to continue it," if difference.split("`")[1] in LENGTH else ""
            )
            raise UserError(
                f"{folder} holds another run: {difference}. Set another `output_dir`,{longer} or remove the folder."
            )
        if self.has_ended and (damage := find_damage(folder)):
            if not self.args.resume_from_checkpoint:
                raise UserError(
                    f"{folder} {damage}. Add `--resume_from_checkpoint true` to continue from its newest checkpoint, or "
                    "remove the folder."
                )
            logger.warning("The adapter in %s is not used, because the folder %s.", folder, damage)


class Job:
    """The runs of a training script.

    Args:
        arguments: Arguments of the script, the model, the adapter, the data and the training, and others.

    Attributes:
        runs: The runs. The first one is the rule of the recipe.
        tasks: Tasks to evaluate, from `load_tasks`.
        references: Problems of `diagnose_task` with their solutions, from `load_tasks`.

    Raises:
        UserError: If settings exclude each other, or the folder of a run holds another run.
    """

    def __init__(self, *arguments: Any) -> None:
        self.script_args, self.model_args, self.adapter_args, self.data_args, self.args, *_ = arguments
        if self.script_args.push_merged_to_hub and not self.args.hub_model_id:
            raise UserError("`hub_model_id` must be set if `push_merged_to_hub` is set.")
        check_trackers(self.args.report_to)
        check_devices(self.args)
        recipe = recipe_dict(*arguments)
        rules = [rule for rule in self.script_args.compare_with or () if rule != self.args.rule]
        self.runs = [Run(self.script_args, self.args, recipe), *(self._compared_run(rule, recipe) for rule in rules)]
        for run in self.runs:
            run.check()
            run.args.run_name = f"{run.title}, {run.args.run_name or f'seed {run.args.seed}, {run.args.output_dir}'}"
            run.args.resume_from_checkpoint = find_checkpoint(run.args.resume_from_checkpoint, run.args.output_dir)
        self.tasks: list[Task | Group] = []
        self.references: list[dict[str, str]] = []
        self.progress: JobProgressCallback | None = None
        if self.args.process_index == 0:
            self.print_plan()

    def _compared_run(self, rule: str, recipe: dict) -> Run:
        """Return the run of a rule of `compare_with`, in a subfolder."""
        changes = {"rule": rule, "output_dir": f"{self.args.output_dir}/{rule}", "compare_with": None}
        changes |= {"evaluate_base": False}  # whose results the first run has
        if self.args.resume_from_checkpoint:
            changes["resume_from_checkpoint"] = "true"
        own_recipe = override({name: recipe[name] for name in recipe if name not in names_of("output")}, changes)
        return Run(*build([type(self.script_args), type(self.args)], own_recipe), own_recipe)

    def print_plan(self) -> None:
        """Print the model, the rules, the data, the training, and the checkpoint that it uses or could use."""
        args, recipe, runs = self.args, self.runs[0].recipe, self.runs
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
            "memory": self.describe_memory(),
            "trained": ", ".join(run.args.output_dir for run in runs if run.is_trained),
            "continues": "" if runs[0].is_trained else args.resume_from_checkpoint,
            "not used": unused and f"{unused}. Add `--resume_from_checkpoint true` to continue from there.",
        }
        print("\n".join(f"{name:<12}{text}" for name, text in plan.items() if text), flush=True)

    def describe_memory(self) -> str:
        """Return the estimated GPU memory of the training, or an empty text for a model whose shapes are not known."""
        from transformers import PreTrainedConfig

        args, model, adapter = self.args, self.model_args, self.adapter_args.adapter_name_or_path
        if not (max_length := getattr(args, "max_length", None)):  # GRPO has none
            return ""
        try:
            name = model_path(model.model_name_or_path)
            config, _ = PreTrainedConfig.get_config_dict(name, revision=model.model_revision)
            sizes = estimate_memory(
                config,
                args.per_device_train_batch_size * max_length,
                num_loops=model.num_loops,
                rank=adapter_rank(adapter) if adapter else self.adapter_args.lora_r,
                checkpointing=args.gradient_checkpointing,
                four_bit="load_in_4bit" in str(args.model_init_kwargs),
            )
        except (OSError, KeyError, UserError):  # without a network, or with other fields
            return ""
        total = sizes.pop("total", None)
        parts = ", ".join(f"{size:.1f} {part}" for part, size in sizes.items())
        return total and f"about {total:.1f} GB on a GPU in bfloat16 ({parts})"

    # Data

    def print_examples(self, dataset: DatasetDict) -> None:
        """Print the numbers of examples and steps."""
        args, num_examples = self.args, len(dataset["train"])
        steps = math.ceil(args.num_train_epochs * math.ceil(num_examples / args.examples_per_step))
        if args.process_index == 0:
            print(
                f"{'examples':<12}{num_examples:,}, {len(dataset.get('eval') or ()):,} held out, "
                f"{args.max_steps if args.max_steps > 0 else steps:,} optimizer steps",
                flush=True,
            )

    def load_tasks(self, held_out: Any) -> None:
        """Load the tasks to evaluate and the reference solutions to score.

        Args:
            held_out: Held-out examples, which the task `development` asks, or None.
        """
        from loopdropout_trainer.diagnostics import reference_examples
        from loopdropout_trainer.evaluation import check_programs, load_benchmarks

        options = self.script_args
        sources = (
            options.own_benchmarks,
            options.benchmark_revisions,
            options.benchmark_limit,
            self.runs[0].recipe.get("preparation"),
            held_out,
        )
        self.tasks = load_benchmarks(options.benchmarks or (), *sources)
        check_programs(self.tasks, options.allow_unsafe_code)
        if name := getattr(options, "diagnose_task", None):
            self.references = reference_examples(load_benchmarks([name], *sources)[0])

    # Trainings

    def unfinished(self) -> Iterator[Run]:
        """Yield the runs that are not trained, or not measured as their recipe says. Their folders are locked meanwhile."""
        for run in self.runs:
            with lock_folder(run.args.output_dir) if self.args.process_index == 0 else nullcontext():
                if not run.is_complete:
                    yield run

    def load_model(self, run: Run) -> PreTrainedModel | PeftModel:
        """Load the base model of a run, with the adapter that the training starts from, if there is one.

        `model_init_kwargs` of the run override the settings of the model.
        """
        from loopdropout_trainer.saving.loading import load_adapter, load_model

        load_kwargs = {**self.model_args.load_kwargs, **(run.args.model_init_kwargs or {})}
        model = load_model(self.model_args.model_name_or_path, **load_kwargs)
        adapter = self.adapter_args.adapter_name_or_path
        return model if adapter is None else load_adapter(model, adapter, is_trainable=True)

    def train(self, trainer: Trainer, run: Run) -> None:
        """Evaluate the base model, train an adapter, and write the results of the training.

        An adapter that is already trained is loaded instead.
        """
        import torch

        from loopdropout_trainer.progress import JobProgressCallback
        from loopdropout_trainer.training.stopping import NonFiniteGradientError

        trainer.saved_facts |= {"method": run.title, "prompt_template": self.data_args.prompt_format}
        if run.script_args.evaluate_base:
            with trainer.model.disable_adapter():
                self._evaluate(trainer, run, self.tasks)
        folder = Path(trainer.args.output_dir)
        if self.progress is None:
            self.progress = JobProgressCallback(sum(not run.is_trained for run in self.runs))
        self.progress.attach(trainer, run.title)
        is_trained = run.is_trained
        if trainer.is_world_process_zero():
            if (folder / RUN_FILE).exists():  # it is measured further, or made longer
                write_run(folder, status="trained" if is_trained else "stopped")
            dump_recipe(run.recipe, folder / RECIPE_FILE)
        if is_trained:
            load_trained(trainer, folder)
            return
        trainer.method = run.title
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # of the run before
        try:
            trainer.train(trainer.args.resume_from_checkpoint)
        except NonFiniteGradientError:
            if trainer.is_world_process_zero():
                write_run(folder, status="non-finite")
            raise

    def save(self, trainer: Trainer, run: Run) -> None:
        """Save a new adapter with its training settings, its card and the state of its training.

        Add a file of an adapter here, or in `save_model` if other training programs are to write it, too.
        """
        import torch

        from loopdropout_trainer.training.resuming import describe_data

        if run.is_trained:
            return
        trainer.save_model()
        trainer.save_state()
        if trainer.is_world_process_zero():
            # A finished run is measured further with its adapter and the state of its training.
            record_files(trainer.args.output_dir, [*adapter_patterns(trainer.model.peft_config), STATE_FILE])
            write_run(
                trainer.args.output_dir,
                status="trained",
                model_revision=trainer.looped.trained_with.get("base_revision"),
                training_data=describe_data(trainer.callback_handler.train_dataloader.dataset),
                device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                num_processes=trainer.args.world_size,
            )

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer of the base model, with the recipe's chat template and end token."""
        from loopdropout_trainer.saving.source import MODELS, find_source
        from loopdropout_trainer.tokenizers import load_tokenizer

        model_args = self.model_args
        source = find_source(model_args.model_name_or_path, revision=model_args.model_revision, accept=MODELS)
        end_token = getattr(self.args, "eos_token", None)
        return load_tokenizer(*source.tokenizer, model_args.chat_template, end_token)

    # After the training

    def measure(self, trainer: Trainer, run: Run) -> None:
        """Measure a trained adapter as the recipe says, and write the results."""
        import torch
        from torch.utils.data import DataLoader

        from loopdropout_trainer.diagnostics import label_batches, readouts, single_loop
        from loopdropout_trainer.evaluation import DEVELOPMENT

        # The loss of reference solutions and held-out examples in one loop only, and of each loop's readout
        diagnosed, batch_size = {}, trainer.args.per_device_eval_batch_size
        if self.references:
            diagnosed[run.script_args.diagnose_task] = label_batches(
                self.references, trainer.processing_class, batch_size
            )
        if num_batches := getattr(run.script_args, "single_loop_batches", 0):
            loader = DataLoader(trainer.eval_dataset, batch_size, collate_fn=trainer.data_collator)
            diagnosed[DEVELOPMENT] = [*islice(loader, num_batches)]
        for task, batches in diagnosed.items():
            record(trainer, run, [*single_loop(trainer.model, batches), *readouts(trainer.model, batches)], task=task)

        # All tasks, and the first one at other depths and in one loop only. They come last, because a sweep chooses as soon as
        # it finds an accuracy, and breaks ties by the loss.
        self._evaluate(trainer, run, self.tasks)
        for depth in run.script_args.eval_num_loops or ():
            if depth != trainer.num_loops:
                self._evaluate(trainer, run, self.tasks[:1], num_loops=depth)
        if run.script_args.single_loop_accuracy:
            for gates in torch.eye(trainer.num_loops).tolist():
                self._evaluate(trainer, run, self.tasks[:1], gates=gates)

    def _evaluate(self, trainer: Trainer, run: Run, tasks: list[Task | Group], **place: Any) -> None:
        """Write the results of tasks. `place`: `num_loops` or `gates` [K] of the evaluation."""
        from loopdropout_trainer.evaluation import LoopedLM, evaluate_tasks

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

    def finish_run(self, trainer: Trainer, run: Run) -> None:
        """Write the card with the results and, if `merge` is set, the merged model. Mark the run as finished."""
        from loopdropout_trainer.progress import finish_run
        from loopdropout_trainer.saving.cards import read_card_fields, write_model_card
        from loopdropout_trainer.saving.merging import merge_and_save

        folder, hub_model_id = Path(trainer.args.output_dir), trainer.args.hub_model_id
        if not trainer.is_world_process_zero():
            return
        card = read_card_fields(folder)
        write_model_card(folder, trainer.model, repo_id=hub_model_id, **card)
        if run.script_args.merge:
            merge_and_save(trainer.model, folder / "merged", trainer.processing_class, card, hub_model_id)
        finish_run(trainer, card["results"])
        write_run(folder)

    @property
    def folders(self) -> list[str]:
        """Folders of the runs."""
        return [run.args.output_dir for run in self.runs]

    def push(self) -> None:
        """Push the merged model if `push_merged_to_hub` is set."""
        from loopdropout_trainer.saving.merging import push_merged_to_hub

        if self.args.process_index == 0 and self.script_args.push_merged_to_hub:
            folder = Path(self.args.output_dir, "merged")
            print(f"Pushed to {push_merged_to_hub(folder, self.args.hub_model_id, token=self.args.hub_token)}")


def check_trackers(names: list[str]) -> None:
    """Raise UserError for a tracker that is unknown or not installed."""
    if not names:
        return
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        for tracker in get_reporting_integration_callbacks(names):
            tracker()
    except (ValueError, RuntimeError) as error:
        raise UserError(f"`report_to`: {error}") from error


def adapter_rank(adapter: str) -> int:
    """Return the rank of a saved adapter."""
    from loopdropout_trainer.saving.source import find_source, read_adapter_config

    return read_adapter_config(find_source(adapter, accept=("adapter",), what="adapter").folder).r


def load_state(folder: str | Path) -> TrainerState:
    """Return the state of a training, or of its checkpoint."""
    from transformers import TrainerState

    return TrainerState.load_from_json(str(Path(folder, STATE_FILE)))


def load_trained(trainer: Trainer, folder: str | Path) -> None:
    """Load a trained adapter and the state of its training."""
    from loopdropout_trainer.saving.source import find_source

    trainer.model.load_adapter(str(folder), "default")
    trainer.state = load_state(folder)
    trainer.training_id = find_source(folder).training_id


def record(trainer: Trainer, run: Run, rows: Iterable[dict], **facts: Any) -> None:
    """Write results of a trainer's model, with the columns that they share."""
    facts |= result_columns(trainer, run.title)
    of_base = {"method": "base model", "seed": None, "step": None, "training": None}
    rows = [{**facts, **row, **(of_base if row["gates"] == "none" else {})} for row in rows]
    if trainer.is_world_process_zero():
        write_results(trainer.args.output_dir, rows, facts["step"])
