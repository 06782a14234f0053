"""Checks of the examples and of the chat template that a program gives a trainer, before TRL tokenizes the examples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import cached_file

from loopdropout_trainer.data.formats import wrong_columns
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.tokenizers import CHAT_TEMPLATES, check_chat_template, set_chat_template, unknown_template


_CONVERTERS = {"list": "from_list", "tuple": "from_list", "DataFrame": "from_pandas"}
"""Functions of `datasets.Dataset` that convert other containers of examples, by the name of the container's type."""


def read_first(dataset: Any) -> Mapping[str, Any] | None:
    """Return the first example of a dataset, or None without one."""
    example = None if dataset is None else next(iter(dataset), None)
    return example if isinstance(example, Mapping) else None


def has_conversations(example: Mapping[str, Any] | None) -> bool | None:
    """Return whether an example is a conversation, or None for tokens or without an example."""
    from trl.data_utils import is_conversational, is_conversational_from_value

    if example is None or "input_ids" in example:
        return None
    return bool(is_conversational(example) or is_conversational_from_value(example))


def name_datasets(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the datasets among the arguments of a trainer, each with its name in messages."""
    yield "`train_dataset`", arguments.get("train_dataset")
    held_out = arguments.get("eval_dataset")
    if not isinstance(held_out, dict):
        yield "`eval_dataset`", held_out
        return
    for name, dataset in held_out.items():
        yield f"`eval_dataset[{name!r}]`", dataset


def check_containers(arguments: Mapping[str, Any]) -> None:
    """Raise UserError if examples are in a list or in a table of pandas, which `Dataset` converts."""
    for title, dataset in name_datasets(arguments):
        kind = type(dataset).__name__
        if kind in _CONVERTERS:
            raise UserError(
                f"{title} must be a `Dataset` or an `IterableDataset`, got a {kind}. Convert it by "
                f"`datasets.Dataset.{_CONVERTERS[kind]}`."
            )


def check_columns(arguments: Mapping[str, Any], formats: Collection[Sequence[str]]) -> None:
    """Raise UserError unless the examples have the columns of one of TRL's formats, or tokens.

    Args:
        arguments: Arguments of a trainer.
        formats: Columns of each format that the trainer reads. Without any, all columns are accepted.
    """
    from trl.data_utils import is_conversational_from_value

    for title, dataset in name_datasets(arguments) if formats else ():
        example = read_first(dataset)
        if example is None or "input_ids" in example or is_conversational_from_value(example):
            continue
        readable = formats
        if "prompt" in example:  # which TRL looks for first, and then reads no format without it
            readable = [columns for columns in formats if "prompt" in columns]
        if not any({*example}.issuperset(columns) for columns in readable):
            fix = "Rename columns by `Dataset.rename_column`, or make new ones by `Dataset.map`."
            raise wrong_columns(title, readable, example, fix)


def check_conversations(arguments: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if examples are conversations, and the tokenizer has no chat template."""
    if any(has_conversations(read_first(dataset)) for _, dataset in name_datasets(arguments)):
        check_chat_template(tokenizer)


def check_assistant_loss(args: TrainingArguments, example: Mapping[str, Any] | None) -> None:
    """Raise UserError if only the assistant's turns are to be trained on, and an example is a text without turns."""
    if not getattr(args, "assistant_only_loss", False) or example is None:
        return
    texts = [name for name in ("prompt", "completion", "text") if isinstance(example.get(name), str)]
    if texts:
        raise UserError(
            f"`assistant_only_loss` must be false for examples without turns of an assistant, got the text `{texts[0]}`. Of a "
            "pair of texts, only the completion is trained on."
        )


def choose_template(args: TrainingArguments, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Set the chat template that `chat_template_path` names, if it is a file or one of the package's templates.

    Returns:
        The name of a tokenizer or a model, whose template and tokens TRL copies, or None.
    """
    name = getattr(args, "chat_template_path", None)
    if name is None:
        return None
    if name in CHAT_TEMPLATES or Path(name).is_file():
        set_chat_template(tokenizer, name)
        return None
    try:
        cached_file(name, "tokenizer_config.json")
    except (OSError, ValueError):
        others = "a Jinja file, or the name of a tokenizer with a chat template"
        raise unknown_template("chat_template_path", name, others) from None
    return name
