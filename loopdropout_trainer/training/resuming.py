"""Resuming a run as if it had never stopped: from its own checkpoint, with its totals, and not beyond its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl
from transformers.utils import logging

from loopdropout_trainer.saving.adapter_files import check_resumable
from loopdropout_trainer.saving.files import write_atomically
from loopdropout_trainer.training.checkpoints import (
    CheckpointError,
    newest_whole_checkpoint,
    run_of,
    why_broken,
)
from loopdropout_trainer.training.distributed import divides_weights
from loopdropout_trainer.training.identity import differences, run_identity
from loopdropout_trainer.training.resources import forget_peak_memory, peak_memory_gb


logger = logging.get_logger(__name__)

PROGRESS = "progress.json"


class ResumingMixin:
    """Finds the checkpoint that a TRL trainer's run goes on from, and gives the run back what transformers forgets.

    That is: the losses, seconds and tokens so far, so that what is reported is the whole run; the patience of
    `EarlyStoppingCallback`; and that a finished run is finished.
    """

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self._earlier: dict[str, Any] = {}  # the totals of the legs before this one
        self._began = time.time()
        self._goes_on_changed = False
        self.add_callback(_OnTrainBegin(self._take_up_progress))

    @cached_property
    def run_identity(self) -> dict[str, Any]:
        """What makes this run the run that it is; its checkpoints carry it."""
        return run_identity(self.args, self.model, self.train_dataset, whole=not divides_weights(self.args))

    def progress(self) -> dict[str, Any]:
        """Return the totals of the run so far, over all its legs.

        A collective call: all processes must make it.

        Returns:
            seconds: wall time of training, with its evaluations and saving, up to the last checkpoint of each leg.
            step_seconds: of that, in training steps.
            num_tokens: tokens trained on, without padding.
            peak_memory_gb: most memory that the first process has held, in 10^9 bytes.
        """
        peaks = [peak for peak in (peak_memory_gb(), self._earlier.get("peak_memory_gb")) if peak is not None]
        return {
            "seconds": self._earlier.get("seconds", 0.0) + time.time() - self._began,
            "step_seconds": self.unit_gates_callback.train_seconds,
            "num_tokens": getattr(self, "_total_train_tokens", 0),  # not every trainer of TRL's counts them
            "peak_memory_gb": max(peaks, default=None),
            "loss_sum": self._total_loss_scalar,
            "loss_since_log": self.accelerator.reduce(self._tr_loss, "mean").item(),
            "last_logged_step": self._globalstep_last_logged,
        }

    def _take_up_progress(self) -> None:
        """Set the counters of this leg to where the legs before ended."""
        forget_peak_memory()
        self._began = time.time()
        if not self._earlier:
            return
        self._initial_global_step = 0  # the reported loss is the mean over all steps
        self._total_loss_scalar = self._earlier["loss_sum"]
        self._tr_loss += self._earlier["loss_since_log"]
        self._globalstep_last_logged = self._earlier["last_logged_step"]
        self._total_train_tokens = self._earlier["num_tokens"]
        self.unit_gates_callback.train_seconds = self._earlier["step_seconds"]
        self._logged = (self._earlier["num_tokens"], self._earlier["step_seconds"])

    def _save_progress(self, folder: Path) -> None:
        progress = self.progress()
        if self.args.should_save:
            write_atomically(folder / PROGRESS, json.dumps(progress, indent=1))

    def _finalize_training(self, trial, num_train_samples, start_time):
        return super()._finalize_training(trial, num_train_samples, start_time - self._earlier.get("seconds", 0.0))

    def _init_training_state(self, max_steps, steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial):
        place = super()._init_training_state(
            max_steps, steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._earlier = {}
        if resume_from_checkpoint is None:
            return place
        progress = Path(resume_from_checkpoint) / PROGRESS
        if progress.exists():
            self._earlier = json.loads(progress.read_text(encoding="utf-8"))
        stopped_early = self._restore_callbacks()
        if self.state.global_step > max_steps:
            raise CheckpointError(
                f"The checkpoint {resume_from_checkpoint} is of step {self.state.global_step}, beyond the {max_steps} steps "
                "of this run: raise `max_steps` (or `num_train_epochs`), or resume from an earlier checkpoint."
            )
        if self.state.global_step == max_steps or stopped_early:
            logger.info(f"The run is finished at step {self.state.global_step}: nothing is left to train.")
            return num_train_epochs, 0  # transformers would train one more step of an epoch that ended in the middle
        return place

    def _restore_callbacks(self) -> bool:
        """Give callbacks such as `EarlyStoppingCallback` their state back; return whether one of these had stopped the run."""
        table = self.state.stateful_callbacks
        saved = {name: each if isinstance(each, list) else [each] for name, each in table.items()}
        stopped = False
        for callback in self.callback_handler.callbacks:
            if not isinstance(callback, ExportableState) or isinstance(callback, TrainerControl):
                continue
            states = saved.get(type(callback).__name__)
            if states:
                for name, value in states.pop(0).get("attributes", {}).items():
                    setattr(callback, name, value)
            if isinstance(callback, EarlyStoppingCallback):
                stopped |= callback.early_stopping_patience_counter >= callback.early_stopping_patience
        self._list_callback_states()
        return stopped

    def _list_callback_states(self) -> None:
        """Make the state's table of callbacks that of this run's: transformers appends to the one that it has loaded."""
        stateful = [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]
        table: dict[str, Any] = {}
        for callback in stateful:
            table.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks = {name: states[0] if len(states) == 1 else [] for name, states in table.items()}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        scheduler = self.lr_scheduler
        rates = list(getattr(scheduler, "base_lrs", ()))
        fields = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        if not self._goes_on_changed or checkpoint is None or self.is_deepspeed_enabled:
            return
        # What was asked for counts, not what the checkpoint was made with.
        for group, asked in zip(self.optimizer.param_groups, fields, strict=True):
            group.update(asked)
        if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            scheduler.base_lrs = rates
            scheduler._last_lr = now = [
                rate * each(scheduler.last_epoch) for rate, each in zip(rates, scheduler.lr_lambdas, strict=True)
            ]
            for group, rate in zip(self.optimizer.param_groups, now, strict=True):
                group["lr"] = rate

    # Which checkpoint

    def _checkpoint_to_resume(self, wanted: str | bool) -> str | None:
        """Return the checkpoint that the main process chooses, on all processes.

        Raises:
            CheckpointError: if it is not whole, or belongs to another run.
            ValueError: if it belongs to another adapter, base model or depth.
        """
        choose = self._newest_of_this_run if wanted is True else lambda: self._given(str(wanted))
        checkpoint, self._goes_on_changed = self.from_main_process(choose)
        return checkpoint

    def from_main_process(self, compute: Callable[[], Any]) -> Any:
        """Return on all processes what the main one computes, or raise what it raises."""
        outcome: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                outcome = [compute(), None]
            except (OSError, RuntimeError, ValueError) as error:
                outcome = [None, error]
        result, error = broadcast_object_list(outcome)
        if error is not None:
            raise error
        return result

    def _newest_of_this_run(self) -> tuple[str | None, bool]:
        own = newest_whole_checkpoint(self.args.output_dir, self.run_identity)
        if own is None:
            own = newest_whole_checkpoint(self.args.output_dir)  # of another run
        return (None, False) if own is None else self._checked(own)

    def _given(self, folder: str) -> tuple[str, bool]:
        if reason := why_broken(folder, sealed=False):
            raise CheckpointError(f"The checkpoint {folder} cannot be used: {reason}.")
        return self._checked(folder)

    def _checked(self, folder: str | Path) -> tuple[str, bool]:
        """Return the checkpoint, and whether the run goes on with other settings, if it may go on from there."""
        check_resumable(self.model, folder)
        run = run_of(folder)
        if run is None:
            logger.warning(
                f"{folder} does not say which run it belongs to: resuming from it as it is. Its training time, and the "
                "losses up to there, are not in what this run reports."
            )
        changed = differences(run, self.run_identity)
        if changed and not self.args.resume_with_changed_settings:
            raise CheckpointError(
                f"The checkpoint {folder} belongs to another run: {', '.join(changed)}. Resume with the settings that it was "
                "started with, choose another `output_dir`, or go on all the same with `resume_with_changed_settings: true`."
            )
        if changed:
            logger.warning(f"Going on from {folder} with changed settings: {', '.join(changed)}.")
        return str(folder), bool(changed)

    def _newest_checkpoint(self) -> str | None:
        """Return the newest whole checkpoint of this run, as the main process finds it, on all processes."""
        newest = self.from_main_process(lambda: newest_whole_checkpoint(self.args.output_dir, self.run_identity))
        return None if newest is None else str(newest)


class _OnTrainBegin(TrainerCallback):
    def __init__(self, act) -> None:
        self.act = act

    def on_train_begin(self, args, state, control, **kwargs):
        self.act()
