"""The training of a run: a new one, one that continues, or the adapter of one that has ended, and its device."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from loopdropout_trainer.results.run_files import has_trained, write_run
from loopdropout_trainer.saving.checkpoints import load_state


if TYPE_CHECKING:
    import torch
    from transformers import Trainer


def train_new(trainer: Trainer, folder: Path) -> None:
    """Train an adapter, or continue its training. `run.json` notes why it ended early, unless it failed."""
    import torch

    from loopdropout_trainer.training.stopping import NonFiniteGradientError, TrainingInterrupted

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # of the run before
    try:
        trainer.train(trainer.args.resume_from_checkpoint)
    except (NonFiniteGradientError, TrainingInterrupted) as error:
        is_noted = error.status is not None and not has_trained(folder)  # else the training there has ended before
        if is_noted and trainer.is_world_process_zero():
            write_run(folder, status=error.status)
        raise


def load_trained(trainer: Trainer, folder: str | Path) -> None:
    """Load a trained adapter, the state of its training, and the facts that were saved with it."""
    from loopdropout_trainer.saving.base_model import check_base
    from loopdropout_trainer.saving.source import find_source

    source = find_source(folder)
    check_base(source, trainer.model)
    trainer.model.load_adapter(str(folder), "default")
    trainer.state = load_state(folder)
    trainer.training_id = source.training_id
    trainer.looped.trained_with = source.facts()


def name_device(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor as the system gives it, such as "cpu (x86_64, AMD EPYC 9V74)"."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    names = [platform.machine()]
    with suppress(OSError):
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            names.append(match[1])
    return f"cpu ({', '.join(names)})"
