"""Verifiable rewards: whether a completion's answer is the reference's. Functions as TRL's trainers take them.

Each is called with completions (texts, or conversations of one assistant turn) and the dataset's `answer` of each, and
returns 1.0 or 0.0 for each, or None where there is no reference: such a completion has no part in the training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from loopdropout_trainer.evaluation.benchmarks import gsm8k
from loopdropout_trainer.evaluation.results import same_last_number


Completion = str | list[dict[str, str]]
Reward = Callable[..., list[float | None]]


def _reward(judge: Callable[[str, str], bool]) -> Reward:
    """Make a reward function of a verdict on one completion and its reference."""

    @functools.wraps(judge)
    def reward(completions: Sequence[Completion], answer: Sequence[str | None], **others: Any) -> list[float | None]:
        return [
            None if reference is None else float(judge(_text(completion), reference))
            for completion, reference in zip(completions, answer, strict=True)
        ]

    del reward.__wrapped__  # its arguments are its own
    return reward


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


@_reward
def gsm8k_strict(completion: str, reference: str) -> bool:
    """Say whether the number after the first `#### ` is written as the reference's: the score of the benchmark `gsm8k`."""
    return gsm8k.gsm8k_strict(completion, reference).correct


@_reward
def gsm8k_format(completion: str, reference: str) -> bool:
    """Say whether a number stands after a `#### `, right or wrong."""
    return gsm8k.extract_answer(completion) is not None


@_reward
def last_number(completion: str, reference: str) -> bool:
    """Say whether the last number is the reference's last, whatever stands before it."""
    return same_last_number(completion, reference)


@_reward
def math_verify(completion: str, reference: str) -> bool:
    r"""Say whether the package math-verify finds the completion's answer equal to the reference's, as LaTeX or a number.

    What a solution's last `\boxed{...}`, or GSM8K's `#### N`, names is the reference; without either it is the whole text.
    """
    from math_verify import parse, verify

    _, mark, number = reference.rpartition("#### ")
    return bool(verify(parse(number if mark else reference), parse(completion)))


REWARDS: dict[str, Reward] = {
    reward.__name__: reward for reward in (gsm8k_strict, gsm8k_format, last_number, math_verify)
}
