"""Fields that say when a training is evaluated and saved, and whether they fit each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import TrainingArguments

from loopdropout_trainer.errors import UserError, closest_match


_COSTS = ("runtime", "samples_per_second", "steps_per_second", "num_tokens", "model_preparation_time")
"""Ends of the names of measured times and numbers of tokens, which do not say which checkpoint is the best one."""

_METRICS = {
    "sft": ("mean_token_accuracy", "entropy"),
    "dpo": (
        "rewards/accuracies",
        "rewards/margins",
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
        "logits/chosen",
        "logits/rejected",
        "mean_token_accuracy",
        "entropy",
    ),
    "grpo": ("reward", "reward_std", "frac_reward_zero_std", "kl", "entropy"),
}
"""Further metrics of TRL's evaluations, by the command that trains. GRPO adds groups, such as rewards/NAME/mean."""


def word_of(choice: Any) -> Any:
    """Return the word of a choice of transformers, such as "epoch" for `IntervalStrategy.EPOCH`."""
    return getattr(choice, "value", choice)


def packs_evaluation(args: Any) -> bool:
    """Return whether evaluations pack their examples, so that a row of a batch has several. Only SFT can do it."""
    eval_packing = getattr(args, "eval_packing", None)
    if eval_packing is None:
        return bool(getattr(args, "packing", False))
    return eval_packing


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


def list_metrics(command: str, datasets: Iterable[str] = ()) -> list[str]:
    """Return the names of the metrics of an evaluation that can tell which checkpoint is the best one.

    They are without `eval_` and without the groups of GRPO.

    Args:
        command: Command that trains: sft, dpo or grpo.
        datasets: Names of the held-out datasets if there are several.
    """
    names = ["loss", *_METRICS[command]]
    of_datasets = [f"{dataset}_{name}" for dataset in datasets for name in names]
    return of_datasets or names


def check_best_metric(args: Any, datasets: Iterable[str] = ()) -> None:
    """Raise UserError if no evaluation of a training has `metric_for_best_model`. Else its first evaluation would stop it.

    Args:
        args: Settings of the training, a `GateConfig`.
        datasets: Names of the held-out datasets if there are several.
    """
    metric = args.metric_for_best_model
    if metric is None or word_of(args.eval_strategy) == "no":
        return
    name = metric.removeprefix("eval_")
    if args.command == "grpo" and "/" in name:  # of a group, whose names depend on the rewards and the loss
        return
    names = list_metrics(args.command, datasets)
    if name not in names:
        raise unknown_metric(metric, names)


def unknown_metric(metric: str, names: Sequence[str]) -> UserError:
    """Return the error about a `metric_for_best_model` that is none of an evaluation's metrics, `names` without `eval_`."""
    names = [name for name in names if not name.endswith(_COSTS)]
    hint = closest_match(metric.removeprefix("eval_"), names)
    return UserError(f"`metric_for_best_model` must be one of {', '.join(names)}, got {metric!r}.{hint}")


def _is_multiple(save_steps: float, eval_steps: float) -> bool:
    """Return whether every save is at an evaluation. Both are numbers of steps, or both are shares of all steps below 1."""
    have_one_unit = (eval_steps < 1) == (save_steps < 1)
    ratio = save_steps / eval_steps
    return have_one_unit and round(ratio) >= 1 and math.isclose(ratio, round(ratio))
