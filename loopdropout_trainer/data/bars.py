"""Progress bars of `datasets`, for long work only. The bars of short work push the plan of a run off the screen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


MOST_ROWS = 5000
"""Number of rows that take a few seconds at most, so they need no bar."""

MOST_BYTES = 5_000_000
"""Size of files that are read within a second."""


@contextmanager
def hide_short_bars(num_rows: float = 0, num_bytes: float = 0) -> Iterator[None]:
    """Hide the progress bars of `datasets` inside the block if it handles few rows, and files of few bytes.

    A user's own choice, by `datasets.disable_progress_bars` or by HF_DATASETS_DISABLE_PROGRESS_BARS, is kept.
    """
    from datasets import are_progress_bars_disabled, config, disable_progress_bars, enable_progress_bars

    is_long = num_rows > MOST_ROWS or num_bytes > MOST_BYTES
    is_set = config.HF_DATASETS_DISABLE_PROGRESS_BARS is not None
    if is_long or is_set or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
