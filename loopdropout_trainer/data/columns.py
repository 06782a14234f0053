"""Checks of the columns of data, before examples are made of its rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import yaml
from accelerate import PartialState
from transformers.utils import logging

from loopdropout_trainer.data.csv_files import advise_header, lacks_header
from loopdropout_trainer.data.formats import (
    TARGETS,
    enumerate_columns,
    find_format,
    guess_columns,
    is_alpaca,
    to_messages,
    wrong_columns,
)
from loopdropout_trainer.data.preparations import Row
from loopdropout_trainer.data.sources import DataSource
from loopdropout_trainer.errors import UserError, closest_match, count


if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.get_logger(__name__)


def check_columns(
    columns: Sequence[str],
    formats: Sequence[Sequence[str]],
    mapping: Mapping[str, str],
    template_fields: Sequence[str],
    rows: Dataset,
    data: DataSource,
    is_mixture: bool,
    is_held_out: bool = False,
) -> None:
    """Raise UserError unless the data has the columns that examples are made of, or the columns that are renamed to them.

    Args:
        columns: Columns that examples are made of, or none if the data has no format.
        formats: Columns of each format that the data can have.
        mapping: Columns of the data by their new names.
        template_fields: Columns in the user's `prompt_template`.
        rows: Rows of the data.
        data: Source of the data, which the message names.
        is_mixture: Whether there are several data sets, each of which can have a mapping.
        is_held_out: Whether the data is that of `eval_files`, which is read by the fields of the whole recipe.
    """
    names = rows.column_names
    needed = ({*columns} - {*mapping}) | {*mapping.values()}
    missing = sorted(needed.difference(names))
    if columns and not missing:
        return
    wanted = [missing] if missing else formats
    surplus, own_columns = _find_surplus_fields(columns, formats, mapping, template_fields, names)
    is_mistyped = any(closest_match(name, names) for name in missing)
    list_of_rows = _find_list_of_rows(rows)
    if surplus and not is_mistyped:
        # The fields are often those of other data, in a recipe that this one extends.
        fix = _explain_surplus(surplus, own_columns, data, is_mixture, is_held_out)
    elif rows.info.builder_name == "csv" and lacks_header(names):
        fitting = [columns for columns in wanted if len(columns) == len(names)] or wanted
        fix = advise_header(fitting[0])
    elif is_alpaca(names) and not mapping and not template_fields:
        fix = "Set `prompt_template: alpaca` and `column_mapping: {completion: output}`, which also read the `input`."
    elif mapping and {*names}.issuperset(mapping):  # of old names to new ones, as `datasets.rename_columns` takes it
        reverse = ", ".join(f"{column}: {name}" for name, column in mapping.items())
        fix = f"The mapping is reversed. Write `column_mapping: {{{reverse}}}`."
    elif list_of_rows is not None:
        fix = f"Its rows are in the list `{list_of_rows}` of one object. Write its items as lines of a .jsonl file."
    else:
        guess = {}
        if not mapping and len(rows):
            unused = {name: value for name, value in rows[0].items() if name not in needed}
            guess = guess_columns(unused, wanted)
        fix = _explain_fields(guess, is_mixture)
    typed = {field: f"`prompt_template` asks for `{field}`." for field in template_fields}
    typed |= {column: f"`column_mapping` takes `{column}` as `{name}`." for name, column in mapping.items()}
    raise wrong_columns(f"The data of {data}", wanted, names, fix, typed)


def _find_list_of_rows(rows: Dataset) -> str | None:
    """Return the column of data with a single row that has a list of objects, which are not turns, or None."""
    if len(rows) != 1:
        return None
    for name, value in rows[0].items():
        is_list = isinstance(value, list) and len(value) > 0 and isinstance(value[0], dict)
        if is_list and not {"role", "from"} & {*value[0]}:
            return name
    return None


def _explain_fields(guess: Mapping[str, str], is_mixture: bool) -> str:
    """Return a sentence about the fields that give the data other columns.

    Args:
        guess: `column_mapping` as an example, or empty without one.
        is_mixture: Whether each data set can have a mapping.
    """
    place, example = "", ""
    if is_mixture:
        place = " (for one data set, in its item of `datasets`)"
    if guess:
        fields = {"column_mapping": dict(guess)}
        line = yaml.safe_dump(fields, default_flow_style=None, sort_keys=False, width=math.inf).strip()
        example = f", for example `{line}`"
    return f"`column_mapping` renames columns{place}{example}, and `prompt_template` makes prompts from them."


def _find_surplus_fields(
    columns: Sequence[str],
    formats: Sequence[Sequence[str]],
    mapping: Mapping[str, str],
    template_fields: Sequence[str],
    names: Sequence[str],
) -> tuple[list[str], Sequence[str]]:
    """Return the fields without which examples can be made of the data, and the columns that they are made of then.

    Both are empty if the data needs the fields. Other arguments: `check_columns`. `names`: the columns of the data.
    """
    own_format = find_format(names, formats)
    without_mapping = columns if template_fields else own_format
    if mapping and without_mapping and {*names}.issuperset(without_mapping):
        return ["column_mapping"], without_mapping
    if not template_fields or not own_format:
        return [], ()
    if {*names}.issuperset(mapping.values()):
        return ["prompt_template"], own_format
    return ["column_mapping", "prompt_template"], own_format


def _explain_surplus(
    surplus: Sequence[str], own_columns: Sequence[str], data: DataSource, is_mixture: bool, is_held_out: bool
) -> str:
    """Return a sentence on how to read data without some fields, so that other data of the recipe keeps those that it needs.

    Args:
        surplus: Fields without which examples can be made of the data.
        own_columns: Columns that they are made of then.
        data, is_mixture, is_held_out: As in `check_columns`.
    """
    reason = f"because the data has {enumerate_columns(own_columns)}"
    if "prompt_template" in surplus and (is_mixture or is_held_out):
        return (
            f"All data of a recipe shares `prompt_template`. Remove it, {reason}, and write the prompts of the other data "
            "into its files."
        )
    if is_held_out:
        return f"Move `column_mapping` into the items of `datasets`, {reason}."
    if is_mixture:  # the other data sets may need the mapping of the recipe
        return f"Set `column_mapping: {{}}` in the item of {data} in `datasets`, {reason}."
    fields = " and ".join(f"`{field}`" for field in surplus)
    return f"Remove {fields}, {reason}."


def warn_about_unused(unused: Collection[str], columns: Collection[str], data: DataSource) -> None:
    """Log that a column of images or of system turns is ignored, because examples would often make no sense without it.

    Args:
        unused: Columns of the data that examples are not made of.
        columns: Columns that they are made of.
        data: Source of the data, which the message names.
    """
    for name in ("image", "images"):
        if name in unused and PartialState().is_main_process:
            logger.warning(f"The column `{name}` of the data of {data} is ignored, because the models read text only.")
    conversations = {"messages", "conversations"}.intersection(columns)
    if conversations and "system" in unused and PartialState().is_main_process:
        logger.warning(
            f"The column `system` of the data of {data} is ignored. To train on it, make it the first turn of "
            f"`{conversations.pop()}`, with the role system."
        )


def warn_about_rows(
    title: str,
    numbers: Sequence[int],
    num_rows: int,
    fact: str,
    describe_row: Callable[[int], str],
    advice: str = "",
) -> None:
    """Log how many examples have something that is probably a mistake, and the first one of them. Without any, log nothing.

    Args:
        title: Name of the data.
        numbers: Numbers of these examples.
        num_rows: Number of all examples.
        fact: What they have, as the end of a sentence. Further sentences about it may follow.
        describe_row: Function that returns the place of an example with a number, such as "row 4 of chats.jsonl".
        advice: Sentences about what to do, at the end.
    """
    if numbers and PartialState().is_main_process:
        verb = "has" if len(numbers) == 1 else "have"
        sentences = (
            f"{len(numbers):,} of the {count(num_rows, 'example')} in {title} {verb} {fact}. The first one is "
            f"{describe_row(numbers[0])}. {advice}"
        )
        logger.warning(sentences.rstrip())


def warn_about_weights(title: str, numbers: Sequence[int], num_rows: int, describe_row: Callable[[int], str]) -> None:
    """Log that weights of turns are ignored, with which other programs leave turns out of the loss.

    Args:
        title: Name of the data.
        numbers: Numbers of the examples whose turns have a weight.
        num_rows: Number of all examples.
        describe_row: Function that returns the place of an example with a number, such as "row 4 of chats.jsonl".
    """
    fact = "turns with the key `weight`, which is ignored, so turns of the assistant with the weight 0 are trained on, too"
    warn_about_rows(title, numbers, num_rows, fact, describe_row)


def warn_about_other_format(
    unused: Collection[str], columns: Sequence[str], formats: Sequence[Sequence[str]], data: DataSource
) -> None:
    """Log that columns of another format are ignored, if examples are made of the columns of a format that was found.

    Args:
        unused: Columns of the data that examples are not made of.
        columns: Columns that they are made of.
        formats: Columns of each format that the data can have.
        data: Source of the data, which the message names.
    """
    others = find_format(unused, formats)
    if not others or columns not in formats or not PartialState().is_main_process:
        return
    verb = "is" if len(others) == 1 else "are"
    logger.warning(
        f"The data of {data} has {enumerate_columns(columns)}, which are trained on, so {enumerate_columns(others)} {verb} "
        f"ignored. To train on {enumerate_columns(others)}, set `columns: [{', '.join(others)}]` in an item of `datasets`."
    )


def warn_about_mapping(mapping: Mapping[str, str], columns: Collection[str], data: DataSource) -> None:
    """Log which items of `column_mapping` change nothing, because examples are made of other columns.

    Args:
        mapping: Columns of the data by their new names.
        columns: Columns that examples are made of.
        data: Source of the data, which the message names.
    """
    read = {*columns, *_ALSO_READ}
    for name, column in mapping.items():
        if name not in read and PartialState().is_main_process:
            logger.warning(
                f"`column_mapping` takes `{column}` of the data of {data} as `{name}`, which changes nothing, because "
                f"examples are made of {enumerate_columns(columns)}.{closest_match(name, columns)}"
            )


_ALSO_READ = ("input", "tools", "chat_template_kwargs")
"""Columns that examples can have besides those that they are made of. The first one is of Alpaca's prompt."""


