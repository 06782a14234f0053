"""Teacher-forced scores of target tokens: cross entropy and hits of the final loop, or of every loop's readout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from loopdropout_trainer.looped import find_looped_model


Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """What was found for each row.

    Attributes:
        losses: [N] cross entropy in nats, summed over the row's target tokens.
        hits: [N] target tokens that are the most probable one.
        tokens: [N] target tokens.
    """

    losses: np.ndarray
    hits: np.ndarray
    tokens: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[np.ndarray]) -> Scores:
        """Return the scores of all rows from those of single batches, [3, B] each.

        Raises:
            ValueError: if no row has a target token.
        """
        losses, hits, tokens = np.concatenate(parts, axis=1) if parts else np.zeros((3, 0))
        if tokens.sum() == 0:
            raise ValueError("The batches hold no target token: every label is -100.")
        return cls(losses, hits, tokens)

    @property
    def loss(self) -> float:
        """Cross entropy per target token, in nats."""
        return float(self.losses.sum() / self.tokens.sum())

    @property
    def accuracy_percent(self) -> float:
        """Share of target tokens that are the most probable one."""
        return float(100 * self.hits.sum() / self.tokens.sum())


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Run the block in evaluation mode and without gradients; put training mode back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def split_labels(model: nn.Module, batch: Batch) -> tuple[Batch, torch.Tensor]:
    """Return a batch without its labels, on the model's device, and the label of what follows each position, [B, S - 1]."""
    device = next(model.parameters()).device
    inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    return inputs, inputs.pop("labels")[:, 1:]


def score_final(model: nn.Module, batch: Batch) -> np.ndarray:
    """Return losses, hits and tokens [3, B] of the final loop, under the gates in force.

    Args:
        model: looped causal language model, with or without an adapter, in evaluation mode.
        batch: model inputs with `labels` [B, S], -100 where no target is.
    """
    looped = find_looped_model(model)
    inputs, labels = split_labels(model, batch)
    return _score(looped, looped.base_model(**inputs, use_cache=False).last_hidden_state, labels)


def score_readouts(model: nn.Module, batch: Batch) -> np.ndarray:
    """Return the same as `score_final` for every loop's readout, [K, 3, B]."""
    looped = find_looped_model(model)
    inputs, labels = split_labels(model, batch)
    return np.stack([_score(looped, readout, labels) for readout in looped.loop_readouts(**inputs)])


def target_logits(looped: nn.Module, readout: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the float32 logits [targets, V] of a readout [B, S, H] where `kept` [B, S - 1] marks a target."""
    return looped.get_output_embeddings()(readout[:, :-1][kept]).float()


def _score(looped: nn.Module, readout: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    kept = labels != -100
    logits, targets = target_logits(looped, readout, kept), labels[kept]
    found = torch.zeros(3, *labels.shape, dtype=torch.float64)
    kept = kept.cpu()
    found[0][kept] = F.cross_entropy(logits, targets, reduction="none").double().cpu()
    found[1][kept] = (logits.argmax(dim=-1) == targets).double().cpu()
    found[2][kept] = 1
    return found.sum(dim=-1).numpy()


def score_batches(model: nn.Module, batches: Iterable[Batch]) -> Scores:
    """Return the scores of all batches' rows, under the gates in force, in this process alone.

    Raises:
        ValueError: if the batches hold no target token.
    """
    with measuring(model):
        return Scores.join([score_final(model, batch) for batch in batches])
