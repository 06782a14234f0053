"""What the adapter does in each loop, measured while it is trained, on a few fixed rows.

live/rho_loop_t       loss reduction with the adapter in loop t only, in percent of the frozen model's loss
live/readout_loop_t   cross entropy of loop t's readout with every loop adapted
live/loss_dose_c      cross entropy with the gate c in every loop, c = 0, 0.5, 1, 2
live/seconds          that the measurement took
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice

import torch
from transformers import Trainer, TrainerCallback

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.processes import random_states_kept
from loopdropout_trainer.training.distributed import shards_weights
from loopdropout_trainer.training.scores import Batch, readout_losses, reduction, score


class LiveDiagnosticsCallback(TrainerCallback):
    """Measures every `live_diagnostics_steps` steps and at the end of the training, and logs as the trainer does.

    Training does not notice: gates, random states, gradients and the trainer's own metrics are left as they are. Measured on
    are the first `live_diagnostics_rows` evaluation rows of the trainer, whose model has an adapter.

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

    def on_train_begin(self, args, state, control, **kwargs):
        self._last_step = -1

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.live_diagnostics_steps == 0:
            self._measure(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        if state.global_step != self._last_step:
            self._measure(state.global_step)

    def _measure(self, step: int) -> None:
        began = time.perf_counter()
        self._last_step = step
        with random_states_kept(), self.trainer.accelerator.autocast():
            logs = self._losses()
        # Past TRL's `log`, which would add and clear the metrics that the trainer has gathered since it logged last; and
        # without the effect that a log of the trainer's own, due at this step, is taken for done.
        is_due = self.trainer.control.should_log
        Trainer.log(self.trainer, {**logs, "live/seconds": round(time.perf_counter() - began, 3)})
        self.trainer.control.should_log = is_due

    def _losses(self) -> dict[str, float]:
        model = self.trainer.model
        num_loops = find_looped_model(model).config.num_loops
        loss = lambda gates: score(model, self.batches, gates).loss
        readouts = readout_losses(model, self.batches)
        doses = {f"{dose:g}": loss(torch.full((num_loops,), dose)) for dose in (0.0, 0.5, 2.0)} | {"1": readouts[-1]}
        only = map(loss, torch.eye(num_loops))
        logs = {f"live/rho_loop_{t}": reduction(doses["0"], each) for t, each in enumerate(only, start=1)}
        logs |= {f"live/readout_loop_{t}": each for t, each in enumerate(readouts, start=1)}
        return logs | {f"live/loss_dose_{dose}": each for dose, each in doses.items()}


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