def warn_about_text_fields(fields: Mapping[str, str], columns: Sequence[str], data: DataSource) -> None:
    """Log which fields of texts are set, but change nothing, because the data has no completions that are texts.

    Args:
        fields: Values of `prompt_end` and `target_prefix`, by name.
        columns: Columns that examples are made of.
        data: Source of the data, which the message names.
    """
    for name, value in fields.items():
        if value and PartialState().is_main_process:
            logger.warning(
                f"`{name}: {json.dumps(value)}` changes nothing, because only prompts and completions that are texts get it, "
                f"and the examples of {data} are made of {enumerate_columns(columns)}."
            )


_MOST_PLACES = 3
"""Number of rows that a message names."""


def check_one_format(
    title: str,
    rows: Iterable[tuple[int, Row]],
    columns: Sequence[str],
    formats: Iterable[Sequence[str]],
    describe_row: Callable[[int], str],
    usual: Sequence[int] = (),
) -> None:
    """Raise UserError if rows have no text in the columns of their source, but in those of another format.

    The message names the rows of the rarer format, because they are probably the ones that belong elsewhere.

    Args:
        title: Name of the source.
        rows: Numbers of rows with the rows.
        columns: Columns of the source's format.
        formats: Columns of each format.
        describe_row: Function that returns the place of a row with a number, such as "row 4 of chats.jsonl".
        usual: Numbers of further rows, which have text in `columns`.
    """
    expected, found = columns, ()
    usual, others = [*usual], []
    for number, row in rows:
        filled = _find_filled_format(row, columns, formats)
        if filled == columns:
            usual.append(number)
        elif filled:
            found = found or filled
            others.append(number)
    if not others:
        return
    numbers = others
    if 0 < len(usual) < len(others):
        expected, found, numbers = found, columns, usual
    raise UserError(
        f"{title} must have rows of one format, got {enumerate_columns(found)} instead of {enumerate_columns(expected)} in "
        f"{_name_places(numbers, describe_row)}. Put the rows of each format into a file of their own, and list the files in "
        "`datasets` of a recipe or of `SFTDataArguments`."
    )


