"""A TRL trainer that loses nothing: complete files only, no step on a NaN, one run in a folder, and a Hub that may refuse."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState, TrainerControl
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.adapter_files import check_resumable, save_adapter_card, save_adapter_metadata
from loopdropout_trainer.saving.files import is_about_files, staged_files, write_atomically
from loopdropout_trainer.saving.hub import push_error
from loopdropout_trainer.saving.lock import folder_lock
from loopdropout_trainer.training.checkpoints import sealing
from loopdropout_trainer.training.checkpoints.identity import continues, differences, run_identity
from loopdropout_trainer.training.checkpoints.sealing import CheckpointError, run_of
from loopdropout_trainer.training.checkpoints.signals import SIGNALS, StopSignals, TrainingInterrupted
from loopdropout_trainer.training.distributed import float32_state_dict, has_unsharded_weights, shards_weights
from loopdropout_trainer.training.resources import forget_peak_memory, peak_memory_gb


logger = logging.get_logger(__name__)

PROGRESS = "progress.json"
RULE_STATE = "rule_state.json"
_STATE = "trainer_state.json"
_TOTALS = (
    *("seconds", "step_seconds", "num_tokens", "peak_memory_gb"),
    *("loss_sum", "loss_since_log", "last_logged_step"),
)


class NonFiniteLossError(RuntimeError):
    """The loss, a gradient or a weight became NaN or infinite; nothing of it was saved."""


class PeerLostError(RuntimeError):
    """Another process of this run has ended, or cannot be reached."""


class CheckpointsMixin:
    """Saves, resumes, stops and pushes a TRL trainer's run so that no fault changes or loses what was trained.

    `train(resume_from_checkpoint=True)` resumes from the run's newest complete checkpoint, starts at the beginning if there is
    none, and loads the adapter if the training is complete; so the same command starts a run and continues it after any
    interruption. Ctrl-C and SIGTERM stop it after the running step, with a checkpoint.

    What transformers forgets on resuming is given back: the losses, seconds and tokens so far, so that what is reported is
    the complete run, and the patience of `EarlyStoppingCallback`.
    """

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self._earlier: dict[str, Any] = {}  # the totals of the legs before this one
        self._complete: dict[str, Any] | None = None  # the totals of a training that has ended
        self._began = time.time()
        self._goes_on_changed = False
        self._signals = StopSignals()
        self._stopping: str | None = None  # the signal by which a process was asked to stop
        self._saving: Path | None = None  # the checkpoint that is being written
        self._losses: list[torch.Tensor] = []  # of the running step, by micro-batch
        self.add_callback(_RunCallback(self))

    @cached_property
    def run_identity(self) -> dict[str, Any]:
        """What makes this run the run that it is; its checkpoints carry it."""
        return run_identity(self.args, self.model, self.train_dataset, unsharded=not shards_weights(self.args))

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
            PeerLostError: if another process of the run ended.
            TrainingInterrupted: after a checkpoint, if the run was asked to stop.
        """
        wanted = resume_from_checkpoint or None
        vars(self).pop("run_identity", None)  # arguments may have been changed since
        self._complete, self._stopping = None, None
        with self.only_run_in_output_dir():
            if wanted is True and self.from_main_process(self._is_complete):
                return self._load_complete_training()
            checkpoint = self._checkpoint_to_resume(wanted)
            with StopSignals() as self._signals:
                try:
                    output = super().train(checkpoint, *args, **kwargs)
                except RuntimeError as error:
                    if (lost := self._peer_lost(error)) is not None:
                        raise lost from error
                    raise
                self._complete = self.progress()
                if not self._stopping and (signal := self._asked_to_stop()):
                    # After the last step: in an evaluation, or while saving.
                    self._stopping, last = signal, self._checkpoint_folder()
                    if not self.from_main_process(lambda: (last / sealing.MANIFEST).exists()):
                        self._save_checkpoint(self.model, trial=None)
        if self._stopping:
            self._complete = None
            raise TrainingInterrupted(
                f"Stopped after step {self.state.global_step} of {self.state.max_steps}. "
                f"{_what_is_safe(self._newest_checkpoint())} `resume_from_checkpoint: true` goes on from there.",
                self._stopping,
            )
        return output

    @contextmanager
    def only_run_in_output_dir(self) -> Iterator[None]:
        """Keep other processes' runs out of `output_dir` inside the block; all processes of this run enter it.

        Raises:
            LockedError: if another run is at work there.
        """
        lock = ExitStack()
        self.from_main_process(lambda: lock.enter_context(folder_lock(self.args.output_dir)))
        with lock:
            yield

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

    def _peer_lost(self, error: RuntimeError) -> PeerLostError | None:
        """Return the error of a process whose peer has ended; None if that is not what `error` tells."""
        words = ("gloo", "NCCL", "closed by peer", "reset by peer", "Broken pipe", "timed out")
        own = type(error).__module__.startswith(__package__.split(".")[0])
        if own or self.accelerator.num_processes == 1 or not any(word in str(error) for word in words):
            return None
        newest = sealing.newest_complete_checkpoint(self.args.output_dir)  # of any run: identities may need the others
        return PeerLostError(
            f"Another process of this run ended or cannot be reached ({_one_line(error)}): its own log says why. "
            f"{_what_is_safe(newest)} `resume_from_checkpoint: true` goes on from there."
        )

    # Totals

    def progress(self) -> dict[str, Any]:
        """Return the totals of the run so far, over all its legs.

        A collective call: all processes must make it.

        Returns:
            seconds: wall time of training, with its evaluations and saving, up to the last checkpoint of each leg.
            step_seconds: of that, in training steps.
            num_tokens: tokens trained on, without padding.
            peak_memory_gb: most memory that the first process has held, in 10^9 bytes.
        """
        if self._complete is not None:
            return self._complete
        peaks = [peak for peak in (peak_memory_gb(), self._earlier.get("peak_memory_gb")) if peak is not None]
        return {
            "seconds": self._earlier.get("seconds", 0.0) + time.time() - self._began,
            "step_seconds": self.step_callback.train_seconds,
            "num_tokens": getattr(self, "_total_train_tokens", 0),  # not every trainer of TRL's counts them
            "peak_memory_gb": max(peaks, default=None),
            "loss_sum": self._total_loss_scalar,
            "loss_since_log": self.accelerator.reduce(self._tr_loss, "mean").item(),
            "last_logged_step": self._globalstep_last_logged,
        }

    def begin_leg(self) -> None:
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
        self.step_callback.train_seconds = self._earlier["step_seconds"]
        self._logged = (self._earlier["num_tokens"], self._earlier["step_seconds"])

    def _finalize_training(self, trial, num_train_samples, start_time):
        return super()._finalize_training(trial, num_train_samples, start_time - self._earlier.get("seconds", 0.0))

    # Resuming

    def _is_complete(self) -> bool:
        """Return whether `output_dir` holds the adapter of this very run, trained to its end."""
        folder = Path(self.args.output_dir)
        if not has_unsharded_weights(self.accelerator) or not (folder / sealing.MANIFEST).exists():
            return False
        if run_of(folder) is None or differences(run_of(folder), self.run_identity):
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
            self._load_rule_state(folder)
            self.state = TrainerState.load_from_json(str(folder / _STATE))
            self._complete = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
            last = self.state.log_history[-1]
            metrics = {name: last[name] for name in ("train_runtime", "train_loss")}
        logger.info(f"The training in {folder} is complete: its adapter is loaded, and nothing is trained.")
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _checkpoint_to_resume(self, wanted: str | bool | None) -> str | None:
        """Return the checkpoint that the main process chooses, on all processes.

        Raises:
            CheckpointError: if it is damaged, or belongs to another run, or `output_dir` does.
            ValueError: if it belongs to another adapter, base model or depth.
        """
        checkpoint, self._goes_on_changed = self.from_main_process(lambda: self._choose_checkpoint(wanted))
        return checkpoint

    def _choose_checkpoint(self, wanted: str | bool | None) -> tuple[str | None, bool]:
        if wanted is True:
            newest = sealing.newest_complete_checkpoint(self.args.output_dir, self.run_identity)
            newest = newest or sealing.newest_complete_checkpoint(
                self.args.output_dir
            )  # of another run, which is refused
            if newest is not None:
                return self._checked(newest)
        checked = None, False
        if wanted not in (None, True):
            if fault := sealing.fault_of_checkpoint(wanted, sealed=False):
                raise CheckpointError(f"The checkpoint {wanted} cannot be used: {fault}.")
            checked = self._checked(wanted)
        self._check_owner()
        return checked

    def _check_owner(self) -> None:
        """Refuse an `output_dir` in which another run has sealed its checkpoints or its trained adapter, and this one nothing.

        Raises:
            CheckpointError: naming what differs.
        """
        folders = list(sealing.sealed_folders(self.args.output_dir))
        runs = [run for run in map(run_of, folders) if run is not None]
        changed = [differences(run, self.run_identity) for run in runs]
        own = any(continues(run, self.run_identity) for run in runs)
        if runs and not own and not self.args.resume_with_changed_settings:
            raise CheckpointError(
                f"`output_dir` {self.args.output_dir} holds another run: {', '.join(changed[-1])}. Choose another, or write "
                "over it all the same with `resume_with_changed_settings: true`."
            )

    def _checked(self, folder: str | Path) -> tuple[str, bool]:
        """Return the checkpoint, and whether the run goes on with other settings, if it may go on from there."""
        with _reading(folder):
            TrainerState.load_from_json(str(Path(folder) / _STATE))
        check_resumable(self.model, folder)
        run = run_of(folder)
        if run is None:
            logger.warning(
                f"{folder} does not say which run it belongs to: resuming from it as it is. Its training time, and the "
                "losses up to there, are not in what this run reports."
            )
        changed = differences(run, self.run_identity)
        if changed and continues(run, self.run_identity):
            logger.warning(f"The run goes on from {folder} for longer: {', '.join(changed)}.")
        elif changed and not self.args.resume_with_changed_settings:
            raise CheckpointError(
                f"The checkpoint {folder} belongs to another run: {', '.join(changed)}. Resume with the settings that it was "
                "started with, choose another `output_dir`, or go on all the same with `resume_with_changed_settings: true`."
            )
        elif changed:
            logger.warning(f"Going on from {folder} with changed settings: {', '.join(changed)}.")
        return str(folder), bool(changed)

    def _init_training_state(self, max_steps, steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial):
        place = super()._init_training_state(
            max_steps, steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._earlier = {}
        if resume_from_checkpoint is None:
            return place
        with _reading(resume_from_checkpoint):
            progress = Path(resume_from_checkpoint) / PROGRESS
            if progress.exists():
                totals = json.loads(progress.read_text(encoding="utf-8"))
                self._earlier = {name: totals[name] for name in _TOTALS}
            self._load_rule_state(Path(resume_from_checkpoint))
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

    def _load_rule_state(self, folder: Path) -> None:
        """Give the rule its memory back, if it has one."""
        if not self.rule.state_dict():
            return
        if not (folder / RULE_STATE).is_file():
            raise CheckpointError(
                f"{folder} holds no {RULE_STATE}, from which the rule {self.rule.name!r} would go on."
            )
        self.rule.load_state_dict(json.loads((folder / RULE_STATE).read_text(encoding="utf-8")))

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
        rates = list(getattr(scheduler, "base_lrs", ()))
        fields = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        with _reading(checkpoint):
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

    def _newest_checkpoint(self) -> str | None:
        """Return the newest complete checkpoint of this run, as the main process finds it, on all processes."""
        newest = self.from_main_process(self._newest_checkpoint_here)
        return None if newest is None else str(newest)

    def _newest_checkpoint_here(self) -> Path | None:
        return sealing.newest_complete_checkpoint(self.args.output_dir, self.run_identity)

    # Numbers, and being asked to stop

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self._losses.append(loss)
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm)
        self._check_step(norm)
        return norm

    def _check_step(self, norm: torch.Tensor | float | None) -> None:
        """Refuse the step if a loss or the gradient is not finite; note whether any process was asked to stop.

        All processes decide together, and look at the numbers once in a step: one alone would leave the others waiting for
        its gradients.
        """
        device = self.accelerator.device
        losses = torch.stack([loss.to(device).float() for loss in self._losses])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norm = torch.zeros((), device=device) if norm is None else torch.as_tensor(norm, device=device).float()
        broken = torch.stack([(~torch.isfinite(losses)).any().float(), (~torch.isfinite(norm)).float()])
        facts = torch.cat([broken, self._signals_here()])
        loss_is_broken, gradient_is_broken, *asked = self.accelerator.reduce(facts, "sum").tolist()
        self._stopping = _signal_of(asked)
        scaled = getattr(self.accelerator, "scaler", None) is not None  # float16: it skips such steps and scales less
        if not self.args.stop_on_nan or not (loss_is_broken or gradient_is_broken and not scaled):
            return
        what, number = ("loss", losses[~torch.isfinite(losses)]) if loss_is_broken else ("gradient", norm)
        where = f" ({number.flatten()[0].item()})" if number.numel() else " in another process"
        taken = "nothing was saved after it" if self.is_deepspeed_enabled else "the step was not taken"
        raise NonFiniteLossError(
            f"The {what} of step {self.state.global_step + 1} is not finite{where}; {taken}. "
            f"{_what_is_safe(self._newest_checkpoint())} Lower `learning_rate` or look for a broken example; "
            "`stop_on_nan: false` trains on regardless."
        )

    def _signals_here(self) -> torch.Tensor:
        """Return for each of SIGNALS whether it has asked this process to stop, as 0 or 1."""
        return torch.tensor([float(self._signals.asked == name) for name in SIGNALS], device=self.accelerator.device)

    def _asked_to_stop(self) -> str | None:
        """Return the signal by which a process was asked to stop since the last step; a collective call."""
        return _signal_of(self.accelerator.reduce(self._signals_here(), "sum").tolist())

    def _check_weights(self) -> None:
        """Refuse to save weights that are not finite.

        Raises:
            NonFiniteLossError: naming the first.
        """
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        finite = torch.stack([torch.isfinite(_local(p)).all() for p in trained.values()])
        broken = (~finite).sum().float()
        if not has_unsharded_weights(self.accelerator):
            broken = self.accelerator.reduce(broken, "sum")
        if broken.item():
            names = [name for name, is_finite in zip(trained, finite.tolist(), strict=True) if not is_finite]
            raise NonFiniteLossError(
                f"The weights after step {self.state.global_step} are not finite"
                f"{f' (`{names[0]}`)' if names else ' in another process'}, so they were not saved. "
                f"{_what_is_safe(self._newest_checkpoint_here())} Lower `learning_rate` or look for a broken example."
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
            state_dict = float32_state_dict(self.model, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if not self.args.should_save or self._saving == folder:  # a checkpoint is complete when it is sealed
            self._save_files(folder, state_dict, folder)
            return
        is_run = self._complete is not None and folder == Path(self.args.output_dir)
        advice = f"{_what_is_safe(self._newest_checkpoint_here())} Free some space and resume or save again."
        with staged_files(folder, "The adapter", advice) as partial:
            self._save_files(partial, state_dict, folder)
            names = [
                file.relative_to(partial) for file in partial.rglob("*") if file.is_file() and file.suffix != ".md"
            ]
            if is_run:
                self.state.save_to_json(str(partial / _STATE))
                (partial / PROGRESS).write_text(json.dumps(self._complete, indent=1), encoding="utf-8")
        if is_run:
            sealing.seal(folder, self.run_identity, [*names, _STATE, PROGRESS])

    def _save_files(self, folder: Path, state_dict: dict | None, name: Path) -> None:
        super()._save(str(folder), state_dict)
        if not self.args.should_save:
            return
        args = self.args
        save_adapter_metadata(
            self.model,
            folder,
            num_loops=self.num_loops,
            **find_looped_model(self.model).trained_with,
            rule_args=args.rule_args,
            gate_seed=args.seed if args.gate_seed is None else args.gate_seed,
        )
        save_adapter_card(self.model, folder, args.hub_model_id or str(name))
        memory = self.rule.state_dict()
        if memory:
            (folder / RULE_STATE).write_text(json.dumps(memory), encoding="utf-8")

    def save_progress(self, folder: Path) -> None:
        """Write into a checkpoint what resuming needs beside transformers' files; all processes must make this call."""
        progress = self.progress()
        if self.args.should_save:
            write_atomically(folder / PROGRESS, json.dumps(progress, indent=1))

    def _checkpoint_folder(self, trial=None) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"

    def _save_checkpoint(self, model, trial) -> None:
        args, folder = self.args, self._checkpoint_folder(trial)
        self._check_weights()  # before anything is touched
        if args.should_save:
            sealing.unseal(folder)
        self._list_callback_states()
        limit, args.save_total_limit = args.save_total_limit, None  # nothing is deleted before the new one is complete
        self._saving = folder
        try:
            super()._save_checkpoint(model, trial)
            self.save_progress(folder)
            self.accelerator.wait_for_everyone()
            if args.should_save:
                sealing.seal(folder, self.run_identity)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not is_about_files(error):
                raise
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"The checkpoint of step {self.state.global_step} could not be written to {folder.parent} "
                f"({_one_line(error)}). {_what_is_safe(self._newest_checkpoint_here())} Free some space and resume with "
                "`resume_from_checkpoint: true`."
            ) from error
        finally:
            args.save_total_limit = limit
            self._saving = None
        if args.should_save:
            best = self.state.best_model_checkpoint
            sealing.rotate(folder.parent, limit, [folder] if best is None else [folder, best], self.run_identity)

    # The Hub

    def init_hf_repo(self, token: str | None = None, *args: Any, **kwargs: Any) -> None:
        try:
            super().init_hf_repo(token, *args, **kwargs)
        except Exception as error:
            raise push_error(error, self._repo(), "Nothing was trained yet", self.args.hub_token, token) from None

    def push_to_hub(self, *args, **kwargs):
        """Save the adapter, then push it.

        Raises:
            PushError: if the Hub refuses; the adapter is in `output_dir` all the same.
        """
        self.save_model(_internal_call=True)
        try:
            return super().push_to_hub(*args, **kwargs)
        except Exception as error:
            safe = f"The adapter is safe in {self.args.output_dir}"
            raise push_error(error, self._repo(), safe, self.args.hub_token, kwargs.get("token")) from None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        refused = None
        try:
            super()._push_from_checkpoint(checkpoint_folder)
        except Exception as error:
            safe = f"The checkpoint is safe in {checkpoint_folder}, and training goes on"
            refused = str(push_error(error, self._repo(), safe, self.args.hub_token))
        if refused is not None:
            # Outside of `except`: a log handler that fails there prints the Hub's own error, which may hold the token.
            logger.warning(refused)

    def _repo(self) -> str:
        return self.args.hub_model_id or Path(self.args.output_dir).absolute().name


class _RunCallback(TrainerCallback):
    """Begins a leg of a run, and ends it after a step in which a process was asked to stop, with a checkpoint."""

    def __init__(self, trainer: CheckpointsMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.begin_leg()

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer._losses = []

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer._stopping:
            control.should_save = control.should_training_stop = True


@contextmanager
def _reading(folder: str | Path | None) -> Iterator[None]:
    """Say in one sentence that a file of a checkpoint cannot be used, whatever its reader raises."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint {folder} cannot be used: a file in it is damaged ({type(error).__name__}: {_one_line(error)})."
        ) from error


def _signal_of(asked: list[float]) -> str | None:
    """Return the last of SIGNALS that has come to any process, by how many it has come to."""
    return next((name for name, processes in zip(reversed(SIGNALS), reversed(asked), strict=True) if processes), None)


def _one_line(error: Exception) -> str:
    """Return the beginning of an error's message, in one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a parameter."""
    parameter = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _what_is_safe(checkpoint: str | Path | None) -> str:
    return f"The newest complete checkpoint is {checkpoint}." if checkpoint else "There is no earlier checkpoint."
