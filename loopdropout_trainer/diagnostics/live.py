"""What the adapter does in each loop, measured while it is trained, on a few fixed rows.

live/rho_loop_t       loss reduction with the adapter in loop t only, in percent of the frozen model's loss
live/readout_loop_t   cross entropy of loop t's readout with every loop adapted
live/loss_dose_c      cross entropy with the gate c in every loop, c = 0, 0.5, 1, 2
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from loopdropout_trainer.adapters import use_gates
from loopdropout_trainer.diagnostics.scores import Batch, measuring, score_final, score_readouts
from loopdropout_trainer.training.distributed import divides_weights


logger = logging.get_logger(__name__)


class LiveDiagnosticsCallback(TrainerCallback):
    """Measures every `live_diagnostics_steps` steps and at the end, and logs like the trainer does.

    Training does not notice: gates, random states, gradients and the trainer's own metrics are left as they are.

    Args:
        trainer: whose first evaluation rows are measured on; without any, its first training rows.

    Raises:
        ValueError: if the processes hold parts of the weights only.
    """

    def __init__(self, trainer: Trainer) -> None:
        if divides_weights(trainer.args):
            raise ValueError(
                "`live_diagnostics_steps` needs whole weights in every process, and ZeRO-3 and FSDP divide them: set it to "
                "0, and run recipes/diagnose.py on the saved adapter."
            )
        self.trainer = trainer
        self.batches: list[Batch] = []  # of this process
        self.seconds = 0.0
        self._began = 0.0
        self._last_step = -1

    def on_train_begin(self, args, state, control, **kwargs):
        self.seconds, self._began, self._last_step = 0.0, time.perf_counter(), -1
        with _random_states_kept():
            self.batches = self._share_of_batches()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.live_diagnostics_steps == 0:
            self._measure(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        if state.global_step != self._last_step:
            self._measure(state.global_step)
        share = 100 * self.seconds / (time.perf_counter() - self._began)
        logger.info(f"Live diagnostics took {self.seconds:.1f} seconds, {share:.1f}% of the training's time.")

    def _share_of_batches(self) -> list[Batch]:
        trainer = self.trainer
        rows = trainer.eval_dataset
        if isinstance(rows, dict):
            rows = next(iter(rows.values()), None)
        rows = list(islice(iter(trainer.train_dataset if rows is None else rows), trainer.args.live_diagnostics_rows))
        size = trainer.args.per_device_eval_batch_size
        batches = [trainer.data_collator(rows[start : start + size]) for start in range(0, len(rows), size)]
        for batch in batches:
            batch.pop("example_ids", None)
        accelerator = trainer.accelerator
        return batches[accelerator.process_index :: accelerator.num_processes]

    def _measure(self, step: int) -> None:
        began = time.perf_counter()
        self._last_step = step
        with _random_states_kept():
            logs = self._losses()
        seconds = time.perf_counter() - began
        self.seconds += seconds
        # Past TRL's `log`, which would add and clear the metrics that the trainer has gathered since it logged last; and
        # without the effect that a log of the trainer's own, due at this step, is taken for done.
        is_due = self.trainer.control.should_log
        Trainer.log(self.trainer, {**logs, "live/seconds": round(seconds, 3)})
        self.trainer.control.should_log = is_due

    def _losses(self) -> dict[str, float]:
        num_loops = self.trainer.num_loops
        one_hot = torch.eye(num_loops)
        frozen, half, double = (self._loss(torch.full((num_loops,), dose)) for dose in (0.0, 0.5, 2.0))
        only = [self._loss(one_hot[loop]) for loop in range(num_loops)]
        readouts = self._readout_losses()
        logs = {f"live/rho_loop_{t}": 100 * (frozen - loss) / frozen for t, loss in enumerate(only, start=1)}
        logs |= {f"live/readout_loop_{t}": loss for t, loss in enumerate(readouts, start=1)}
        doses = {"0": frozen, "0.5": half, "1": readouts[-1], "2": double}
        return logs | {f"live/loss_dose_{dose}": loss for dose, loss in doses.items()}

    def _loss(self, gates: torch.Tensor) -> float:
        """Return the final loop's loss of all processes' rows under gates [K]."""
        with use_gates(self.trainer.model, gates):
            return self._mean(self._sums(score_final))

    def _readout_losses(self) -> list[float]:
        return [self._mean(sums) for sums in self._sums(score_readouts)]

    def _sums(self, score) -> np.ndarray:
        """Return losses, hits and tokens [..., 3] summed over this process's rows."""
        model, accelerator = self.trainer.model, self.trainer.accelerator
        shape = (self.trainer.num_loops, 3) if score is score_readouts else (3,)
        sums = np.zeros(shape)
        with measuring(model), accelerator.autocast():
            for batch in self.batches:
                sums += score(model, batch).sum(axis=-1)
        return sums

    def _mean(self, sums: np.ndarray) -> float:
        device = self.trainer.accelerator.device
        total = self.trainer.accelerator.reduce(torch.tensor(sums, dtype=torch.float32, device=device), "sum")
        return float(total[0] / total[2])


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put Python's, NumPy's and torch's random states back after the block."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
