"""Tokens of examples, with exact masks of the trained tokens."""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data.formats import wrong_columns
from loopdropout_trainer.data.preparations import Row
from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.limits import render_chat
from loopdropout_trainer.tokenizers import check_chat_template


_TARGETS = ("completion", "messages", "text")
"""Columns with the text or the turns that the model is trained on."""

_COLUMNS = (("prompt", "completion"), ("messages",), ("text",))

_MASK = "return_assistant_tokens_mask"


def tokenize(
    example: Row, tokenizer: PreTrainedTokenizerBase, assistant_only_loss: bool = False, is_one_text: bool = False
) -> dict[str, list[int]]:
    """Tokenize an example in one of TRL's formats so that no token is part of both prompt and completion.

    The end of a prompt can merge with the start of the completion. Some tokenizers make the token ":The" of "Answer:" and
    "The", and no answer to the prompt alone begins with that token. Use it as a function of `Dataset.map`.

    Args:
        example: Columns `prompt` and `completion` (texts or messages), `messages` or `text`. Texts get an end token.
            Messages may have `tools` (a list or JSON) and `chat_template_kwargs`, which their chat template reads.
        tokenizer: Tokenizer with the chat template of the training.
        assistant_only_loss: Whether to return `assistant_masks` for messages.
        is_one_text: Whether to tokenize prompt and completion together. A token that spans both is then part of the
            completion.

    Returns:
        `input_ids`, and the masks of `SFTTrainer` (1 for a target): `completion_mask` if there is a prompt, and
        `assistant_masks`.
    """
    _check_mapping(example)
    prompt = example.get("prompt")
    given = [name for name in _TARGETS if name in example]
    if not given:
        raise wrong_columns("An example", _COLUMNS, example, "Rename its columns.")
    target = example[given[0]]
    _check_values(given[0], target, prompt)
    if isinstance(target, list):
        return _tokenize_turns(prompt, target, example, tokenizer, assistant_only_loss)
    return _tokenize_texts(prompt, target, tokenizer, is_one_text)


def _check_mapping(example: Any) -> None:
    """Raise UserError unless an example has columns."""
    if not isinstance(example, Mapping):
        raise UserError(f"An example must be a mapping such as {{'text': 'x'}}, got {short_repr(example)}.")


def _check_values(name: str, target: Any, prompt: Any) -> None:
    """Raise UserError unless the column `name` and the prompt are both texts, or both lists of messages."""
    if not isinstance(target, str | list):
        raise UserError(f"`{name}` of an example must be a text or a list of messages, got {short_repr(target)}.")
    kind, noun = (list, "a list of messages") if isinstance(target, list) else (str, "a text")
    if prompt is not None and not isinstance(prompt, kind):
        raise UserError(f"`prompt` of an example must be {noun} as its `{name}` is, got {short_repr(prompt)}.")


def _tokenize_turns(
    prompt: list[Row] | None,
    turns: list[Row],
    example: Row,
    tokenizer: PreTrainedTokenizerBase,
    assistant_only_loss: bool,
) -> dict[str, list[int]]:
    """Tokenize a conversation, whose last turns are the completion if the first ones are given as its prompt."""
    tools = example.get("tools")
    if isinstance(tools, str):
        tools = _read_tools(tools)
    template = {"tools": tools or None, **(example.get("chat_template_kwargs") or {})}
    options = dict(template)
    if assistant_only_loss:
        options["chat_template"] = find_training_template(tokenizer)
        options[_MASK] = True
    if prompt is None:
        return _render(tokenizer, turns, **options)
    columns = _render(tokenizer, prompt + turns, **options)
    start = _render(tokenizer, prompt, add_generation_prompt=True, **template)["input_ids"]
    return _mask_prompt(columns, start)


