"""The order of the training examples, which depends on the seed and the epoch only, in every process and after a resume."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.training.config import LoopDropoutGRPOConfig


def check_sampling(args: TrainingArguments, dataset: Any) -> None:
    """Raise UserError if the order of the examples would depend on more than the seed and the epoch, or no batch is left."""
    batch_size = args.per_device_train_batch_size
    if args.dataloader_drop_last and isinstance(dataset, Sized) and len(dataset) < batch_size:
        raise UserError(
            f"`per_device_train_batch_size` must be at most {len(dataset)}, the number of training examples, if "
            f"`dataloader_drop_last` is true, got {batch_size}."
        )
    if isinstance(args, LoopDropoutGRPOConfig) and isinstance(dataset, Sized):
        _check_prompts(args, len(dataset))
    if args.train_sampling_strategy == "batch_rebalance":
        raise UserError(
            "`train_sampling_strategy` must be 'random', 'group_by_length' or 'sequential', got 'batch_rebalance', which "
            "does not support gates because its batches differ in their number of examples."
        )
    if not args.accelerator_config.use_seedable_sampler:
        raise UserError(
            "`accelerator_config` must have `use_seedable_sampler: true`, because a training could not be resumed otherwise."
        )


def _check_prompts(args: LoopDropoutGRPOConfig, num_prompts: int) -> None:
    """Raise UserError if TRL would leave out all prompts, because they fill no batch of completions."""
    if num_prompts >= args.prompts_per_generation:
        return
    raise UserError(
        f"`generation_batch_size` must be at most {num_prompts * args.num_generations}, which is `num_generations` "
        f"({args.num_generations}) times the number of training prompts ({num_prompts}), got {args.generation_batch_size}. "
        "Set a lower `per_device_train_batch_size`, from which it follows."
    )


def seed_lengths(sampler: Sampler | None, seed: int) -> Sampler | None:
    """Return a sampler that has random numbers of its own if it groups examples by their length. Others stay unchanged.

    transformers' sampler takes them from the global state. It differs between processes after they drop other activations,
    and a resumed epoch cannot restore it as it was when the epoch began.
    """
    if isinstance(sampler, LengthGroupedSampler):
        return _SeededLengthSampler(sampler, seed)
    return sampler


class _SeededLengthSampler(LengthGroupedSampler):
    epoch = 0

    def __init__(self, sampler: LengthGroupedSampler, seed: int) -> None:
        super().__init__(sampler.batch_size, lengths=sampler.lengths)
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch. accelerate calls it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()
