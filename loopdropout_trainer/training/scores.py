"""Teacher-forced scores of target tokens: of the final loop under any gates, and of each loop's readout.

A batch is model inputs with `labels` [B, S], -100 where no target is. Of several processes each holds the complete model
and all batches, and takes a share of the batches: all of them must call these functions, and get the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch import nn
from torch.nn import functional as F

from loopdropout_trainer.adapters import use_gates
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.processes import all_processes


Batch = dict[str, torch.Tensor]
Found = TypeVar("Found")


class Scores(NamedTuple):
    """Means over target tokens: cross entropy in nats, and how often the target is the most probable token, in percent."""

    loss: float
    accuracy_percent: float


@dataclass(frozen=True)
class SingleLoopActivation:
    """Cross entropies of the final loop in nats per target token: no loop adapted, CE(0); only t, CE(e_t); every loop."""

    frozen: float
    only: tuple[float, ...]
    all_on: float

    @property
    def reductions(self) -> tuple[float, ...]:
        """rho_t = 100 (CE(0) - CE(e_t)) / CE(0) for t = 1..K, in percent."""
        return tuple(reduction(self.frozen, loss) for loss in self.only)


def reduction(frozen: float, loss: float) -> float:
    """Return by how much a loss is below the frozen model's, in percent of the latter."""
    return 100 * (frozen - loss) / frozen


def single_loop_activation(model: PeftModel, batches: Iterable[Batch]) -> SingleLoopActivation:
    """Measure how well the update works in one loop alone (Appendix "Single-Loop Activation"), by K + 2 passes.

    The batches are model inputs with `labels` [B, S], -100 where no target is; without any target it is a ValueError.
    """
    batches = list(batches)
    num_loops = find_looped_model(model).config.num_loops
    loss = lambda gates: score(model, batches, gates).loss
    only = tuple(map(loss, torch.eye(num_loops)))
    return SingleLoopActivation(loss(torch.zeros(num_loops)), only, loss(torch.ones(num_loops)))


def readout_losses(model: nn.Module, batches: Iterable[Batch]) -> list[float]:
    """Return the cross entropy per target token, in nats, of each loop's readout, t = 1..K, under the gates in force."""
    return [each.loss for each in score_readouts(model, batches)]


def score(
    model: nn.Module,
    batches: Iterable[Batch],
    gates: Sequence[float] | torch.Tensor | None = None,
) -> Scores:
    """Return the final loop's scores under gates [K]; None: those in force."""
    final = lambda looped, inputs: [looped.base_model(**inputs, use_cache=False).last_hidden_state]
    with nullcontext() if gates is None else use_gates(model, gates):
        return _scores(model, batches, final)[0]


def score_readouts(model: nn.Module, batches: Iterable[Batch]) -> list[Scores]:
    """Return the scores of every loop's readout, all K from one forward pass."""
    return _scores(model, batches, lambda looped, inputs: looped.loop_readouts(**inputs))


def _scores(
    model: nn.Module,
    batches: Iterable[Batch],
    readouts_of: Callable[[nn.Module, Batch], Sequence[torch.Tensor]],
) -> list[Scores]:
    """Return each readout's means over the target tokens of all batches (not means of the batches' means)."""

    def sums_of(batch: Batch) -> np.ndarray:  # [readouts, 3]: losses, most probable targets, targets
        looped, inputs, labels = split_batch(model, batch)
        is_target = labels != -100
        targets, sums = labels[is_target], []  # [n]
        for readout in readouts_of(looped, inputs):
            logits = looped.get_output_embeddings()(readout[:, :-1][is_target]).float()  # [n, V]
            losses = F.cross_entropy(logits, targets, reduction="none").double().sum()
            sums.append([losses.item(), (logits.argmax(dim=-1) == targets).sum().item(), len(targets)])
        return np.array(sums)

    sums = sum(over_batches(model, batches, sums_of), np.zeros((1, 3)))
    if not sums[0, 2]:
        raise UserError("The batches hold no target token: every label is -100.")
    return [Scores(losses / tokens, 100 * most_probable / tokens) for losses, most_probable, tokens in sums.tolist()]


def over_batches(model: nn.Module, batches: Iterable[Batch], measure: Callable[[Batch], Found]) -> list[Found]:
    """Return what `measure` finds in every batch, in their order; it runs in evaluation mode and without gradients."""
    state = all_processes()
    share = list(enumerate(batches))[state.process_index :: state.num_processes]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            found = [(place, measure(batch)) for place, batch in share]
    finally:
        model.train(was_training)
    return [value for _, value in sorted(gather_object(found), key=lambda pair: pair[0])]


def split_batch(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch, torch.Tensor]:
    """Return the looped model, its inputs on its device, and the label of what follows each position, [B, S - 1]."""
    looped = find_looped_model(model)
    device = next(model.parameters()).device
    inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    inputs = dict(looped.complete_batch(inputs))  # as in training: what else the model reads of a batch with labels
    return looped, inputs, inputs.pop("labels")[:, 1:]
