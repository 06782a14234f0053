"""The launched processes of one run: what only the first does, each one's log and random states, being asked to stop."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm


LIBRARY_BYTES = 4e8
"""What a process holds on a CPU before it has any weights: Python and what training or evaluation imports, as measured."""


def all_processes(use_cpu: bool = False) -> PartialState:
    """Return this process's view of all of them, and set up their group if nobody has: on accelerators, if there are any."""
    # Without `cpu`, every process of a group without accelerators takes itself for the only one. Outside of trainings, which
    # set up the group themselves, the first process may wait long for the last one.
    return PartialState(cpu=use_cpu or not torch.accelerator.is_available(), timeout=timedelta(days=7))


def from_main_process(compute: Callable[..., Any], *arguments: Any) -> Any:
    """Return in all processes what the main one computes of these arguments, or raise what it raises."""
    outcome: list[Any] = [None]
    if all_processes().is_main_process:
        try:
            outcome = [compute(*arguments)]
        except (OSError, RuntimeError, ValueError) as error:
            outcome = [error]
    (value,) = broadcast_object_list(outcome)
    if isinstance(value, Exception):
        raise value
    return value


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put Python's, NumPy's and torch's random states back after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _LogAboveBars(logging.StreamHandler):
    """Writes log records above the bars; a message that every evaluation of a run repeats is written once."""

    _said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if line not in self._said or record.levelno > logging.WARNING:
            tqdm.write(line, file=sys.stderr)
        self._said.add(line)


def show_log() -> None:
    """Write this package's log to standard error: from INFO on in the first process, from WARNING on in the others."""
    log = logging.getLogger("loopdropout_trainer")
    if not log.handlers:
        log.addHandler(_LogAboveBars())
        log.handlers[0].setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


# Stopping a training between two steps when it is asked to stop in the middle of one.


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

    asked: str | None = None
    _before: dict[int, object] = {}
    _came = 0.0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            usual = (signal.default_int_handler, signal.SIG_DFL)
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self._before = {number: handler for number, handler in handlers.items() if handler in usual}
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
