"""Teacher-forced scores of target tokens, also live in training: of the final loop under any gates, and of each readout.

A batch is model inputs with `labels` [B, S], -100 where no target is. Of several processes each holds the complete model
and all batches, and takes a share of the batches: all of them must call these functions, and get the same results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object, send_to_device
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback

from loopdropout_trainer.lora import use_gates
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.processes import all_processes, random_states_kept
from loopdropout_trainer.training.distributed import shards_weights


Batch = dict[str, Tensor]
Value = TypeVar("Value")


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
    return [scores.loss for scores in score_readouts(model, batches)]


def score(
    model: nn.Module,
    batches: Iterable[Batch],
    gates: Sequence[float] | Tensor | None = None,
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
    readouts_of: Callable[[nn.Module, Batch], Sequence[Tensor]],
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


def over_batches(model: nn.Module, batches: Iterable[Batch], measure: Callable[[Batch], Value]) -> list[Value]:
    """Return what `measure` finds in every batch, in their order; it runs in evaluation mode and without gradients."""
    state = all_processes()
    batches = list(batches)
    own = np.array_split(np.arange(len(batches)), state.num_processes)[state.process_index]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            measured = [measure(batches[place]) for place in own]
    finally:
        model.train(was_training)
    return gather_object(measured)


def split_batch(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch, Tensor]:
    """Return the looped model, its inputs on its device, and the label of what follows each position, [B, S - 1]."""
    looped = find_looped_model(model)
    inputs = send_to_device(batch, next(model.parameters()).device)
    inputs = dict(looped.complete_batch(inputs))  # as in training: what else the model reads of a batch with labels
    return looped, inputs, inputs.pop("labels")[:, 1:]


# Live diagnostics: the same while an adapter is trained, on a few fixed rows.


class LiveDiagnosticsCallback(TrainerCallback):
    """Measures every `live_diagnostics_steps` steps and at the end of the training, and logs as the trainer does.

    Training does not notice: gates, random states, gradients and the trainer's own metrics are left as they are. Measured on
    are the first `live_diagnostics_rows` evaluation rows of the trainer, whose model has an adapter. It logs

        live/rho_loop_t       loss reduction with the adapter in loop t only, in percent of the frozen model's loss
        live/readout_loop_t   cross entropy of loop t's readout with every loop adapted
        live/loss_dose_c      cross entropy with the gate c in every loop, c = 0, 0.5, 1, 2
        live/seconds          that the measurement took

    Raises:
        ValueError: without evaluation rows, or if the processes hold shards of the weights only.
    """

    def __init__(self, trainer: Trainer) -> None:
        if shards_weights(trainer.args):
            raise UserError(
                "Live diagnostics need unsharded weights in every process, and ZeRO-3 and FSDP shard them: leave them out, "
                "and run recipes/diagnose.py on the saved adapter."
            )
        self.trainer = trainer
        with random_states_kept():
            self.batches = evaluation_batches(trainer, trainer.args.live_diagnostics_rows)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.live_diagnostics_steps == 0:
            self._measure()

    def on_train_end(self, args, state, control, **kwargs):
        if state.global_step % args.live_diagnostics_steps:
            self._measure()

    def _measure(self) -> None:
        began = time.perf_counter()
        with random_states_kept(), self.trainer.accelerator.autocast():
            logs = self._losses()
        # Past TRL's `log`, which would add and clear the metrics that the trainer has gathered since it logged last; and
        # without the effect that a log of the trainer's own, due at this step, is taken for done.
        is_due = self.trainer.control.should_log
        Trainer.log(self.trainer, {**logs, "live/seconds": round(time.perf_counter() - began, 3)})
        self.trainer.control.should_log = is_due

    def _losses(self) -> dict[str, float]:
        model, batches = self.trainer.model, self.batches
        activation = single_loop_activation(model, batches)
        num_loops = len(activation.only)
        logs = {f"live/rho_loop_{t}": rho for t, rho in enumerate(activation.reductions, start=1)}
        logs |= {f"live/readout_loop_{t}": loss for t, loss in enumerate(readout_losses(model, batches), start=1)}
        logs |= {"live/loss_dose_0": activation.frozen, "live/loss_dose_1": activation.all_on}
        for dose in (0.5, 2.0):
            logs[f"live/loss_dose_{dose:g}"] = score(model, batches, [dose] * num_loops).loss
        return logs


def evaluation_batches(trainer: Trainer, num_rows: int) -> list[Batch]:
    """Return a trainer's first evaluation rows, each once, collated as the trainer does; the same in each process."""
    rows = trainer.eval_dataset
    if isinstance(rows, Mapping):
        rows = next(iter(rows.values()), None)
    if rows is None:
        raise UserError("Diagnostics of a training need evaluation rows: set `num_eval_examples` or `eval_files`.")
    rows, size = list(islice(iter(rows), num_rows)), trainer.args.per_device_eval_batch_size
    batches = [trainer.data_collator(rows[start : start + size]) for start in range(0, len(rows), size)]
    for batch in batches:
        batch.pop("example_ids", None)  # for the gates of training
    return batches
