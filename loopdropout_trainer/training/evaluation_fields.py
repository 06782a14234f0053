"""Fields that say when a training is evaluated and saved, and whether they fit each other."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from loopdropout_trainer.errors import UserError


logger = logging.get_logger(__name__)


def word_of(choice: Any) -> Any:
    """Return the word of a choice of transformers, such as "epoch" for `IntervalStrategy.EPOCH`."""
    return getattr(choice, "value", choice)


def warn_of_unused_steps(args: TrainingArguments, given_names: Collection[str]) -> None:
    """Warn if `eval_steps` or `save_steps` is set, but the training is not evaluated or saved by its steps.

    Args:
        args: Settings of the training.
        given_names: Names of the fields that the user has set. `save_steps` has a default.
    """
    strategy = word_of(args.eval_strategy)
    if args.eval_steps is not None and strategy != "steps":
        logger.warning_once(
            f"`eval_steps` has no effect, because `eval_strategy` is {strategy}. Set it to steps to evaluate every "
            f"{args.eval_steps:g} steps."
        )
    saving = word_of(args.save_strategy)
    if "save_steps" in given_names and saving != "steps":
        logger.warning_once(
            f"`save_steps` has no effect, because `save_strategy` is {saving}.{_explain_saving(args, given_names)}"
        )


def _explain_saving(args: TrainingArguments, given_names: Collection[str]) -> str:
    """Return the sentence on why checkpoints are saved at evaluations, or "" if the user has set `save_strategy`."""
    if "save_strategy" in given_names:
        return ""
    reason = "load_best_model_at_end"
    if args.early_stopping_patience is not None:
        reason = "early_stopping_patience"
    return f" `{reason}` keeps the best checkpoint, and so each evaluation saves one."


def check_best_checkpoint(args: TrainingArguments) -> None:
    """Raise UserError unless the checkpoints are saved at evaluations, if the best one is to be kept.

    transformers asks for the same in other words, but accepts early stopping at evaluations without a checkpoint.
    """
    is_early, keeps_best = args.early_stopping_patience is not None, args.load_best_model_at_end
    _check_saving_best(args)
    if is_early and not keeps_best:
        raise UserError("`load_best_model_at_end` must be true if `early_stopping_patience` is set, got false.")
    if not keeps_best:
        return
    condition = "if `load_best_model_at_end` is true"
    if is_early:
        condition = "if `early_stopping_patience` is set"
    evaluation, saving = word_of(args.eval_strategy), word_of(args.save_strategy)
    if evaluation == "no":
        raise UserError(f"`eval_strategy` must be steps or epoch {condition}, got no.")
    # "best" saves at evaluations only. About a mistyped word, transformers raises an error.
    if saving == "best" or evaluation not in ("steps", "epoch"):
        return
    if saving != evaluation:
        raise UserError(f"`save_strategy` must be {evaluation}, as `eval_strategy`, {condition}, got {saving}.")
    if evaluation == "epoch":
        return
    eval_steps, save_steps = args.eval_steps or args.logging_steps, args.save_steps
    if is_early:  # which may stop at any evaluation
        wanted, is_right = "equal", save_steps == eval_steps
    else:
        wanted, is_right = "be a multiple of", _is_multiple(save_steps, eval_steps)
    if not is_right:
        raise UserError(f"`save_steps` must {wanted} `eval_steps` ({eval_steps:g}) {condition}, got {save_steps:g}.")


def _check_saving_best(args: TrainingArguments) -> None:
    """Raise UserError if `save_strategy` is best, and nothing says which checkpoint is."""
    if word_of(args.save_strategy) != "best":
        return
    if args.metric_for_best_model is None and not args.load_best_model_at_end:  # which takes the held-out loss
        raise UserError(
            "`metric_for_best_model` must be set if `save_strategy` is best, got None. Set it to loss, the held-out loss."
        )
    if word_of(args.eval_strategy) == "no":
        raise UserError("`eval_strategy` must be steps or epoch if `save_strategy` is best, got no.")


def _is_multiple(save_steps: float, eval_steps: float) -> bool:
    """Return whether every save is at an evaluation. Both are numbers of steps, or both are shares of all steps below 1."""
    have_one_unit = (eval_steps < 1) == (save_steps < 1)
    ratio = save_steps / eval_steps
    return have_one_unit and round(ratio) >= 1 and math.isclose(ratio, round(ratio))