def check_names(
    title: str, left_out: Dataset, kept: Dataset, columns: Sequence[str], describe_row: Callable[[int], str]
) -> None:
    """Raise UserError if rows without text have it in a column with a mistyped name, or have turns in an unknown column.

    A column that other rows have, too, is not a mistake.

    Args:
        title: Name of the data.
        left_out: Rows without text.
        kept: Rows with text.
        columns: Columns that examples are made of, by their names in the data.
        describe_row: Function that returns the place of a row without text, such as "row 4 of chats.jsonl".
    """
    for name in left_out.column_names:
        if name in columns:
            continue
        values = left_out[name][:]
        filled = [number for number, value in enumerate(values) if value]
        if not filled:
            continue
        expected = [column for column in columns if not left_out[filled[0]][column]]
        hint = closest_match(name, expected, cutoff=0.8)
        has_turns = expected == ["messages"] and guess_columns({name: values[filled[0]]}, [("messages",)])
        if not hint and not has_turns:
            continue
        if all(value is None for value in kept[name][:]):
            raise UserError(
                f"{title} must have {enumerate_columns(expected)} in each row, got `{name}` instead in "
                f"{_name_places(filled, describe_row)}.{hint}"
            )


def _name_places(numbers: Sequence[int], describe_row: Callable[[int], str]) -> str:
    """Return the places of the first rows with some numbers, and how many others there are."""
    places = ", ".join(describe_row(number) for number in numbers[:_MOST_PLACES])
    if len(numbers) > _MOST_PLACES:
        places += f" and {len(numbers) - _MOST_PLACES:,} more"
    return places


