"""Examples on their way to the training. Each step is cached, counts what it leaves out, and names the row of a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loopdropout_trainer.data.bars import hide_short_bars
from loopdropout_trainer.data.caching import step_key
from loopdropout_trainer.data.files import describe_row, error_in_row
from loopdropout_trainer.data.formats import find_features
from loopdropout_trainer.data.preparations import Row
from loopdropout_trainer.data.sources import DataSource
from loopdropout_trainer.errors import UserError


if TYPE_CHECKING:
    from datasets import Dataset

_SINGULAR = {"they have": "it has", "they repeat": "it repeats", "excludes them": "excludes it"}
"""The words in reasons why examples are left out, for a single example."""


class LeftOut(NamedTuple):
    """A number of examples that are not trained on. Its text is "3 examples, because they repeat a held-out example".

    Attributes:
        number: Number of examples.
        noun: What they are, in the plural, such as "held-out examples".
        reason: Why they are left out, in the plural.
    """

    number: int
    noun: str
    reason: str

    def __str__(self) -> str:
        return f"{self._subject()}, because {self._cause()}"

    def sentence(self) -> str:
        verb = "is" if self.number == 1 else "are"
        return f"{self._subject()} {verb} left out, because {self._cause()}."

    def _subject(self) -> str:
        noun = self.noun
        if self.number == 1:
            noun = noun.replace("examples", "example", 1)  # not in the name of a file behind it
        return f"{self.number:,} {noun}"

    def _cause(self) -> str:
        reason = self.reason
        if self.number == 1:
            for plural, singular in _SINGULAR.items():
                reason = reason.replace(plural, singular, 1)
        return reason


class Examples(NamedTuple):
    """Examples, with a key of everything that they were made from, and with the rows that they come from.

    `select`, `replace`, `add` and `keep` return the result of a step. `datasets` caches it under a key made of the key of
    these examples and of the step. A `UserError` of a step's function names the row of the example.

    Attributes:
        rows: The examples.
        key: Key of everything that they were made from.
        sources: Sources of the examples.
        origins: For each example, the index of its source and the number of its row there, from 0 [N, 2].
    """

    rows: Dataset
    key: str
    sources: list[DataSource]
    origins: np.ndarray

    def describe_row(self, index: int) -> str:
        """Return the place of an example, such as "row 4 of chats.jsonl"."""
        source, number = self.origins[index].tolist()
        return describe_row(self.sources[source], number)

    def select(self, indices: np.ndarray) -> Examples:
        """Take the examples with these indices [N]."""
        key = step_key(self.key, indices)
        return Examples(self.rows.select(indices), key, self.sources, self.origins[indices])

    def replace(self, function: Callable[..., Row], **options: Any) -> Examples:
        """Make an example of each one by a function of it and the options, which are part of the key."""
        key = step_key(self.key, function.__name__, options)
        step = self._name_rows(function, **options)
        features = find_features(step(self.rows[0], 0))
        names = self.rows.column_names
        rows = self._map(step, key, features=features, remove_columns=names)
        return self._replace(rows=rows, key=key)

    def add(self, function: Callable[..., Row], **options: Any) -> Examples:
        """Add the columns that a function of each example and the options returns."""
        # The options are not in the key here and in `keep`. They must depend only on what is in the key of the rows, or be
        # named in `reason`, as `max_length` is.
        key = step_key(self.key, function.__name__)
        step = self._name_rows(function, **options)
        return self._replace(rows=self._map(step, key), key=key)

    def keep(
        self, function: Callable[..., bool], left_out: list[LeftOut], noun: str, reason: str, **options: Any
    ) -> Examples:
        """Leave out the examples for which a function is false, and add their number and the reason to `left_out`."""
        key = step_key(self.key, function.__name__, reason)  # the options are in the key of the rows or in the reason
        if not len(self.rows):
            return self._replace(key=key)
        kept = self._find(function, key, **options)
        if len(kept) < len(self.rows):
            left_out.append(LeftOut(len(self.rows) - len(kept), noun, reason))
        rows = self.rows.select(kept, new_fingerprint=key)
        return self._replace(rows=rows, key=key, origins=self.origins[kept])

    def find(self, function: Callable[..., bool], **options: Any) -> list[int]:
        """Return the numbers of the examples for which a function is true. All of its options are in the key of the rows."""
        return self._find(function, step_key(self.key, function.__name__), **options).tolist()

    def _find(self, function: Callable[..., bool], key: str, **options: Any) -> np.ndarray:
        """Return the numbers [n] of the examples for which a function is true."""
        if not len(self.rows):  # the result of `map` would have no column of flags
            return np.array([], dtype=int)

        def flag(row: Row) -> Row:
            return {"is_true": function(row, **options)}

        # A column of flags instead of `filter`, which does not tell the indices of the rows that it keeps.
        names = self.rows.column_names
        flags = self._map(self._name_rows(flag), step_key(key, "flags"), remove_columns=names, desc="Filter")
        return np.flatnonzero(read_numbers(flags, "is_true"))

    def _map(self, step: Callable[[Row, int], Row], key: str, **options: Any) -> Dataset:
        """Return the results of a function of each example and its index."""
        with hide_short_bars(num_rows=len(self.rows)):
            return self.rows.map(step, with_indices=True, new_fingerprint=key, **options)

    def _name_rows(self, function: Callable[..., Any], **options: Any) -> Callable[[Row, int], Any]:
        """Return a function of an example and its index, which calls `function` and names the row in a `UserError`."""

        def step(example: Row, index: int) -> Any:
            try:
                return function(example, **options)
            except UserError as error:
                raise error_in_row(self.describe_row(index), error) from error

        return step


def read_numbers(rows: Dataset, name: str) -> np.ndarray:
    """Return a column of integers [N]. Flags become 0 and 1.

    `[:]` reads all of them together, and not one after the other, which takes 4 seconds for 100,000 rows.
    """
    return np.array(rows[name][:], dtype=int)
