"""The kinds of prompts in examples. They are saved with an adapter, so that `chat` and `serve` can name the ones left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.data.formats import rename_keys


if TYPE_CHECKING:
    from datasets import Dataset

_BEGINNINGS = ("prompt", "messages", "conversations", "chosen")
"""Columns of which the first one in an example begins its conversation."""


def find_beginning(example: Mapping[str, Any]) -> str | None:
    """Return the column that begins the conversation of an example, or None for an example of texts or tokens."""
    return next((name for name in _BEGINNINGS if isinstance(example.get(name), list)), None)


def find_system_turns(conversations: Iterable[Any]) -> dict[str, Any]:
    """Return the settings about the system turns of conversations, of which only the first turns are read.

    They are `system_turn`, the text if all conversations begin with the same one, or `has_system_turns` if only some of them
    have one, or they differ. Such texts are not saved, because they may say something about a single row.
    """
    texts, has_others = set(), False
    for conversation in conversations:
        turns = rename_keys(conversation)
        if not turns or turns[0].get("role") != "system":
            has_others = True
        elif isinstance(turns[0].get("content"), str):
            texts.add(turns[0]["content"])
        else:  # a list of parts, which is not compared
            return {"has_system_turns": True}
        if len(texts) > 1 or (texts and has_others):
            return {"has_system_turns": True}
    return {"system_turn": texts.pop()} if texts else {}


def find_prompts(examples: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings about the prompts of examples in several formats.

    They are `is_chat` (whether there are conversations), `has_plain_texts` if there are also texts, and those of
    `find_system_turns` about the conversations.
    """
    first_turns, num_examples = [], 0  # whole conversations would fill the memory
    for example in examples:
        num_examples += 1
        beginning = find_beginning(example)
        if beginning is not None:
            first_turns.append(example[beginning][:1])
    settings: dict[str, Any] = {"is_chat": bool(first_turns)}
    if 0 < len(first_turns) < num_examples:
        settings["has_plain_texts"] = True
    return settings | find_system_turns(first_turns)


_NOTE = "Prompts of the examples: "
"""Beginning of the description of a dataset whose examples are tokens."""


def note_prompts(rows: Dataset, prompts: Mapping[str, Any]) -> None:
    """Write the settings of `find_prompts` into the description of a dataset, because its tokens do not tell them."""
    rows.info.description = _NOTE + json.dumps(prompts)


def read_prompts(rows: Any) -> dict[str, Any]:
    """Return the settings that `note_prompts` has written for a dataset, or none for other examples."""
    description = getattr(getattr(rows, "info", None), "description", None) or ""
    if not description.startswith(_NOTE):
        return {}
    return json.loads(description.removeprefix(_NOTE))
