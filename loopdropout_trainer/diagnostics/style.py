"""One look for every figure: a method has the same colour, marker, line and hatch wherever it is drawn.

The colours are Okabe and Ito's, which colour-blind readers can tell apart; markers, lines and hatches do the same in print
without colour. Needs matplotlib (`pip install loopdropout-trainer[plots]`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


COLUMN_WIDTH = 3.3
"""Width of a figure in one of two columns, in inches; labels are legible at this size, unscaled."""

PAGE_WIDTH = 5.5
"""Width of a figure across a page of one column, in inches."""

SEQUENTIAL_MAP = "cividis"
"""Colour map of a quantity from low to high; its lightness rises evenly."""

DIVERGING_MAP = "PuOr"
"""Colour map of a quantity around zero."""


@dataclass(frozen=True)
class MethodStyle:
    """How one method is drawn: `color`, `marker` and `linestyle` of a line, `color` and `hatch` of a bar."""

    color: str
    marker: str
    linestyle: str
    hatch: str

    @property
    def line(self) -> dict[str, Any]:
        """The keywords of matplotlib's `plot` and `errorbar`."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.linestyle}

    @property
    def bar(self) -> dict[str, Any]:
        """The keywords of matplotlib's `bar`."""
        return {"color": self.color, "hatch": self.hatch, "edgecolor": "white", "linewidth": 0}


BASE = "base"
"""Name of the model without an adapter in every diagnostic and figure."""

_KNOWN = {
    BASE: MethodStyle("#6b6b6b", "", ":", ".."),
    "lora": MethodStyle("#E69F00", "o", "--", ""),
    "loop dropout": MethodStyle("#0072B2", "s", "-", "//"),
}
_OTHERS = (
    MethodStyle("#009E73", "^", "-.", "\\\\"),
    MethodStyle("#CC79A7", "D", (0, (3, 1, 1, 1)), "xx"),
    MethodStyle("#D55E00", "v", (0, (5, 1)), "--"),
    MethodStyle("#56B4E9", "P", (0, (1, 1)), "++"),
    MethodStyle("#000000", "X", "-", "oo"),
    MethodStyle("#B8AB00", "*", "--", "||"),
)


def method_styles(methods: Iterable[str]) -> dict[str, MethodStyle]:
    """Return the style of each method.

    The base model, LoRA and Loop Dropout look the same in every figure; others take the remaining styles in the order of
    `methods`, and start again after the last.

    Args:
        methods: names, as they stand in the legend. `loop_dropout` and `Loop Dropout (p=0.5)` are Loop Dropout.
    """
    styles: dict[str, MethodStyle] = {}
    others = 0
    for method in methods:
        if method in styles:
            continue
        known = _KNOWN.get(_plain(method))
        if known is not None and known not in styles.values():
            styles[method] = known
        else:
            styles[method] = _OTHERS[others % len(_OTHERS)]
            others += 1
    return styles


def _plain(method: str) -> str:
    return re.sub(r"\(.*\)", "", method).replace("_", " ").strip().lower()


@contextmanager
def new_figure(
    rows: int = 1, columns: int = 1, width: float | None = None, height: float = 2.2, **keywords: Any
) -> Iterator[tuple[Any, Any]]:
    """Open a figure in the common style and close it at the end of the block; save it inside with `save_figure`.

    Args:
        rows, columns: of axes.
        width: in inches. Default: `COLUMN_WIDTH` for one column of axes, `PAGE_WIDTH` for more.
        height: of one row of axes, in inches.
        keywords: of matplotlib's `subplots`.

    Yields:
        The figure and its axes (one, or an array of them, as `subplots` returns them).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = width or (COLUMN_WIDTH if columns == 1 else PAGE_WIDTH)
    with pyplot.rc_context(_RC):
        figure, axes = pyplot.subplots(rows, columns, figsize=(width, height * rows), layout="constrained", **keywords)
        try:
            yield figure, axes
        finally:
            pyplot.close(figure)


_RC = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "errorbar.capsize": 2,
    "pdf.fonttype": 42,  # letters stay letters, which printers and search want
    "savefig.dpi": 300,
}


def legend_above(figure: Any, axes: Any, columns: int | None = None) -> None:
    """Put one legend for the whole figure above its axes, where it covers nothing; default: as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        widest = 0.05 * max(map(len, labels)) + 0.5  # inches, at the legend's letters
        columns = columns or max(1, int(figure.get_figwidth() / widest))
        figure.legend(handles, labels, loc="outside upper center", ncols=min(columns, len(labels)))


def save_figure(figure: Any, path: str | Path, legend_of: Any = None) -> list[Path]:
    """Save a figure as PNG and as PDF.

    Args:
        figure: of matplotlib.
        path: without its ending.
        legend_of: axes whose legend is put above the whole figure, where it covers nothing.

    Returns:
        The two paths.
    """
    if legend_of is not None:
        legend_above(figure, legend_of)
    paths = [Path(f"{path}.png"), Path(f"{path}.pdf")]
    for each in paths:
        # Without the date, the same numbers give the same file.
        figure.savefig(each, metadata={"CreationDate": None} if each.suffix == ".pdf" else None)
    return paths
