"""The examples that the rows of one source make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.data.arguments import DataArguments
from loopdropout_trainer.data.caching import examples_key
from loopdropout_trainer.data.columns import (
    check_columns,
    check_names,
    check_one_format,
    describe_missing_text,
    describe_turns,
    warn_about_blanks,
    warn_about_empty_answers,
    warn_about_equal_pairs,
    warn_about_mapping,
    warn_about_other_format,
    warn_about_text_fields,
    warn_about_unused,
    warn_about_weights,
)
from loopdropout_trainer.data.examples import Examples, LeftOut
from loopdropout_trainer.data.formats import (
    TARGETS,
    check_contents,
    check_filled,
    check_roles,
    has_empty_answer,
    has_text,
    has_weight,
    is_equal_pair,
    join_text_parts,
    to_messages,
    to_text,
)
from loopdropout_trainer.data.holding_out import random_order
from loopdropout_trainer.data.preparations import (
    FIELD,
    PACKAGED_PREPARATIONS,
    PREPARATIONS,
    Row,
    find_columns,
    keep_all,
)
from loopdropout_trainer.data.repeats import write_content
from loopdropout_trainer.data.sources import DataSource
from loopdropout_trainer.errors import UserError, short_repr


if TYPE_CHECKING:
    from datasets import Dataset


def make_examples(
    rows: Dataset,
    data: DataSource,
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    left_out: list[LeftOut],
    title: str | None = None,
    source: int = 0,
    optional: Sequence[str] = (),
) -> Examples:
    """Return the examples of the usable rows of a source.

    Args:
        rows: Rows of the source.
        data: The source.
        args: How rows become examples.
        tokenizer: Tokenizer of the training.
        left_out: List to which the numbers of rows without an example are added.
        title: Name of the source in messages, if there are several.
        source: Number of the source.
        optional: Columns that all examples get, if other sources have them.

    Raises:
        UserError: If the rows lack columns, have several formats, or make no example.
    """
    columns = _find_used_columns(rows, data, args)
    row_numbers = np.arange(len(rows))
    origins = np.stack([np.zeros_like(row_numbers), row_numbers], axis=1)  # [N, 2], as in `Examples`
    examples = Examples(rows, examples_key(rows, args, tokenizer), [data], origins)
    # The plan names a single source already.
    noun = f"examples of {title}" if title else "examples"
    examples = _leave_out_empty(examples, columns, args, tokenizer.chat_template, left_out, noun)
    # If rows have one of two formats each, this was an error, so here they have both.
    _warn_about_other_format(rows, columns, data, args)
    examples = _leave_out_excluded(examples, args, tokenizer, left_out, noun)
    return examples.replace(
        _make_example, args=args, source=source, optional=optional, chat_template=tokenizer.chat_template
    )


def _find_used_columns(rows: Dataset, data: DataSource, args: DataArguments) -> Sequence[str]:
    """Return the columns that examples are made of, by their new names. Raise UserError if the rows lack one of them."""
    mapping = args.column_mapping or {}
    columns = find_columns(args, [*rows.column_names, *mapping])
    template_fields = FIELD.findall(args.template) if args.prompt_template else []
    is_mixture = len(args.datasets or ()) > 1
    is_held_out = bool(args.eval_files) and data.files == [*args.eval_files]
    check_columns(columns, args.formats, mapping, template_fields, rows, data, is_mixture, is_held_out)
    unused = {*rows.column_names} - {*columns} - {*mapping.values()}
    warn_about_unused(unused, columns, data)
    if args.preparation not in PACKAGED_PREPARATIONS:  # which may read any columns
        return columns
    warn_about_mapping(mapping, columns, data)
    if not is_mixture and not _has_text_pairs(rows, columns, args):
        text_fields = {"prompt_end": args.prompt_end, "target_prefix": args.target_prefix}
        warn_about_text_fields(text_fields, columns, data)
    return columns


def _warn_about_other_format(rows: Dataset, columns: Sequence[str], data: DataSource, args: DataArguments) -> None:
    """Log which columns of another format are ignored, unless the user has chosen the columns."""
    mapping = args.column_mapping or {}
    if args.preparation in PACKAGED_PREPARATIONS and not {*columns} & {*mapping}:
        unused = {*rows.column_names} - {*columns} - {*mapping.values()}
        warn_about_other_format(unused, columns, args.formats, data)


def _has_text_pairs(rows: Dataset, columns: Sequence[str], args: DataArguments) -> bool:
    """Return whether rows make prompts and completions that are texts, and not turns."""
    from datasets import Value

    if PREPARATIONS[args.preparation].columns:  # which makes them of other columns
        return True
    name = (args.column_mapping or {}).get("completion", "completion")
    return "completion" in columns and isinstance(rows.features[name], Value)


def _leave_out_empty(
    rows: Examples,
    columns: Sequence[str],
    args: DataArguments,
    chat_template: Any,
    left_out: list[LeftOut],
    noun: str,
) -> Examples:
    """Leave out the rows of a source without text to train on.

    Raises:
        UserError: If no row has such a text, or if rows without it have the columns of another format.
    """
    data = rows.sources[0]
    own_names = [(args.column_mapping or {}).get(name, name) for name in columns]
    reason = f"they have no text to train on ({describe_missing_text(columns)})"
    # The reason that `keep` notes is completed below with the first of the rows that it leaves out.
    noted: list[LeftOut] = []
    kept = rows.keep(_has_texts, noted, noun, reason, args=args, columns=columns, chat_template=chat_template)
    empty = np.setdiff1d(rows.origins[:, 1], kept.origins[:, 1]).tolist()  # numbers of the rows without text
    if empty:
        # The reason would be wrong for rows of another format, so they are an error before it is given.
        read_rows = _read_numbered_rows(rows, empty, args, chat_template)
        usual = kept.origins[:, 1].tolist()
        check_one_format(f"The data of {data}", read_rows, columns, args.formats, rows.describe_row, usual)
        check_names(
            f"The data of {data}",
            rows.rows.select(empty),
            kept.rows,
            own_names,
            lambda number: rows.describe_row(empty[number]),
        )
        turns = describe_turns(_read_row(rows.rows[empty[0]], args, chat_template), columns)
        place = f"{rows.describe_row(empty[0])}{turns}"
        left_out.append(LeftOut(len(empty), noun, f"{reason}. The first one is {place}"))
    for name, own_name in zip(columns, own_names, strict=True):
        if name not in TARGETS:
            warn_about_blanks(str(data), own_name, kept.rows[own_name][:], kept.describe_row)
    if not _has_text_pairs(rows.rows, columns, args):
        numbers = kept.find(_has_empty_answer, args=args, columns=columns, chat_template=chat_template)
        warn_about_empty_answers(str(data), numbers, len(kept.rows), kept.describe_row)
        # Later rows can have the key, too. Most data cannot have it, so their rows need not be read.
        if any(_may_have_key(kept.rows.features[name], "weight") for name in own_names):
            numbers = kept.find(_has_weight, columns=own_names)
            warn_about_weights(str(data), numbers, len(kept.rows), kept.describe_row)
    if "rejected" in columns:
        numbers = kept.find(_is_equal_pair, args=args, chat_template=chat_template)
        warn_about_equal_pairs(str(data), numbers, len(kept.rows), kept.describe_row)
    if not len(kept.rows):
        target, wanted, found = columns[-1], "text", "no examples"
        if len(rows.rows):
            first_row = _read_row(rows.rows[0], args, chat_template)
            found = f"{short_repr(first_row[target])}{describe_turns(first_row, columns)}"
            if isinstance(first_row[target], list):  # whose other turns can have texts
                wanted = "a text of the assistant"
        raise UserError(f"The data of {data} must have an example with {wanted} in {target}, got {found}.")
    return kept


def _read_numbered_rows(
    rows: Examples, numbers: Sequence[int], args: DataArguments, chat_template: Any
) -> Iterator[tuple[int, Row]]:
    """Yield some rows of a source with their numbers, one at a time, because there may be many."""
    for number in numbers:
        yield number, _read_row(rows.rows[number], args, chat_template)


def _leave_out_excluded(
    examples: Examples, args: DataArguments, tokenizer: PreTrainedTokenizerBase, left_out: list[LeftOut], noun: str
) -> Examples:
    """Leave out the rows that the preparation excludes. Raise UserError if it excludes all of them."""
    if PREPARATIONS[args.preparation].keep is keep_all:
        return examples
    reason = f"`preparation: {args.preparation}` excludes them"
    kept = examples.keep(_is_kept, left_out, noun, reason, args=args, tokenizer=tokenizer)
    if not len(kept.rows):
        data = examples.sources[0]
        raise UserError(f"The data of {data} must have examples that `preparation: {args.preparation}` keeps.")
    return kept


def _read_row(row: Row, args: DataArguments, chat_template: Any) -> Row:
    """Rename columns as `column_mapping` says, and make texts of numbers to train on and of parts that are texts."""
    renamed = {name: row[column] for name, column in (args.column_mapping or {}).items()}
    read = {}
    for name, value in {**row, **renamed}.items():
        read[name] = join_text_parts(to_text(name, value), chat_template)
    return read


def _has_texts(row: Row, args: DataArguments, columns: Sequence[str], chat_template: Any) -> bool:
    """Return whether a row has all columns, and text in those to train on. Raise UserError for wrong turns."""
    row = _read_row(row, args, chat_template)
    example = {name: to_messages(row[name]) for name in columns}
    # A mistake in the turns of any column is an error, also if the row has no text in another one.
    for value in example.values():
        check_roles(value, chat_template)
        check_contents(value, chat_template)
    for name, value in example.items():
        if value is None:
            return False
        if name in TARGETS and not has_text(name, value):
            return False
    for value in example.values():  # of a row that is not left out
        check_filled(value, chat_template)
    return True


def _has_empty_answer(row: Row, args: DataArguments, columns: Sequence[str], chat_template: Any) -> bool:
    """Return whether a conversation of a row that is trained on has an empty answer."""
    row = _read_row(row, args, chat_template)
    targets = [to_messages(row[name]) for name in columns if name in TARGETS]
    return any(has_empty_answer(target, chat_template) for target in targets)


def _may_have_key(feature: Any, key: str) -> bool:
    """Return whether a value of a column may have a key by the type of the column. Values of any type may have all keys."""
    from datasets import Json, LargeList, List

    if isinstance(feature, Json):
        return True
    if isinstance(feature, List | LargeList):
        return _may_have_key(feature.feature, key)
    if isinstance(feature, dict):
        return key in feature or any(_may_have_key(inner, key) for inner in feature.values())
    return False


def _has_weight(row: Row, columns: Sequence[str]) -> bool:
    """Return whether a turn of a row has a weight. `columns`: names in the data."""
    return any(has_weight(row[name]) for name in columns)


def _is_equal_pair(row: Row, args: DataArguments, chat_template: Any) -> bool:
    """Return whether a row has the same answer as chosen and as rejected."""
    return is_equal_pair(_read_row(row, args, chat_template))


def _is_kept(row: Row, args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> bool:
    row = _read_row(row, args, tokenizer.chat_template)
    return PREPARATIONS[args.preparation].keep(row, args, tokenizer)


def _make_example(row: Row, args: DataArguments, source: int, optional: Sequence[str], chat_template: Any) -> Row:
    """Return the example of a row, with the columns that only this package reads (`OWN_COLUMNS`)."""
    row = {**dict.fromkeys(optional), **_read_row(row, args, chat_template)}
    identity, example = PREPARATIONS[args.preparation].make_example(row, args)
    # `order` is a random number of the row's identity and the seed, by which examples are held out. Rows with different
    # identities can make the same example, also in another format. Then they have the same number in `content`.
    own = {
        "order": random_order(identity, args.split_seed),
        "content": random_order(write_content(example), seed=0),
        "is_one_text": args.target_prefix != "",
        "source": source,
    }
    return {**example, **own}
