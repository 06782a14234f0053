"""Checks of each row that a program gives a trainer, and conversations in TRL's spelling."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset, Features, IterableDataset, Json

from loopdropout_trainer.data.bars import hide_short_bars
from loopdropout_trainer.data.columns import (
    describe_missing_text,
    warn_about_blanks,
    warn_about_empty_answers,
    warn_about_equal_pairs,
    warn_about_rows,
    warn_about_weights,
)
from loopdropout_trainer.data.files import error_in_row
from loopdropout_trainer.data.formats import (
    TARGETS,
    check_answer,
    check_complete,
    check_contents,
    check_filled,
    check_roles,
    check_turns,
    has_empty_answer,
    has_text,
    has_weight,
    is_equal_pair,
    join_text_parts,
    to_messages,
    to_trl_name,
)
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.training.examples import DATASETS, find_columns, name_datasets, read_first


class RowReader(NamedTuple):
    """How a training reads rows.

    Attributes:
        chat_template: Text of the chat template, a mapping of several ones, or None.
        assistant_only_loss: Whether only the assistant's turns are trained on.
    """

    chat_template: Any
    assistant_only_loss: bool = False

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that TRL makes tokens of, with conversations as the chat template reads them."""
        example = {}
        for name, value in row.items():
            example[to_trl_name(name)] = to_messages(join_text_parts(value, self.chat_template))
        return example

    def check(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return the columns as `write` does, or raise UserError for a wrong row.

        Args:
            row: Columns that TRL makes tokens of.
            place: Place of the row, such as "row 4 of `train_dataset`".
        """
        example = self.write(row)
        given = dict(zip(row, example.values(), strict=True))  # with the user's names of the columns
        try:
            for name, turns in given.items():
                check_turns(name, turns)
                check_roles(turns, self.chat_template)
                check_contents(turns, self.chat_template)
                check_filled(turns, self.chat_template)
            check_complete(given)
            if self.assistant_only_loss:
                target = list(given)[-1]  # the completion of a pair, whose prompt is not trained on
                check_answer(target, given[target])
        except UserError as error:
            raise error_in_row(place, error) from None
        return example


def check_rows(arguments: dict[str, Any], formats: Collection[Sequence[str]], reader: RowReader) -> None:
    """Raise UserError for the first row that TRL cannot read, or whose turns have a role that is a mistake.

    Conversations become as in the examples of a recipe: ShareGPT's keys and roles are renamed, and numbers and parts that are
    texts become texts. A stream can be endless, so each of its rows is checked when the training reads it.

    Args:
        arguments: Arguments of a trainer. Streams are replaced by streams that check their rows, and datasets with
            conversations in another spelling by ones in TRL's.
        formats: Columns of each format that the trainer reads.
        reader: How the training reads rows.
    """
    checked = {}
    for title, given in name_datasets(arguments):
        dataset = given
        example = read_first(dataset)
        columns = find_columns(example, formats)
        if columns == ("messages",) and "conversations" in example:
            dataset = given.remove_columns("conversations")  # TRL would read them instead
        checked[title] = dataset
        if columns and isinstance(dataset, Dataset):
            checked[title] = _check_dataset(title, dataset, columns, reader)
        elif columns and isinstance(dataset, IterableDataset):
            first = {name: example[name] for name in columns}
            checked[title] = _check_stream(title, dataset, first, reader)
    for argument in DATASETS:
        if f"`{argument}`" in checked:
            arguments[argument] = checked[f"`{argument}`"]
        elif argument in arguments:
            arguments[argument] = {name: checked[f"`{argument}[{name!r}]`"] for name in arguments[argument]}


class UnusualRows(NamedTuple):
    """Numbers, from 1, of rows that a training reads although they are probably mistakes.

    Attributes:
        empty: Rows without a text to train on.
        partly_empty: Other rows with an empty turn of the assistant.
        equal: Pairs whose chosen answer is the rejected one, too.
        weighted: Rows whose turns have a weight, which is ignored.
    """

    empty: list[int]
    partly_empty: list[int]
    equal: list[int]
    weighted: list[int]

    def add(self, number: int, example: Mapping[str, Any], chat_template: Any) -> None:
        """Add the number of a row if its columns are unusual."""
        targets = {name: value for name, value in example.items() if name in TARGETS}
        if not all(has_text(name, value) for name, value in targets.items()):
            self.empty.append(number)
        elif any(has_empty_answer(value, chat_template) for value in targets.values()):
            self.partly_empty.append(number)
        if is_equal_pair(example):
            self.equal.append(number)
        if any(has_weight(value) for value in example.values()):
            self.weighted.append(number)

    def warn(self, title: str, rows: Dataset) -> None:
        """Log how many rows are unusual, also those with another empty column, such as the prompt."""
        if self.empty:
            targets = [name for name in rows.column_names if name in TARGETS]  # without another one, a row is an error
            _warn_of_empty(self.empty, len(rows), title, targets)
        warn_about_empty_answers(title, self.partly_empty, len(rows), _name_row)
        warn_about_equal_pairs(title, self.equal, len(rows), _name_row)
        warn_about_weights(title, self.weighted, len(rows), _name_row)
        for name in rows.column_names:
            if name not in TARGETS:
                warn_about_blanks(title, name, rows[name][:], lambda number: f"row {number + 1:,}")


def _name_row(number: int) -> str:
    """Return the place of a row, whose numbers begin with 1."""
    return f"row {number:,}"


def _check_dataset(title: str, dataset: Dataset, columns: Sequence[str], reader: RowReader) -> Dataset:
    """Check each row, and return the dataset with conversations in TRL's spelling, or itself if all of them are in it."""
    rows = dataset.select_columns(list(columns)).with_format(None)
    is_other = False
    unusual = UnusualRows([], [], [], [])
    for number, row in enumerate(rows, start=1):
        example = reader.check(row, f"row {number:,} of {title}")
        is_other |= example != row
        unusual.add(number, example, reader.chat_template)
    unusual.warn(title, rows)
    if not is_other:
        return dataset
    # `Json` keeps each value as it is.
    types = {name: feature for name, feature in dataset.features.items() if name not in columns}
    for name in columns:
        types[to_trl_name(name)] = Json() if isinstance(rows[0][name], list) else dataset.features[name]

    def write(row: Mapping[str, Any]) -> dict[str, Any]:
        return reader.write({name: row[name] for name in columns})

    with hide_short_bars(num_rows=len(dataset)):
        return dataset.map(write, remove_columns=list(columns), features=Features(types))


def _warn_of_empty(empty: Sequence[int], num_rows: int, title: str, columns: Sequence[str]) -> None:
    """Log how many rows have no text to train on, in a recipe's words. TRL trains on the end token that follows.

    Args:
        empty: Numbers of the rows, from 1.
        num_rows: Number of all rows.
        title: Name of the dataset.
        columns: Columns to train on.
    """
    fact = f"no text to train on ({describe_missing_text(columns)})"
    advice = (
        "A recipe leaves such examples out. In Python, remove them by `Dataset.filter`, because the model learns to answer "
        "nothing from them."
    )
    warn_about_rows(title, empty, num_rows, fact, _name_row, advice)


def _check_stream(
    title: str, dataset: IterableDataset, first: Mapping[str, Any], reader: RowReader
) -> IterableDataset:
    """Return a stream that checks each row as it passes, with conversations in TRL's spelling.

    Args:
        title: Name of the stream.
        dataset: The stream.
        first: First row with the columns that TRL makes tokens of. A stream takes long to read it again.
        reader: How the training reads rows.
    """

    def check(row: dict[str, Any], index: int) -> dict[str, Any]:
        own = {name: row[name] for name in first}
        return reader.check(own, f"row {index + 1:,} of {title}")

    features = dataset.features
    if reader.write(first) != first:  # so that the types of columns change
        features = None
    return dataset.map(check, with_indices=True, remove_columns=list(first), features=features)
