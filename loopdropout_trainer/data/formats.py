"""The columns of TRL's dataset formats, and conversations in other spellings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.bounds import is_written_number
from loopdropout_trainer.errors import UserError, choose_advice, closest_match, join_words, short_repr


if TYPE_CHECKING:
    from datasets import Features

PAIRS = (("prompt", "completion"),)
"""Columns of prompts with a completion, which is the reference of GRPO."""

TEXTS = (*PAIRS, ("messages",), ("conversations",), ("text",))
"""Columns of each format of SFT, in the order in which they are looked for."""

PREFERENCES = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
"""Columns of each format of DPO."""

FORMATS = (*PREFERENCES, *TEXTS)
"""Columns of each format, in the order in which they are looked for."""

TARGETS = {"chosen", "rejected", "completion", "messages", "conversations", "text", "answer", "response"}
"""Columns that the model can be trained on, which must not be empty."""

_KEYS = {"from": "role", "value": "content"}
"""TRL's names of the keys of ShareGPT conversations."""

_ROLES = {"human": "user", "gpt": "assistant"}
"""TRL's names of the roles of ShareGPT conversations."""

_OTHER_ROLES = {
    "ai": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "chatgpt": "assistant",
    "claude": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "instruction": "system",
}
"""Roles of other programs, and the ones here that they mean."""

USUAL_ROLES = ("system", "user", "assistant", "tool")
"""Roles that chat templates usually know. Each template decides for itself whether it can write a turn of such a role."""


def find_format(names: Iterable[str], formats: Iterable[tuple[str, ...]] = FORMATS) -> tuple[str, ...]:
    """Return the columns of the first format that columns with these names make, or none."""
    names = set(names)
    for columns in formats:
        if names.issuperset(columns):
            return columns
    return ()


_USUAL_COLUMNS = {
    "prompt": ("question", "instruction", "query", "problem", "input"),
    "completion": ("answer", "output", "response", "solution", "target"),
    "chosen": ("preferred", "accepted", "good"),
    "rejected": ("dispreferred", "refused", "bad"),
}
"""Names that columns of a format often have elsewhere."""


def is_alpaca(names: Iterable[str]) -> bool:
    """Return whether columns with these names are those of Alpaca, whose prompt has an instruction and an input."""
    return {*names}.issuperset(("instruction", "input", "output"))


