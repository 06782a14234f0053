"""Checks of the examples and of the chat template that a program gives a trainer, before TRL tokenizes the examples."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, TrainingArguments

from loopdropout_trainer.data.bars import hide_short_bars
from loopdropout_trainer.data.columns import check_one_format
from loopdropout_trainer.data.files import error_in_row
from loopdropout_trainer.data.formats import (
    find_format,
    guess_columns,
    is_alpaca,
    to_messages,
    wrong_columns,
)
from loopdropout_trainer.data.saved_prompts import find_beginning, find_system_turns, read_prompts
from loopdropout_trainer.data.tokenizing import find_training_template
from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.limits import render_chat
from loopdropout_trainer.tokenizers import check_chat_template
from loopdropout_trainer.training.evaluation_fields import word_of


logger = logging.getLogger(__name__)

_CONVERTERS = {"dict": "from_dict", "list": "from_list", "tuple": "from_list", "DataFrame": "from_pandas"}
"""Functions of `datasets.Dataset` that convert other containers of examples, by the name of the container's type."""


def read_first(dataset: Any) -> Mapping[str, Any] | None:
    """Return the first example of a dataset, or None without one."""
    example = None if dataset is None else next(iter(dataset), None)
    return example if isinstance(example, Mapping) else None


def has_conversations(example: Mapping[str, Any] | None) -> bool | None:
    """Return whether an example is a conversation, or None for tokens or without an example."""
    from trl.data_utils import is_conversational

    if example is None or "input_ids" in example:
        return None
    return bool(is_conversational(example) or _has_sharegpt(example))


def _has_sharegpt(example: Mapping[str, Any]) -> bool:
    """Return whether an example has a conversation in the column of ShareGPT, with its keys or with TRL's."""
    from trl.data_utils import is_conversational, is_conversational_from_value

    return is_conversational_from_value(example) or is_conversational({"messages": example.get("conversations")})


def _reads_sharegpt(example: Mapping[str, Any]) -> bool:
    """Return whether an example is trained on as the conversation in the column of ShareGPT, which becomes `messages`.

    TRL looks for `prompt` first. Turns in `messages` come before those in `conversations`, as in a recipe.
    """
    return "prompt" not in example and not example.get("messages") and _has_sharegpt(example)


def describe_prompts(dataset: Any) -> dict[str, Any]:
    """Return the settings about the prompts of a dataset that are saved with an adapter. Of streams, the first row is read."""
    noted = read_prompts(dataset)
    if noted:
        return noted
    example = read_first(dataset)
    settings = {"is_chat": has_conversations(example)}
    if not settings["is_chat"] or not isinstance(dataset, Dataset):
        return settings
    column = find_beginning(example)
    if column is None:
        return settings
    rows = dataset.select_columns([column]).with_format(None)
    return settings | find_system_turns(row[column] for row in rows)


