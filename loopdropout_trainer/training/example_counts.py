"""Numbers of examples that a trainer leaves out, cuts or trains on several times, of which TRL says nothing."""

from __future__ import annotations

import json
from collections.abc import Sized
from typing import Any

import numpy as np
import pyarrow.compute as pc
from accelerate import PartialState
from datasets import Dataset
from transformers.utils import logging

from loopdropout_trainer.data import LeftOut
from loopdropout_trainer.data.repeats import OF_HELD_OUT, describe_repeats
from loopdropout_trainer.errors import UserError, count
from loopdropout_trainer.training.batches import has_target
from loopdropout_trainer.training.examples import name_datasets


logger = logging.get_logger(__name__)

_ROWS_READ_TOGETHER = 1000


def check_lengths(trainer: Any) -> None:
    """Warn if TRL has left out examples whose prompt fills `max_length`, which it does not say.

    Args:
        trainer: `LoopDropoutSFTTrainer` with prepared examples.

    Raises:
        UserError: If no example of a dataset is left, or none has a token to train on, so that the loss would be zero.
    """
    length = trainer.args.max_length
    for title, dataset in name_datasets(vars(trainer)):
        is_prepared = isinstance(dataset, Dataset) and "labels" in dataset.column_names
        if not is_prepared or title not in trainer._num_given:
            continue
        num_left, given = len(dataset), trainer._num_given[title]
        if num_left < given and not trainer.args.packing:
            noun = f"examples of the {given:,} in {title}"
            reason = f"they have no token to train on among the first {length:,} (`max_length`)"
            logger.warning(LeftOut(given - num_left, noun, reason).sentence())
        rows = dataset.select_columns("labels").with_format(None)
        if not any(has_target(row["labels"]) for row in rows):
            reason = "their texts are empty"
            if length is not None:
                reason += f" or their prompts have {length:,} tokens (`max_length`) or more"
            raise UserError(
                f"{title} must have a token to train on, got {count(given, 'example')} without one, because {reason}."
            )


def warn_of_cut(whole: Dataset, args: Any, packing: bool, name: str) -> None:
    """Log how many examples of a dataset are cut at `max_length`. Those without a trained token in the rest are left out.

    Args:
        whole: Examples with `input_ids` and `labels`, before they are cut.
        args: Settings of the training, as `SFTConfig`.
        packing: Whether several examples become one row. Only the packing strategy `bfd` cuts examples.
        name: TRL's name of the dataset: "train", "eval", "test" or the name of one of several held-out datasets.
    """
    if packing and args.packing_strategy != "bfd":
        return
    limit = args.max_length
    kept = slice(-limit, None) if args.truncation_mode == "keep_end" and not packing else slice(limit)
    lengths = np.concatenate([_count_tokens(table) for table in _read_tables(whole, "input_ids")])
    too_long = whole.select(np.flatnonzero(lengths > limit))
    num_cut = len(too_long)
    if "labels" in whole.column_names:
        rows = too_long.select_columns("labels").with_format(None)
        num_cut = sum(has_target(row["labels"][kept]) for row in rows)
    _warn_of_number_cut(num_cut, len(whole), limit, name)


def warn_of_cut_pairs(given: Sized, pairs: Dataset, args: Any, name: str) -> None:
    """Log how many pairs of a dataset are cut at `max_length`, and how many TRL leaves out because of their prompts.

    Args:
        given: Pairs before TRL has made tokens of them.
        pairs: Pairs with `prompt_ids`, `chosen_ids` and `rejected_ids`, which are cut in the batches.
        args: Settings of the training, as `DPOConfig`.
        name: As in `warn_of_cut`.
    """
    limit = args.max_length
    num_left_out = len(given) - len(pairs)
    if num_left_out and PartialState().is_main_process:
        noun = f"examples of the {len(given):,} in {_title_of(name)}"
        reason = f"they have a prompt of {limit:,} tokens (`max_length`) or more"
        logger.warning(LeftOut(num_left_out, noun, reason).sentence())
    num_cut = 0
    for table in _read_tables(pairs, "prompt_ids", "chosen_ids", "rejected_ids"):
        prompts, chosen = _count_tokens(table, "prompt_ids"), _count_tokens(table, "chosen_ids")
        rejected = _count_tokens(table, "rejected_ids")
        num_cut += int((prompts + np.maximum(chosen, rejected) > limit).sum())
    _warn_of_number_cut(num_cut, len(given), limit, name)


