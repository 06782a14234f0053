"""The end of a training and its continuation: signals, early stops, NaN and infinity, and folders that cannot be written."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather, reduce
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from loopdropout_trainer.errors import UserError, count, find_write_error
from loopdropout_trainer.saving.checkpoints import (
    count_worse_evaluations,
    describe_lost_steps,
    describe_unsaved_best,
    find_early_stop,
    find_next_patience,
    has_stopped_early,
    load_state,
    name_metric,
    newest_checkpoint,
)
from loopdropout_trainer.training.evaluation_fields import check_best_metric, unknown_metric


logger = logging.get_logger(__name__)

REPEATED_SECONDS = 3
"""Seconds in which a further signal is a repetition, such as a launcher's SIGTERM after Ctrl-C in its terminal."""


class NonFiniteGradientError(UserError):
    """A gradient is NaN or infinite, or a weight is. Neither is applied or saved.

    Attributes:
        status: Status of the run in `run.json`.
    """

    status = "non-finite"


class TrainingInterrupted(KeyboardInterrupt):
    """SIGTERM or Ctrl-C stopped a training, after a step and with a checkpoint.

    Attributes:
        signal: Number of the signal.
        status: Status of the run in `run.json`, or None for a run that cannot be continued.
    """

    signal: int = signal.SIGINT
    status: str | None = "stopped"