def skips_preparation(args: Any) -> bool:
    """Return whether TRL takes the datasets as they are. Only the arguments of SFT have the field."""
    return bool((getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"))


@contextmanager
def hide_length_warnings(args: Any) -> Iterator[None]:
    """Hide transformers' warning about texts with more tokens than the tokenizer's limit, if `max_length` cuts them.

    Args:
        args: Settings of the training. Those of GRPO have no `max_length`.
    """
    if getattr(args, "max_length", None) is None:
        yield
        return
    reporter = logging.getLogger("transformers.tokenization_utils_base")

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Token indices sequence length is longer")

    reporter.addFilter(is_other)
    try:
        yield
    finally:
        reporter.removeFilter(is_other)


_SHAREGPT = ("conversations",)
"""Columns of ShareGPT's format."""

DATASETS = ("train_dataset", "eval_dataset", "test_dataset")
"""Arguments with datasets: of a trainer, of its `evaluate` and of its `predict`."""


def name_datasets(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the datasets among the arguments of a trainer or of its methods, each with its name in messages."""
    for argument in DATASETS:
        if argument not in arguments:
            continue
        dataset = arguments[argument]
        if argument == "eval_dataset" and isinstance(dataset, dict):
            for name, part in dataset.items():
                yield f"`{argument}[{name!r}]`", part
        else:
            yield f"`{argument}`", dataset


def hide_bars_of_few(arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Hide the progress bars of `datasets` in a block that prepares the datasets among some arguments, if they are short."""
    num_rows = 0.0
    for _, dataset in name_datasets(arguments):
        if dataset is not None:
            num_rows += len(dataset) if isinstance(dataset, Sized) else math.inf  # a stream
    return hide_short_bars(num_rows=num_rows)


def check_datasets(arguments: Mapping[str, Any]) -> None:
    """Raise UserError if a dataset has no examples, or is a list or a table of pandas, which `Dataset` converts."""
    for title, dataset in name_datasets(arguments):
        kind = type(dataset).__name__
        parts = [*dataset.values()] if isinstance(dataset, dict) else []
        if parts and isinstance(parts[0], Dataset | IterableDataset):  # a `DatasetDict`, as `load_dataset` returns it
            splits = ", ".join(map(str, dataset))
            chosen = "train" if "train" in dataset else next(iter(dataset))
            raise UserError(
                f"{title} must be a `Dataset` or an `IterableDataset`, got a {kind} with the splits {splits}. Choose "
                f"one, as by `[{chosen!r}]`."
            )
        if isinstance(dataset, list | tuple) and dataset and isinstance(dataset[0], Dataset | IterableDataset):
            raise UserError(
                f"{title} must be one `Dataset` or `IterableDataset`, got a {kind} of them. Join them by "
                "`datasets.concatenate_datasets`."
            )
        if kind in _CONVERTERS:
            raise UserError(
                f"{title} must be a `Dataset` or an `IterableDataset`, got a {kind}. Convert it by "
                f"`datasets.Dataset.{_CONVERTERS[kind]}`."
            )
        if isinstance(dataset, Iterator):  # of Python, which can be read once
            raise UserError(
                f"{title} must be a `Dataset` or an `IterableDataset`, got a {kind}. Give the function that makes it to "
                "`datasets.IterableDataset.from_generator`."
            )
        if isinstance(dataset, str | Path):
            raise UserError(
                f"{title} must be a `Dataset` or an `IterableDataset`, got {short_repr(str(dataset))}. Load a file by "
                "`datasets.load_dataset('json', data_files=..., split='train')`."
            )
        if dataset is not None and not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
            raise UserError(f"{title} must be a `Dataset` or an `IterableDataset`, got {short_repr(dataset)}.")
        if isinstance(dataset, Sized) and len(dataset) == 0:
            raise UserError(f"{title} must have at least one example.")


def check_train_dataset(dataset: Any) -> None:
    """Raise UserError if there is no dataset to train on."""
    if dataset is None:
        raise UserError(
            "`train_dataset` must be a `Dataset` or an `IterableDataset`, got None. Make one of rows by "
            "`datasets.Dataset.from_list(rows)`, or load one by `datasets.load_dataset`."
        )


def check_given(args: TrainingArguments, arguments: Mapping[str, Any]) -> None:
    """Raise UserError if there is no dataset to train on, or evaluations are asked for without a dataset for them."""
    check_train_dataset(arguments.get("train_dataset"))
    if not isinstance(arguments["train_dataset"], Sized) and args.max_steps <= 0:
        raise UserError(
            f"`max_steps` must be at least 1 if `train_dataset` is a stream, whose length is not known, got {args.max_steps}."
        )
    strategy = word_of(args.eval_strategy)
    if strategy != "no" and arguments.get("eval_dataset") is None:
        raise UserError(
            f"`eval_dataset` must be given if `eval_strategy` is {strategy}, got None. Hold out examples, as in "
            "`train_dataset.train_test_split(test_size=100)`, or set `eval_strategy` to no."
        )


def check_columns(arguments: Mapping[str, Any], formats: Collection[Sequence[str]]) -> None:
    """Raise UserError unless the examples have the columns of one of TRL's formats, or tokens.

    Args:
        arguments: Arguments of a trainer.
        formats: Columns of each format that the trainer reads. Without any, all columns are accepted.
    """
    if not formats:
        return
    for title, dataset in name_datasets(arguments):
        example = read_first(dataset)
        if example is None or "input_ids" in example:
            continue
        if ("messages",) in formats and _reads_sharegpt(example):
            _check_one_format(title, dataset, example, formats)
            continue
        readable = formats
        if "prompt" in example:  # which TRL looks for first, and then reads no format without it
            readable = [columns for columns in formats if "prompt" in columns]
        if ("messages",) in readable:
            readable = [*readable]
            readable.insert(readable.index(("messages",)) + 1, _SHAREGPT)
            if "conversations" in example:  # `check_rows` says what is wrong with them
                _check_one_format(title, dataset, example, formats)
                continue
        if not any({*example}.issuperset(columns) for columns in readable):
            raise wrong_columns(title, readable, example, _find_fix(example, readable, formats))
        _check_one_format(title, dataset, example, formats)


def warn_of_unused_function(arguments: Mapping[str, Any]) -> None:
    """Warn if `formatting_func` has no effect, because TRL reads other columns of the examples before its texts.

    Args:
        arguments: Arguments of a trainer.
    """
    if arguments.get("formatting_func") is None:
        return
    for title, dataset in name_datasets(arguments):
        example = read_first(dataset) or {}
        chats = [name for name in ("messages", "conversations") if isinstance(example.get(name), list)]
        read_before = ["prompt"] if "prompt" in example else chats
        if read_before:
            logger.warning(
                f"`formatting_func` has no effect on {title}, because TRL reads the column `{read_before[0]}` first. Make the "
                "texts before, by `dataset.map(lambda row: {'text': function(row)}, remove_columns=dataset.column_names)`."
            )


def make_text(function: Callable[[Any], Any], row: Mapping[str, Any]) -> str:
    """Return the text that `formatting_func` makes of a row, or raise UserError for another value. TRL does not name it.

    Args:
        function: The user's `formatting_func`.
        row: Row of a dataset.
    """
    text = function(row)
    if isinstance(text, str):
        return text
    fix = ""
    if isinstance(text, list) and text and isinstance(text[0], Mapping):
        fix = (
            " Make conversations before, by `dataset.map(lambda row: {'messages': function(row)}, "
            "remove_columns=dataset.column_names)`, and leave out `formatting_func`."
        )
    raise UserError(f"`formatting_func` must return a text for each row, got {short_repr(text)}.{fix}")


def _find_fix(
    example: Mapping[str, Any], readable: Collection[Sequence[str]], formats: Collection[Sequence[str]]
) -> str:
    """Return a sentence on how examples get the columns of a format.

    Args:
        example: First example.
        readable: Columns of each format that TRL looks for in such an example.
        formats: Columns of each format that the trainer reads.
    """
    chats = [name for name in ("messages", *_SHAREGPT) if name in example]
    if "prompt" in example and chats and ("messages",) in formats:
        return (
            f"To train on `{chats[0]}`, remove the prompt by `remove_columns('prompt')`, because TRL reads it first."
        )
    if is_alpaca(example):
        return (
            'Make examples by `load_datasets`, whose `SFTDataArguments` take `prompt_template="alpaca"` and '
            '`column_mapping={"completion": "output"}`, or by `Dataset.map`.'
        )
    renamed = {old: new for new, old in guess_columns(example, readable).items()}
    call = f"rename_columns({renamed})" if renamed else "Dataset.rename_columns"
    return f"Rename columns by `{call}`, or make new ones by `Dataset.map`."


def _check_one_format(
    title: str, dataset: Any, example: Mapping[str, Any], formats: Collection[Sequence[str]]
) -> None:
    """Raise UserError if rows of a dataset have different formats, each in columns that are empty in the other rows."""
    columns = find_columns(example, formats)
    known = [name for name in dict.fromkeys(itertools.chain(*formats, _SHAREGPT)) if name in example]
    if not isinstance(dataset, Dataset) or not columns or {*known} == {*columns}:
        return
    rows = enumerate(dataset.select_columns(known).with_format(None), start=1)
    check_one_format(title, rows, columns, [*formats, _SHAREGPT], lambda number: f"row {number:,} of {title}")


def explain_row(
    arguments: Mapping[str, Any], formats: Collection[Sequence[str]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise UserError for the first conversation that the chat template of a tokenizer cannot write. TRL names no row."""
    for place, row in _iterate_rows(arguments, formats):
        turns = {name: to_messages(value) for name, value in row.items()}
        if not all(isinstance(value, list) for value in turns.values()):
            continue
        # A prompt is the beginning of the other columns (`completion`, or `chosen` and `rejected`), or alone, as in GRPO.
        beginning = turns.pop("prompt", [])
        conversations = [beginning + value for value in turns.values()] or [beginning]
        try:
            for conversation in conversations:
                render_chat(tokenizer, conversation)
        except UserError as error:
            raise error_in_row(place, error) from None


def _iterate_rows(
    arguments: Mapping[str, Any], formats: Collection[Sequence[str]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the columns of each row that TRL makes tokens of, with the place of the row, such as "row 4 of ..."."""
    for title, dataset in name_datasets(arguments):
        if not isinstance(dataset, Dataset):
            continue
        columns = find_columns(read_first(dataset), formats)
        if not columns:
            continue
        for number, row in enumerate(dataset.select_columns(list(columns)).with_format(None)):
            yield f"row {number + 1:,} of {title}", row


def find_columns(example: Mapping[str, Any] | None, formats: Collection[Sequence[str]]) -> tuple[str, ...]:
    """Return the columns that TRL makes tokens of, or none for examples without a format or with tokens."""
    if example is None or "input_ids" in example:
        return ()
    # TRL renames `conversations` in ShareGPT's spelling to `messages` before it looks for a format.
    if ("messages",) in formats and _reads_sharegpt(example):
        return _SHAREGPT
    return find_format(example, [*map(tuple, formats), _SHAREGPT])


def check_conversations(arguments: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if examples are conversations, and the tokenizer has no chat template."""
    if any(has_conversations(read_first(dataset)) for _, dataset in name_datasets(arguments)):
        check_chat_template(tokenizer, in_trainer=True)


def check_assistant_loss(
    args: TrainingArguments, datasets: Iterable[tuple[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise UserError if only the assistant's turns are to be trained on, and an example is a text or has unmarked turns.

    Args:
        args: Settings of the training.
        datasets: Datasets with their names in messages, of which the first examples are read. The first dataset is trained
            on. The other ones are only checked if the training evaluates them.
        tokenizer: Tokenizer, whose chat template must mark the turns unless TRL knows it.
    """
    if not getattr(args, "assistant_only_loss", False):
        return
    for title, dataset in datasets:
        example = read_first(dataset)
        if example is not None:
            _check_turns_of(title, example, args, tokenizer)
        if word_of(args.eval_strategy) == "no":
            return


def _check_turns_of(
    title: str, example: Mapping[str, Any], args: TrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise UserError if the first example of a dataset is a text, or has turns that the chat template does not mark."""
    texts = [name for name in ("prompt", "completion", "text") if isinstance(example.get(name), str)]
    if texts:
        raise UserError(
            f"`assistant_only_loss` must be false for examples without turns of an assistant, got the text `{texts[0]}` in "
            f"{title}. Of a pair of texts, only the completion is trained on."
        )
    copies_template = getattr(args, "chat_template_path", None) is not None  # of another tokenizer
    if has_conversations(example) and not copies_template:
        check_chat_template(tokenizer, in_trainer=True)
        find_training_template(tokenizer)


def check_token_ids(title: str, dataset: Any, num_tokens: int) -> None:
    """Raise UserError if examples have tokens that the model does not know, which would be an error of the GPU.

    Args:
        title: Name of the dataset in the message.
        dataset: Examples with tokens. Streams and other datasets are not read.
        num_tokens: Number of tokens that the model has embeddings for.
    """
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return
    column = dataset.data.column("input_ids")  # of all rows of the table, which may be more than those of the dataset
    if not pa.types.is_integer(getattr(column.type, "value_type", pa.null())):
        return
    # All tokens are compared in one call, which takes far less time than rows of Python. Only an error looks for its row.
    limits = pc.min_max(pc.list_flatten(column)).as_py()
    if limits["min"] is None or (limits["min"] >= 0 and limits["max"] < num_tokens):
        return
    for number, row in enumerate(dataset.select_columns("input_ids").with_format(None)):
        for token in row["input_ids"]:
            if not 0 <= token < num_tokens:
                place = f"row {number + 1:,} of {title}"
                reason = (
                    f"`input_ids` must be from 0 to {num_tokens - 1:,}, got {token:,}. Use the model's own tokenizer."
                )
                raise error_in_row(place, UserError(reason))
