"""The files that a trainer writes and pushes: checkpoints, its adapter with settings and card, and its results."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from loopdropout_trainer.errors import UserError, as_path
from loopdropout_trainer.lora import check_present, find_active_adapter
from loopdropout_trainer.results.run_files import RECIPE_FILE, read_used_imports, write_results
from loopdropout_trainer.results.training_results import (
    mean_loss,
    result_columns,
    saved_step,
    training_recipe,
    training_results,
)
from loopdropout_trainer.saving.cards import CARD_FILE, read_card_of, write_model_card
from loopdropout_trainer.saving.checkpoints import (
    EARLY_STOPPING,
    delete_older_checkpoints,
    find_broken_save,
    newest_checkpoint,
)
from loopdropout_trainer.saving.integrity import adapter_patterns, begin, record, saving
from loopdropout_trainer.saving.loading import save_adapter_metadata
from loopdropout_trainer.saving.metadata import read_metadata
from loopdropout_trainer.saving.saved_adapter import adapter_folder, check_adapter_folder, holds_adapter
from loopdropout_trainer.saving.trainings import describe_old_merge, describe_training, warn_of_untrained
from loopdropout_trainer.settings.arguments import find_unsaved_fields
from loopdropout_trainer.settings.recipe import dump_recipe
from loopdropout_trainer.training.argument_checks import hint_at_arguments
from loopdropout_trainer.training.clock import StepClock
from loopdropout_trainer.training.stopping import check_finite


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

    @property
    def _step_clock(self) -> StepClock:
        """Clock of the steps of the training, whose seconds a checkpoint keeps."""
        return self.resumption.clock

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log values, in training with the means of `_step_metrics`. The loss at the end is the mean over all steps.

        transformers' loss at the end leaves out the steps before an interruption, so it would differ from the tables.
        """
        if self.model.training:
            for name, values in self._step_metrics.items():
                logs[name] = sum(values) / len(values)
            self._step_metrics.clear()
        if "train_loss" in logs and "train_runtime" in logs:  # the log at the end
            self._step_clock.stop()
            logs["train_loss"] = mean_loss(self.state.log_history)
        super().log(logs, start_time)

    def _record_training(self) -> None:
        """Write the settings and results of a training and its state with the logged losses, for reports, cards and plots."""
        self.save_state()
        rows = training_results(self)
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
            if self.recipe is None:  # a command saves the adapter
                self._warn_of_former_adapter()

    def _warn_of_former_adapter(self) -> None:
        """Warn after a training if its folder has results and a card of this training, but the adapter of a former one."""
        folder = adapter_folder(self.args.output_dir, self.model.active_adapters[0])
        if not holds_adapter(folder):
            return
        try:
            saved = read_metadata(folder)
        except UserError:  # saving writes it again
            return
        if (saved.get("training_id"), saved.get("step")) != (self.training_id, saved_step(self)):
            logger.warning(
                f"{folder} still holds the adapter that was saved before this training. `trainer.save_model()` replaces it."
            )

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

    @hint_at_arguments
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the adapter with its training settings and its card. Weights that are not finite are not saved."""
        if output_dir is not None:
            as_path("output_dir", output_dir)
        check_present(self.model)
        check_finite(self.model, self.state.global_step, self.args)
        folder = output_dir or self.args.output_dir
        check_adapter_folder(folder, "Save the adapter into another folder, as by `trainer.save_model(folder)`.")
        is_checkpoint = _internal_call and output_dir is not None
        if not self.args.should_save:
            super().save_model(output_dir, _internal_call)
        elif is_checkpoint:  # `_save_checkpoint` marks the whole folder
            self._save_adapter(output_dir, _internal_call)
            card = Path(self.args.output_dir, CARD_FILE)
            if card.is_file():  # TRL has called `create_model_card` for this checkpoint
                shutil.copy2(card, output_dir)
        else:
            warn_of_untrained(self.model, folder, merges=False)
            self._warn_of_other_trainer(folder)
            self._warn_of_several_adapters(folder)
            with saving(folder, adapter_patterns(self.model.peft_config)):
                self._save_adapter(output_dir, _internal_call)
            if not _internal_call:
                card = read_card_of(self.model)
                if self.args.push_to_hub:  # which `_save_adapter` has done
                    card = replace(card, repo_id=self.hub_model_id, revision=self.args.hub_revision)
                write_model_card(folder, self.model, card)
                if self.recipe is None:
                    self._warn_of_old_merge(folder)

    def _warn_of_old_merge(self, folder: str) -> None:
        """Warn if the merged model in the folder of the saved adapter is of another training or step."""
        old_merge = describe_old_merge(folder, is_command=False)
        if old_merge:
            logger.warning(old_merge)

    def _warn_of_other_trainer(self, folder: str) -> None:
        """Warn if the active adapter has other weights than those that this trainer's results are of."""
        present, active = self.looped.trained_with, self.model.active_adapters[0]
        own = self.looped.adapter_of_training(self.training_id)
        if own in self.model.peft_config and own != active:
            logger.warning(
                f"{folder} gets the settings and the card of the adapter {active!r}, which is active, but the last training "
                f"of this trainer has trained {own!r}. To save that one, activate it by `trainer.model.set_adapter({own!r})`."
            )
            return
        if self.training_id is None or present.get("training_id") in (None, self.training_id):
            return
        newest = newest_checkpoint(self.args.output_dir)
        fix = "To keep each adapter, save it before another trainer trains the model."
        if newest is not None:
            fix = f"The adapter of this trainer is in {newest}."
        logger.warning(
            f"The weights that {folder} gets are not those of this trainer's training, because another trainer has trained "
            f"its model since: {describe_training(present)}. {fix}"
        )

    def _warn_of_several_adapters(self, folder: str) -> None:
        """Warn if PEFT saves another adapter in the folder itself, which plain PEFT loads from there."""
        active = self.model.active_adapters[0]
        if active != "default" and "default" in self.model.peft_config:
            logger.warning(
                f"The adapter {active!r} is saved in {adapter_folder(folder, active)}, and {folder} itself holds the adapter "
                f"'default', as PEFT saves several adapters. `load_model` loads {active!r} from {folder}, but PEFT needs the "
                "subfolder."
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
        with self._step_clock.pause():
            self._write_checkpoint(model, trial)

    def _write_checkpoint(self, model: nn.Module, trial: Any) -> None:
        args = self.args
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if args.should_save:
            if folder.is_dir() and not folder.is_symlink() and find_broken_save(folder):
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

    @property
    def _line_title(self) -> str:
        """The beginning of a line about this training in the log of a command, which can train several methods."""
        return f"{self.method}: " if self.method else ""

    def _load_callback_state(self) -> None:
        """Restore the user's callbacks, if `restore_callback_states_from_checkpoint` is set.

        Callbacks of this package restore themselves. transformers would replace them by new ones, which would not know the
        trainer, and would come after the callback that resets the gates.
        """
        saved = self.state.stateful_callbacks
        own = {type(callback).__name__ for callback in (*self._step_callbacks, self.resumption)} | {EARLY_STOPPING}
        self.state.stateful_callbacks = {name: state for name, state in saved.items() if name not in own}
        if not self.args.restore_callback_states_from_checkpoint:
            self._warn_of_new_callbacks()
        super()._load_callback_state()
        self.state.stateful_callbacks = saved
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExportableState):  # transformers cannot save one that the checkpoint lacks
                saved.setdefault(type(callback).__name__, callback.state())

    def _warn_of_new_callbacks(self) -> None:
        """Warn if callbacks of the user have a state in the checkpoint, but begin again."""
        for callback in self.callback_handler.callbacks:
            name = type(callback).__name__
            if isinstance(callback, ExportableState) and name in self.state.stateful_callbacks:
                logger.warning(
                    f"{name} begins again, because `restore_callback_states_from_checkpoint` is false, so the training may "
                    "end at another step."
                )
