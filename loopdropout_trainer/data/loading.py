"""From rows to training and held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from loopdropout_trainer.arithmetic import arithmetic_problems
from loopdropout_trainer.data.arguments import DataArguments
from loopdropout_trainer.data.caching import examples_key, step_key
from loopdropout_trainer.data.files import load_rows
from loopdropout_trainer.data.formats import FORMATS, TARGETS, find_features, has_text, to_text
from loopdropout_trainer.data.holding_out import random_order
from loopdropout_trainer.data.preparations import PREPARATIONS, Row, find_columns
from loopdropout_trainer.data.tokenizing import tokenize
from loopdropout_trainer.errors import UserError, short_repr


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

logger = logging.get_logger(__name__)


def load_datasets(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> DatasetDict:
    """Return training examples in source order (`train`) and held-out examples (`eval`, if there are any).

    The choice of held-out examples depends on the rows and `split_seed` alone. Training examples that repeat a held-out
    example are left out. Examples have the columns of one of TRL's formats: `prompt` and `completion`, `messages`, `text`, or
    `chosen` and `rejected`. Pairs of texts are also tokenized, with `input_ids` and `completion_mask` of `tokenize`.

    Args:
        args: Source of the rows, and how they become examples.
        tokenizer: Tokenizer with the chat template of the training.
        max_length: Longest example in tokens, end token included. Longer examples are left out, not cut.

    Raises:
        UserError: if the data cannot be loaded, or if too few examples are left.
    """
    from datasets import DatasetDict

    with PartialState().local_main_process_first():  # the other processes read the cache of `datasets`
        datasets = _split(args, tokenizer)
        for name, examples in datasets.items():
            datasets[name] = _complete(examples, tokenizer, max_length)
    datasets = DatasetDict({name: split for name, split in datasets.items() if len(split)})
    if "train" not in datasets:
        raise UserError(f"`max_length` must be larger, because no example has {max_length} tokens or fewer.")
    return datasets


def _split(args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> dict[str, Examples]:
    """Return the training and the held-out examples, which may be none."""
    preparation = PREPARATIONS[args.preparation]
    num_train = args.num_train_examples or preparation.num_train_examples
    num_eval = args.num_held_out
    if preparation.problems:
        num_problems = num_train + num_eval
        rows = arithmetic_problems(preparation.problems, num_problems, args.split_seed, args.arithmetic_steps)
    else:
        rows = load_rows(args, args.train_files)
    examples = _make_examples(rows, args, tokenizer)
    orders = np.array(examples.rows["order"])
    train, held_out = preparation.split(orders, num_eval)
    eval_examples = examples.select(held_out)
    if args.eval_files:
        eval_examples = _make_examples(load_rows(args, args.eval_files), args, tokenizer)
    is_repeated = np.isin(orders[train], eval_examples.rows["order"])
    _log_left_out(np.sum(is_repeated), "they repeat a held-out example")
    train = train[~is_repeated]
    if len(train) < (args.num_train_examples or 1) or len(held_out) < num_eval:
        raise UserError(
            f"`num_train_examples` and `num_eval_examples` must be at most {len(train):,} and {len(held_out):,}, the "
            f"numbers of usable examples, got {args.num_train_examples} and {num_eval:,}."
        )
    # `train` is in order of preference, from which the first ones are taken. They are trained on in the order of the source.
    return {"train": examples.select(np.sort(train[:num_train])), "eval": eval_examples}


class Examples(NamedTuple):
    """Examples, with a key of everything that they were made from.

    Each method returns the result of a step. `datasets` caches it under the key of these examples and the step's inputs.
    """

    rows: Dataset
    key: str

    def select(self, indices: np.ndarray) -> Examples:
        """Take the examples with these indices [N]."""
        return Examples(self.rows.select(indices), step_key(self.key, indices))

    def replace(self, function: Callable[..., Row], **options: Any) -> Examples:
        """Make an example of each one by a function of it and the options."""
        key = step_key(self.key, function.__name__)
        features = find_features(function(self.rows[0], **options))
        names = self.rows.column_names
        rows = self.rows.map(function, features=features, remove_columns=names, fn_kwargs=options, new_fingerprint=key)
        return Examples(rows, key)

    def add(self, function: Callable[..., Row], **options: Any) -> Examples:
        """Add the columns that a function of each example and the options returns."""
        key = step_key(self.key, function.__name__)
        return Examples(self.rows.map(function, fn_kwargs=options, new_fingerprint=key), key)

    def keep(self, function: Callable[..., bool], reason: str, **options: Any) -> Examples:
        """Leave out the examples for which a function is false, and log the reason with their number."""
        key = step_key(self.key, function.__name__, reason)
        rows = self.rows.filter(function, fn_kwargs=options, new_fingerprint=key)
        _log_left_out(len(self.rows) - len(rows), reason)
        return Examples(rows, key)


def _make_examples(rows: Dataset, args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> Examples:
    """Return the examples of the usable rows, with their `order` in random choices."""
    mapping = args.column_mapping or {}
    columns = find_columns(args, [*rows.column_names, *mapping])
    _check_columns(columns, mapping, rows.column_names)
    examples = Examples(rows, examples_key(rows, args, tokenizer))
    reason = "they have no text to train on, or `preparation` excludes them"
    examples = examples.keep(_is_usable, reason, args=args, columns=columns, tokenizer=tokenizer)
    if not len(examples.rows):
        first = short_repr(_read_row(rows[0], args)[columns[-1]]) if len(rows) else "no examples"
        raise UserError(f"The data must have an example with text in {columns[-1]}, got {first}.")
    return examples.replace(_make_example, args=args)


def _complete(examples: Examples, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Dataset:
    """Return examples with the tokens of pairs of texts, without examples that are too long."""
    if len(examples.rows) and isinstance(examples.rows[0].get("completion"), str):
        examples = examples.add(_add_tokens, tokenizer=tokenizer)
    if max_length is not None:
        reason = f"they have more than {max_length:,} tokens"
        examples = examples.keep(_fits, reason, tokenizer=tokenizer, max_length=max_length)
    return examples.rows.remove_columns(["order", "is_one_text"])


def _check_columns(columns: Sequence[str], mapping: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise UserError unless the data has the columns that examples are made of, or the columns that are renamed to them."""
    needed = ({*columns} - {*mapping}) | {*mapping.values()}
    missing = sorted(needed.difference(names))
    if columns and not missing:
        return
    expected = ", ".join(missing)
    if not missing:
        expected = ", or ".join(" and ".join(names) for names in FORMATS)
    raise UserError(
        f"The data must have {expected}, got the columns {', '.join(names)}. `column_mapping` renames columns, and "
        "`prompt_template` makes prompts from them."
    )


