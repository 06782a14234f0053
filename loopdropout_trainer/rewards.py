"""Verifiable rewards for GRPO: whether a completion's answer equals the reference.

TRL calls a reward with the completions (texts, or conversations of one assistant turn) and the dataset's column `answer`. It
returns 1.0 or 0.0 for each completion, or None without a reference, so that the completion has no part in the training.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loopdropout_trainer.bounds import is_written_number
from loopdropout_trainer.errors import UserError, closest_match, hint_at_own_file, short_repr


Reward = Callable[..., list[float | None]]

REWARDS: dict[str, Reward] = {}
"""Rewards by name. They are also the scorers of own benchmarks."""

_ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")
_INTEGER = re.compile(r"-?\d[\d,]*")


def register_reward(is_right: Callable[[str, str], bool]) -> Reward:
    """Add a comparison of one completion with its reference to `REWARDS`, and return the reward function."""

    @functools.wraps(is_right)
    def reward(
        completions: Sequence[str | list[dict[str, str]]], answer: Sequence[str | float | None], **columns: Any
    ) -> list[float | None]:
        rewards = []
        for completion, given in zip(completions, answer, strict=True):
            reference = read_reference(given)
            text = completion
            if not isinstance(completion, str):  # turns of a conversation
                text = completion[-1]["content"] or ""
            rewards.append(None if reference is None else float(is_right(text, reference)))
        return rewards

    del reward.__wrapped__  # it has other arguments
    REWARDS[reward.__name__] = reward
    return reward


def read_reference(answer: Any) -> str | None:
    """Return the reference of a completion as a text, or None without one. A number becomes the text of it, such as "4".

    A whole number can be a float, such as 4.0 in a column that lacks another value. It stands for the integer.

    Args:
        answer: Value of the column `answer`.

    Raises:
        UserError: If it is neither a text, nor a number, nor None.
    """
    if getattr(answer, "ndim", None) == 0:  # a number of numpy or torch, as in a dataset of their format
        answer = answer.item()
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    if is_written_number(answer):
        return str(answer)
    if answer is None or isinstance(answer, str):
        return answer
    raise UserError(f"`answer` must be a text or a number, got {short_repr(answer)}.")


def find_rewards(rewards: Sequence[Any]) -> list[Any]:
    """Return rewards for TRL, with the functions of `REWARDS` in place of their names.

    Args:
        rewards: Functions, reward models, their folders or Hub names, or names in `REWARDS`.

    Raises:
        UserError: If a name is neither in `REWARDS`, nor a folder, nor of the form `user/name`.
    """
    found = []
    for reward in rewards:
        is_name = isinstance(reward, str) and "/" not in reward and not Path(reward).is_dir()
        if not isinstance(reward, str) and not callable(reward):
            raise UserError(
                f"`reward_funcs` must be functions, reward models or names of rewards, got {short_repr(reward)}."
            )
        if is_name and reward not in REWARDS:
            raise UserError(
                f"`reward_funcs` must be functions, reward models, or names such as {', '.join(REWARDS)}, got {reward!r}."
                f"{closest_match(reward, REWARDS)}{hint_at_own_file()}"
            )
        found.append(REWARDS[reward] if is_name else reward)
    return found


def _normalize(text: str) -> str:
    return re.sub(r"\.$", "", text.rpartition("#### ")[2].replace(",", "").replace("$", "")).lower()


@register_reward
def gsm8k_strict(completion: str, reference: str) -> bool:
    """Compare the number after the first `#### ` as text, as lm-eval's `gsm8k` does with the filter `strict-match`."""
    match = _ANSWER.search(completion)
    return match is not None and _normalize(match.group(1)) == _normalize(reference)


@register_reward
def gsm8k_format(completion: str, reference: str) -> bool:
    """Return whether a number follows a `#### `, right or wrong."""
    return _ANSWER.search(completion) is not None


@register_reward
def last_number(completion: str, reference: str) -> bool:
    """Compare the last integer with the last integer of the reference."""
    got, wanted = _last_integer(completion), _last_integer(reference)
    return wanted is not None and got == wanted


def _last_integer(text: str) -> str | None:
    numbers = _INTEGER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


@register_reward
def exact_match(completion: str, reference: str) -> bool:
    """Compare the whole texts without the spaces around them."""
    return completion.strip() == reference.strip()


@register_reward
def math_verify(completion: str, reference: str) -> bool:
    r"""Compare answers with the package math-verify, as LaTeX or as numbers.

    The reference's answer is its last `\boxed{...}`, or the number after GSM8K's `#### `, or its whole text.
    """
    from math_verify import parse, verify

    _, mark, number = reference.rpartition("#### ")
    return bool(verify(parse(number if mark else reference), parse(completion)))
