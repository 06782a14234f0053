"""Lines of a figure that hide each other, because their values are equal, such as those of two methods that solve nothing."""

from __future__ import annotations

import pandas as pd

from loopdropout_trainer.errors import join_words


_HIDDEN_SHARE = 0.005
"""Share of the height of a panel, about the width of a line, up to which two values are at one place of the figure."""


def describe_hidden_lines(data: pd.DataFrame, x: str) -> str:
    """Return a sentence about the lines of a figure that hide each other, or "" without any.

    Args:
        data: From `points`, or `loss_curves`, with the columns `panel`, `label` and `mean`.
        x: Column of the horizontal axis.
    """
    panels: dict[tuple[str, ...], list[str]] = {}  # by the labels of the lines
    for panel, rows in data.groupby("panel", sort=False, observed=True):
        for labels in _group_equal_lines(rows.pivot(index=x, columns="label", values="mean")):
            panels.setdefault(labels, []).append(str(panel))
    has_one_panel = data["panel"].nunique() == 1
    texts = []
    for labels, names in panels.items():
        lines = join_words(labels)
        texts.append(lines if has_one_panel else f"{lines} ({', '.join(names)})")
    if not texts:
        return ""
    return f"Lines with equal or nearly equal values hide each other: {'; '.join(texts)}."


def _group_equal_lines(values: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return the labels of the lines that are at the same places, for each such group of two or more.

    Args:
        values: Means of a panel, with one column for each line.
    """
    tolerance = _HIDDEN_SHARE * (values.max().max() - values.min().min())
    groups: list[list[str]] = []
    for label in values.dropna(axis="columns", how="all"):
        equal = [group for group in groups if _are_equal(values[label], values[group[0]], tolerance)]
        if equal:
            equal[0].append(label)
        else:
            groups.append([label])
    return [tuple(group) for group in groups if len(group) > 1]


def _are_equal(line: pd.Series, other: pd.Series, tolerance: float) -> bool:
    """Return whether two lines have points at the same places, and values that differ by the tolerance at most."""
    has_same_places = (line.isna() == other.isna()).all()
    return bool(has_same_places and (line - other).abs().max() <= tolerance)
