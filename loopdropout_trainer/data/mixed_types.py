"""Columns of JSON files with texts and numbers, of which `datasets` reads some texts as numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transformers.utils import logging


if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.get_logger(__name__)


def warn_of_mixed_types(rows: Dataset, title: str) -> None:
    """Log which texts of files are next to numbers, because `datasets` reads "007" as 7 there, and "1.50" as 1.5.

    Args:
        rows: Rows of the files.
        title: Name of the files in the message.
    """
    for column, feature in rows.features.items():
        for path in _find_json(feature, (column,)):
            values = rows.select_columns([column]).with_format(None)[column]
            is_mixed = any(_has_number(value, path[1:]) for value in values)
            if is_mixed:
                logger.warning_once(
                    f"`{'.'.join(path)}` of {title} has texts and other values, such as numbers. There, `datasets` "
                    'reads a text that looks like another value as that value, such as "1.50" as 1.5 and "007" as 7. '
                    "To train on the texts as they are, write all values of the column in quotes."
                )


def _find_json(feature: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the names on the way to each single value of any type. A list of such values, as of tools, has no texts."""
    from datasets import Json, List

    if isinstance(feature, Json):
        yield path
    elif isinstance(feature, List):
        if not isinstance(feature.feature, Json):
            yield from _find_json(feature.feature, path)
    elif isinstance(feature, dict):
        for name, inner in feature.items():
            yield from _find_json(inner, (*path, name))


def _has_number(value: Any, path: Sequence[str]) -> bool:
    """Return whether a value has a number, or true or false, at the end of a path of names. Lists on the way are searched."""
    if isinstance(value, list):
        return any(_has_number(item, path) for item in value)
    if not path:
        return isinstance(value, int | float)  # also true and false
    return isinstance(value, dict) and _has_number(value.get(path[0]), path[1:])
