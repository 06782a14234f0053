"""The end of a training: signals, gradients that are not finite, and complete checkpoints."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from loopdropout_trainer.errors import UserError


logger = logging.get_logger(__name__)

REPEATED_SECONDS = 3
"""Seconds in which a further signal is a repetition, such as a launcher's SIGTERM after Ctrl-C in its terminal."""


class NonFiniteGradientError(UserError):
    """A gradient is NaN or infinite. The weights are unchanged since the step before."""


class TrainingInterrupted(KeyboardInterrupt):
    """SIGTERM or Ctrl-C stopped a training, after a step and with a checkpoint.

    Attributes:
        signal: Number of the signal.
    """

    signal: int = signal.SIGINT


class StopCallback(TrainerCallback):
    """Stop a training with a checkpoint after SIGTERM or Ctrl-C, and before a step with a gradient that is not finite.

    Attributes:
        received: Number of the signal that a process received, or 0.
    """

    received = 0

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if threading.current_thread() is threading.main_thread():
            default = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
            for number, handler in default.items():
                if signal.getsignal(number) == handler:  # another handler is the program's own
                    self._handlers[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        if not self.received:
            logger.warning("Training stops after this step with a checkpoint. Another signal stops it immediately.")
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > REPEATED_SECONDS:
            self.restore_handlers()
            raise KeyboardInterrupt

    def restore_handlers(self) -> None:
        """Give the signals their former handlers back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if not gradients or args.fp16:  # the scaler of float16 skips such steps
            return
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded gradients
        if not bool(norm.isfinite()):
            raise NonFiniteGradientError(
                f"The gradients of optimizer step {state.global_step + 1} are not finite. Set a lower `learning_rate` or "
                "`max_grad_norm`, or train in float32."
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if args.world_size > 1:  # all processes stop after the same step
            self.received = int(reduce(torch.tensor(self.received, device=args.device), "sum"))
        if self.received:
            control.should_save = True
            control.should_training_stop = True
        # A log is the mean over all processes. So the logs of a checkpoint, and of the whole training, miss no step.
        control.should_log |= control.should_save or control.should_evaluate or control.should_training_stop

    on_epoch_end = on_step_end

    def raise_if_stopped(self, state: TrainerState) -> None:
        """Raise TrainingInterrupted after a training that a signal stopped before its last step."""
        if self.received and state.global_step < state.max_steps:
            interrupted = TrainingInterrupted(
                f"Training stopped after step {state.global_step:,} of {state.max_steps:,}. Continue with "
                "`resume_from_checkpoint`."
            )
            interrupted.signal = signal.SIGTERM if self.received % signal.SIGTERM == 0 else signal.SIGINT
            raise interrupted


def newest_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint in a folder, or None. The Trainer writes its state last."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.split("-")[1].isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        try:
            json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            logger.warning_once("The checkpoint %s is incomplete and is not used.", folder)
        else:
            return str(folder)
    return None


def find_checkpoint(args: TrainingArguments) -> str | None:
    """Return the checkpoint that `resume_from_checkpoint` names. `true` is the newest complete one in `output_dir`."""
    name = args.resume_from_checkpoint
    if str(name).lower() == "true":
        return newest_checkpoint(args.output_dir)
    if name and not Path(name, TRAINER_STATE_NAME).is_file():
        raise UserError(f"`resume_from_checkpoint` must be true or the folder of a checkpoint, got {name}.")
    return name
