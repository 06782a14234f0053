"""Stopping a training between two steps when it is asked to stop in the middle of one."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType


class TrainingInterrupted(KeyboardInterrupt):
    """A training was asked to stop, and has; one sentence that says what is saved.

    Attributes:
        signal: name of the signal that asked for it, SIGINT or SIGTERM, in this process or another one of the run.
    """

    def __init__(self, message: str, signal: str = "SIGINT") -> None:
        super().__init__(message)
        self.signal = signal


class StopSignals:
    """Inside the block, the first Ctrl-C (SIGINT) or SIGTERM is noted in `asked`, by its name; a later one acts at once.

    A launcher repeats the terminal's signal to its workers: what comes within two seconds is one and the same. Handlers of
    the user's own, and threads other than the main one, which gets no signals, are left alone.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._before: dict[int, object] = {}
        self._came = 0.0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
            self._before = {number: each for number, each in defaults.items() if signal.getsignal(number) is each}
            for number in self._before:
                signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked, self._came = signal.Signals(number).name, time.monotonic()
            print("\nStopping after this step, with a checkpoint; again: at once.", file=sys.stderr, flush=True)
        elif time.monotonic() - self._came > 2:
            self.__exit__()
            signal.raise_signal(number)