def guess_columns(example: Mapping[str, Any], formats: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return which columns could be renamed to those of a format, as an example for a message.

    Args:
        example: First row of the data.
        formats: Columns of each format that the data can have.

    Returns:
        Columns of the data by their names in a format, or an empty dict if no format has enough columns.
    """
    formats = [*map(tuple, formats)]
    chats, texts = [], []
    for name, value in example.items():
        if isinstance(value, str):
            texts.append(name)
        elif isinstance(value, list) and _is_chat(value):
            chats.append(name)
    if chats and ("messages",) in formats:
        return {"messages": chats[0]}
    of_chats = [("messages",), ("conversations",)]
    formats = [columns for columns in formats if columns not in of_chats]  # a text is not a conversation
    for others in ([], texts):  # first by usual names only
        for columns in formats:
            renamed = _find_names(columns, example, others)
            if renamed:
                return renamed
    return {}


def _is_chat(turns: Sequence[Any]) -> bool:
    return bool(turns) and isinstance(turns[0], dict) and bool({"role", "from"} & {*turns[0]})


def _find_names(columns: Sequence[str], names: Collection[str], others: Sequence[str]) -> dict[str, str]:
    """Return the other names of columns: usual ones, or some of the others. It is empty if there are too few."""
    found: dict[str, str] = {}
    for column in columns:
        usual = [name for name in (column, *_USUAL_COLUMNS.get(column, ())) if name in names]
        free = [name for name in [*usual, *others] if name not in found.values()]
        if not free:
            return {}
        found[column] = free[0]
    return {column: name for column, name in found.items() if column != name}


def wrong_columns(
    title: str,
    formats: Iterable[Sequence[str]],
    names: Iterable[str],
    fix: str,
    typed: Mapping[str, str] | None = None,
) -> UserError:
    """Return the error about data without the columns that examples are made of.

    Args:
        title: Name of the data.
        formats: Columns of each format that the data can have.
        names: Columns that the data has.
        fix: Sentence on how to get the columns.
        typed: Columns that the user has named in a field, with the sentence that says so.
    """
    typed = typed or {}
    choices = [enumerate_columns(columns) for columns in formats]
    expected = choices[0]
    if len(choices) > 1:
        expected = f"one of: {'; '.join(choices)}"
    names, known = [*names], set().union(*formats)
    hint = ""
    for name in names:  # the first one that is similar to a known column
        if name not in known and not hint:
            hint = closest_match(name, known - {*typed}, cutoff=0.8)
    typed_names = sorted(known.intersection(typed))
    matches = [closest_match(name, names) for name in typed_names]
    for name, match in zip(typed_names, matches, strict=True):
        hint += f" {typed[name]}{match}"
    if typed_names and all(matches):
        fix = ""  # the user has used a field of the fix, and only mistyped the names in it
    if {"chosen", "rejected"} <= {*names} - known:
        trainer = choose_advice("`loopdropout dpo`", "`LoopDropoutDPOTrainer`")
        hint += f" {trainer} trains on pairs of chosen and rejected answers."
    message = f"{title} must have {expected}, got the columns {', '.join(names)}.{hint}"
    return UserError(f"{message} {fix}".rstrip())


def enumerate_columns(columns: Sequence[str]) -> str:
    """Return the names of columns in words, such as "`prompt`, `chosen` and `rejected`"."""
    return join_words([f"`{name}`" for name in columns])


def to_trl_name(column: str) -> str:
    """Return TRL's name of a column, which is `messages` for ShareGPT's `conversations`."""
    return "messages" if column == "conversations" else column


def to_messages(value: Any) -> Any:
    """Rename the keys and roles of ShareGPT conversations, and make texts of numbers. Return other values unchanged."""
    turns = rename_keys(value)
    if not isinstance(turns, list):
        return turns
    messages = []
    for turn in turns:
        messages.append(_to_message(turn) if isinstance(turn, dict) else turn)
    return messages


def _to_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    message = _write_number(turn)
    if turn.get("role") in _ROLES:
        message["role"] = _ROLES[turn["role"]]
    return message


def join_text_parts(value: Any, chat_template: Any) -> Any:
    """Make a text of each content that is a list of texts, such as [{"type": "text", "text": "Hi"}]. Keep other values.

    Args:
        value: Conversation, with the keys of TRL or ShareGPT, or another value.
        chat_template: Text of the chat template, a mapping of several ones, or None. If it reads parts, they are kept.
    """
    if not isinstance(value, list) or _reads_parts(str(chat_template)):
        return value
    return [_join_parts(turn) if isinstance(turn, dict) else turn for turn in value]


def _join_parts(turn: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(turn)
    for key in ("content", "value"):
        parts = turn.get(key)
        if isinstance(parts, list) and parts and all(_is_text_part(part) for part in parts):
            joined[key] = "".join(part["text"] for part in parts)
    return joined


def _is_text_part(part: Any) -> bool:
    """Return whether a part of a content is a text and nothing else. Files in Parquet can have further keys without value."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        return False
    return all(value is None or key in ("type", "text") for key, value in part.items())


def _write_number(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Make texts of numbers that are the content of a turn.

    `datasets` reads a content such as "content": 7 of a file as a number, which chat templates need not be able to write.
    """
    texts = {key: str(turn[key]) for key in ("content", "value") if is_written_number(turn.get(key))}
    return {**turn, **texts}


def rename_keys(value: Any) -> Any:
    """Rename the keys of ShareGPT conversations, as TRL does for its trainers. Return other values unchanged."""
    if not isinstance(value, list):
        return value
    return [_rename_keys_of(turn) for turn in value]


def _rename_keys_of(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    message = {key: item for key, item in turn.items() if key not in _KEYS}
    for old, new in _KEYS.items():
        # A Parquet file with both spellings has all four keys in each turn, so the present name may be there and empty.
        if old in turn and message.get(new) is None:
            message[new] = turn[old]
    return message


def to_text(name: str, value: Any) -> Any:
    """Return the text of a number in a column to train on, such as the `answer` 7. Return other values unchanged."""
    return str(value) if name in TARGETS and is_written_number(value) else value


def list_turns(turns: Any) -> list[dict[str, Any]]:
    """Return the turns of a conversation, without other items, and none of a value that is not a conversation."""
    if not isinstance(turns, list):
        return []
    return [turn for turn in turns if isinstance(turn, dict)]


def has_weight(turns: Any) -> bool:
    """Return whether a turn of a conversation has a weight. A value that is not a conversation has none."""
    return any(turn.get("weight") is not None for turn in list_turns(turns))


def check_roles(turns: Any, chat_template: Any) -> None:
    """Raise UserError if a turn of a conversation has a role that no chat template knows, which is a mistake.

    Many templates write any role, so the model would learn turns of an "assitant". A role that only the training's own
    template names, such as "developer", is right.

    Args:
        turns: Conversation with TRL's keys, or another value, which has no roles.
        chat_template: Text of the chat template of the training, a mapping of several ones, or None.
    """
    for turn in list_turns(turns):
        if "role" not in turn:
            continue  # which `check_turns` explains
        role = turn["role"]
        if role in USUAL_ROLES or str(role) in re.findall(r"\w+", str(chat_template)):
            continue
        spellings = {meant: f" ({spelling})" for spelling, meant in _ROLES.items()}
        roles = ", ".join(f"{usual}{spellings.get(usual, '')}" for usual in USUAL_ROLES)
        hint = _hint_at_role(str(role).lower())
        raise UserError(f"A role must be {roles} or another one in the chat template, got {short_repr(role)}.{hint}")


def _hint_at_role(role: str) -> str:
    """Return the end of a message about a role that no chat template knows."""
    if role in ("function_call", "tool_call"):
        return " Write a call of a function as `tool_calls` of a turn of the assistant."
    meant = _ROLES.get(role) or _OTHER_ROLES.get(role)
    if meant is not None:
        return f" Did you mean {meant!r}?"
    return closest_match(role, [*USUAL_ROLES, *_ROLES])


def check_contents(turns: Any, chat_template: Any) -> None:
    """Raise UserError if a turn has its text under another key, or in a list of parts that the chat template cannot read.

    Args:
        turns: Conversation with TRL's keys, or another value, which has no contents.
        chat_template: Text of the chat template of the training, a mapping of several ones, or None.
    """
    for turn in list_turns(turns):
        if "role" in turn:  # else `check_turns` explains it
            _check_keys(turn, chat_template)
        has_parts = isinstance(turn.get("content"), list | dict)
        if has_parts and not _reads_parts(str(chat_template)):  # it would write them as Python does
            raise UserError(f"{_wrong_turn(turn)} The chat template reads no parts of a content, such as images.")


@cache  # each conversation of a dataset asks, and a search takes longer than its other checks
def _reads_parts(chat_template: str) -> bool:
    return re.search(r"is (not )?(string|iterable|sequence)|\btype\b", chat_template) is not None


_BESIDE_CONTENT = ("role", "content", "name", "id", "tool_call_id")
"""Keys of a turn that do not replace its content."""


def _check_keys(turn: Mapping[str, Any], chat_template: Any) -> None:
    """Raise UserError if a turn without content has a text under a key that is a mistake."""
    if turn.get("content") is not None or _replaces_content(turn, chat_template):
        return
    keys = [key for key, value in turn.items() if value is not None]
    texts = [key for key in keys if key not in _BESIDE_CONTENT and isinstance(turn[key], str | list)]
    if not texts:
        return
    fix = ""
    if len(texts) == 1:
        fix = f" Rename `{texts[0]}` to `content`."
    raise UserError(f"A turn must have `content`, got the keys {', '.join(keys)}.{fix}")


def _replaces_content(turn: Mapping[str, Any], chat_template: Any) -> bool:
    """Return whether a turn needs no content, because it has `tool_calls`, or `reasoning_content` that the template reads."""
    if turn.get("tool_calls"):
        return True
    others = [key for key, value in turn.items() if value is not None and key not in _BESIDE_CONTENT]
    return any(re.search(rf"""[.'"]{re.escape(key)}\b""", str(chat_template)) for key in others)


def check_filled(turns: Any, chat_template: Any) -> None:
    """Raise UserError if a turn has no content, and nothing that replaces it. Templates write it as empty, or as "None".

    Args:
        turns: Conversation with TRL's keys, or another value, which has no turns.
        chat_template: Text of the chat template of the training, a mapping of several ones, or None.
    """
    for turn in list_turns(turns):
        if "role" not in turn:
            continue  # which `check_turns` explains
        if turn.get("content") is None and not _replaces_content(turn, chat_template):
            raise UserError(f"{_wrong_turn(turn)} Write its text, or remove the conversation.")


def check_turns(name: str, target: Any) -> None:
    """Raise UserError if a column of conversations has a text or a mapping, or a conversation has a turn without a role.

    Args:
        name: Name of the column.
        target: Its value, a conversation with TRL's keys or another value.
    """
    if isinstance(target, str | dict) and name in ("messages", "conversations"):
        fix = ""
        if isinstance(target, dict):  # as {"role": [...], "content": [...]}
            fix = ' Write each turn as an item of a list, such as [{"role": "user", "content": "Hi"}].'
        elif target.lstrip().startswith("["):  # as a cell of a CSV file
            fix = " Parse the text by `json.loads`, and save the rows as JSON Lines."
        raise UserError(f"`{name}` must be a list of turns with `role` and `content`, got {short_repr(target)}.{fix}")
    if not isinstance(target, list):
        return
    for turn in target:
        if not isinstance(turn, dict) or "role" not in turn:
            raise _wrong_turn(turn)


def _wrong_turn(turn: Any) -> UserError:
    return UserError(f"A turn must have a `role` and a text as `content`, got {short_repr(turn)}.")


def check_complete(example: Mapping[str, Any]) -> None:
    """Raise UserError unless the columns of an example are all texts, or all conversations with turns.

    TRL's trainers need it. A recipe leaves out examples without a text.

    Args:
        example: Columns of an example, with TRL's keys in conversations.
    """
    kinds = []
    for name, value in example.items():
        if isinstance(value, str):
            kinds.append(f"a text as `{name}`")
            continue
        if not isinstance(value, list) or not value:
            raise UserError(
                f"`{name}` must be a text or a list of turns with `role` and `content`, got {short_repr(value)}."
            )
        kinds.append(f"a list as `{name}`")
    if len({type(value) for value in example.values()}) > 1:
        raise UserError(
            f"{enumerate_columns(example)} must be all texts or all lists of turns with `role` and `content`, got "
            f"{' and '.join(kinds)}."
        )


def check_answer(name: str, turns: Any) -> None:
    """Raise UserError if a conversation that is trained on has no turn of the assistant, and only those turns count.

    A role that only the chat template knows, such as "model", can be that of the assistant, too.

    Args:
        name: Name of the column.
        turns: Conversation with TRL's keys, or a text.
    """
    if not isinstance(turns, list):
        return
    roles = [str(turn["role"]) for turn in turns]
    if {*roles}.issubset(("system", "user", "tool")):
        raise UserError(
            f"`{name}` must have a turn of the assistant, because `assistant_only_loss` trains on nothing else, got the roles "
            f"{', '.join(roles)}. Remove the row, as by `Dataset.filter`."
        )


def has_text(name: str, target: Any) -> bool:
    """Return whether a column has a text to train on: a text itself, or the assistant's turns of a conversation.

    Args:
        name: Name of the column.
        target: Its value, a conversation with TRL's keys or another value.
    """
    check_turns(name, target)
    if isinstance(target, str):
        return bool(target.strip())
    if not isinstance(target, list):
        return False
    answers = [turn for turn in target if turn["role"] == "assistant"]
    return any(turn.get("tool_calls") or _has_content(turn) for turn in answers)


def has_empty_answer(target: Any, chat_template: Any) -> bool:
    """Return whether a conversation has a turn of the assistant with an empty text, and nothing that replaces it.

    A model learns to answer nothing from such a turn. Without any other answer, `has_text` is false for the conversation.

    Args:
        target: Value of a column, a conversation with TRL's keys or another value.
        chat_template: Text of the chat template of the training, a mapping of several ones, or None.
    """
    if not isinstance(target, list):
        return False
    answers = [turn for turn in target if turn["role"] == "assistant"]
    return any(not _has_content(turn) and not _replaces_content(turn, chat_template) for turn in answers)


def is_equal_pair(example: Mapping[str, Any]) -> bool:
    """Return whether an example is a pair whose chosen answer is the rejected one, too, so that DPO has no gradient."""
    return "chosen" in example and "rejected" in example and example["chosen"] == example["rejected"]


def _has_content(turn: Mapping[str, Any]) -> bool:
    """Return whether the content of a turn is not empty. It can be a list of parts, such as texts."""
    content = turn.get("content")
    if isinstance(content, str):
        return bool(content.strip())
    return isinstance(content, list) and bool(content)


def find_features(example: Mapping[str, Any]) -> Features | None:
    """Return types of columns for texts, numbers, and conversations and tools in any shape, or None for other examples.

    `datasets` takes the type of a column from its first rows. Later rows fail, or get the keys of the first ones, if their
    turns or tools have other keys. `Json` keeps each value as it is. A text that was made of a number would be a number again.
    """
    from datasets import Features, Json, Value

    is_plain = all(isinstance(value, str | int) for value in example.values())
    has_turns = any(isinstance(value, list | dict) for value in example.values())
    if not is_plain and not has_turns:
        return None
    types = {str: Value("string"), bool: Value("bool"), int: Value("int64")}
    return Features({name: types.get(type(value), Json()) for name, value in example.items()})
