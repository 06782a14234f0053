"""A TRL trainer that loses nothing: whole files only, no step on a NaN, one run in a folder, and a Hub that may refuse."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.utils import logging

from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.adapter_files import save_adapter_card, save_adapter_metadata
from loopdropout_trainer.saving.files import is_about_files, staged_files
from loopdropout_trainer.saving.hub import push_error
from loopdropout_trainer.saving.lock import folder_lock
from loopdropout_trainer.training.checkpoints import (
    CheckpointError,
    newest_whole_checkpoint,
    rotate_checkpoints,
    seal_checkpoint,
    unseal_checkpoint,
)
from loopdropout_trainer.training.distributed import float32_state_dict, whole_parameters
from loopdropout_trainer.training.interruption import StopSignals, TrainingInterrupted
from loopdropout_trainer.training.resuming import ResumingMixin


logger = logging.get_logger(__name__)


class NonFiniteLossError(RuntimeError):
    """The loss, a gradient or a weight became NaN or infinite; nothing of it was saved."""


class FaultToleranceMixin(ResumingMixin):
    """Saves, resumes, stops and pushes a TRL trainer's run so that no fault changes or loses what was trained.

    `train(resume_from_checkpoint=True)` resumes from the run's newest checkpoint that is whole, and starts at the beginning
    if there is none; so the same command starts a run and continues it after any interruption. Ctrl-C and SIGTERM stop it
    after the running step, with a checkpoint.
    """

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self._signals = StopSignals()
        self._stopping = False
        self._losses: list[torch.Tensor] = []  # of the running step, by micro-batch
        self.add_callback(_StopCallback(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train, from the beginning or from a checkpoint.

        Args:
            resume_from_checkpoint: folder of a checkpoint; True for this run's newest whole one in `output_dir`, if any.
            args, kwargs: as for TRL's `train`.

        Raises:
            CheckpointError: if the given checkpoint is not whole or belongs to another run, or a new one cannot be written.
            ValueError: if the checkpoint belongs to another adapter, base model or depth.
            NonFiniteLossError: if the loss or a gradient becomes NaN or infinite, unless `stop_on_nan` is false, or a weight
                that would be saved.
            LockedError: if another process trains in `output_dir`.
            TrainingInterrupted: after a checkpoint, if the run was asked to stop.
        """
        wanted = resume_from_checkpoint or None
        vars(self).pop("run_identity", None)  # arguments may have been changed since
        with self.only_run_in_output_dir():
            checkpoint = None if wanted is None else self._checkpoint_to_resume(wanted)
            self._stopping = False
            with StopSignals() as self._signals:
                output = super().train(checkpoint, *args, **kwargs)
        if self._stopping:
            raise TrainingInterrupted(
                f"Stopped after step {self.state.global_step} of {self.state.max_steps}. "
                f"{_what_is_safe(self._newest_checkpoint())} `resume_from_checkpoint: true` goes on from there."
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

    # Numbers

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
        facts = torch.stack(
            [
                (~torch.isfinite(losses)).any().float(),
                (~torch.isfinite(norm)).float(),
                torch.tensor(float(self._signals.asked is not None), device=device),
            ]
        )
        loss_is_broken, gradient_is_broken, stop = self.accelerator.reduce(facts, "sum").tolist()
        self._stopping = bool(stop)
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

    def _check_weights(self) -> None:
        """Refuse to save weights that are not finite.

        Raises:
            NonFiniteLossError: naming the first.
        """
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        finite = torch.stack([torch.isfinite(_local(p)).all() for p in trained.values()])
        broken = (~finite).sum().float()
        if not whole_parameters(self.accelerator):
            broken = self.accelerator.reduce(broken, "sum")
        if broken.item():
            names = [name for name, is_finite in zip(trained, finite.tolist(), strict=True) if not is_finite]
            raise NonFiniteLossError(
                f"The weights after step {self.state.global_step} are not finite"
                f"{f' (`{names[0]}`)' if names else ' in another process'}, so they were not saved. "
                f"{_what_is_safe(self._newest_checkpoint_here())} Lower `learning_rate` or look for a broken example."
            )

    def _newest_checkpoint_here(self) -> Path | None:
        return newest_whole_checkpoint(self.args.output_dir, self.run_identity)

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the adapter, whole or not at all.

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
        if not self.args.should_save or self._saving == folder:  # a checkpoint is whole when it is sealed
            self._save_files(folder, state_dict, folder)
            return
        advice = f"{_what_is_safe(self._newest_checkpoint_here())} Free some space and resume or save again."
        with staged_files(folder, "The adapter", advice) as partial:
            self._save_files(partial, state_dict, folder)

    def _save_files(self, folder: Path, state_dict: dict | None, name: Path) -> None:
        super()._save(str(folder), state_dict)
        if self.args.should_save:
            save_adapter_metadata(self.model, folder, **self._training_facts())
            save_adapter_card(self.model, folder, self.args.hub_model_id or str(name))

    def _training_facts(self) -> dict[str, Any]:
        args = self.args
        seed = args.seed if args.gate_seed is None else args.gate_seed
        return {
            "num_loops": self.num_loops,
            **find_looped_model(self.model).trained_with,
            "rule_args": args.rule_args,
            "gate_seed": seed,
        }

    _saving: Path | None = None  # the checkpoint that is being written

    def _save_checkpoint(self, model, trial) -> None:
        args = self.args
        run_dir = self._get_output_dir(trial=trial)
        folder = Path(run_dir) / f"checkpoint-{self.state.global_step}"
        self._check_weights()  # before anything is touched
        if args.should_save:
            unseal_checkpoint(folder)
        self._list_callback_states()
        limit, args.save_total_limit = args.save_total_limit, None  # nothing is deleted before the new one is whole
        self._saving = folder
        try:
            super()._save_checkpoint(model, trial)
            self._save_progress(folder)
            self.accelerator.wait_for_everyone()
            if args.should_save:
                seal_checkpoint(folder, self.run_identity)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not is_about_files(error):
                raise
            shutil.rmtree(folder, ignore_errors=True)
            newest = newest_whole_checkpoint(run_dir, self.run_identity)
            raise CheckpointError(
                f"The checkpoint of step {self.state.global_step} could not be written to {run_dir} "
                f"({' '.join(str(error).split())}). {_what_is_safe(newest)} Free some space and resume with "
                "`resume_from_checkpoint: true`."
            ) from error
        finally:
            args.save_total_limit = limit
            self._saving = None
        if args.should_save:
            best = self.state.best_model_checkpoint
            keep = [folder] if best is None else [folder, best]
            rotate_checkpoints(run_dir, limit, keep, self.run_identity)

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


class _StopCallback(TrainerCallback):
    """Ends the training after a step in which a process was asked to stop, with a checkpoint."""

    def __init__(self, trainer: FaultToleranceMixin) -> None:
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer._losses = []

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer._stopping:
            control.should_save = control.should_training_stop = True


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a parameter."""
    parameter = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _what_is_safe(checkpoint: str | Path | None) -> str:
    return f"The newest whole checkpoint is {checkpoint}." if checkpoint else "There is no earlier checkpoint."
