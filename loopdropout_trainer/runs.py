"""A run: the training of one rule, with its folder and the state that the folder is in."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from loopdropout_trainer.arguments import AdapterArguments, RewardArguments, ScriptArguments, SFTArguments
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.results import (
    LENGTH,
    MEASURED,
    RESUMABLE,
    UNCOMPARED,
    find_difference,
    is_finished,
    read_run,
)
from loopdropout_trainer.saving.integrity import find_damage
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
        """Raise UserError if settings exclude each other, or the folder holds another run."""
        uses_all_depths = self.script_args.merge or self.script_args.eval_num_loops
        if uses_all_depths and not self.args.make_rule().mergeable:
            raise UserError(
                f"`merge` and `eval_num_loops` must not be set for {self.args.rule!r}, whose update differs between loops."
            )
        if self.script_args.merge and shards_weights(self.args):
            raise UserError(
                "`merge` must be false under ZeRO-3 and FSDP, because no process has all weights. Merge the saved adapter by "
                "`loopdropout merge` afterwards."
            )
        self._check_recipe()
        self._check_adapter()

    def _check_recipe(self) -> None:
        """Raise UserError if the folder holds a run of another recipe."""
        folder = self.args.output_dir
        ignored = UNCOMPARED | MEASURED
        if self.args.resume_from_checkpoint:
            ignored = RESUMABLE
        difference = find_difference(folder, self.recipe, ignored)
        if difference is None:
            return
        fix = "Set another `output_dir`, or remove the folder."
        if difference.field in LENGTH:
            fix = "Set another `output_dir`, or add `--resume_from_checkpoint true` to continue it, or remove the folder."
        raise UserError(f"{folder} holds another run: {difference}. {fix}")

    def _check_adapter(self) -> None:
        """Raise UserError if the folder has a damaged adapter, unless the training continues from a checkpoint."""
        if not self.has_ended:
            return
        folder = self.args.output_dir
        damage = find_damage(folder)
        if damage is None:
            return
        if not self.args.resume_from_checkpoint:
            raise UserError(
                f"{folder} {damage}. Add `--resume_from_checkpoint true` to continue from its newest checkpoint, or remove "
                "the folder."
            )
        logger.warning("The adapter in %s is not used, because the folder %s.", folder, damage)
