"""The measured time of the steps of a training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Measure the seconds of the steps of a training, without its evaluations, samples and checkpoints.

    A checkpoint keeps the seconds of its steps, so that a resumed training continues the sum.

    Attributes:
        seconds: Seconds of the steps until now, or NaN if those before an interruption were not measured.
    """

    seconds = 0.0
    _start: float | None = None  # when the running interval began, or None outside of steps

    def start(self) -> None:
        """Begin or continue to measure."""
        self._start = time.monotonic()

    def stop(self) -> None:
        """Add the running interval, after the work that a GPU still has to do."""
        if self._start is None:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds += time.monotonic() - self._start
        self._start = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time of this block. Inside of another pause, and outside of a training, nothing changes."""
        if self._start is None:
            yield
            return
        self.stop()
        try:
            yield
        finally:
            self.start()
