"""From the rows of all sources to training and held-out examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from loopdropout_trainer.arithmetic import arithmetic_problems
from loopdropout_trainer.data.arguments import DataArguments
from loopdropout_trainer.data.examples import Examples, LeftOut, read_numbers
from loopdropout_trainer.data.files import load_rows
from loopdropout_trainer.data.holding_out import interleave
from loopdropout_trainer.data.loaded import LoadedExamples, MixedSource, count_sources
from loopdropout_trainer.data.making import make_examples
from loopdropout_trainer.data.mixing import (
    OWN_COLUMNS,
    Losses,
    add_labels,
    check_formats,
    concatenate,
    differ_in_format,
    have_one_format,
    is_mixed,
    mix,
)
from loopdropout_trainer.data.preparations import PREPARATIONS, Row
from loopdropout_trainer.data.saved_prompts import find_prompts, note_prompts
from loopdropout_trainer.data.sources import DataSource, find_shares
from loopdropout_trainer.data.splitting import split_examples
from loopdropout_trainer.data.tokenizing import tokenize
from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.tokenizers import check_tokenizer


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

logger = logging.get_logger(__name__)

_OPTIONAL_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns of conversations that some data sets of a mixture may lack."""


def load_datasets(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> DatasetDict:
    """Return training examples in source order (`train`) and held-out examples (`eval`, if there are any).

    The choice of held-out examples depends on the rows and `split_seed` alone. Training examples that repeat a held-out
    example are left out. Examples have the columns of one of TRL's formats: `prompt` and `completion`, `messages`, `text`, or
    `chosen` and `rejected`. Pairs of texts are also tokenized, with `input_ids` and `completion_mask` of `tokenize`.
    Examples of several formats have only `input_ids` and `labels`, as in trainings on each of them alone.

    Args:
        args: Source of the rows, and how they become examples.
        tokenizer: Tokenizer with the chat template of the training.
        max_length: Longest example in tokens, end token included. Longer examples are left out, not cut.
        completion_only_loss: As in `SFTConfig`, for the labels of examples of several formats.
        assistant_only_loss: As in `SFTConfig`, for the same labels.

    Raises:
        UserError: if the data cannot be loaded, or if too few examples are left.
    """
    if not isinstance(args, DataArguments):
        raise UserError(
            f"`args` must be `DataArguments`, such as `DataArguments(preparation='arithmetic')`, got {short_repr(args)}."
        )
    check_tokenizer(tokenizer, "tokenizer")
    left_out: list[LeftOut] = []
    losses = Losses(completion_only_loss, assistant_only_loss)
    try:
        loaded = load_examples(args, tokenizer, max_length, left_out, losses)
        if loaded.prompts:
            note_prompts(loaded.datasets["train"], loaded.prompts)  # for the trainer
        return loaded.datasets
    finally:
        if PartialState().is_main_process:
            for part in left_out:
                logger.warning(part.sentence())


def load_examples(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    left_out: list[LeftOut],
    losses: Losses,
) -> LoadedExamples:
    """Return the examples of `load_datasets` with their numbers, and add to `left_out` which ones are left out, and why."""
    with PartialState().local_main_process_first():  # the other processes read the cache of `datasets`
        mixture = _load_mixture(args, tokenizer, left_out, losses)
        file = _load_held_out_file(args, mixture.examples, tokenizer, left_out, losses)
        try:
            split = split_examples(args, mixture.examples, file.examples, left_out)
        except UserError:
            # No number of held-out examples helps if all of them are too long.
            _check_lengths(_add_columns(mixture.examples, tokenizer, max_length), max_length)
            raise
        complete = _add_columns(split.train, tokenizer, max_length)
        train = _leave_out_long(complete, max_length, left_out, "examples")
        _check_lengths(complete, max_length)
        complete = _add_columns(split.held_out, tokenizer, max_length)
        held_out = _leave_out_long(complete, max_length, left_out, "held-out examples")
    lengths = None
    if "num_tokens" in train.column_names:
        lengths = read_numbers(train, "num_tokens")
    num_different = len(np.unique(read_numbers(train, "content")))
    return LoadedExamples(
        datasets=_join_splits(train, held_out),
        lengths=lengths,
        sources=_count_sources(args, mixture, train, held_out),
        source_numbers=read_numbers(train, "source"),
        prompts=_find_prompts(train),
        num_repeats=len(train) - num_different,
        held_out_loss=file.loss,
        train_loss=file.train_loss,
    )


def _join_splits(train: Dataset, held_out: Dataset) -> DatasetDict:
    """Return the examples with the columns that trainers read. Without held-out examples there is no `eval`."""
    from datasets import DatasetDict

    datasets = DatasetDict()
    for name, examples in {"train": train, "eval": held_out}.items():
        if len(examples):
            unread = [column for column in examples.column_names if column in OWN_COLUMNS]
            datasets[name] = examples.remove_columns(unread)
    return datasets


def _find_prompts(train: Dataset) -> dict[str, Any]:
    """Return the settings of `find_prompts` of examples of several formats, else none."""
    if "mixed" not in train.column_names:
        return {}
    return find_prompts(mixed["example"] for mixed in train["mixed"])


class Mixture(NamedTuple):
    """The usable examples of all sources.

    Attributes:
        examples: Examples that training and held-out examples are chosen from.
        titles: Names of the sources.
        sizes: Number of usable examples of each source, of which the mixture may have a part.
        losses: Tokens of each source that are trained on, if the sources have several formats, else "".
    """

    examples: Examples
    titles: list[str]
    sizes: list[int]
    losses: list[str]


def _count_sources(args: DataArguments, mixture: Mixture, train: Dataset, held_out: Dataset) -> list[MixedSource]:
    """Return the data sets of a mixture with the numbers of their examples, or none if there is only one data set."""
    if len(mixture.sizes) == 1:
        return []
    held_out_numbers = np.array([], dtype=int)
    if not args.eval_files:  # whose examples come from no data set of the mixture
        held_out_numbers = read_numbers(held_out, "source")
    shares = find_shares(args.train_sources)
    train_numbers = read_numbers(train, "source")
    return count_sources(mixture.titles, mixture.sizes, mixture.losses, shares, train_numbers, held_out_numbers)


def _load_mixture(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, left_out: list[LeftOut], losses: Losses
) -> Mixture:
    """Return the usable examples of the data set, the files or the problems to train on, or of a mixture of `datasets`."""
    if PREPARATIONS[args.preparation].problems:
        return _make_problems(args, tokenizer, left_out)
    sources = args.train_sources
    titles = [str(source) for source in sources]
    parts = _load_parts(args, sources, tokenizer, left_out)
    sizes = [len(part.rows) for part in parts]
    if len(parts) == 1:
        return Mixture(parts[0], titles, sizes, losses=[""])
    loss_texts = [""] * len(parts)
    if not have_one_format(parts):
        check_formats(parts, titles, args.formats)
        has_template = tokenizer.chat_template is not None
        for number, part in enumerate(parts):
            loss_texts[number] = losses.describe(part.rows.features, titles[number], has_template)
        parts = [mix(part, losses) for part in parts]  # now all of them have the same columns
    order = interleave(sizes, find_shares(sources))  # a part of the examples, if the shares ask for it
    return Mixture(concatenate(parts).select(order), titles, sizes, loss_texts)


def _make_problems(args: DataArguments, tokenizer: PreTrainedTokenizerBase, left_out: list[LeftOut]) -> Mixture:
    """Return the examples of a preparation that generates arithmetic problems, as many as are trained on and held out."""
    preparation = PREPARATIONS[args.preparation]
    num_train = args.num_train_examples or preparation.num_train_examples
    num_problems = num_train + args.num_held_out
    rows = arithmetic_problems(preparation.problems, num_problems, args.split_seed, args.arithmetic_steps)
    examples = make_examples(rows, DataSource(args.preparation), args, tokenizer, left_out)
    return Mixture(examples, titles=[args.preparation], sizes=[num_problems], losses=[""])


def _load_parts(
    args: DataArguments, sources: Sequence[DataSource], tokenizer: PreTrainedTokenizerBase, left_out: list[LeftOut]
) -> list[Examples]:
    """Return the usable examples of each source."""
    rows = [load_rows(source) for source in sources]
    names = {name for part in rows for name in part.column_names}
    optional = [name for name in _OPTIONAL_COLUMNS if name in names]
    parts = []
    for number, source in enumerate(sources):
        title = str(source) if len(sources) > 1 else None
        own_args = args.of_source(source)
        parts.append(make_examples(rows[number], source, own_args, tokenizer, left_out, title, number, optional))
    return parts


class HeldOutFile(NamedTuple):
    """The usable examples of `eval_files`, or None without the field, and the losses as in `LoadedExamples`."""

    examples: Examples | None = None
    loss: str = ""
    train_loss: str = ""


def _load_held_out_file(
    args: DataArguments,
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    left_out: list[LeftOut],
    losses: Losses,
) -> HeldOutFile:
    """Return the examples of `eval_files`. `examples`: the usable ones of the training data."""
    if not args.eval_files:
        return HeldOutFile()
    source = DataSource("json", data_files=args.eval_files)
    held_out = make_examples(load_rows(source), source, args, tokenizer, left_out, "`eval_files`")
    is_mixture = is_mixed(examples)
    if not is_mixture and not differ_in_format(examples, held_out, args.formats):
        return HeldOutFile(held_out)
    has_template = tokenizer.chat_template is not None
    # Both raise UserError for texts without turns.
    loss = losses.describe(held_out.rows.features, "`eval_files`", has_template)
    train_loss = ""
    if not is_mixture:
        train_loss = losses.describe(examples.rows.features, "the training data", has_template)
    return HeldOutFile(mix(held_out, losses), loss, train_loss)


def _leave_out_long(examples: Examples, max_length: int | None, left_out: list[LeftOut], noun: str) -> Dataset:
    """Return the examples from `_add_columns` that have at most `max_length` tokens."""
    if max_length is None:
        return examples.rows
    reason = f"they have more than {max_length:,} tokens"
    noted: list[LeftOut] = []
    kept = examples.keep(_fits, noted, noun, reason, max_length=max_length)
    for part in noted:
        left_out.append(part._replace(reason=f"{reason}. The longest one is {_describe_longest(examples)}"))
    return kept.rows


def _add_columns(examples: Examples, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Examples:
    """Add the tokens of examples of several formats and of pairs of texts, and the numbers of tokens if there is a limit."""
    if is_mixed(examples):
        return add_labels(examples, tokenizer)
    if len(examples.rows) and isinstance(examples.rows[0].get("completion"), str):
        return examples.add(_add_tokens, tokenizer=tokenizer)
    if max_length is not None:
        return examples.add(_count_tokens, tokenizer=tokenizer)
    return examples


def _check_lengths(examples: Examples, max_length: int | None) -> None:
    """Raise UserError if each example to train on has more than `max_length` tokens, with the length of the shortest one."""
    if max_length is None:
        return
    lengths = read_numbers(examples.rows, "num_tokens")
    shortest = int(lengths.argmin())
    if lengths[shortest] > max_length:
        place = examples.describe_row(shortest)
        raise UserError(
            f"`max_length` must be at least {lengths[shortest]:,}, the number of tokens of the shortest example ({place}), "
            f"got {max_length:,}."
        )


def _describe_longest(examples: Examples) -> str:
    """Return the place of the longest example with its length, such as "row 4 of chats.jsonl, with 2,048 tokens"."""
    lengths = read_numbers(examples.rows, "num_tokens")
    longest = int(lengths.argmax())
    return f"{examples.describe_row(longest)}, with {lengths[longest]:,} tokens"


def _add_tokens(example: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    tokens = tokenize(example, tokenizer, is_one_text=example["is_one_text"])
    return {**tokens, "num_tokens": len(tokens["input_ids"])}


def _count_tokens(example: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    """Return the number of tokens of an example: of a preference pair, with the longer answer."""
    answers = [example[name] for name in ("chosen", "rejected") if name in example]
    wholes = [{**example, "completion": answer} for answer in answers]
    if not wholes:
        wholes = [example]
    return {"num_tokens": max(len(tokenize(whole, tokenizer)["input_ids"]) for whole in wholes)}


def _fits(example: Row, max_length: int) -> bool:
    return example["num_tokens"] <= max_length
