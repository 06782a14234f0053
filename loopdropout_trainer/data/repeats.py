"""What makes two examples the same, and sentences about those that repeat another one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


OF_HELD_OUT = "a held-out example"
"""An example that one to train on can repeat."""


def describe_repeats(num_repeats: int, num_examples: int, place: str = "", repeated: str = "another one") -> str:
    """Return the part of a sentence that says how many examples repeat another one.

    Args:
        num_repeats: Number of training examples that repeat another one.
        num_examples: Number of training examples.
        place: Name of the dataset with them, or "" if there is only one.
        repeated: What they repeat.
    """
    verb = "repeats" if num_repeats == 1 else "repeat"
    dataset = f" in {place}" if place else ""
    return f"{num_repeats:,} of the {num_examples:,} examples{dataset} {verb} {repeated}"


_TARGETS = ("messages", "text", "completion", "chosen", "rejected")
"""Columns of an example, each of which the model reads behind the prompt."""

_SETTINGS = ("tools", "chat_template_kwargs")
"""Columns that a chat template reads besides the turns."""


def write_content(example: Mapping[str, Any]) -> str:
    """Return a text that is equal for examples of which the model reads the same, also if their formats differ.

    A prompt and a completion are read as one conversation, or as one text, and so are a prompt and the chosen answer of a
    pair. So `messages` can repeat a pair of turns, and `text` a pair of texts.

    Args:
        example: Columns of an example, with TRL's keys in conversations.
    """
    wholes = []
    for name in _TARGETS:
        if name in example:
            wholes.append(_join(example.get("prompt"), example[name]))
    if not wholes:  # of a preparation of the user, for GRPO
        return json.dumps(example, sort_keys=True, default=str)
    settings = {}
    for name in _SETTINGS:
        if example.get(name):  # a mixture adds empty ones, if another data set has them
            settings[name] = example[name]
    return json.dumps([wholes, settings], sort_keys=True, default=str)


def _join(prompt: Any, target: Any) -> Any:
    """Return the conversation or the text of a prompt, which may be None, and a target."""
    if isinstance(prompt, str | None) and isinstance(target, str):
        return (prompt or "") + target
    if not isinstance(prompt, list | None) or not isinstance(target, list):
        return [prompt, target]  # no format, which is an error where the example becomes tokens
    turns = []
    for turn in [*(prompt or []), *target]:
        turns.append(_drop_unread(turn) if isinstance(turn, dict) else turn)
    return turns


def _drop_unread(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out keys without value, which `datasets` adds if another turn has them, and the weight, which is ignored."""
    return {key: value for key, value in turn.items() if value is not None and key != "weight"}
