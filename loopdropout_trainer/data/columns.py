"""Checks of the columns of data, before examples are made of its rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import yaml
from accelerate import PartialState
from transformers.utils import logging

from loopdropout_trainer.data.formats import enumerate_columns, find_format, guess_columns, wrong_columns
from loopdropout_trainer.data.preparations import Row
from loopdropout_trainer.data.sources import DataSource
from loopdropout_trainer.errors import closest_match


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
    """
    names = rows.column_names
    needed = ({*columns} - {*mapping}) | {*mapping.values()}
    missing = sorted(needed.difference(names))
    if columns and not missing:
        return
    wanted = [missing] if missing else formats
    place = " (for one data set, in its item of `datasets`)" if is_mixture else ""
    unused = {}
    if len(rows):
        unused = {name: value for name, value in rows[0].items() if name not in needed}
    guess = {} if mapping else guess_columns(unused, wanted)
    line = yaml.safe_dump({"column_mapping": guess}, default_flow_style=None, sort_keys=False, width=math.inf).strip()
    example = f", for example `{line}`" if guess else ""
    fix = f"`column_mapping` renames columns{place}{example}, and `prompt_template` makes prompts from them."
    typed = {field: f"`prompt_template` asks for `{field}`." for field in template_fields}
    typed |= {column: f"`column_mapping` takes `{column}` as `{name}`." for name, column in mapping.items()}
    surplus, own_columns = _find_surplus_fields(columns, formats, mapping, template_fields, names)
    if surplus and not any(closest_match(name, names) for name in missing):  # else a name is mistyped
        # The fields are often those of other data, in a recipe that this one extends.
        fields = " and ".join(f"`{field}`" for field in surplus)
        fix = f"Remove {fields}, because the data has {enumerate_columns(own_columns)}."
    raise wrong_columns(f"The data of {data}", wanted, names, fix, typed)


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


def describe_other_format(row: Row, columns: Sequence[str], formats: Sequence[Sequence[str]]) -> str:
    """Return that a row without text has the columns of another format, as the end of a sentence, or "" if it has none."""
    for others in formats:
        is_filled = all(row.get(name) for name in others)
        if is_filled and not {*others} & {*columns}:
            names = " and ".join(f"`{name}`" for name in others)
            return f", which has {names}. Put such rows into a file of their own, as an item of `datasets`"
    return ""