class StopCallback(TrainerCallback):
    """Stop a training with a checkpoint after SIGTERM or Ctrl-C, and before a step with a gradient that is not finite.

    Attributes:
        received: Number of the signal that a process received, or 0.
    """

    received = 0
    _is_kept = False  # whether `save_total_limit` is suspended, so that the checkpoint of a stop stays

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self._is_first_process = state.is_world_process_zero
        self.received = 0  # also after an interrupted training of the same trainer
        if threading.current_thread() is threading.main_thread():
            default = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
            for number, handler in default.items():
                if signal.getsignal(number) == handler:  # another handler is the program's own
                    self._handlers[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        if not self.received:
            if self._is_first_process:  # the others get the signal, too
                logger.warning(
                    "Training stops after this step with a checkpoint. To stop it immediately, repeat the signal after "
                    f"{REPEATED_SECONDS} seconds."
                )
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > REPEATED_SECONDS:
            self.restore_handlers()
            raise KeyboardInterrupt

    def restore_handlers(self) -> None:
        """Give the signals their former handlers back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if not gradients or args.fp16:  # the scaler of float16 skips such steps
            return
        norm = torch.nn.utils.get_total_norm(gradients)
        if hasattr(norm, "full_tensor"):  # of sharded gradients
            norm = norm.full_tensor()
        if not bool(norm.isfinite()):
            fix = "Set a lower `learning_rate` or `max_grad_norm`"
            is_rounded = args.bf16 or any(weight.dtype != torch.float32 for weight in model.parameters())
            if is_rounded:
                fix += ", or train in float32"
            raise NonFiniteGradientError(
                f"The gradients of optimizer step {state.global_step + 1} are not finite. {fix}."
            )

    def on_step_end(self, args, state, control, **kwargs):
        if args.world_size > 1:  # all processes stop after the same step
            received = gather(torch.tensor([self.received], device=args.device))  # [processes]
            self.received = first_signal(received.tolist())
        if self.received:
            control.should_save = True
            control.should_training_stop = True
        # A log is the mean over all processes of the steps since the last log. With a log at each of these events, the logs of
        # a checkpoint, and of the whole training, miss no step.
        control.should_log |= control.should_save or control.should_evaluate or control.should_training_stop

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        # With a limit of 1 and a best checkpoint, transformers deletes every other one at the end, also that of a stop.
        is_stopped = self.received and state.global_step < state.max_steps
        if is_stopped and args.save_total_limit == 1 and state.best_model_checkpoint is not None:
            args.save_total_limit = None
            self._is_kept = True

    def on_train_end(self, args, state, control, **kwargs):
        if self._is_kept:
            args.save_total_limit = 1
            self._is_kept = False

    def raise_if_stopped(self, args: TrainingArguments, state: TrainerState, resuming: str) -> None:
        """Raise TrainingInterrupted after a training that a signal stopped before its last step.

        Args:
            args: Arguments of the training.
            state: State of the training.
            resuming: Code or option that continues it.
        """
        if self.received and state.global_step < state.max_steps:
            advice = f"Continue with {resuming}."
            if args.save_only_model:
                advice = "It cannot be continued, because with `save_only_model` its checkpoint has the adapter only."
            interrupted = TrainingInterrupted(
                f"Training stopped after step {state.global_step:,} of {state.max_steps:,}. {advice}"
            )
            if args.save_only_model:
                interrupted.status = None
            if self.received == signal.SIGTERM:
                interrupted.signal = signal.SIGTERM
            raise interrupted


class EarlyStopCallback(EarlyStoppingCallback):
    """Stop a training as transformers' callback does, and count on from the evaluations before an interruption."""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.early_stopping_patience_counter = count_worse_evaluations(state)

    def report_stop(
        self, args: TrainingArguments, state: TrainerState, resuming: str, is_command: bool, title: str = ""
    ) -> None:
        """Log that a training stopped early, and how it continues.

        Args:
            args: Arguments of the training.
            state: State of the training at its end.
            resuming: Code or option that continues it.
            is_command: Whether a command trains, and not a program or a notebook.
            title: Beginning of the line, which names the training, such as "LoRA: ".
        """
        # Another callback may have stopped the training.
        is_patient = self.early_stopping_patience_counter < self.early_stopping_patience
        if is_patient or find_early_stop(state) is None or not state.is_world_process_zero:
            return
        kept = f" The weights of step {state.best_global_step:,} are kept." if state.best_model_checkpoint else ""
        metric = name_metric(args.metric_for_best_model)
        evaluations = count(self.early_stopping_patience, "evaluation")
        logger.warning(
            f"{title}Training stopped early, at step {state.global_step:,} of {state.max_steps:,}, after {evaluations} "
            f"without a better {metric}.{kept}{self._describe_continuing(args, state, resuming, is_command)}"
        )

    def _describe_continuing(
        self, args: TrainingArguments, state: TrainerState, resuming: str, is_command: bool
    ) -> str:
        patience = find_next_patience(args.output_dir, self.early_stopping_patience)
        if patience is None or args.save_only_model:
            return ""
        start = describe_lost_steps(args.output_dir, state.global_step)
        # The field is read when a trainer is made.
        change = f"make a new trainer with `early_stopping_patience={patience}`"
        if is_command:
            change = f"set `early_stopping_patience` to {patience}"
        return f" To train it further, {change}, for example, and continue with {resuming}{start}."


@contextmanager
def closing_bars(trainer: Trainer, ends_training: bool = False) -> Iterator[None]:
    """Close transformers' progress bars if an error or Ctrl-C ends the block. The next call would continue them.

    Args:
        trainer: Trainer that runs in the block.
        ends_training: Whether the block is a training, whose bar is closed, too.
    """
    try:
        yield
    except BaseException:
        for callback in trainer.callback_handler.callbacks:
            bars = [getattr(callback, name, None) for name in ("training_bar", "training_tracker")]  # in a notebook
            has_begun = trainer.state.epoch is not None and any(bar is not None for bar in bars)
            if getattr(callback, "prediction_bar", None) is not None:
                callback.on_predict(trainer.args, trainer.state, trainer.control)
            if ends_training and has_begun:
                callback.on_train_end(trainer.args, trainer.state, trainer.control)
        raise


def warn_of_unsaved_best(args: TrainingArguments, state: TrainerState, title: str = "") -> None:
    """Warn after a training with `load_best_model_at_end` if no checkpoint has its best step.

    `title`: Beginning of the line, which names the training.
    """
    if not args.load_best_model_at_end or not state.is_world_process_zero:
        return
    if unsaved := describe_unsaved_best(state, args.metric_for_best_model):
        logger.warning(
            f"{title}{unsaved}, because checkpoints are saved at other steps. Evaluate and save at the same steps."
        )


_LIBRARIES = ("loopdropout_trainer", "transformers", "trl")


def check_metric(trainer: Trainer) -> None:
    """Raise UserError if no evaluation of a trainer will have `metric_for_best_model`, as far as it is known before.

    Metrics of your own come from `compute_metrics`, and can come from classes of your own: a trainer, or a callback.
    """
    classes = [type(trainer), *map(type, trainer.callback_handler.callbacks)]
    has_own_class = any(cls.__module__.split(".")[0] not in _LIBRARIES for cls in classes)
    if trainer.compute_metrics is not None or has_own_class:  # then `explain_metrics` names what is missing
        return
    held_out = trainer.eval_dataset
    check_best_metric(trainer.args, held_out if isinstance(held_out, dict) else ())


@contextmanager
def explain_metrics(trainer: Trainer) -> Iterator[None]:
    """Turn transformers' error about a `metric_for_best_model` that an evaluation has not measured into one sentence.

    A reward that no held-out completion has is None, which transformers compares with numbers.
    """
    try:
        yield
    except KeyError as error:
        if "`metric_for_best_model`" not in str(error):
            raise
        measured = trainer.state.log_history[-1]
        names = [name.removeprefix("eval_") for name in measured if name.startswith("eval_")]
        raise unknown_metric(trainer.args.metric_for_best_model, names) from None
    except TypeError:
        name = trainer.args.metric_for_best_model
        measured = trainer.state.log_history[-1] if trainer.state.log_history else {}
        log_name = f"eval_{str(name).removeprefix('eval_')}"
        if name is None or measured.get(log_name, 0) is not None:
            raise
        raise UserError(
            f"`metric_for_best_model` must be a number in each evaluation, but {name} is None at step "
            f"{measured['step']:,}, because no held-out completion has a reward. Remove examples without a reward, or set it "
            "to another metric."
        ) from None


@contextmanager
def ended_early(trainer: Trainer, checkpoint: str | None) -> Iterator[None]:
    """Let a training that continues from a checkpoint take no further step, if it has stopped early at that checkpoint.

    Such a training was interrupted between its last checkpoint and its end. Inside of the block, the step of the checkpoint is
    its last one.
    """
    args = trainer.args
    state = load_state(checkpoint) if checkpoint else None
    if state is None or not has_stopped_early(state, args.early_stopping_patience):
        yield
        return
    wanted = args.max_steps
    args.max_steps = state.global_step
    try:
        yield
    finally:
        # transformers has copied the block's number of steps into the state, which later checkpoints and logs keep.
        args.max_steps = wanted
        trainer.state.max_steps = wanted if wanted > 0 else state.max_steps  # -1: the number follows from the epochs


def first_signal(received: Sequence[int]) -> int:
    """Return the signal that stops a training of several processes, or 0.

    Args:
        received: Number of the signal that each process received: 2 (SIGINT), 15 (SIGTERM) or 0. After Ctrl-C in a terminal,
            some processes may get SIGTERM from the launcher, so SIGINT counts.
    """
    return min((number for number in received if number), default=0)


def check_finite(model: nn.Module, step: int, args: TrainingArguments) -> None:
    """Raise NonFiniteGradientError if a trained weight is NaN or infinite, before the model is saved."""
    trained = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    is_finite = all(bool(weight.isfinite().all()) for weight in trained)
    num_spoiled = torch.tensor(float(not is_finite), device=args.device)
    if args.world_size > 1:  # all processes raise
        num_spoiled = reduce(num_spoiled, "sum")
    if num_spoiled:
        raise NonFiniteGradientError(
            f"The weights after optimizer step {step} are not finite and are not saved. Set a lower `learning_rate`."
        )


@contextmanager
def explain_write_errors(output_dir: str | Path) -> Iterator[None]:
    """Turn the error of a full disk or an unwritable folder into one sentence that names the newest checkpoint."""
    try:
        yield
    except Exception as error:
        reason = find_write_error(error)
        if reason is None:
            raise
        newest = newest_checkpoint(output_dir)
        kept = "There is no complete checkpoint"
        if newest:
            kept = f"The newest complete checkpoint is {newest}"
        raise UserError(f"`output_dir` {output_dir} cannot be written: {reason}. {kept}.") from error
