"""Warnings about fields of a training that are accepted, but have no effect or an unusual value."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from loopdropout_trainer.training.unused_fields import describe_reversed, describe_unused


logger = logging.get_logger(__name__)

_USUAL_VALUES = {
    "learning_rate": (0.02, "1e-5 to 1e-3 for LoRA"),
    "weight_decay": (1, "0 to 0.1"),
    "loraplus_lr_ratio": (100, "4 to 16"),
    "p": (0.95, "0.25 to 0.75"),
}
"""Largest value of a field without a warning, and its usual values. A larger one is almost surely a mistake, as 2 for 2e-4."""


def warn_of_fields(args: TrainingArguments, given_names: Collection[str]) -> None:
    """Warn of fields that have no effect or an unusual value, in the first process.

    Args:
        args: Settings of the training, a `GateConfig`.
        given_names: Names of the fields that the user has set.
    """
    if args.process_index != 0:
        return
    _warn_of_unusual_values(args)
    sentences = describe_unused(args, given_names)
    is_reversed = describe_reversed(args)
    if is_reversed is not None:
        sentences.append(is_reversed)
    for sentence in sentences:
        logger.warning_once(sentence)


def _warn_of_unusual_values(args: Any) -> None:
    for name, (largest, usual) in _USUAL_VALUES.items():
        value = getattr(args, name)
        if isinstance(value, list):  # a drop probability for each loop
            value = max(value)
        if value is not None and value > largest:
            logger.warning_once(f"`{name}` is {value:g}, far above the usual values, {usual}.")
    if args.learning_rate == 0:
        logger.warning_once("`learning_rate` is 0, so the training changes no weight, unless you give an optimizer.")
