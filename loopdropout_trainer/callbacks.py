"""The callback that keeps sampled gates inside training steps."""

from __future__ import annotations

import time

from transformers import TrainerCallback

from loopdropout_trainer.looped import LoopState


class UnitGatesCallback(TrainerCallback):
    """Puts unit gates back whenever a training step has ended, so that nothing after it sees a sampled gate.

    That is evaluation, generation, prediction, saving and the callbacks that come later. It also counts the
    micro-batches of the running optimizer step, which place an example in the step's global batch, and the time spent
    in training steps.

    Attributes:
        micro_batch: micro-batches of the running optimizer step that have drawn their gates.
        train_seconds: wall time spent in training steps so far, evaluation and saving left out.
    """

    def __init__(self, loop_state: LoopState) -> None:
        self.loop_state = loop_state
        self.micro_batch = 0
        self.train_seconds = 0.0
        self._step_began = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.micro_batch = 0
        self._step_began = time.perf_counter()

    def on_substep_end(self, args, state, control, **kwargs):
        self.loop_state.unit_gates()

    def on_step_end(self, args, state, control, **kwargs):
        self.loop_state.unit_gates()
        self.train_seconds += time.perf_counter() - self._step_began

    def on_train_end(self, args, state, control, **kwargs):
        self.loop_state.unit_gates()
