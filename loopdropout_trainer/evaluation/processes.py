"""This process among all that evaluate together: each holds the complete model and takes a share of the problems.

What a process computes beside a training changes nothing of it: its random states are put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list


def all_processes(**kwargs: Any) -> PartialState:
    """Return this process's view of all of them, and set up their group if nobody has; kwargs are for that."""
    # Without `cpu`, every process of a group without accelerators takes itself for the only one.
    return PartialState(cpu=not torch.accelerator.is_available(), **kwargs)


def from_main_process(compute: Callable[[], Any]) -> Any:
    """Return in all processes what the main one computes, or raise the ValueError that it raises."""
    outcome: list[Any] = [None]
    if all_processes().is_main_process:
        try:
            outcome = [compute()]
        except ValueError as error:
            outcome = [error]
    (value,) = broadcast_object_list(outcome)
    if isinstance(value, ValueError):
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