def find_training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return TRL's chat template that marks the assistant's turns, or None if the tokenizer's own one marks them.

    Raises:
        UserError: If the tokenizer has no chat template, or one that marks no turns and that TRL does not know.
    """
    from trl import get_training_chat_template  # takes seconds

    check_chat_template(tokenizer)
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:
        raise UserError(
            "`assistant_only_loss` must be false, or the chat template must write each answer with its end token between "
            "`{% generation %}` and `{% endgeneration %}`, which this one does not."
        ) from None


def _read_tools(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"`tools` must be a list of schemas or its JSON, got {short_repr(text)}.") from None


def _render(tokenizer: PreTrainedTokenizerBase, turns: list[Row], **options: Any) -> dict[str, list[int]]:
    """Return the tokens of turns as the chat template writes them, and the mask of the assistant's tokens if it is asked."""
    check_chat_template(tokenizer)
    text = render_chat(tokenizer, turns, **{name: value for name, value in options.items() if name != _MASK})
    if _MASK not in options:
        return {"input_ids": _encode(tokenizer, text, add_special_tokens=False)}
    no_warnings = {"verbose": False}  # about long texts
    encoded = tokenizer.apply_chat_template(turns, return_dict=True, tokenizer_kwargs=no_warnings, **options)
    return {name: encoded[name] for name in ("input_ids", "assistant_masks")}


def _tokenize_texts(
    prompt: str | None, target: str, tokenizer: PreTrainedTokenizerBase, is_one_text: bool
) -> dict[str, list[int]]:
    """Tokenize a text, or a prompt and its completion, with an end token."""
    if is_one_text or not target.endswith(tokenizer.eos_token):
        target += tokenizer.eos_token
    if prompt is None:
        return {"input_ids": _encode(tokenizer, target)}
    ids = _encode(tokenizer, prompt + target)
    start = _encode(tokenizer, prompt)
    if not is_one_text and ids[: len(start)] != start:
        # A token of the whole text spans the prompt and the completion. Tokenize both on their own, unless this changes the
        # text: some tokenizers begin each text with a space.
        parted = start + _encode(tokenizer, target, add_special_tokens=False)
        if tokenizer.decode(parted) == tokenizer.decode(ids):
            ids = parted
    return _mask_prompt({"input_ids": ids}, start)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> list[int]:
    return tokenizer(text, verbose=False, **options)["input_ids"]  # without warnings about long texts


def _mask_prompt(columns: dict[str, list[int]], start: list[int]) -> dict[str, list[int]]:
    """Add the `completion_mask` of an example whose prompt alone has the tokens `start`."""
    ids = columns["input_ids"]
    length = len(os.path.commonprefix([start, ids]))  # takes any lists, not only paths
    return {**columns, "completion_mask": [0] * length + [1] * (len(ids) - length)}


def label_example(
    example: Row,
    tokenizer: PreTrainedTokenizerBase,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> dict[str, list[int]]:
    """Return `input_ids` and `labels` (-100 for tokens without loss) of an example, as in training.

    Args:
        example: Example from `load_datasets`, or columns that `tokenize` takes.
        tokenizer: Tokenizer with the chat template of the training.
        completion_only_loss: As in `SFTConfig`. Default: for examples with a prompt.
        assistant_only_loss: As in `SFTConfig`.
    """
    _check_mapping(example)
    if "labels" in example:  # of a mixture of formats
        return {"input_ids": example["input_ids"], "labels": example["labels"]}
    columns = example if "input_ids" in example else tokenize(example, tokenizer, assistant_only_loss)
    labels = list(columns["input_ids"])
    masks = []
    if completion_only_loss is not False and "completion_mask" in columns:
        masks.append(columns["completion_mask"])
    if assistant_only_loss and "assistant_masks" in columns:
        masks.append(columns["assistant_masks"])
    for mask in masks:
        labels = [label if is_target else -100 for label, is_target in zip(labels, mask, strict=True)]
    return {"input_ids": columns["input_ids"], "labels": labels}


def preview(example: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of an example as the model sees it, with the trained tokens between ⟦ and ⟧.

    Args:
        example: `input_ids` and `labels`, from `label_example` or from the dataset of a trainer.
        tokenizer: Tokenizer of the training.
    """
    text = ""
    pairs = zip(example["input_ids"], example["labels"], strict=True)
    for is_trained, tokens in groupby(pairs, lambda pair: pair[1] != -100):
        piece = tokenizer.decode([token for token, _ in tokens])
        text += f"⟦{piece}⟧" if is_trained else piece
    return text
