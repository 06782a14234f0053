"""The launched processes of one run: what all of them do, what only the first does, and each one's random states."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list


LIBRARY_BYTES = 4e8
"""What a process holds on a CPU before it has any weights: Python and what training or evaluation imports, as measured."""


def all_processes(use_cpu: bool = False) -> PartialState:
    """Return this process's view of all of them, and set up their group if nobody has: on accelerators, if there are any."""
    # Without `cpu`, every process of a group without accelerators takes itself for the only one. Outside of trainings, which
    # set up the group themselves, the first process may wait long for the last one.
    return PartialState(cpu=use_cpu or not torch.accelerator.is_available(), timeout=timedelta(days=7))


def from_main_process(compute: Callable[[], Any]) -> Any:
    """Return in all processes what the main one computes, or raise what it raises."""
    outcome: list[Any] = [None]
    if all_processes().is_main_process:
        try:
            outcome = [compute()]
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
