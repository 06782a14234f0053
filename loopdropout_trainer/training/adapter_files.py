"""The files that a trainer writes and pushes: checkpoints, its adapter with settings and card, and its results."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from torch import nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy
from transformers.utils import PushInProgress, logging

from loopdropout_trainer.arguments import find_unsaved_fields
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.lora import check_present, find_active_adapter
from loopdropout_trainer.recipe import dump_recipe
from loopdropout_trainer.results import RECIPE_FILE, read_used_imports, write_results
from loopdropout_trainer.saving.cards import CARD_FILE, read_card_fields, read_card_of, write_model_card
from loopdropout_trainer.saving.checkpoints import EARLY_STOPPING, delete_older_checkpoints
from loopdropout_trainer.saving.integrity import adapter_patterns, begin, find_damage, record, saving
from loopdropout_trainer.saving.loading import save_adapter_metadata
from loopdropout_trainer.saving.pushing import (
    create_branch,
    explain_push,
    find_repository,
    keep_card,
    name_on_card,
    push_run,
    upload,
)
from loopdropout_trainer.saving.saved_adapter import adapter_folder
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.training.start import describe_training
from loopdropout_trainer.training.stopping import check_finite
from loopdropout_trainer.training_results import (
    mean_loss,
    result_columns,
    saved_step,
    training_recipe,
    training_results,
)


logger = logging.get_logger(__name__)


class AdapterFilesMixin:
    """Saving and logging of a TRL trainer with a gated adapter. `AdapterTrainingMixin` lists its attributes."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model has trained on, which TRL counts and logs under this name."""
        return self._total_train_tokens

    @num_tokens.setter
    def num_tokens(self, num_tokens: int) -> None:
        self._total_train_tokens = num_tokens

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log values, in training with the means of `step_metrics`. The loss at the end is the mean over all steps.

        transformers' loss at the end leaves out the steps before an interruption, so it would differ from the tables.
        """
        if self.model.training:
            for name, values in self.step_metrics.items():
                logs[name] = sum(values) / len(values)
            self.step_metrics.clear()
        if "train_loss" in logs and "train_runtime" in logs:  # the log at the end
            logs["train_loss"] = mean_loss(self.state.log_history)
        super().log(logs, start_time)

    def record_training(self, first_step: int) -> None:
        """Write the settings and results of a training and its state with the logged losses, for reports, cards and plots.

        Args:
            first_step: Step that the training was continued from, or 0.
        """
        self.save_state()
        rows = training_results(self, first_step)
        if self.is_world_process_zero():
            recipe, comments = self.recipe, []
            if recipe is None:
                recipe = training_recipe(self)
                self._warn_of_unsaved_fields(recipe)
                earlier = self.start.get("earlier_trainings")
                comments = [f"The adapter was trained before: {'; '.join(earlier)}."] if earlier else []
            recipe = {"command": self.args.command, **recipe}
            folder = self.args.output_dir
            dump_recipe(recipe, Path(folder, RECIPE_FILE), comments, read_used_imports(folder))
            columns = result_columns(self, self.method or self.rule.title)
            rows = [{"task": "training", **columns, **row} for row in rows]
            write_results(self.args.output_dir, rows, columns["step"], columns["training"])

    def _warn_of_unsaved_fields(self, recipe: Mapping[str, Any]) -> None:
        """Warn if the recipe of a training in Python would make another adapter."""
        if "adapter_name_or_path" in recipe:  # which has these fields
            return
        names = find_unsaved_fields(self.model.peft_config[self.model.active_adapters[0]])
        if names:
            logger.warning(
                f"{RECIPE_FILE} has no {', '.join(f'`{name}`' for name in names)} of the LoraConfig, because recipes have no "
                "such fields. Repeat this training in Python."
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the adapter with its training settings and its card. Weights that are not finite are not saved."""
        check_present(self.model)
        check_finite(self.model, self.state.global_step, self.args)
        folder = output_dir or self.args.output_dir
        is_checkpoint = _internal_call and output_dir is not None
        if not self.args.should_save:
            super().save_model(output_dir, _internal_call)
        elif is_checkpoint:  # `_save_checkpoint` marks the whole folder
            self._save_adapter(output_dir, _internal_call)
            card = Path(self.args.output_dir, CARD_FILE)
            if card.is_file():  # TRL has called `create_model_card` for this checkpoint
                shutil.copy2(card, output_dir)
        else:
            self._warn_of_replacing(folder)
            with saving(folder, adapter_patterns(self.model.peft_config)):
                self._save_adapter(output_dir, _internal_call)
            if not _internal_call:
                repository = {}
                if self.args.push_to_hub:  # which `_save_adapter` has done
                    repository = {"repo_id": self.hub_model_id, "revision": self.args.hub_revision}
                write_model_card(folder, self.model, **repository, **read_card_of(self.model))

    def _warn_of_replacing(self, folder: str) -> None:
        """Warn if an adapter that nobody has trained replaces a trained one in a folder."""
        if self.looped.trained_with.get("training_id") is not None:
            return
        try:
            saved = find_source(folder).metadata
        except UserError:  # a folder without a usable adapter
            return
        if saved.get("training_id") is not None:
            logger.warning(
                f"{folder} has an adapter from {describe_training(saved)}. `save_model` replaces it by one that no `train()` "
                "has trained. To keep a trained adapter, save into another folder."
            )

    def _save_adapter(self, output_dir: str | None, _internal_call: bool) -> None:
        folder = output_dir or self.args.output_dir
        is_checkpoint = _internal_call and output_dir is not None
        step = self.state.global_step if is_checkpoint else saved_step(self)
        trained_last = self.looped.trained_with.get("training_id") == self.training_id  # and no other trainer since
        if trained_last:
            self.looped.trained_with = {**self.looped.trained_with, "step": step}
        settings = self.looped.trained_with
        save_adapter_metadata(self.model, folder, **settings)  # first: without it, an adapter runs at another depth
        super().save_model(output_dir, _internal_call)
        save_adapter_metadata(self.model, folder, **settings)  # again, with the new adapter_config.json

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, and delete older ones only after all of its files have reached the disk."""
        args = self.args
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if args.should_save:
            if folder.is_dir() and not folder.is_symlink() and find_damage(folder):
                shutil.rmtree(folder)  # whose other files would count as files of the new checkpoint
            begin(folder)
        self.accelerator.wait_for_everyone()  # before another process writes into the folder
        # transformers deletes older checkpoints as soon as it has written this one, which may not have reached the disk then.
        limit = args.save_total_limit
        args.save_total_limit = None
        card = Path(args.output_dir, CARD_FILE)
        had_card = card.is_file()
        try:
            super()._save_checkpoint(model, trial)
        finally:
            args.save_total_limit = limit
        if args.should_save and not (had_card or args.push_to_hub):
            # TRL wrote it for the checkpoint. Its code loads an adapter next to it, which this folder does not have yet.
            card.unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()  # every process writes its own state of the random numbers
        if args.should_save:
            record(folder)
            delete_older_checkpoints(folder, limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()  # a process that ends earlier would make the launcher end the first one

    def _load_best_model(self) -> None:
        """Load the best checkpoint. transformers does not find an adapter there that is not named "default"."""
        adapter = find_active_adapter(self.model)
        if adapter == "default" or self.is_deepspeed_enabled or self.is_fsdp_enabled:  # which have files of their own
            super()._load_best_model()
        else:
            self.model.load_adapter(str(adapter_folder(self.state.best_model_checkpoint, adapter)), adapter)

    def _load_callback_state(self) -> None:
        """Restore the user's callbacks, if `restore_callback_states_from_checkpoint` is set.

        Callbacks of this package restore themselves. transformers would replace them by new ones, which would not know the
        trainer, and would come after the callback that resets the gates.
        """
        saved = self.state.stateful_callbacks
        own = {type(callback).__name__ for callback in (*self.step_callbacks, self.resumption)} | {EARLY_STOPPING}
        self.state.stateful_callbacks = {name: state for name, state in saved.items() if name not in own}
        if not self.args.restore_callback_states_from_checkpoint:
            self._warn_of_new_callbacks()
        super()._load_callback_state()
        self.state.stateful_callbacks = saved

    def _warn_of_new_callbacks(self) -> None:
        """Warn if callbacks of the user have a state in the checkpoint, but begin again."""
        for callback in self.callback_handler.callbacks:
            name = type(callback).__name__
            if isinstance(callback, ExportableState) and name in self.state.stateful_callbacks:
                logger.warning(
                    f"{name} begins again, because `restore_callback_states_from_checkpoint` is false, so the training may "
                    "end at another step."
                )

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        *,
        revision: str | None = None,
    ) -> None:
        """Write the card of the adapter, which names its base model and its rule, in place of TRL's.

        Args:
            model_name: Title of the card, as in TRL. Default: `hub_model_id`, or the name of `output_dir`.
            dataset_name: Name of the training data. Default: as the training knows it.
            tags: Further tags of the card.
            revision: Branch in the commands of the card. Default: `hub_revision`.
        """
        if self.is_world_process_zero():
            repo_id = self.hub_model_id or self.args.hub_model_id  # the first one, of a push, has its user
            repository = {"repo_id": repo_id, "revision": revision or self.args.hub_revision}
            self._write_card(model_name, dataset_name, tags, **repository)

    def _write_card(
        self,
        title: str | None = None,
        dataset: str | None = None,
        tags: str | list[str] | None = None,
        **repository: str | None,
    ) -> None:
        """Write the card. `repository`: arguments `repo_id` and `revision` of `write_model_card`. Others are as in TRL."""
        if self.recipe is None:  # the folder may have the recipe and the results of other weights
            card = read_card_of(self.model)
        else:  # a command has written its recipe before the training, and before the end there may be other results
            weights = {"training": self.training_id, "step": saved_step(self)}
            card = read_card_fields(self.args.output_dir, weights)
        if dataset is not None:
            card |= {"dataset": dataset, "data_description": None}
        write_model_card(self.args.output_dir, self.model, title=title, tags=tags or (), **repository, **card)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, and the branch that `hub_revision` names. transformers creates no branch."""
        token = token or self.args.hub_token
        # transformers calls it in `__init__` for `push_to_hub`, before it makes the state of the training.
        saved, fix = "No file was uploaded.", {}
        if not hasattr(self, "state"):
            later = f"`loopdropout push {self.args.output_dir} --hub_model_id {self._hub_id}`"
            saved = "Nothing was trained."
            fix = {
                "retry": "start again",
                "otherwise": f", or train without `push_to_hub` and push later with {later}",
            }
        with explain_push(self._hub_name, saved, token, **fix):
            if private is not None and self.is_world_process_zero():
                # Releases of transformers before 5.24 have no `private` here. They accept a repository that exists.
                HfApi(token=token).create_repo(self._hub_id, private=private, exist_ok=True)
            super().init_hf_repo(token)
            if self.is_world_process_zero():
                create_branch(self.hub_model_id, self.args.hub_revision, token)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Push the adapter with its card. The arguments are those of transformers' Trainer and of `create_model_card`.

        A branch `revision` is created if it does not exist. Folders of checkpoints and other runs are not pushed. The card
        names the repository, unless the push fails.

        Raises:
            UserError: If the push fails. The adapter is saved then.
        """
        args = self.args
        token, revision = token or args.hub_token, revision or args.hub_revision
        self.callback_handler.on_push_begin(args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        if isinstance(tags, str):
            tags = [tags]
        tags = [*(tags or ()), *(getattr(self.model, "model_tags", None) or ())]
        self._write_card(model_name, dataset_name, tags)  # the card that stays if the push fails
        self._finish_current_push()
        explained = explain_push(self._hub_name, f"The adapter is saved in {args.output_dir}.", token)
        with explained, keep_card(args.output_dir):
            # A subclass may write a card of its own.
            self.create_model_card(model_name=model_name, dataset_name=dataset_name, tags=tags)
            create_branch(self.hub_model_id, revision, token)
            with name_on_card(args.output_dir, self.hub_model_id, revision):
                return self._push(commit_message, token, revision, background=not blocking)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the adapter of a checkpoint in the background, without the folders of other runs."""
        args = self.args
        is_busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if is_busy and not args.hub_always_push:
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        place = f"step {self.state.global_step}"
        if args.save_strategy == SaveStrategy.EPOCH:
            place = f"epoch {int(self.state.epoch)}"
        message = f"Training in progress, {place}"
        jobs = [self._push(message, args.hub_token, args.hub_revision, background=True)]
        names = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: Path(checkpoint_folder).name}
        if args.hub_strategy in names:
            checkpoint_job = upload(
                checkpoint_folder,
                self.hub_model_id,
                f"{message}, checkpoint",
                token=args.hub_token,
                branch=args.hub_revision,
                path_in_repo=names[args.hub_strategy],
                run_as_future=True,
            )
            jobs.append(checkpoint_job)
        if is_busy:
            jobs = [*self.push_in_progress.jobs, *jobs]
        self.push_in_progress = PushInProgress(jobs)

    def _push(self, message: str, token: str | None, branch: str | None, background: bool) -> Any:
        return push_run(
            self.args.output_dir,
            self.hub_model_id,
            self.model.peft_config,
            message=message,
            token=token,
            branch=branch,
            background=background,
        )

    @property
    def _hub_id(self) -> str:
        """The repository to push to. As in transformers, it has the name of `output_dir` by default."""
        return find_repository(self.args)

    @property
    def _hub_name(self) -> str:
        """The repository in messages."""
        if self.args.hub_model_id:
            return self._hub_id
        return f"the repository {self._hub_id}, which has the name of `output_dir` because `hub_model_id` is not set,"
