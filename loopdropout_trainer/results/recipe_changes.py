"""The differences between the recipes of two runs, and the settings in which they may differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loopdropout_trainer.errors import count, join_words, short_repr
from loopdropout_trainer.results.run_files import read_recipe
from loopdropout_trainer.settings.arguments import names_of


UNCOMPARED = names_of("never")
"""Settings that `compare_recipes` ignores by default, since they do not change a result."""

MEASURED = names_of("score", "measurement", "output")
"""Settings of the steps after the training. They may change after a run has finished."""

LENGTH = {"max_steps", "num_train_epochs", "early_stopping_patience"}
"""Settings that may change when a run is resumed, usually to make it longer."""

CHOICE = {"load_best_model_at_end", "metric_for_best_model", "greater_is_better"}
"""Settings of the best checkpoint, which may change when a run is resumed. `early_stopping_patience` sets them, too."""

RESUMABLE = UNCOMPARED | MEASURED | LENGTH | CHOICE | names_of("monitoring")
"""Settings that may change if a run is resumed. The weights after a step do not depend on them, except that the
schedules of the learning rate and of gates read the length."""


class Difference(NamedTuple):
    """The fields in which two recipes differ: the first one with its values, and the others.

    Its text has a clause for each field, such as "`learning_rate` changed from 0.001 to 0.0003". If there are many, it counts
    the last ones.
    """

    field: str
    saved: Any
    new: Any
    others: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        return join_clauses([difference.describe() for difference in (self, *self.others)])

    def describe(self) -> str:
        """Return the clause about the first field alone."""
        return f"`{self.field}` changed from {self._text(self.saved)} to {self._text(self.new)}"

    def _text(self, value: Any) -> str:
        if self.field == "num_loops" and value is None:
            return "the model's own"
        if value is None:
            return "the default"
        text = short_repr(value)
        if isinstance(value, float):  # a recipe has 3 where the arguments of a training have 3.0
            return text.removesuffix(".0")
        return text


_MOST_NAMED = 4
"""Number of fields that a message names."""


def join_clauses(clauses: Sequence[str]) -> str:
    """Return clauses about fields as one text. If there are many, it counts the last ones."""
    named = [*clauses[:_MOST_NAMED]]
    num_others = len(clauses) - len(named)
    if num_others:
        named.append(f"{count(num_others, 'other field')} changed")
    return join_words(named)


def compare_recipes(
    saved: Mapping[str, Any],
    new: Mapping[str, Any],
    ignored: Collection[str] = UNCOMPARED,
    fields: Collection[str] | None = None,
) -> Difference | None:
    """Find the differences between two recipes.

    Args:
        saved: settings of the earlier run. new: settings of the later run.
        ignored: fields that may differ.
        fields: fields to compare. Default: all.

    Returns:
        The first field that differs, with its values and the others that differ, or None without a difference.
    """
    if fields is None:
        fields = {**saved, **new}
    differences = []
    for name in fields:
        if name not in ignored and saved.get(name) != new.get(name):
            differences.append(Difference(name, saved.get(name), new.get(name)))
    if not differences:
        return None
    first, *others = differences
    return first._replace(others=tuple(others))


def find_difference(
    folder: str | Path,
    new: Mapping[str, Any],
    ignored: Collection[str] = UNCOMPARED,
    fields: Collection[str] | None = None,
) -> Difference | None:
    """Compare the recipe of the run in a folder, if there is one, with a new recipe, as `compare_recipes` does."""
    saved = read_recipe(folder)
    return compare_recipes(saved, new, ignored, fields) if saved else None
