"""What became of the rows: how many were kept, and why the others were not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class DataReport:
    """Counts of rows; `print` shows them as a table.

    Attributes:
        source: where the rows came from.
        read: rows read.
        train, held_out: rows kept to train and to evaluate on.
        train_tokens: tokens of the training examples, each counted once; longest: most tokens of one of them.
        dropped: number of dropped rows by reason.
        unused: usable rows beyond the number to train on.
        bad_rows: the first few bad rows that were skipped, with their places.
    """

    source: str = ""
    read: int = 0
    train: int = 0
    held_out: int = 0
    train_tokens: int = 0
    longest: int = 0
    unused: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bad_rows: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dropped = Counter(self.dropped)  # a plain mapping, where it was read from JSON

    def __str__(self) -> str:
        counts = [("read", self.read), ("  to train on", self.train), ("  held out", self.held_out)]
        counts += [("  not used", self.unused)] if self.unused else []
        counts += [(f"  dropped: {reason}", count) for reason, count in sorted(self.dropped.items())]
        width = max(len(name) for name, _ in counts)
        lines = [f"Rows of {self.source}"]
        lines += [f"{name:<{width}} {count:>11,}" for name, count in counts]
        lines += [f"    {bad}" for bad in self.bad_rows]
        return "\n".join(lines)
