"""Checks of what the rewards of GRPO read and return: the references of the examples, and the numbers of a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset
from torch import nn

from loopdropout_trainer.data.columns import warn_about_rows
from loopdropout_trainer.data.files import error_in_row
from loopdropout_trainer.errors import UserError, count, short_repr
from loopdropout_trainer.rewards import read_reference
from loopdropout_trainer.training.examples import read_first


def check_answers(title: str, dataset: Any, is_needed: bool) -> bool:
    """Check the column `answer` of a dataset, the reference that the rewards of this package read.

    Args:
        title: Name of the dataset in messages.
        dataset: Examples. The answers of a stream are not read, because the rewards check them later.
        is_needed: Whether an example without a reference has no reward, because all rewards read it.

    Returns:
        Whether an example is known to have a reference.

    Raises:
        UserError: If there is no such column, an answer is neither a text nor a number, or no example has a needed one.
    """
    example = read_first(dataset)
    if example is None:
        return False
    if "answer" not in example:
        raise UserError(
            f"{title} must have the column `answer`, the reference that a reward of this package reads, got the columns "
            f"{', '.join(example)}. Rename one by `Dataset.rename_column`."
        )
    if not isinstance(dataset, Dataset):
        return False
    missing = _find_missing_answers(title, dataset)
    if not is_needed or not missing:
        return len(missing) < len(dataset)
    if len(missing) == len(dataset):
        raise UserError(
            f"{title} must have a text or a number as `answer`, the reference that all rewards read, got None in all of its "
            f"{count(len(dataset), 'example')}."
        )
    fact = "no `answer`, so that completions get no reward and train nothing"
    advice = "A recipe leaves such examples out. In Python, remove them by `Dataset.filter`."
    warn_about_rows(title, missing, len(dataset), fact, lambda number: f"row {number:,}", advice)
    return True


def _find_missing_answers(title: str, dataset: Dataset) -> list[int]:
    """Return the numbers of the rows, from 1, whose `answer` is None. Raise UserError for one that is no reference."""
    missing = []
    rows = dataset.select_columns(["answer"]).with_format(None)
    for number, row in enumerate(rows, start=1):
        try:
            reference = read_reference(row["answer"])
        except UserError as error:
            raise error_in_row(f"row {number:,} of {title}", error) from None
        if reference is None:
            missing.append(number)
    return missing


def with_checked_result(reward: Any, name: str) -> Any:
    """Return a reward function that raises UserError if it returns anything but a number or None for each completion.

    Args:
        reward: Reward function, which can be asynchronous, or a reward model, which stays as it is.
        name: Its name in logs.
    """
    if isinstance(reward, nn.Module):
        return reward
    if _is_asynchronous(reward):

        async def get_rewards(**inputs: Any) -> list[Any]:
            rewards = await reward(**inputs)
            return _check_result(rewards, name, len(inputs["completions"]))

    else:

        def get_rewards(**inputs: Any) -> list[Any]:
            return _check_result(reward(**inputs), name, len(inputs["completions"]))

    return get_rewards


def _is_asynchronous(reward: Callable[..., Any]) -> bool:
    while isinstance(reward, functools.partial):
        reward = reward.func
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


def _check_result(rewards: Any, name: str, num_completions: int) -> list[Any]:
    """Return the result of a reward function as a list. Raise UserError unless each completion has a number or None."""
    expected = f"The reward function `{name}` must return a list with a number or None for each completion"
    if isinstance(rewards, str | dict) or not _is_iterable(rewards):
        raise UserError(f"{expected}, got {short_repr(rewards)}.")
    rewards = [*rewards]
    if len(rewards) != num_completions:
        raise UserError(f"{expected}, got {len(rewards):,} of them for {count(num_completions, 'completion')}.")
    for number, reward in enumerate(rewards, start=1):
        if reward is not None and not _is_number(reward):
            raise UserError(f"{expected}, got {short_repr(reward)} for completion {number:,}.")
    return rewards


def _is_iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:  # also of a tensor without dimensions
        return False
    return True


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of Python, or of numpy or torch without dimensions."""
    if isinstance(value, int | float | np.number | np.bool_):
        return True
    return getattr(value, "ndim", None) == 0 and not isinstance(value, str)  # a text of numpy has none either
