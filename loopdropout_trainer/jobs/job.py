"""The job of a training script: the trainings, measurements and files of its runs.

A job trains the rule of its recipe, and the rules of `compare_with` in subfolders. Each of them is a run. Libraries that only
trainings and measurements need are imported in the functions, so that mistakes in a recipe are found within seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.costs.trainings import count_steps
from loopdropout_trainer.data import DataArguments, LeftOut
from loopdropout_trainer.errors import UserError, count, is_unreachable
from loopdropout_trainer.files import lock_folder
from loopdropout_trainer.gates.rule import check_rule_name
from loopdropout_trainer.jobs.base_results import evaluate_base
from loopdropout_trainer.jobs.checks import check_scored_loops, check_settings
from loopdropout_trainer.jobs.example_plan import count_rows, describe_left_out, describe_loaded
from loopdropout_trainer.jobs.measuring import measure
from loopdropout_trainer.jobs.plan import (
    describe_plan,
    describe_trained,
    print_next_commands,
    write_plan,
)
from loopdropout_trainer.jobs.run_training import load_trained, name_device, train_new
from loopdropout_trainer.jobs.runs import Run, describe_further
from loopdropout_trainer.jobs.starts import read_trainings
from loopdropout_trainer.jobs.training_data import (
    NotLoaded,
    TrainingExamples,
    load_examples_of_plan,
    load_training,
)
from loopdropout_trainer.results.run_files import DEVELOPMENT, write_run
from loopdropout_trainer.saving.checkpoints import STATE_FILE, find_checkpoint, find_early_stop
from loopdropout_trainer.saving.integrity import adapter_patterns
from loopdropout_trainer.saving.integrity import record as record_files
from loopdropout_trainer.saving.metadata import MERGED_FOLDER
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, ScriptArguments, names_of
from loopdropout_trainer.settings.recipe import build, override
from loopdropout_trainer.terminal import print_sentences
from loopdropout_trainer.training.sampling import check_sampling
from loopdropout_trainer.training.unused_fields import warn_of_unreached


if TYPE_CHECKING:
    from datasets import DatasetDict
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

    from loopdropout_trainer.costs.trainings import Training
    from loopdropout_trainer.data import LoadedExamples
    from loopdropout_trainer.jobs.progress import JobProgressCallback
    from loopdropout_trainer.training.config import GateConfig


logger = logging.getLogger(__name__)


class Job:
    """The runs of a training script.

    Args:
        settings: Settings that the dataclasses were made from, by `read_settings`. They are the recipe of the first run.
        script: Steps around the training.
        model: Base model.
        adapter: New adapter, or the adapter that the training starts from.
        data: Source of the examples.
        training: Settings of the training.

    Attributes:
        runs: The runs. The first one is the rule of the recipe.
        starts_over: Whether the user has set `resume_from_checkpoint` to false.
        conflict: Message of a dry run about a folder that keeps a run from starting, or None.
        trainings, plan: What the costs of the runs depend on, and the texts of the plan by title, in the process that prints.
        loaded, tokenizer: Examples and their tokenizer, from `load_data`.
        tasks: Tasks to evaluate, from `load_tasks`.
        references: Problems of `diagnose_task` with their solutions, from `load_tasks`.

    Raises:
        UserError: If settings exclude each other, or the folder of a run holds another run.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        script: ScriptArguments,
        model: ModelArguments,
        adapter: AdapterArguments,
        data: DataArguments,
        training: GateConfig,
    ) -> None:
        self.script_args, self.model_args, self.adapter_args = script, model, adapter
        self.data_args, self.args = data, training
        check_settings(script, data, training)
        is_decided = settings.get("resume_from_checkpoint") is not None
        self.starts_over = is_decided and not training.resume_from_checkpoint
        self.runs = self._make_runs(settings)
        self.conflict = self._find_conflict()
        if self.conflict is not None and not script.dry_run:
            raise UserError(self.conflict)
        # Set by the steps of the job.
        self.tasks: list[Task | Group] = []
        self.references: list[dict[str, str]] = []
        self.progress: JobProgressCallback | None = None
        self.loaded: LoadedExamples | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.trainings: list[Training] = []
        self.plan: dict[str, str] = {}
        if training.process_index == 0:
            self.trainings = read_trainings(self.runs, model, adapter)
            self.plan = describe_plan(self.runs, model, adapter, self.trainings)

    def _find_conflict(self) -> str | None:
        """Return the message about the first run that the files in its folder keep from starting, or None."""
        for run in self.runs:
            conflict = run.find_conflict()
            if conflict is not None:
                return conflict
        return None

    def _make_runs(self, settings: Mapping[str, Any]) -> list[Run]:
        """Return the run of the recipe and those of `compare_with`, with their names and the checkpoints they continue from.

        Raises:
            UserError: If the settings of a run exclude each other.
        """
        # The recipe is saved without the secret and without `resume_from_checkpoint`. Whether to resume is decided at each
        # start: if somebody repeats the run from its `recipe.yaml`, `false` there would discard the checkpoints of an
        # interrupted repetition.
        unsaved = ("hub_token", "resume_from_checkpoint")
        recipe = {name: value for name, value in settings.items() if name not in unsaved}
        runs = [Run(self.script_args, self.args, recipe, self.starts_over)]
        for rule in self.script_args.compare_with or ():
            check_rule_name("compare_with", rule)
            if rule != self.args.rule:
                runs.append(self._compared_run(rule, recipe))
        for run in runs:
            run.check()
            args = run.args
            name = args.run_name or f"seed {args.seed}, {args.output_dir}"
            args.run_name = f"{run.title}, {name}"
            args.resume_from_checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
        return runs

    def _compared_run(self, rule: str, recipe: dict) -> Run:
        """Return the run of a rule of `compare_with`, in a subfolder."""
        changes = {
            "rule": rule,
            "output_dir": f"{self.args.output_dir}/{rule}",
            "compare_with": None,
            "evaluate_base": False,  # the first run has the results
        }
        shared = {name: value for name, value in recipe.items() if name not in names_of("output")}
        own_recipe = override(shared, changes)
        resumption = {"resume_from_checkpoint": "true"} if self.args.resume_from_checkpoint else {}
        script_args, args = build([type(self.script_args), type(self.args)], {**own_recipe, **resumption})
        return Run(script_args, args, own_recipe, self.starts_over)

    def end_dry_run(self) -> None:
        """End a dry run, which has printed the plan and has written nothing.

        Raises:
            UserError: If the same command without `dry_run` would not start, because of the files in a folder.
        """
        if self.conflict is not None:
            raise UserError(self.conflict)

    # Data

    def load_data(self) -> DatasetDict | None:
        """Load the tokenizer and the examples, and print the plan with the numbers of examples and steps.

        A mistake in the data is an error before any line of the plan. Only the examples that are left out are printed then,
        with the reason, because it may be why too few are left.

        Returns:
            The examples, as `load_datasets` does, or None in a dry run that cannot reach the Hub, which has printed the rest
            of the plan.
        """
        left_out: list[LeftOut] = []
        try:
            examples = self._load_examples(left_out)
            if isinstance(examples, NotLoaded):
                self._print_plan({"examples": examples.text})
                return None
            datasets = examples.loaded.datasets
            check_sampling(self.args, datasets["train"])
            check_scored_loops(self.script_args, datasets)
        except BaseException:
            if left_out and self.args.process_index == 0:
                print(*describe_left_out(left_out), sep="\n", flush=True)
            raise
        self.loaded, self.tokenizer = examples.loaded, examples.tokenizer
        if self.plan:
            self._print_plan(describe_loaded(self.loaded, left_out, self.data_args, self.args, self.trainings))
        self._hint_at_evaluation(datasets)
        warn_of_unreached(self.args, count_steps(self.args, count_rows(self.loaded, self.args)))
        return datasets

    def _load_examples(self, left_out: list[LeftOut]) -> TrainingExamples | NotLoaded:
        """Load the tokenizer and the examples. Only a plan does without them, and a preview prints one."""
        arguments = self.model_args, self.data_args, self.args, left_out
        if self.script_args.dry_run and getattr(self.script_args, "preview", None) is None:
            return load_examples_of_plan(*arguments)
        try:
            return load_training(*arguments)
        except UserError as error:
            if is_unreachable(error):  # the plan needs no network
                self._print_plan({})
            raise

    def _print_plan(self, texts: Mapping[str, str]) -> None:
        """Print the plan with further texts, in the process that has it."""
        if self.plan:
            self.plan |= texts
            print(*write_plan(self.plan), sep="\n", flush=True)

    def _hint_at_evaluation(self, datasets: DatasetDict) -> None:
        """Log that the training is not evaluated on the held-out examples that the user has asked for, and no task is."""
        recipe, options = self.runs[0].recipe, self.script_args
        is_asked_for = recipe.get("num_eval_examples") or recipe.get("eval_files")
        is_used = DEVELOPMENT in (options.benchmarks or ()) or getattr(options, "single_loop_batches", 0)
        is_chosen = recipe.get("eval_strategy") is not None
        can_evaluate = is_asked_for and "eval" in datasets  # else all of them are left out as too long
        if can_evaluate and not is_used and not is_chosen and self.args.process_index == 0:
            logger.warning(
                "`eval_strategy` is not set, so the training is not evaluated on its %s. Set it to steps or epoch.",
                count(len(datasets["eval"]), "held-out example"),
            )

    def load_tasks(self, held_out: Any) -> None:
        """Load the tasks to evaluate and the reference solutions to score.

        Args:
            held_out: Held-out examples, which the task `development` asks, or None.
        """
        from loopdropout_trainer.diagnostics import reference_examples
        from loopdropout_trainer.evaluation import check_programs, load_benchmarks

        options = self.script_args
        sources = {
            "own_benchmarks": options.own_benchmarks,
            "revisions": options.benchmark_revisions,
            "limit": options.benchmark_limit,
            "preparation": self.runs[0].recipe.get("preparation"),
            "held_out": held_out,
        }
        self.tasks = load_benchmarks(options.benchmarks or (), **sources)
        check_programs(self.tasks, options.allow_unsafe_code)
        diagnosed = getattr(options, "diagnose_task", None)  # only `sft` has the field
        if diagnosed:
            self.references = reference_examples(load_benchmarks([diagnosed], **sources)[0])

    # Trainings

    def run(self, make_trainer: Callable[[Run], Trainer], held_out: Any = None) -> None:
        """Train, save and measure each run that is not finished. Then print the results and the next commands.

        Args:
            make_trainer: Function that returns the trainer of a run.
            held_out: Held-out examples, which the task `development` asks, or None.
        """
        self.load_tasks(held_out)
        self._say_what_is_trained()
        for run in self.unfinished():
            trainer, begins_anew = make_trainer(run), run.begins_anew
            self.train(trainer, run)
            self.save(trainer, run)
            if run.script_args.evaluate_base and not begins_anew:  # else the training has begun with it
                evaluate_base(trainer, run, self.tasks)
            measure(trainer, run, self.tasks, self.references)
            self.finish_run(trainer, run)
        if self.args.process_index == 0:
            from loopdropout_trainer.jobs.shown_results import show_results

            show_results(self.runs)
            print_next_commands(self.runs)
        self.push()

    def _say_what_is_trained(self) -> None:
        """Print which runs are not trained, because their training has ended before, and how to train them again."""
        folders = describe_trained(self.runs)
        if folders and self.args.process_index == 0:
            print_sentences(
                f"Nothing is trained in {folders}, because the training there has ended before."
                f"{describe_further(self.runs)} To train again, set another `output_dir`, or remove the "
                "folder (its results are lost)."
            )

    def unfinished(self) -> Iterator[Run]:
        """Yield the runs that are not trained, or not measured as their recipe says. Their folders are locked meanwhile."""
        for run in self.runs:
            with ExitStack() as stack:
                if self.args.process_index == 0:  # the only process that writes there
                    stack.enter_context(lock_folder(run.args.output_dir))
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
        if adapter is None:
            return model
        return load_adapter(model, adapter, is_trainable=True)

    def train(self, trainer: Trainer, run: Run) -> None:
        """Train an adapter, or load it if it is already trained, and write the recipe of the run.

        A training that begins anew has its recipe from its beginning, and the results of its base model. One that continues
        has it from its first step on, so that a command that is refused before changes nothing in the folder.
        """
        from loopdropout_trainer.jobs.progress import JobProgressCallback
        from loopdropout_trainer.jobs.recording import RunRecord

        trainer.method, trainer.recipe = run.title, run.recipe
        trainer.saved_facts |= {**self.loaded.prompts, "prompt_template": self.data_args.prompt_format}
        num_trainings = sum(not run.is_trained for run in self.runs)
        folder, record = Path(trainer.args.output_dir), RunRecord(trainer, run, self.loaded)
        if self.progress is None:
            self.progress = JobProgressCallback(num_trainings)
        self.progress.attach(trainer, run.title)
        if run.is_trained:
            load_trained(trainer, folder)
            record.write(status="trained")
            return
        if run.begins_anew:
            if trainer.is_world_process_zero():
                run.remove_checkpoints_of_other_code()
            record.write()
            if run.script_args.evaluate_base:  # in a folder that a report understands if this is killed
                evaluate_base(trainer, run, self.tasks)
        trainer.add_callback(record)
        try:
            train_new(trainer, folder)
        finally:
            self.progress.close()
        record.write()  # also if no step was left to train

    def save(self, trainer: Trainer, run: Run) -> None:
        """Save a new adapter with its training settings, its card and the state of its training.

        Add a file of an adapter here, or in `save_model` if other training programs are to write it, too.
        """
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
                stopped_early_at=find_early_stop(trainer.state),
                model_revision=trainer.looped.trained_with.get("base_revision"),
                training_data=describe_data(trainer.callback_handler.train_dataloader.dataset),
                device=name_device(trainer.args.device),
                num_processes=trainer.args.world_size,
            )

    # After the training

    def finish_run(self, trainer: Trainer, run: Run) -> None:
        """Write and push the card with the results and, if `merge` is set, the merged model. Mark the run as finished."""
        from loopdropout_trainer.jobs.progress import finish_run
        from loopdropout_trainer.saving.cards import read_card_fields, write_model_card
        from loopdropout_trainer.saving.merging import merge_and_save
        from loopdropout_trainer.saving.pushing import explain_push, find_command, name_on_card, push_run

        folder = Path(trainer.args.output_dir)
        if not trainer.is_world_process_zero():
            return
        card = read_card_fields(folder)
        write_model_card(folder, trainer.model, card)
        if run.script_args.merge:
            merge_and_save(trainer.model, folder / MERGED_FOLDER, trainer.processing_class, card)
        finish_run(trainer, card.results)
        if trainer.args.push_to_hub:  # the training has pushed the adapter without its measurements
            name, args = trainer.hub_model_id, trainer.args
            command = find_command(folder, name, args.hub_revision, args.hub_private_repo)
            retry = f"push again with `{command}`"
            explained = explain_push(name, f"The adapter is saved in {folder}.", args.hub_token, retry)
            with explained, name_on_card(folder, name, args.hub_revision):
                commit = push_run(
                    folder, name, trainer.model.peft_config, token=args.hub_token, branch=args.hub_revision
                )
            print(f"Pushed to {commit.repo_url}")
        write_run(folder)

    def push(self) -> None:
        """Push the merged model if `push_merged_to_hub` is set."""
        from loopdropout_trainer.saving.merging import push_merged_to_hub

        if self.args.process_index == 0 and self.script_args.push_merged_to_hub:
            folder, args = Path(self.args.output_dir, MERGED_FOLDER), self.args
            address = push_merged_to_hub(
                folder,
                args.hub_model_id,
                token=args.hub_token,
                private=args.hub_private_repo,
                revision=args.hub_revision,
            )
            print(f"Pushed to {address}")
