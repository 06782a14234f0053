"""A TRL trainer that loses nothing: whole checkpoints only, no step on a NaN, and a Hub that may refuse."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from transformers.utils import logging

from loopdropout_trainer.saving.adapter_files import (
    adapter_metadata,
    check_resumable,
    save_adapter_card,
    save_adapter_metadata,
)
from loopdropout_trainer.saving.hub import push_error
from loopdropout_trainer.training.checkpoints import (
    CheckpointError,
    newest_whole_checkpoint,
    rotate_checkpoints,
    seal_checkpoint,
    unseal_checkpoint,
    why_broken,
)
from loopdropout_trainer.training.distributed import float32_state_dict


logger = logging.get_logger(__name__)


class NonFiniteLossError(RuntimeError):
    """The loss became NaN or infinite; the step was not taken."""


class FaultToleranceMixin:
    """Saves, resumes, stops and pushes a TRL trainer's run so that no fault changes or loses what was trained.

    `train(resume_from_checkpoint=True)` resumes from the newest checkpoint that is whole, and starts at the beginning if
    there is none; so the same command starts a run and continues it after any interruption.
    """

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train, from the beginning or from a checkpoint.

        Args:
            resume_from_checkpoint: folder of a checkpoint; True for the newest whole one in `output_dir`, if any.
            args, kwargs: as for TRL's `train`.

        Raises:
            CheckpointError: if the given checkpoint is not whole, or a new one cannot be written.
            ValueError: if the checkpoint belongs to another adapter, base model or depth.
            NonFiniteLossError: if the loss becomes NaN or infinite, unless `stop_on_nan` is false.
        """
        checkpoint = resume_from_checkpoint or None
        if checkpoint is True:
            checkpoint = self._newest_whole_checkpoint()
        elif checkpoint is not None and (reason := why_broken(checkpoint, sealed=False)):
            raise CheckpointError(f"The checkpoint {checkpoint} cannot be used: {reason}.")
        if checkpoint is not None:
            check_resumable(self.model, checkpoint)
            for name, value in self._training_facts().items():
                before = adapter_metadata(checkpoint).get(name, value)
                if before != value:
                    logger.warning(f"Resuming with `{name}` {value!r}; the run was started with {before!r}.")
        return super().train(checkpoint, *args, **kwargs)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.args.stop_on_nan:
            # All processes stop together: one alone would leave the others waiting for its gradients.
            broken = self.accelerator.reduce((~torch.isfinite(loss)).float(), "sum")
            if broken.item():
                newest = self._newest_whole_checkpoint()
                raise NonFiniteLossError(
                    f"The loss of step {self.state.global_step + 1} is not finite{self._where(loss)}; the step was not taken. "
                    f"{_what_is_safe(newest)} Lower `learning_rate` or look for a broken example; `stop_on_nan: false` "
                    "trains on regardless."
                )
        return loss

    def _where(self, loss: torch.Tensor) -> str:
        return " in another process" if torch.isfinite(loss) else f" ({loss.item()})"

    def _newest_whole_checkpoint(self) -> str | None:
        """Return what the main process finds, on all processes."""
        found = [None]
        if self.accelerator.is_main_process:
            newest = newest_whole_checkpoint(self.args.output_dir)
            found = [None if newest is None else str(newest)]
        return broadcast_object_list(found)[0]

    def _training_facts(self) -> dict[str, Any]:
        args = self.args
        seed = args.seed if args.gate_seed is None else args.gate_seed
        return {
            "num_loops": self.num_loops,
            "rule": args.rule,
            "p": args.p,
            "rule_args": args.rule_args,
            "gate_seed": seed,
        }

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.is_deepspeed_enabled:
            state_dict = float32_state_dict(self.model, state_dict)
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            save_adapter_metadata(output_dir or self.args.output_dir, **self._training_facts())
            save_adapter_card(self.model, output_dir or self.args.output_dir, self.args.hub_model_id)

    def _save_checkpoint(self, model, trial) -> None:
        args = self.args
        run_dir = self._get_output_dir(trial=trial)
        folder = Path(run_dir) / f"checkpoint-{self.state.global_step}"
        if args.should_save:
            unseal_checkpoint(folder)
        limit, args.save_total_limit = args.save_total_limit, None  # nothing is deleted before the new one is whole
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if args.should_save:
                seal_checkpoint(folder)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not _is_about_files(error):
                raise
            shutil.rmtree(folder, ignore_errors=True)
            newest = newest_whole_checkpoint(run_dir)
            raise CheckpointError(
                f"The checkpoint of step {self.state.global_step} could not be written to {run_dir} "
                f"({' '.join(str(error).split())}). {_what_is_safe(newest)} Free some space and resume with "
                "`resume_from_checkpoint: true`."
            ) from error
        finally:
            args.save_total_limit = limit
        if args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(run_dir, limit, keep=[folder] if best is None else [folder, best])

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
        try:
            super()._push_from_checkpoint(checkpoint_folder)
        except Exception as error:
            safe = f"The checkpoint is safe in {checkpoint_folder}, and training goes on"
            logger.warning(str(push_error(error, self._repo(), safe, self.args.hub_token)))

    def _repo(self) -> str:
        return self.args.hub_model_id or Path(self.args.output_dir).absolute().name


def _what_is_safe(checkpoint: str | Path | None) -> str:
    return f"The newest whole checkpoint is {checkpoint}." if checkpoint else "There is no earlier checkpoint."


def _is_about_files(error: Exception) -> bool:
    return isinstance(error, (OSError, SafetensorError)) or any(
        words in str(error) for words in ("PytorchStreamWriter", "failed writing", "unexpected pos", "file write")
    )