def _title_of(name: str) -> str:
    """Return the name in messages of a dataset with TRL's name."""
    return f"`{name}_dataset`" if name in ("train", "eval", "test") else f"`eval_dataset[{name!r}]`"


def _warn_of_number_cut(num_cut: int, num_examples: int, limit: int, name: str) -> None:
    if num_cut == 0 or not PartialState().is_main_process:
        return
    verb = "is cut, because it has" if num_cut == 1 else "are cut, because they have"
    logger.warning(
        f"{num_cut:,} of the {num_examples:,} examples in {_title_of(name)} {verb} more than {limit:,} tokens (`max_length`). "
        "A recipe and `load_datasets` leave such examples out, because the model does not see their ends."
    )


def describe_repeated(trainer: Any) -> list[str]:
    """Return sentences about the examples of a trainer that repeat another one or a held-out one. Streams are not read.

    Examples are the same if they have the same tokens, in SFT after `max_length` has cut them. Each one is read once and
    becomes a number, which takes 5 to 20 seconds for 1,000,000 examples with 500 tokens. In GRPO, whose examples have no
    tokens, all columns but `id` are compared.

    Args:
        trainer: Trainer of this package.
    """
    numbers = {}
    for title, dataset in name_datasets(vars(trainer)):
        own = _number_examples(dataset) if isinstance(dataset, Dataset) else None
        if own is not None:
            numbers[title] = own
    train = numbers.pop("`train_dataset`", None)
    if train is None:
        return []
    sentences = []
    num_repeats = len(train) - len(np.unique(train))
    if num_repeats:
        sentences.append(describe_repeats(num_repeats, len(train), "`train_dataset`") + ".")
    for title, held_out in numbers.items():
        num_repeats = int(np.isin(train, held_out).sum())
        if num_repeats:
            repeats = describe_repeats(num_repeats, len(train), "`train_dataset`", OF_HELD_OUT)
            effect = "reward is too high" if trainer.objective == "GRPO" else "loss is too low"
            sentences.append(f"{repeats} of {title}, so the held-out {effect}. A recipe leaves such examples out.")
    return sentences


def _read_tables(dataset: Dataset, *columns: str) -> Any:
    """Yield the rows of a dataset in tables of Arrow, which are read far faster than rows of Python."""
    return dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=_ROWS_READ_TOGETHER)


def _count_tokens(table: Any, column: str = "input_ids") -> np.ndarray:
    """Return the numbers of tokens of rows [N]."""
    return pc.list_value_length(table.column(column)).to_numpy()


def _number_examples(dataset: Dataset) -> np.ndarray | None:
    """Return a number for each example [N], which is equal for equal examples, or None for a dataset of another kind."""
    names = dataset.column_names
    if "input_ids" in names:
        return _number_tokens(dataset, "input_ids")
    parts = [name for name in names if name.endswith("_ids")]  # of a preference pair
    if parts:
        numbers = zip(*(_number_tokens(dataset, name).tolist() for name in parts), strict=True)
        return np.array([hash(own) for own in numbers], dtype=np.int64)
    if "prompt" in names:  # of GRPO
        rows = dataset.select_columns([name for name in names if name != "id"]).with_format(None)
        return np.array([hash(json.dumps(row, sort_keys=True, default=str)) for row in rows], dtype=np.int64)
    return None


def _number_tokens(dataset: Dataset, column: str) -> np.ndarray:
    """Return a number for the tokens of each example in a column [N]. A packed row has several examples."""
    is_packed = "seq_lengths" in dataset.column_names
    columns = [column, "seq_lengths"] if is_packed else [column]
    numbers = []
    for table in _read_tables(dataset, *columns):
        tokens = pc.list_flatten(table.column(column)).to_numpy()
        if is_packed:
            lengths = pc.list_flatten(table.column("seq_lengths")).to_numpy()
        else:
            lengths = _count_tokens(table, column)
        end = 0
        for length in lengths.tolist():
            start, end = end, end + length
            numbers.append(hash(tokens[start:end].tobytes()))
    return np.array(numbers, dtype=np.int64)
