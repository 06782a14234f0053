"""A run: the training of one rule, with its folder and the state that the folder is in."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import find_unwritable
from loopdropout_trainer.jobs.changed_benchmarks import find_changed_benchmarks
from loopdropout_trainer.jobs.checks import check_measurements
from loopdropout_trainer.results.imported_code import find_other_code, find_unused_changes
from loopdropout_trainer.results.recipe_changes import CHOICE, LENGTH, MEASURED, RESUMABLE, UNCOMPARED, find_difference
from loopdropout_trainer.results.run_files import has_trained, is_finished, read_recipe
from loopdropout_trainer.saving.checkpoints import (
    describe_lost_steps,
    find_early_stop,
    find_next_patience,
    find_shortening,
    has_stopped_early,
    list_checkpoints,
    load_state,
    newest_checkpoint,
)
from loopdropout_trainer.saving.integrity import find_damage
from loopdropout_trainer.saving.saved_adapter import holds_model
from loopdropout_trainer.settings.arguments import AdapterArguments, RewardArguments, ScriptArguments, SFTArguments
from loopdropout_trainer.training.config import LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig
from loopdropout_trainer.training.distributed import shards_weights


if TYPE_CHECKING:
    from loopdropout_trainer.training.config import GateConfig


logger = logging.getLogger(__name__)

LORA_VARIANTS = {"loraplus_lr_ratio": "LoRA+", "use_rslora": "rsLoRA", "lora_dropout": "Input dropout"}
"""Names of the methods that a setting makes of LoRA."""


TRAINING_TYPES = (
    SFTArguments,
    AdapterArguments,
    LoopDropoutConfig,
    LoopDropoutDPOConfig,
    LoopDropoutGRPOConfig,
    RewardArguments,
)
"""Dataclasses with the fields of all trainings apart from the data, which recipes of trainings set in other scripts."""


class Run(NamedTuple):
    """The training of one rule, with its own arguments and recipe.

    Attributes:
        script_args: Steps around the training.
        args: Settings of the training. `resume_from_checkpoint` is the checkpoint that it continues from, or None.
        recipe: Settings that are saved with the run, without `resume_from_checkpoint`, which is about one start of it.
        starts_over: Whether the user has set `resume_from_checkpoint` to false, so that an unfinished training begins again.
    """

    script_args: ScriptArguments
    args: GateConfig
    recipe: dict
    starts_over: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether the training has ended, with the length and the best checkpoint that the recipe asks for, undamaged."""
        changes_weights = LENGTH | CHOICE
        is_as_asked = self.has_ended and not find_difference(self.args.output_dir, self.recipe, (), changes_weights)
        return is_as_asked and find_damage(self.args.output_dir) is None

    @property
    def has_ended(self) -> bool:
        """Whether `run.json` says that a training has ended, of the present length or a shorter one."""
        return has_trained(self.args.output_dir)

    @property
    def begins_anew(self) -> bool:
        """Whether a training would begin at its first step: none has ended in the folder, and it continues from none."""
        return not self.has_ended and self.args.resume_from_checkpoint is None

    @property
    def is_complete(self) -> bool:
        """Whether the run has finished with all of its measurements."""
        is_measured = is_finished(self.args.output_dir) and not find_difference(self.args.output_dir, self.recipe)
        return is_measured and self.is_trained and not self.changed_benchmarks

    @property
    def changed_benchmarks(self) -> list[str]:
        """Own benchmarks whose files have changed since the run was measured on them."""
        return find_changed_benchmarks(self.args.output_dir, self.recipe)

    @property
    def title(self) -> str:
        """Name of the method in tables."""
        rule = self.args.rule
        title = self.args.make_rule().title
        if rule == "lora":
            for field, name in LORA_VARIANTS.items():
                if self.recipe.get(field):
                    return name
        if rule in ("independent", "learned") and self.args.p:
            return f"{title} + Loop Dropout"
        return title

    def check(self) -> None:
        """Raise UserError if settings exclude each other."""
        check_measurements(self.script_args, self.recipe)
        if self.script_args.merge and shards_weights(self.args):
            raise UserError(
                "`merge` must be false under ZeRO-3 and FSDP, because no process has all weights. Merge the saved adapter by "
                "`loopdropout merge` afterwards."
            )

    def find_conflict(self) -> str | None:
        """Return why the files in the folder keep the run from starting there, as a message with the fix, or None.

        A dry run shows the plan before this message, and a training ends with it before it changes anything.
        """
        return (
            find_unwritable(self.args.output_dir)
            or self._find_whole_model()
            or self.find_other_recipe()
            or self._find_other_code()
            or self._find_damaged_adapter()
            or self._find_longer_training()
            or self._find_other_processes()
            or self._find_stopped_training()
        )

    def _find_whole_model(self) -> str | None:
        """Return the message about a folder that the adapter could not be saved in after the training, or None."""
        folder = self.args.output_dir
        if not holds_model(folder):
            return None
        return f"{folder} holds a whole model, which an adapter must not be saved next to. Set another `output_dir`."

    def find_other_recipe(self) -> str | None:
        """Return the message about a folder that holds a run of another recipe, or None."""
        folder = self.args.output_dir
        ignored = UNCOMPARED | MEASURED
        if self.args.resume_from_checkpoint:
            ignored = self._resumable
        difference = find_difference(folder, self.recipe, ignored)
        if difference is None:
            return None
        fix = "Set another `output_dir`, or remove the folder (its results are lost)."
        newest = newest_checkpoint(folder)
        may_continue = find_difference(folder, self.recipe, self._resumable) is None and newest is not None
        if may_continue and find_shortening(newest, self.args) is None:
            fix = f"Add `--resume_from_checkpoint true` to continue it. Or {fix[0].lower()}{fix[1:]}"
        return f"{folder} holds another run: {difference}. {fix}"

    @property
    def _resumable(self) -> set[str]:
        """Settings in which a training that continues may differ from the recipe in its folder."""
        recipe = read_recipe(self.args.output_dir)
        if recipe.get("eval_files") or recipe.get("num_eval_examples"):
            return RESUMABLE
        return RESUMABLE | {"eval_files"}  # no example was held out, so they leave the training examples as they are

    def _find_other_code(self) -> str | None:
        """Return the message about an adapter or a checkpoint of other imported code, or None. Others take any code."""
        if not self.has_ended and not self.args.resume_from_checkpoint:
            return None
        folder = self.args.output_dir
        difference = find_other_code(folder)
        if difference is not None:
            return (
                f"{folder} holds another run: {difference}. Restore the code, set another `output_dir`, or remove the folder "
                "(its results are lost)."
            )
        for change in find_unused_changes(folder):
            logger.warning(
                "The run in %s continues, but %s. The run has no rule, model or other part of it.", folder, change
            )
        return None

    def remove_checkpoints_of_other_code(self) -> None:
        """Remove the checkpoints of other imported code if the training begins again, as nothing must continue from them."""
        folder = self.args.output_dir
        checkpoints = list_checkpoints(folder)
        change = find_other_code(folder)
        if self.args.resume_from_checkpoint or change is None or not checkpoints:
            return
        logger.warning("The training in %s begins again without its checkpoints, because %s.", folder, change)
        for checkpoint in checkpoints:
            shutil.rmtree(checkpoint)

    def _find_damaged_adapter(self) -> str | None:
        """Return the message about a folder with a damaged adapter, or None if the training continues from a checkpoint."""
        if not self.has_ended:
            return None
        folder = self.args.output_dir
        damage = find_damage(folder)
        if damage is None:
            return None
        if not self.args.resume_from_checkpoint:
            return (
                f"{folder} {damage}. Add `--resume_from_checkpoint true` to continue from its newest checkpoint, or remove "
                "the folder (its results are lost)."
            )
        logger.warning("The adapter in %s is not used, because the folder %s.", folder, damage)
        return None

    def _find_longer_training(self) -> str | None:
        """Return the message about a checkpoint that has more steps than the run asks for, or None."""
        checkpoint = self.args.resume_from_checkpoint
        if checkpoint is None or self.is_trained:
            return None
        return find_shortening(checkpoint, self.args)

    def _find_other_processes(self) -> str | None:
        """Return the message about a checkpoint of another number of processes, or None. A dry run needs only one process."""
        checkpoint = self.args.resume_from_checkpoint
        if checkpoint is None or self.is_trained or self.script_args.dry_run:
            return None
        from loopdropout_trainer.training.resuming import find_other_processes

        return find_other_processes(checkpoint, self.args)

    def _find_stopped_training(self) -> str | None:
        """Return the message about an unfinished training that the user has not decided about, or None."""
        folder = self.args.output_dir
        if self.starts_over or self.args.resume_from_checkpoint or self.has_ended:
            return None
        newest = newest_checkpoint(folder)
        if newest is None:
            return None
        state = load_state(newest)
        if state.global_step >= state.max_steps or has_stopped_early(state, self.args.early_stopping_patience):
            return (
                f"{folder} holds a training that took its last step, {state.global_step:,}, and ended before its adapter was "
                "saved. Finish it with `--resume_from_checkpoint true`, or begin again with `--resume_from_checkpoint false`."
            )
        return (
            f"{folder} holds a training that was stopped at step {state.global_step:,} of {state.max_steps:,}. Continue it "
            "with `--resume_from_checkpoint true`, or begin again with `--resume_from_checkpoint false`."
        )


def describe_further(runs: Sequence[Run]) -> str:
    """Return how to train the runs further whose training has ended, as a sentence, or "" if one has no checkpoint."""
    folders, args = [run.args.output_dir for run in runs if run.is_trained], runs[0].args
    if not all(map(newest_checkpoint, folders)) or args.save_only_model:
        return ""
    patience = args.early_stopping_patience
    if patience is not None and any(find_early_stop(load_state(folder)) for folder in folders):
        most = max(find_next_patience(folder, patience) for folder in folders)
        options = f"add `--early_stopping_patience {most} --resume_from_checkpoint true`"
    elif args.max_steps > 0:
        options = f"raise `max_steps` above {args.max_steps:,} and add `--resume_from_checkpoint true`"
    else:
        options = f"raise `num_train_epochs` above {args.num_train_epochs:g} and add `--resume_from_checkpoint true`"
    starts = [describe_lost_steps(folder, load_state(folder).global_step) for folder in folders]
    return f" To train it further, {options}{max(starts, default='')}."
