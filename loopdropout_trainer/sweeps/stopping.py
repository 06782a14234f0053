"""The end of a sweep by Ctrl-C or SIGTERM, which is one sentence, while its trainings save their checkpoints."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


_SECONDS_OF_ONE_STOP = 2.0
"""Seconds within which several signals are one stop. `timeout` sends one to the process, and another to its group."""


class Terminated(KeyboardInterrupt):
    """SIGTERM stopped a sweep."""

    signal = signal.SIGTERM  # which decides the exit code


class _Stop:
    """Handler of signals. A signal right after another one is left out, so that it does not interrupt the stop itself."""

    def __init__(self) -> None:
        self.last_time = -math.inf

    def __call__(self, number: int, frame: Any) -> None:
        before, self.last_time = self.last_time, time.monotonic()
        if self.last_time - before < _SECONDS_OF_ONE_STOP:
            return
        if number == signal.SIGTERM:
            raise Terminated
        raise KeyboardInterrupt


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Raise `KeyboardInterrupt` in the block after Ctrl-C, and `Terminated` after SIGTERM. A new Ctrl-C raises it again."""
    stop = _Stop()
    former: dict[int, Any] = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the shell lets the process ignore it
        former[signal.SIGINT] = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
