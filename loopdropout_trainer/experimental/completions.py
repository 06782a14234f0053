"""What a checkpoint keeps of reinforcement learning beside the adapter: completions that are still to be trained on."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import logging
from trl.trainer.utils import RepeatSampler


logger = logging.get_logger(__name__)


def save_completions(
    folder: Path, accelerator: Accelerator, micro_batches: int, batches: list[dict[str, torch.Tensor]] | None
) -> None:
    """Write the micro-batches so far, and the completions in use, if there are any, as this process has them."""
    tensors = {
        f"{index}.{name}": tensor.contiguous().clone()
        for index, batch in enumerate(batches or ())
        for name, tensor in batch.items()
        if torch.is_tensor(tensor)
    }
    save_file(tensors, _file(folder, accelerator), {"micro_batches": str(micro_batches)})


def load_completions(
    folder: str | Path, accelerator: Accelerator, micro_batches: int
) -> tuple[int, list[dict[str, torch.Tensor]] | None]:
    """Read what `save_completions` wrote; `micro_batches` is what to take if this process finds nothing.

    With another number of processes, or without the file, completions in use are generated anew, by the checkpoint's weights.
    """
    file = _file(Path(folder), accelerator)
    if not file.is_file():
        logger.warning(f"{folder} has no completions of {file.stem}: those in use are generated again.")
        return micro_batches, None
    with safe_open(file, "pt", device=str(accelerator.device)) as saved:
        micro_batches = int(saved.metadata()["micro_batches"])
        batches: dict[int, dict[str, torch.Tensor]] = {}
        for key in saved.keys():  # noqa: SIM118 - not a dictionary
            index, name = key.split(".", 1)
            batches.setdefault(int(index), {})[name] = saved.get_tensor(key)
    return micro_batches, [batches[index] for index in sorted(batches)] or None


def _file(folder: Path, accelerator: Accelerator) -> Path:
    return folder / f"completions_{accelerator.process_index}_of_{accelerator.num_processes}.safetensors"


def restart_at_epochs(sampler: RepeatSampler) -> RepeatSampler:
    """Give TRL's sampler the order of prompts of any epoch at its beginning, as a resumed run needs it.

    TRL draws the order of each epoch from one generator, which a resumed run would start at the first epoch again.
    """
    if isinstance(sampler, RepeatSampler) and sampler.shuffle and sampler.seed is not None:

        def set_epoch(epoch: int) -> None:
            sampler.generator.manual_seed(sampler.seed)
            for _ in range(epoch):
                torch.randperm(sampler.num_samples, generator=sampler.generator)

        sampler.set_epoch = set_epoch
    return sampler