def _find_filled_format(row: Row, columns: Sequence[str], formats: Iterable[Sequence[str]]) -> Sequence[str]:
    """Return `columns` if a row has text in them, else the columns of another format that it has filled, or none."""
    if all(row.get(name) for name in columns):
        return columns
    for others in formats:
        is_filled = all(row.get(name) for name in others)
        if is_filled and not {*others} & {*columns}:
            return others
    return ()


def describe_missing_text(columns: Sequence[str]) -> str:
    """Return which text an example without text to train on lacks."""
    if {"messages", "conversations"} & {*columns}:
        return "no answer of the assistant"
    parts = []
    for name in columns:
        fault = "is empty" if name in TARGETS else "is null"  # as an empty prompt is trained on
        parts.append(f"`{name}` {fault}")
    return " or ".join(parts)


def warn_about_blanks(title: str, column: str, values: Sequence[object], describe_row: Callable[[int], str]) -> None:
    """Log how many examples have an empty column that is not trained on, such as the prompt. They are not left out.

    Args:
        title: Name of the data.
        column: Name of the column.
        values: Values of the column in all examples.
        describe_row: Function that returns the place of an example with a number, such as "row 4 of pairs.csv".
    """
    blanks = [number for number, value in enumerate(values) if is_blank(value)]
    warn_about_rows(title, blanks, len(values), f"an empty `{column}`. Such examples are kept", describe_row)


def warn_about_empty_answers(
    title: str, numbers: Sequence[int], num_rows: int, describe_row: Callable[[int], str]
) -> None:
    """Log how many conversations have an empty answer next to others. They are not left out.

    Args:
        title: Name of the data.
        numbers: Numbers of these conversations.
        num_rows: Number of all examples.
        describe_row: Function that returns the place of an example with a number, such as "row 4 of chats.jsonl".
    """
    fact = (
        "a turn of the assistant without text, from which the model learns to answer nothing. Such examples are kept"
    )
    warn_about_rows(title, numbers, num_rows, fact, describe_row)


def warn_about_equal_pairs(
    title: str, numbers: Sequence[int], num_rows: int, describe_row: Callable[[int], str]
) -> None:
    """Log how many pairs have the same answer as chosen and as rejected. They are not left out.

    Args:
        title: Name of the data.
        numbers: Numbers of these pairs.
        num_rows: Number of all pairs.
        describe_row: Function that returns the place of a pair with a number, such as "row 4 of pairs.jsonl".
    """
    fact = "the same answer as `chosen` and as `rejected`, from which the model learns nothing. Such examples are kept"
    warn_about_rows(title, numbers, num_rows, fact, describe_row)


def is_blank(value: object) -> bool:
    """Return whether a value of a column is a text without characters, or a conversation without turns."""
    if isinstance(value, str):
        return not value.strip()
    return value == []


def describe_turns(row: Row, columns: Sequence[str]) -> str:
    """Return the roles of the turns of a row without an answer, as the end of a sentence. It is empty for other formats."""
    name = columns[-1]
    if name not in ("messages", "conversations"):
        return ""
    turns = to_messages(row[name])
    roles = dict.fromkeys(str(turn["role"]) for turn in turns) if isinstance(turns, list) else {}
    found = f"the roles {', '.join(roles)}" if roles else f"no turns in `{name}`"
    return f", which has {found}"
