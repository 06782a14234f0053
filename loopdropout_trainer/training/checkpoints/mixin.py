"""Checkpoints of a TRL trainer: complete or absent, never with a NaN, of one run per folder, safe if a push fails."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import type_validator
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from loopdropout_trainer.checks import check_integer
from loopdropout_trainer.errors import one_line
from loopdropout_trainer.processes import StopSignals, TrainingInterrupted, from_main_process
from loopdropout_trainer.record.identity import WHOLE_RUN, Difference, Identity, continues, differences, make_identity
from loopdropout_trainer.saving.adapter_files import check_resumable, save_adapter_metadata
from loopdropout_trainer.saving.cards import save_card
from loopdropout_trainer.saving.files import folder_lock_for_all, is_about_files, staged_files
from loopdropout_trainer.saving.hub import PushError, push_error
from loopdropout_trainer.training import distributed
from loopdropout_trainer.training.checkpoints import sealing
from loopdropout_trainer.training.checkpoints.sealing import CheckpointError, run_of
from loopdropout_trainer.training.memory import forget_peak_memory, peak_memory_gb


logger = logging.get_logger(__name__)

_STATE = "trainer_state.json"


class NonFiniteLossError(RuntimeError):
    """The loss, a gradient or a weight became NaN or infinite; nothing of it was saved."""


class CheckpointsMixin:
    """Saves, resumes, stops and pushes a TRL trainer's run so that no fault changes or loses what was trained.

    `train(resume_from_checkpoint=True)` resumes from the run's newest complete checkpoint, starts at the beginning if there is
    none, and loads the adapter if the training is complete; so the same command starts a run and continues it after any
    interruption. Ctrl-C and SIGTERM stop it after the running step, with a checkpoint.

    What transformers forgets on resuming is restored: the losses, seconds and tokens so far, so that reports are of the
    complete run; what TRL has gathered since it logged last; the state of the rule; and the patience of
    `EarlyStoppingCallback`.
    """

    _complete = False  # whether the training has ended
    _goes_on_changed = False  # whether it goes on from a checkpoint of other settings
    _stopping: str | None = None  # the signal by which a process was asked to stop
    _saving: Path | None = None  # the checkpoint that is being written

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self._run_state = RunState(self)
        self.add_callback(self._run_state)
        self._earlier: dict[str, Any] = {}  # totals up to the checkpoint that was resumed from
        self._signals = StopSignals()
        self._began = time.time()

    @cached_property
    def run_identity(self) -> Identity:
        """What makes this run the run that it is; its checkpoints carry it."""
        unsharded = not distributed.shards_weights(self.args)
        data = {"data": self.train_dataset, "held_out": self.eval_dataset}
        return make_identity(self.model, self.processing_class, settings=self.args, unsharded=unsharded, **data)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train, from the beginning or from a checkpoint.

        Args:
            resume_from_checkpoint: folder of a checkpoint; True for this run's newest complete one in `output_dir`, if any. If
                its training is complete (`save_model` has saved it there), the adapter is loaded and nothing is trained.
            args, kwargs: as for TRL's `train`.

        Raises:
            CheckpointError: if the given checkpoint is damaged, if it or `output_dir` belongs to another run, or if a new one
                cannot be written.
            ValueError: if the checkpoint belongs to another adapter, base model or depth.
            NonFiniteLossError: if the loss or a gradient becomes NaN or infinite, unless `stop_on_nan` is false, or a weight
                that would be saved.
            LockedError: if another process trains in `output_dir`.
            TrainingInterrupted: after a checkpoint, if the run was asked to stop.
        """
        wanted = resume_from_checkpoint or None
        vars(self).pop("run_identity", None)  # arguments may have been changed since
        self._complete, self._stopping, self._earlier = False, None, {}
        with self.only_run_in_output_dir(wanted):
            if wanted is True and from_main_process(self._is_complete):
                return self._load_complete_training()
            checkpoint, self._goes_on_changed = from_main_process(self._choose_checkpoint, wanted)
            with StopSignals() as self._signals:
                output = super().train(checkpoint, *args, **kwargs)
                self._run_state.totals = self.progress()
                if not self._stopping:  # after the last step: in an evaluation, or while saving
                    self._sum_over_processes()
                    last = self._checkpoint_folder()
                    if self._stopping and not from_main_process((last / sealing.MANIFEST).exists):
                        self._save_checkpoint(self.model, trial=None)
        if self._stopping:
            raise TrainingInterrupted(
                f"Stopped after step {self.state.global_step} of {self.state.max_steps}. {self._what_is_safe()} "
                "`resume_from_checkpoint: true` goes on from there.",
                self._stopping,
            )
        self._complete = True
        return output

    @contextmanager
    def only_run_in_output_dir(self, wanted: str | bool | None = None) -> Iterator[None]:
        """Keep other processes' runs out of `output_dir` inside the block; all processes of this run enter it.

        Raises:
            LockedError, CheckpointError: if another run is at work there, or has left what this one would spoil.
        """
        with folder_lock_for_all(self.args.output_dir):
            from_main_process(self._check_output_dir, wanted)
            yield

    def _check_output_dir(self, wanted: str | bool | None) -> None:
        """Refuse to take the place of anything but this run; note whether the folder is another's, and that was asked for."""
        folder = Path(self.args.output_dir)
        runs = list(filter(None, map(run_of, (folder, *sealing.checkpoints(folder)))))
        weights = [file for file in folder.glob("*") if file.suffix in (".safetensors", ".bin")]
        if weights and not isinstance(wanted, str) and not any((folder / name).exists() for name in sealing.OURS):
            raise CheckpointError(f"{weights[0]} is of no run of this package: choose another `output_dir`.")
        unlike = [changed for run in runs if (changed := differences(run, self.run_identity, WHOLE_RUN))]
        self._is_anothers = bool(runs) and not any(continues(run, self.run_identity) for run in runs)
        if self._is_anothers or unlike and not wanted:
            self._refuse_unless_asked(f"`output_dir` {folder} holds", unlike[-1])

    def _what_is_safe(self) -> str:
        """Return a sentence that names the newest complete checkpoint; of any run if `run_identity` is not computed yet."""
        newest = sealing.newest_complete_checkpoint(self.args.output_dir, vars(self).get("run_identity"))
        return f"The newest complete checkpoint is {newest}." if newest else "There is no earlier checkpoint."

    # Totals

    def progress(self) -> dict[str, Any]:
        """Return the totals of the run so far, from before a resume too, and what the reported loss needs after one.

        A collective call: all processes must make it.

        Returns:
            seconds: wall time of training, evaluation and saving; without what followed a checkpoint that was resumed from.
            step_seconds: of that, in training steps.
            num_tokens: tokens trained on, without padding.
            peak_memory_gb: peak memory of the first process, in 10^9 bytes.
        """
        if self._complete:
            return self._run_state.totals
        peaks = peak_memory_gb(), self._earlier.get("peak_memory_gb")
        return {
            "seconds": self._earlier.get("seconds", 0.0) + time.time() - self._began,
            "step_seconds": self.step_callback.train_seconds,
            "num_tokens": self._total_train_tokens,
            "peak_memory_gb": max(filter(None, peaks), default=None),
            "loss_sum": self._total_loss_scalar,
            "loss_since_log": self.accelerator.reduce(self._tr_loss, "mean").item(),
            "last_logged_step": self._globalstep_last_logged,
        }

    def _finalize_training(self, trial, num_train_samples, start_time):
        return super()._finalize_training(trial, num_train_samples, start_time - self._earlier.get("seconds", 0.0))

    # Resuming

    def _is_complete(self) -> bool:
        """Return whether `output_dir` holds the adapter of this very run, trained to its end."""
        folder = Path(self.args.output_dir)
        run, unsharded = run_of(folder), distributed.has_unsharded_weights(self.accelerator)
        if run is None or not unsharded or differences(run, self.run_identity, WHOLE_RUN):
            return False
        fault = sealing.fault_of(folder)
        if fault is not None:
            logger.warning(f"The trained adapter in {folder} is not used: {fault}.")
        return fault is None

    def _load_complete_training(self) -> TrainOutput:
        folder, adapter = Path(self.args.output_dir), self.model.active_adapters[0]
        with _reading(folder):
            place = folder if adapter == "default" else folder / adapter  # as PEFT saves it
            self.model.load_adapter(str(place), adapter, is_trainable=True)
            self.state = TrainerState.load_from_json(str(folder / _STATE))
            self._load_callback_state()
            last = self.state.log_history[-1]
            metrics = {name: last[name] for name in ("train_runtime", "train_loss")}
        self._complete = True
        logger.info(f"The training in {folder} is complete: its adapter is loaded, and nothing is trained.")
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _choose_checkpoint(self, wanted: str | bool | None) -> tuple[str | None, bool]:
        """Return the checkpoint to resume from, and whether the run goes on from it with other settings."""
        output_dir, run = self.args.output_dir, self.run_identity
        if wanted is True:
            wanted = sealing.newest_complete_checkpoint(output_dir, None if self._is_anothers else run)
        elif wanted and (fault := sealing.fault_of_checkpoint(wanted, sealed=False)):
            raise CheckpointError(f"The checkpoint {wanted} cannot be used: {fault}.")
        if wanted is None:
            return None, False
        with _reading(wanted):
            _check_state(TrainerState.load_from_json(str(Path(wanted) / _STATE)))
        check_resumable(self.model, wanted)
        own = run_of(wanted)
        changed, versions = differences(own, run, WHOLE_RUN), differences(own, run, ("versions",))
        if own is None:
            logger.warning(f"{wanted} does not say which run it belongs to: resuming from it as it is.")
        if changed and not continues(own, run):
            self._refuse_unless_asked(f"The checkpoint {wanted} belongs to", changed)
        for differing, what in ((changed, "changed settings"), (versions, "other libraries")):
            if differing:
                logger.warning(f"The run goes on from {wanted} with {what}: {', '.join(map(str, differing))}.")
        return str(wanted), bool(changed)

    def _refuse_unless_asked(self, what: str, changed: list[Difference]) -> None:
        if not self.args.resume_with_changed_settings:
            raise CheckpointError(
                f"{what} another run: {', '.join(map(str, changed))}. Go back to the settings that it was started with, "
                "choose another `output_dir`, or go on all the same with `resume_with_changed_settings: true`; for a longer "
                "run `resume_from_checkpoint: true` does."
            )

    def _init_training_state(self, max_steps, steps_per_epoch, num_train_epochs, checkpoint, trial):
        with _reading(checkpoint):
            place = super()._init_training_state(max_steps, steps_per_epoch, num_train_epochs, checkpoint, trial)
        if checkpoint is None:
            return place
        if self.state.global_step > max_steps:
            raise CheckpointError(
                f"The checkpoint {checkpoint} is of step {self.state.global_step}, beyond the {max_steps} steps of this run: "
                "raise `max_steps` (or `num_train_epochs`), or resume from an earlier checkpoint."
            )
        stopped_early = any(
            callback.early_stopping_patience_counter >= callback.early_stopping_patience
            for callback in self.callback_handler.callbacks
            if isinstance(callback, EarlyStoppingCallback)
        )
        if self.state.global_step == max_steps or stopped_early:
            logger.info(f"The run is finished at step {self.state.global_step}: nothing is left to train.")
            return num_train_epochs, 0  # transformers would train one more step of an epoch that ended in the middle
        return place

    def _load_callback_state(self):
        """Give callbacks such as `EarlyStoppingCallback` their state back, by their names, whatever the arguments say.

        transformers makes new callbacks of their arguments, and only if `restore_callback_states_from_checkpoint` is set.
        """
        self._run_state.totals = {}
        stateful = [callback for callback in self.callback_handler.callbacks if isinstance(callback, ExportableState)]
        for callback in stateful:
            saved = self.state.stateful_callbacks.get(type(callback).__name__, {})
            for name, value in saved.get("attributes", {}).items():
                setattr(callback, name, value)
        self._earlier = self._run_state.totals
        for name in _TOTALS if self._earlier else ():
            type_validator(name, self._earlier[name], int | float)
        # Saving updates the table that was loaded, which may be of other callbacks.
        self.state.stateful_callbacks = {type(state).__name__: state.state() for state in [*stateful, self.control]}

    def _load_from_checkpoint(self, resume_from_checkpoint, *args, **kwargs):
        with _reading(resume_from_checkpoint):
            return super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_scaler(self, checkpoint):
        with _reading(checkpoint):
            return super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint):
        with _reading(checkpoint):
            return super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        scheduler = self.lr_scheduler
        rates = getattr(scheduler, "base_lrs", None)
        groups = [dict(group) for group in self.optimizer.param_groups]
        with _reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if not self._goes_on_changed or checkpoint is None or self.is_deepspeed_enabled:
            return
        # What was asked for counts, not what the checkpoint was made with.
        for group, asked in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(asked)
        if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            scheduler.base_lrs, scheduler.last_epoch = rates, scheduler.last_epoch - 1
            scheduler.step()  # to where it was, by the new rates

    # Numbers, and being asked to stop

    def _get_grad_norm(self, model, grad_norm=None):
        """Refuse the step if a loss or the gradient is not finite; note whether any process was asked to stop.

        All processes decide together, and look at the numbers once in a step: one alone would leave the others waiting for
        its gradients.
        """
        returned = super()._get_grad_norm(model, grad_norm)
        norm = returned.full_tensor() if isinstance(returned, DTensor) else returned
        finite_losses = torch.isfinite(torch.stack(self.step_callback.losses)).all()
        finite_norm = torch.isfinite(torch.as_tensor(0.0 if norm is None else norm))
        broken_losses, broken_norms = self._sum_over_processes(~finite_losses, ~finite_norm)
        scaled = getattr(self.accelerator, "scaler", None) is not None  # float16: it skips such steps and scales less
        if not self.args.stop_on_nan or not (broken_losses or broken_norms and not scaled):
            return returned
        taken = "nothing was saved after it" if self.is_deepspeed_enabled else "the step was not taken"
        raise NonFiniteLossError(
            f"The {'loss' if broken_losses else 'gradient'} of step {self.state.global_step + 1} is not finite; {taken}. "
            f"{self._what_is_safe()} Lower `learning_rate` or look for a broken example; `stop_on_nan: false` trains on "
            "regardless."
        )

    def _sum_over_processes(self, *facts: Tensor) -> list[float]:
        """Return in how many processes each fact holds, and note the signal that has asked any of them to stop."""
        signals = [self._signals.asked == name for name in ("SIGINT", "SIGTERM")]
        held = torch.tensor([*facts, *signals], dtype=torch.float32, device=self.accelerator.device)
        *sums, interrupted, terminated = self.accelerator.reduce(held, "sum").tolist()
        self._stopping = "SIGTERM" if terminated else "SIGINT" if interrupted else None
        return sums

    def _check_weights(self) -> None:
        """Raise NonFiniteLossError instead of saving weights that are not finite."""
        finite = torch.stack([torch.isfinite(_local(p)).all() for p in self.model.parameters() if p.requires_grad])
        broken = (~finite).sum().float()
        if not distributed.has_unsharded_weights(self.accelerator):
            broken = self.accelerator.reduce(broken, "sum")
        if broken:
            raise NonFiniteLossError(
                f"The weights after step {self.state.global_step} are not finite, so they were not saved. "
                f"{self._what_is_safe()} Lower `learning_rate` or look for a broken example."
            )

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the adapter, completely or not at all; in `output_dir`, sealed as what the run has trained.

        Raises:
            NonFiniteLossError: if a weight is NaN or infinite.
            WriteError: if the disk refuses; what was there before is untouched.
        """
        self._check_weights()
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.is_deepspeed_enabled:
            state_dict = distributed.float32_state_dict(self.model, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if not self.args.should_save or self._saving == folder:  # a checkpoint is complete when it is sealed
            self._save_files(folder, state_dict, folder)
            return
        is_run = self._complete and folder == Path(self.args.output_dir)
        advice = f"{self._what_is_safe()} Free some space and resume or save again."
        with staged_files(folder, "The adapter", advice) as partial:
            self._save_files(partial, state_dict, folder)
            if is_run:
                self.state.stateful_callbacks[RunState.__name__] = self._run_state.state()
                self.state.save_to_json(str(partial / _STATE))
            files = [file for file in partial.rglob("*") if file.is_file() and file.suffix != ".md"]
            names = [file.relative_to(partial) for file in files]
        if is_run:
            sealing.seal(folder, self.run_identity, names)

    def _save_files(self, folder: Path, state_dict: dict | None, name: Path) -> None:
        super()._save(str(folder), state_dict)
        if self.args.should_save:
            facts = {"num_loops": self.num_loops, "gate_seed": self.gate_seed, **self.looped.trained_with}
            save_adapter_metadata(self.model, folder, **facts)
            save_card(self.model, folder, self.args.hub_model_id, title=name.resolve().name)

    def _checkpoint_folder(self, trial=None) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"

    def _save_checkpoint(self, model, trial) -> None:
        args, folder = self.args, self._checkpoint_folder(trial)
        self._check_weights()  # before anything is touched
        self._run_state.totals = self.progress()
        if args.should_save:
            sealing.unseal(folder)
        limit, args.save_total_limit = args.save_total_limit, None  # nothing is deleted before the new one is complete
        self._saving = folder
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if args.should_save:
                sealing.seal(folder, self.run_identity)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not is_about_files(error):
                raise
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"The checkpoint of step {self.state.global_step} could not be written to {folder.parent} "
                f"({one_line(error, 200)}). {self._what_is_safe()} Free some space and resume with "
                "`resume_from_checkpoint: true`."
            ) from error
        finally:
            args.save_total_limit, self._saving = limit, None
        if args.should_save:
            best = self.state.best_model_checkpoint
            sealing.rotate(folder.parent, limit, [folder] if best is None else [folder, best], self.run_identity)

    # The Hub

    @contextmanager
    def _pushing(self, safe: str, token: str | None = None) -> Iterator[None]:
        """Say in one sentence, without the token, that the Hub refused, and what is `safe` all the same."""
        try:
            yield
        except Exception as error:
            repo_id = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            raise push_error(error, repo_id, safe, self.args.hub_token, token) from None

    def init_hf_repo(self, token: str | None = None, *args: Any, **kwargs: Any) -> None:
        with self._pushing("Nothing was trained yet", token):
            super().init_hf_repo(token, *args, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        """Save the adapter, then push it.

        Raises:
            PushError: if the Hub refuses; the adapter is in `output_dir` all the same.
        """
        self.save_model(_internal_call=True)
        with self._pushing(f"The adapter is safe in {self.args.output_dir}", kwargs.get("token")):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        refused = None
        try:
            with self._pushing(f"The checkpoint is safe in {checkpoint_folder}, and training goes on"):
                super()._push_from_checkpoint(checkpoint_folder)
        except PushError as error:
            refused = str(error)
        if refused is not None:
            # Outside of `except`: a log handler that fails there prints the Hub's own error, which may hold the token.
            logger.warning(refused)


class RunState(TrainerCallback, ExportableState):
    """What this package adds to a run's trainer_state.json: totals, the rule's state, what is not logged yet.

    It restores the totals as training begins, and stops training after a step, with a checkpoint, on a signal to any process.
    """

    def __init__(self, trainer: CheckpointsMixin) -> None:
        self.trainer = trainer
        self.totals: dict[str, Any] = {}

    @property
    def rule(self) -> dict[str, Any]:
        return self.trainer.rule.state_dict()

    @rule.setter
    def rule(self, memory: dict[str, Any]) -> None:
        if self.rule:
            self.trainer.rule.load_state_dict(memory)

    @property
    def metrics(self) -> dict[str, list[float]]:
        """What TRL has gathered since it logged last; the next entry of the log is the mean of it and of what follows."""
        return dict(self.trainer._metrics["train"])

    @metrics.setter
    def metrics(self, gathered: dict[str, list[float]]) -> None:
        type_validator("metrics", gathered, dict[str, list[int | float]])
        self.trainer._metrics["train"] = defaultdict(list, gathered)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"totals": self.totals, "rule": self.rule, "metrics": self.metrics}}

    def on_train_begin(self, args, state, control, **kwargs):
        trainer, earlier = self.trainer, self.trainer._earlier
        forget_peak_memory()
        trainer._began = time.time()
        if earlier:
            trainer._initial_global_step = 0  # the reported loss is the mean over all steps
            trainer._total_loss_scalar = earlier["loss_sum"]
            trainer._tr_loss += earlier["loss_since_log"]
            trainer._globalstep_last_logged = earlier["last_logged_step"]
            trainer._total_train_tokens = earlier["num_tokens"]
            trainer.step_callback.train_seconds = earlier["step_seconds"]

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer._stopping:
            control.should_save = True

    def on_save(self, args, state, control, **kwargs):
        # Not before: the checkpoint holds `control`, and a run that goes on from it is not to stop.
        control.should_training_stop |= bool(self.trainer._stopping)


_TOTALS = ("seconds", "step_seconds", "num_tokens", "loss_sum", "loss_since_log", "last_logged_step")


def _check_state(state: TrainerState) -> None:
    """Raise ValueError or TypeError for a trainer_state.json that no training has written."""
    for name, number in (
        ("global_step", state.global_step),
        ("max_steps", state.max_steps),
        ("train_batch_size", state.train_batch_size or 0),
    ):
        check_integer(name, number, 0)
    type_validator("log_history", state.log_history, list[dict])


@contextmanager
def _reading(folder: str | Path | None) -> Iterator[None]:
    """Say in one sentence that a file of a checkpoint cannot be used, whatever its reader raises."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint {folder} cannot be used: a file in it is damaged ({type(error).__name__}: "
            f"{one_line(error, 200)})."
        ) from error


def _local(parameter: Tensor) -> Tensor:
    """Return what this process holds of a parameter."""
    parameter = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