def _read_row(row: Row, args: DataArguments) -> Row:
    """Rename columns as `column_mapping` says, and make texts of numbers to train on."""
    renamed = {name: row[column] for name, column in (args.column_mapping or {}).items()}
    return {name: to_text(name, value) for name, value in {**row, **renamed}.items()}


def _is_usable(row: Row, args: DataArguments, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> bool:
    row = _read_row(row, args)
    for name in columns:
        if row[name] is None or (name in TARGETS and not has_text(name, row[name])):
            return False
    return PREPARATIONS[args.preparation].keep(row, args, tokenizer)


def _make_example(row: Row, args: DataArguments) -> Row:
    identity, example = PREPARATIONS[args.preparation].make_example(_read_row(row, args), args)
    return {**example, "order": random_order(identity, args.split_seed), "is_one_text": args.target_prefix != ""}


def _add_tokens(example: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    return tokenize(example, tokenizer, is_one_text=example["is_one_text"])


def _fits(example: Row, tokenizer: PreTrainedTokenizerBase, max_length: int) -> bool:
    """Return whether an example is short enough: of a preference pair, both answers."""
    if "input_ids" in example:
        return len(example["input_ids"]) <= max_length
    whole = [{**example, "completion": example[name]} for name in ("chosen", "rejected") if name in example]
    return all(len(tokenize(part, tokenizer)["input_ids"]) <= max_length for part in whole or [example])


def _log_left_out(number: int, reason: str) -> None:
    if number and PartialState().is_main_process:
        logger.warning(f"{number:,} examples are left out, because {reason}.")
