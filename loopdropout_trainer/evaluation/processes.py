"""This process among all that evaluate together: each holds the whole model and takes a share of the problems."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from torch.distributed.tensor import DTensor


def all_processes(**kwargs: Any) -> PartialState:
    """Return this process's view of all of them, and set up their group if nobody has; kwargs are for that."""
    # Without `cpu`, every process of a group without accelerators takes itself for the only one.
    return PartialState(cpu=not torch.accelerator.is_available(), **kwargs)


def check_whole(model: nn.Module) -> None:
    """Refuse FSDP2's and ZeRO-3's shards: processes that generate texts of different lengths would wait for one another.

    Raises:
        ValueError: if the model's weights are sharded over processes.
    """
    if any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            "The model's weights are sharded over processes, but each process answers problems of its own: leave "
            "`benchmarks` out of the training, and evaluate the saved adapter with recipes/evaluate.py."
        )
