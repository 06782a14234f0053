"""Teacher-forced scores of target tokens, and the states that predict them, under the gates in force.

A batch is model inputs with `labels` [B, S], -100 where no target is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from torch.nn import functional as F

from loopdropout_trainer.looped import find_looped_model


Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """Means over target tokens.

    Attributes:
        loss: cross entropy per target token, in nats.
        accuracy_percent: share of target tokens that are the most probable one.
    """

    loss: float
    accuracy_percent: float

    @classmethod
    def of(cls, sums: np.ndarray) -> Scores:
        """Return the means of sums [3]: losses, most probable targets, targets.

        Raises:
            ValueError: if there is no target token.
        """
        losses, most_probable, tokens = np.broadcast_to(sums, (3,)).tolist()
        if not tokens:
            raise ValueError("The batches hold no target token: every label is -100.")
        return cls(losses / tokens, 100 * most_probable / tokens)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the block in evaluation mode and without gradients; put training mode back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def total(parts: Iterable[np.ndarray], over_processes: bool = False) -> np.ndarray:
    """Return the sum of what batches give, of this process or of all; 0 without batches.

    Args:
        parts: arrays of one shape.
        over_processes: whether every process holds batches of its own, and calls this. A mean over tokens of several
            processes is the quotient of two such sums: means of single batches or processes weigh tokens differently.
    """
    own = sum(parts, np.zeros(()))
    return sum(gather_object([own])) if over_processes else own


def score_final(model: nn.Module, batch: Batch) -> np.ndarray:
    """Return sums over the batch's target tokens, [3]: losses of the final loop, most probable targets, targets."""
    looped, inputs, labels = split_batch(model, batch)
    return _score(looped, looped.base_model(**inputs, use_cache=False).last_hidden_state, labels)


def score_readouts(model: nn.Module, batch: Batch) -> np.ndarray:
    """Return the same as `score_final` for every loop's readout, [K, 3]."""
    looped, inputs, labels = split_batch(model, batch)
    return np.stack([_score(looped, readout, labels) for readout in looped.loop_readouts(**inputs)])


def split_batch(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch, torch.Tensor]:
    """Return the looped model, its inputs on its device, and the label of what follows each position, [B, S - 1]."""
    looped = find_looped_model(model)
    device = next(model.parameters()).device
    inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    inputs = dict(looped.complete_batch(inputs))  # as in training: what else the model reads of a batch with labels
    return looped, inputs, inputs.pop("labels")[:, 1:]


def _score(looped: nn.Module, readout: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    is_target = labels != -100
    targets = labels[is_target]  # [n]
    logits = looped.get_output_embeddings()(readout[:, :-1][is_target]).float()  # [n, V]
    losses = F.cross_entropy(logits, targets, reduction="none").double().sum()
    most_probable = (logits.argmax(dim=-1) == targets).sum()
    return np.array([losses.item(), most_probable.item(), len(targets)])
