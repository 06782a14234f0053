"""Fields of a training that are set, but cannot act, because of other fields or of the number of its steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from loopdropout_trainer.errors import count
from loopdropout_trainer.training.evaluation_fields import word_of


logger = logging.get_logger(__name__)

PUSHED_TO = ("hub_model_id", "hub_private_repo", "hub_revision")
"""Fields about a push, which `trainer.push_to_hub` of Python reads, too."""


class _Condition(NamedTuple):
    """A condition under which fields cannot act.

    Attributes:
        names: Names of the fields.
        reason: The condition in words, after "because".
        fix: Sentence on how to let the fields act, or "".
    """

    names: Collection[str]
    reason: str
    fix: str


def describe_unused(args: TrainingArguments, given_names: Collection[str]) -> list[str]:
    """Return sentences about the fields that the user has set and that cannot act because of other fields.

    Args:
        args: Settings of the training, a `GateConfig`.
        given_names: Names of the fields that the user has set to another value than the default.
    """
    sentences = []
    for names, reason, fix in _find_conditions(args, given_names):
        for name in names:
            if name in given_names:
                sentences.append(f"`{name}` has no effect, because {reason}. {fix}".rstrip())
    return sentences


def _find_conditions(args: Any, given_names: Collection[str]) -> Iterator[_Condition]:
    """Yield the conditions that the settings of a training meet. The arguments are those of `describe_unused`."""
    evaluation, saving = word_of(args.eval_strategy), word_of(args.save_strategy)
    if evaluation != "steps" and args.eval_steps is not None:
        fix = f"Set it to steps to evaluate every {args.eval_steps:g} steps."
        yield _Condition(("eval_steps",), f"`eval_strategy` is {evaluation}", fix)
    if evaluation == "no":
        names = ("eval_delay", "metric_for_best_model", "greater_is_better")
        yield _Condition(names, "`eval_strategy` is no", "Set it to steps or epoch to evaluate the training.")
    elif args.metric_for_best_model is None:
        fix = "Set it to loss, for example, with `load_best_model_at_end: true`."
        yield _Condition(("greater_is_better",), "`metric_for_best_model` is not set", fix)
    if saving != "steps":
        yield _Condition(("save_steps",), f"`save_strategy` is {saving}", _explain_saving(args, given_names))
    if saving == "no":
        names = ("save_total_limit", "save_only_model")
        yield _Condition(names, "`save_strategy` is no", "Set it to steps or epoch to save checkpoints.")
    logging_strategy = word_of(args.logging_strategy)
    if logging_strategy != "steps":
        fix = f"Set it to steps to log every {args.logging_steps:g} steps."
        yield _Condition(("logging_steps",), f"`logging_strategy` is {logging_strategy}", fix)
    if args.warmup_from_first_step and not args.warmup_steps:
        yield _Condition(("warmup_from_first_step",), "`warmup_steps` is 0", "Set it to the steps of the warmup.")
    if word_of(args.lr_scheduler_type) == "constant" and not args.warmup_from_first_step:
        fix = "Set it to constant_with_warmup."
        yield _Condition(("warmup_steps", "warmup_ratio"), "`lr_scheduler_type` is constant", fix)
    if not args.push_to_hub:
        fix = "Set it to true to push the adapter."
        yield _Condition(("hub_strategy", "hub_always_push"), "`push_to_hub` is false", fix)


def _explain_saving(args: Any, given_names: Collection[str]) -> str:
    """Return the sentence on why checkpoints are saved at evaluations, or "" if the user has set `save_strategy`."""
    if "save_strategy" in given_names:
        return ""
    reason = "load_best_model_at_end"
    if args.early_stopping_patience is not None:
        reason = "early_stopping_patience"
    return f"`{reason}` keeps the best checkpoint, and so each evaluation saves one."


def warn_of_unused_pushes(args: TrainingArguments, pushes_merged: bool) -> None:
    """Warn of fields about a push if a command pushes nothing, in the first process.

    Args:
        args: Settings of the training, a `GateConfig`.
        pushes_merged: Whether the command pushes the merged model.
    """
    if args.push_to_hub or pushes_merged or args.process_index != 0:
        return
    for name in PUSHED_TO:
        if getattr(args, name) is not None:
            logger.warning_once(
                f"`{name}` has no effect, because `push_to_hub` is false, so nothing is pushed. Set it to true to push the "
                "adapter."
            )


_HIGHER_IS_BETTER = ("mean_token_accuracy", "rewards/accuracies", "rewards/margins", "reward")
"""Metrics of evaluations whose larger values are better. Smaller losses are better."""


def describe_reversed(args: TrainingArguments) -> str | None:
    """Return the sentence about a `greater_is_better` that keeps the worst checkpoint, or None."""
    metric = args.metric_for_best_model
    if metric is None or args.greater_is_better is None or word_of(args.eval_strategy) == "no":
        return None
    name = metric.removeprefix("eval_")
    is_loss = name == "loss" or name.endswith("_loss")
    if args.greater_is_better and is_loss:
        return (
            f"`greater_is_better` is true for the metric {name}, so the checkpoint with the largest loss counts as the best "
            "one. Remove `greater_is_better`, or set it to false."
        )
    if not args.greater_is_better and name.endswith(_HIGHER_IS_BETTER):  # also after a dataset's name
        return (
            f"`greater_is_better` is false for the metric {name}, so the checkpoint with its smallest value counts as the "
            "best one. Remove `greater_is_better`, or set it to true."
        )
    return None


class _Evaluations(NamedTuple):
    """The evaluations of a training: their number, also without the one after the last step, and when they run in words.

    `ends_with_one`: whether transformers evaluates after the last step although the interval does not end there.
    """

    number: int
    number_before_the_end: int
    ends_with_one: bool
    interval: str
    length: str


def describe_unreached(args: TrainingArguments, num_steps: int | None) -> str | None:
    """Return the sentence about a field that acts at evaluations, if the training ends before the ones that it needs, or None.

    Args:
        args: Settings of the training, a `GateConfig`.
        num_steps: Number of steps of the training, or None if it is not known.
    """
    evaluations = _count_evaluations(args, num_steps)
    if evaluations is None:
        return None
    reason = f"because {evaluations.interval} and the training has {evaluations.length}"
    patience = args.early_stopping_patience
    if evaluations.number == 0:
        name = "eval_strategy"
        if patience is not None:
            name = "early_stopping_patience"
        elif args.load_best_model_at_end:
            name = "load_best_model_at_end"
        field = "eval_steps" if evaluations.ends_with_one else "eval_delay"
        fix = f"Set `{field}` to a smaller number."
        if not evaluations.ends_with_one:
            return f"`{name}` has no effect, {reason}, so it is never evaluated. {fix}"
        if name == "eval_strategy":
            return f"The training is evaluated only after its last step, {reason}. {fix}"
        return f"`{name}` has no effect, {reason}, so it is evaluated only after its last step. {fix}"
    if patience is None or evaluations.number_before_the_end > patience:
        return None
    return (
        f"`early_stopping_patience` {patience} has no effect, {reason}, so it cannot stop before its end. Evaluate more "
        "often, or set a smaller number."
    )


def _count_evaluations(args: Any, num_steps: int | None) -> _Evaluations | None:
    """Return the evaluations of a training, or None if there are none or if their number is not known."""
    strategy = word_of(args.eval_strategy)
    if strategy == "steps" and num_steps is not None:
        interval = args.eval_steps
        if interval < 1:  # a share of all steps
            interval = math.ceil(num_steps * interval)
        end, length = num_steps, count(num_steps, "step")
        text = f"`eval_steps` is {args.eval_steps:,g}"
    elif strategy == "epoch" and args.max_steps <= 0:
        interval, end = 1, math.ceil(args.num_train_epochs)
        length = count(end, "epoch")
        text = "`eval_strategy` is epoch"
    else:
        return None
    places = [place for place in range(int(interval), end + 1, int(interval)) if place >= args.eval_delay]
    if args.eval_delay:
        text += f", `eval_delay` is {args.eval_delay:,g}"
    before_the_end = [place for place in places if place < end]
    ends_with_one = strategy == "steps" and args.eval_delay <= end
    return _Evaluations(len(places), len(before_the_end), ends_with_one, text, length)


def warn_of_unreached(args: TrainingArguments, num_steps: int | None) -> None:
    """Warn of the field that `describe_unreached` names, once and in the first process."""
    sentence = describe_unreached(args, num_steps)
    if sentence is not None and args.process_index == 0:
        logger.warning_once(sentence)


class UnreachedCallback(TrainerCallback):
    """Warn at the beginning of a training of a field that acts at evaluations which the training does not reach."""

    def on_train_begin(self, args, state, control, **kwargs):
        warn_of_unreached(args, state.max_steps)
