"""Errors about a rule that a training cannot run with its model or its trainer.

A trainer asks when it is made, and a dry run with the sizes in the model's config.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gates import GateRule
from loopdropout_trainer.lora import ADAPTER_KINDS


if TYPE_CHECKING:
    from loopdropout_trainer.looped import LoopedModelMixin
    from loopdropout_trainer.training.config import GateConfig


def check_depths(args: GateConfig, rule: GateRule, num_loops: int, one_depth_type: str | None) -> None:
    """Raise UserError if a model or a rule cannot train at the depths of `args`.

    Args:
        args: Settings of the training.
        rule: Rule that draws the gates.
        num_loops: Recurrence depth K of the model.
        one_depth_type: `model_type` of a model that trains only at the depth it was built for, else None.
    """
    depths = args.make_depth_sampler().limits(num_loops)
    for depth in depths:
        rule.check(depth)
    if depths == (num_loops, num_loops):
        return
    bound = None
    if one_depth_type is not None:
        bound = f"`model_type: {one_depth_type}`"
    elif ADAPTER_KINDS[rule.lora_kind].one_depth or rule.wants_sensitivity:
        bound = f"the rule {rule.name!r}"
    if bound is not None:
        raise UserError(f"`depth_sampling` must be 'fixed' for {bound}, got {args.depth_sampling!r}.")


def check_draws(args: GateConfig, rule: GateRule, runs_several_draws: bool) -> None:
    """Raise UserError if a rule has several draws for a micro-batch, and the trainer or DeepSpeed runs one."""
    if rule.draws_per_batch == 1:
        return
    if args.deepspeed:
        raise UserError(f"`deepspeed` must not be set with the rule {rule.name!r}, because it steps after each pass.")
    if not runs_several_draws:
        raise UserError(
            f"`rule` must have one draw for a micro-batch, got {rule.name!r}. Train it with `LoRADropoutSFTTrainer`, or in a "
            "recipe of `loopdropout sft`."
        )


def find_one_depth_type(looped: LoopedModelMixin) -> str | None:
    """Return the `model_type` of a model that trains only at the depth it was built for, or None for another model."""
    if looped.trains_at_one_depth:
        return looped.config.model_type
    return None
