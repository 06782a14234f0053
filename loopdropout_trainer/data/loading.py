"""From rows to training and held-out examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from loopdropout_trainer.arithmetic import arithmetic_problems
from loopdropout_trainer.data.arguments import DataArguments
from loopdropout_trainer.data.caching import examples_key
from loopdropout_trainer.data.columns import (
    check_columns,
    check_one_format,
    describe_missing_text,
    describe_turns,
    warn_about_unused,
)
from loopdropout_trainer.data.examples import Examples, LeftOut
from loopdropout_trainer.data.files import load_rows
from loopdropout_trainer.data.formats import (
    TARGETS,
    check_contents,
    check_roles,
    has_text,
    join_text_parts,
    to_messages,
    to_text,
)
from loopdropout_trainer.data.holding_out import interleave, random_order
from loopdropout_trainer.data.loaded import LoadedExamples, count_sources
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
from loopdropout_trainer.data.preparations import FIELD, PREPARATIONS, Row, find_columns, keep_all
from loopdropout_trainer.data.saved_prompts import find_prompts
from loopdropout_trainer.data.sources import DataSource, find_shares
from loopdropout_trainer.data.tokenizing import tokenize
from loopdropout_trainer.errors import UserError, count, short_repr


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
    left_out: list[LeftOut] = []
    losses = Losses(completion_only_loss, assistant_only_loss)
    try:
        return load_examples(args, tokenizer, max_length, left_out, losses).datasets
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
    from datasets import DatasetDict

    with PartialState().local_main_process_first():  # the other processes read the cache of `datasets`
        mixture = _load_mixture(args, tokenizer, left_out, losses)
        splits = {}
        file = _load_held_out_file(args, mixture.examples, tokenizer, left_out, losses)
        for name, examples in _split(args, mixture.examples, file, left_out).items():
            noun = "examples" if name == "train" else "held-out examples"
            splits[name] = _complete(examples, tokenizer, max_length, left_out, noun)
    if not len(splits["train"]):
        raise UserError(f"`max_length` must be larger, because no example has {max_length} tokens or fewer.")
    lengths = None
    if "num_tokens" in splits["train"].column_names:
        lengths = _read_numbers(splits["train"], "num_tokens")
    source_numbers = _read_numbers(splits["train"], "source")
    sources = []
    if len(mixture.sizes) > 1:
        held_out_numbers = source_numbers[:0]
        if not args.eval_files:
            held_out_numbers = _read_numbers(splits["eval"], "source")
        shares = find_shares(args.train_sources)
        sources = count_sources(
            mixture.titles, mixture.sizes, mixture.losses, shares, source_numbers, held_out_numbers
        )
    prompts = {}
    if "mixed" in splits["train"].column_names:
        prompts = find_prompts(mixed["example"] for mixed in splits["train"]["mixed"])
    datasets = DatasetDict()
    for name, split in splits.items():
        if len(split):
            datasets[name] = split.remove_columns([own for own in split.column_names if own in OWN_COLUMNS])
    num_repeats = len(splits["train"]) - len(np.unique(_read_numbers(splits["train"], "content")))
    loaded = LoadedExamples(datasets, lengths, sources, source_numbers, prompts, num_repeats)
    if file is None:
        return loaded
    return loaded._replace(held_out_loss=file.loss, train_loss=file.train_loss)


def _read_numbers(rows: Dataset, name: str) -> np.ndarray:
    """Return a column of integers. `[:]` reads all of them together, and not one after the other, which takes seconds."""
    return np.array(rows[name][:], dtype=int)


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


def _load_mixture(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, left_out: list[LeftOut], losses: Losses
) -> Mixture:
    """Return the usable examples of the data set, the files or the problems to train on, or of a mixture of `datasets`."""
    preparation = PREPARATIONS[args.preparation]
    if preparation.problems:
        num_problems = (args.num_train_examples or preparation.num_train_examples) + args.num_held_out
        rows = arithmetic_problems(preparation.problems, num_problems, args.split_seed, args.arithmetic_steps)
        source = DataSource(args.preparation)
        return Mixture(
            _make_examples(rows, source, args, tokenizer, left_out), [args.preparation], [num_problems], [""]
        )
    sources = args.train_sources
    rows = [load_rows(source) for source in sources]
    optional = [name for name in _OPTIONAL_COLUMNS if any(name in part.column_names for part in rows)]
    titles = [str(source) for source in sources]
    parts = []
    for number, part in enumerate(rows):
        title = titles[number] if len(rows) > 1 else None
        source, own_args = sources[number], args.of_source(sources[number])
        parts.append(_make_examples(part, source, own_args, tokenizer, left_out, title, number, optional))
    sizes = [len(part.rows) for part in parts]
    if len(parts) == 1:
        return Mixture(parts[0], titles, sizes, [""])
    trained = [""] * len(parts)
    if not have_one_format(parts):
        check_formats(parts, titles, args.formats)
        has_template = tokenizer.chat_template is not None
        for number, part in enumerate(parts):
            trained[number] = losses.describe(part.rows.features, titles[number], has_template)
        parts = [mix(part, losses) for part in parts]
    order = interleave(sizes, find_shares(sources))  # a part of the examples, if the shares ask for it
    return Mixture(concatenate(parts).select(order), titles, sizes, trained)


class HeldOutFile(NamedTuple):
    """The usable examples of `eval_files`, and the losses as in `LoadedExamples`."""

    examples: Examples
    loss: str = ""
    train_loss: str = ""


def _load_held_out_file(
    args: DataArguments,
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    left_out: list[LeftOut],
    losses: Losses,
) -> HeldOutFile | None:
    """Return the examples of `eval_files`, or None without the field. `examples`: the usable ones of the training data."""
    if not args.eval_files:
        return None
    source = DataSource("json", data_files=args.eval_files)
    held_out = _make_examples(load_rows(source), source, args, tokenizer, left_out, "`eval_files`")
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


def _split(
    args: DataArguments, examples: Examples, file: HeldOutFile | None, left_out: list[LeftOut]
) -> dict[str, Examples]:
    """Return the training and the held-out examples, which may be none."""
    preparation = PREPARATIONS[args.preparation]
    num_train = args.num_train_examples or preparation.num_train_examples
    num_eval = args.num_held_out
    # Random numbers, which are equal for equal examples (`random_order`).
    orders = _read_numbers(examples.rows, "order")
    train, held_out = preparation.split(orders, num_eval)
    eval_examples = examples.select(held_out) if file is None else file.examples
    # Rows with other `id`s or the like can be the same example.
    contents, eval_contents = (_read_numbers(part.rows, "content") for part in (examples, eval_examples))
    is_repeated = np.isin(orders[train], _read_numbers(eval_examples.rows, "order"))
    is_repeated |= np.isin(contents[train], eval_contents)
    if is_repeated.any():
        left_out.append(LeftOut(int(is_repeated.sum()), "examples", "they repeat a held-out example"))
    train = train[~is_repeated]
    if file is not None and not len(train):
        raise UserError("The data must have an example that is not in `eval_files`, got none.")
    if not len(train) or len(held_out) < num_eval:
        num_usable = len(np.unique(orders))  # without repeats, because those of held-out examples are not trained on
        raise UserError(
            f"`num_eval_examples` must be at most {num_usable - 1:,}, because the data has "
            f"{count(num_usable, 'usable example')} and one must be left to train on, got {num_eval:,}."
        )
    if len(train) < (args.num_train_examples or 1):
        raise UserError(
            f"`num_train_examples` must be at most {len(train):,}, the number of usable examples that are not held out, "
            f"got {args.num_train_examples:,}."
        )
    # `train` is in order of preference, from which the first ones are taken. They are trained on in the order of the source.
    return {"train": examples.select(np.sort(train[:num_train])), "eval": eval_examples}


def _make_examples(
    rows: Dataset,
    data: DataSource,
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    left_out: list[LeftOut],
    title: str | None = None,
    source: int = 0,
    optional: Sequence[str] = (),
) -> Examples:
    """Return the examples of the usable rows.

    Args:
        rows: Rows of one source.
        data: The source.
        args: How rows become examples.
        tokenizer: Tokenizer of the training.
        left_out: List to which the numbers of rows without an example are added.
        title: Name of the source in messages, if there are several.
        source: Number of the source.
        optional: Columns that all examples get, if other sources have them.
    """
    mapping, template = args.column_mapping or {}, tokenizer.chat_template
    columns = find_columns(args, [*rows.column_names, *mapping])
    of_source = f" of {title}" if title else ""  # in the plan, which names a single source already
    is_mixture = len(args.datasets or ()) > 1
    template_fields = FIELD.findall(args.template) if args.prompt_template else []
    check_columns(columns, args.formats, mapping, template_fields, rows, data, is_mixture)
    warn_about_unused({*rows.column_names} - {*columns, *mapping.values()}, columns, data)
    origins = np.stack([np.zeros(len(rows), dtype=int), np.arange(len(rows))], axis=1)
    everything = Examples(rows, examples_key(rows, args, tokenizer), [data], origins)
    noun = f"examples{of_source}"
    reason = f"they have no text to train on ({describe_missing_text(columns)})"
    examples = everything.keep(_has_texts, left_out, noun, reason, args=args, columns=columns, chat_template=template)
    if len(examples.rows) < len(rows):  # so that `keep` has added their number to `left_out`
        numbers = np.setdiff1d(origins[:, 1], examples.origins[:, 1]).tolist()
        without_text = left_out.pop()  # which would be wrong for rows of another format
        own_rows = ((number, _read_row(rows[number], args, template)) for number in numbers)
        check_one_format(f"The data of {data}", own_rows, columns, args.formats, everything.describe_row)
        row = _read_row(rows[numbers[0]], args, template)
        first_row = f". The first one is {everything.describe_row(numbers[0])}{describe_turns(row, columns)}"
        left_out.append(without_text._replace(reason=reason + first_row))
    if not len(examples.rows):
        found = "no examples"
        if len(rows):
            found = short_repr(_read_row(rows[0], args, template)[columns[-1]])
        raise UserError(f"The data of {data} must have an example with text in {columns[-1]}, got {found}.")
    preparation = PREPARATIONS[args.preparation]
    if preparation.keep is not keep_all:
        reason = f"`preparation: {args.preparation}` excludes them"
        examples = examples.keep(_is_kept, left_out, noun, reason, args=args, tokenizer=tokenizer)
        if not len(examples.rows):
            raise UserError(f"The data of {data} must have examples that `preparation: {args.preparation}` keeps.")
    return examples.replace(_make_example, args=args, source=source, optional=optional, chat_template=template)


def _complete(
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    left_out: list[LeftOut],
    noun: str,
) -> Dataset:
    """Return examples with the tokens of pairs of texts and the numbers of tokens, without examples that are too long."""
    if is_mixed(examples):
        examples = add_labels(examples, tokenizer)
    elif len(examples.rows) and isinstance(examples.rows[0].get("completion"), str):
        examples = examples.add(_add_tokens, tokenizer=tokenizer)
    elif max_length is not None:
        examples = examples.add(_count_tokens, tokenizer=tokenizer)
    if max_length is not None:
        reason = f"they have more than {max_length:,} tokens"
        examples = examples.keep(_fits, left_out, noun, reason, max_length=max_length)
    return examples.rows


def _read_row(row: Row, args: DataArguments, chat_template: Any) -> Row:
    """Rename columns as `column_mapping` says, and make texts of numbers to train on and of parts that are texts."""
    renamed = {name: row[column] for name, column in (args.column_mapping or {}).items()}
    read = {}
    for name, value in {**row, **renamed}.items():
        read[name] = join_text_parts(to_text(name, value), chat_template)
    return read


def _has_texts(row: Row, args: DataArguments, columns: Sequence[str], chat_template: Any) -> bool:
    row = _read_row(row, args, chat_template)
    for name in columns:
        turns = to_messages(row[name])
        check_roles(turns, chat_template)
        check_contents(turns, chat_template)
    for name in columns:
        if row[name] is None or (name in TARGETS and not has_text(name, row[name])):
            return False
    return True


def _is_kept(row: Row, args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> bool:
    return PREPARATIONS[args.preparation].keep(_read_row(row, args, tokenizer.chat_template), args, tokenizer)


def _make_example(row: Row, args: DataArguments, source: int, optional: Sequence[str], chat_template: Any) -> Row:
    row = {**dict.fromkeys(optional), **_read_row(row, args, chat_template)}
    identity, example = PREPARATIONS[args.preparation].make_example(row, args)
    own = {
        "order": random_order(identity, args.split_seed),
        "content": random_order(json.dumps(example, sort_keys=True, default=str), seed=0),
        "is_one_text": args.target_prefix != "",
        "source": source,
    }
    return {**example, **own}


def _add_tokens(example: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    tokens = tokenize(example, tokenizer, is_one_text=example["is_one_text"])
    return {**tokens, "num_tokens": len(tokens["input_ids"])}


def _count_tokens(example: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    """Return the number of tokens of an example: of a preference pair, with the longer answer."""
    whole = [{**example, "completion": example[name]} for name in ("chosen", "rejected") if name in example]
    return {"num_tokens": max(len(tokenize(part, tokenizer)["input_ids"]) for part in whole or [example])}


def _fits(example: Row, max_length: int) -> bool:
    return example["num_tokens"] <= max_length
