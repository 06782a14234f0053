"""The columns of TRL's dataset formats, and conversations in other spellings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loopdropout_trainer.errors import UserError, short_repr


FORMATS = (
    ("prompt", "chosen", "rejected"),
    ("chosen", "rejected"),
    ("prompt", "completion"),
    ("messages",),
    ("conversations",),
    ("text",),
)
"""Columns of each format, in the order in which they are looked for."""

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns of conversations that the chat template reads, as in TRL."""

TARGETS = {"chosen", "rejected", "completion", "messages", "conversations", "text", "answer", "response"}
"""Columns that the model can be trained on, which must not be empty."""

_ROLES = {"human": "user", "gpt": "assistant"}
"""TRL's names of the roles of ShareGPT conversations."""


def find_format(names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of the first format that columns with these names make, or none."""
    names = set(names)
    for columns in FORMATS:
        if names.issuperset(columns):
            return columns
    return ()


def to_messages(value: Any) -> Any:
    """Rename the keys and roles of ShareGPT conversations. Return other values unchanged."""
    if not isinstance(value, list) or not all("from" in turn for turn in value):
        return value
    return [{"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in value]


def has_text(target: Any) -> bool:
    """Return whether a target has a text to train on: a text itself, or the assistant's turns of a conversation."""
    if isinstance(target, str):
        return bool(target.strip())
    if not isinstance(target, list):
        return False
    turns = to_messages(target)
    for turn in turns:
        if not isinstance(turn, dict) or "role" not in turn:
            raise UserError(f"A turn must have a `role` and a text as `content`, got {short_repr(turn)}.")
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    return any(turn.get("tool_calls") or has_text(turn.get("content")) for turn in answers)
