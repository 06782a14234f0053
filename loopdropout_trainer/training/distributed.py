"""Ways to spread a run over processes, memory and rows that would change its result silently: corrected, or refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.utils import logging

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import example_starts


logger = logging.get_logger(__name__)

CHECKPOINTING_FIELDS = tuple(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")  # new name, old name
    if name in TrainingArguments.__dataclass_fields__
)
"""The names that the installed transformers has for the field that computes layers twice."""


def check_arguments(args: TrainingArguments) -> None:
    """Raise ValueError for layouts in which an example's place in the global batch, or in its row, is not known."""
    packs = getattr(args, "packing", False)
    splits = args.accelerator_config.split_batches and args.world_size > 1
    mixes = "packing" if packs else "split_batches"
    for refused, reason in (
        (packs and args.packing_strategy != "bfd",
         f"`packing_strategy` {getattr(args, 'packing_strategy', None)!r} cuts examples in two, and one example has one gate "
         "vector: use 'bfd', which never cuts one."),
        (getattr(args, "loss_average", "tokens") == "micro_batches" and (packs or splits),
         f"`loss_average: micro_batches` weighs an example by the others of its micro-batch, and `{mixes}` changes "
         "which they are: leave one of them out."),
        (args.parallelism_config is not None and args.parallelism_config.non_data_parallel_size > 1,
         "`parallelism_config` with `tp_size`, `cp_size` or `sp_size` above 1 is not supported: several processes would share "
         "rows."),
        (args.ddp_static_graph and args.gradient_accumulation_steps > 1,
         "`ddp_static_graph` fails with `gradient_accumulation_steps` above 1, where only the last micro-batch synchronises "
         "gradients: leave it out."),
    ):  # fmt: skip
        if refused:
            raise UserError(reason)


def check_processes(accelerator: Accelerator) -> None:
    """Raise ValueError for a launch whose processes would train on their own, each to another result."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    kind = accelerator.distributed_type
    if launched != accelerator.num_processes:
        raise UserError(
            f"This is one of {launched} launched processes, but it found {accelerator.num_processes}: they would train "
            "independently of one another. On a machine without accelerators set `use_cpu: true` in the recipe; for a single "
            "process unset WORLD_SIZE."
        )
    if not _asks_for_fsdp():
        return
    if kind != DistributedType.FSDP:
        raise UserError(
            f"FSDP was asked for, but accelerate runs {kind.value}, whose processes would not share gradients: FSDP needs "
            "several processes with an accelerator each."
        )
    if "SHARDED" in str(accelerator.state.fsdp_plugin.state_dict_type):
        raise UserError(
            "`fsdp_state_dict_type` SHARDED_STATE_DICT would save no adapter that can be loaded: set FULL_STATE_DICT."
        )


def _asks_for_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def shards_weights(args: TrainingArguments) -> bool:
    """Return whether each process holds a part of the frozen weights only: under ZeRO-3 and FSDP."""
    plugin = args.deepspeed_plugin
    return _asks_for_fsdp() or (plugin is not None and plugin.zero_stage == 3)


def has_unsharded_weights(accelerator: Accelerator) -> bool:
    """Return whether each process has all parameters and gradients: in one process, and under DDP."""
    kind = accelerator.distributed_type
    return kind == DistributedType.NO or kind.value.startswith("MULTI_")


def may_skip_loops(accelerator: Accelerator, args: TrainingArguments) -> bool:
    """Return whether examples may run different layers with gradient: in one process, and in DDP without a static graph.

    DDP only asks that every adapter take part in every backward pass. ZeRO-3 and FSDP2 hang or crash when a process runs a
    layer less often, and ZeRO-2 was silently wrong when an adapter was left out of one of its loops.
    """
    return has_unsharded_weights(accelerator) and not args.ddp_static_graph and not args.torch_compile


class EvaluationLossMixin:
    """Makes the evaluation loss of a trainer a mean that neither the number of processes nor the size of a batch changes."""

    _evaluated: np.ndarray  # [2]: this process's losses, summed by their weights, and the sum of these

    def evaluated_weight(self, inputs: dict[str, Any]) -> int:
        """Return how many terms the loss of a batch is the mean of, without those that another batch counts too."""
        raise NotImplementedError

    def prediction_step(self, model, inputs, *args, **kwargs):
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        weight = 0 if loss is None else self.evaluated_weight(inputs)
        if weight:
            self._evaluated += [loss.item() * weight, weight]
        return loss, *others

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        self._evaluated = np.zeros(2)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        name = f"{metric_key_prefix}_loss"
        if name in output.metrics:
            total, weight = np.sum(gather_object([self._evaluated]), axis=0).tolist()
            if weight > 0:
                output.metrics[name] = total / weight
        return output


class EveryExampleOnceMixin(EvaluationLossMixin):
    """Lets a trainer whose batches have labels train and evaluate on each example once, in any number of processes.

    accelerate fills the last batches of an epoch with examples of its beginning, so that all processes have the same number
    of full batches. Here the last batches stay as short as they are in one process, and a process that has none left takes
    part with an example whose labels are all ignored: the loss is a sum over labels, divided by their number over all
    processes. With `dataloader_drop_last` the remainder is dropped, which is more in more processes. Streamed datasets, whose
    end is not known, keep accelerate's ways.

    The evaluation loss is the mean over tokens.
    """

    _train_batches: Any = None  # also of a trainer whose `get_train_dataloader` is its owner's

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        counts_labels = self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs
        self._train_batches = deal_by(_EveryExampleOnce, loader) if counts_labels else None
        return loader

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device):
        ends_with_a_filler = getattr(self._train_batches, "ends_with_a_filler", False)
        if ends_with_a_filler and batch_samples and self.accelerator.gradient_state.end_of_dataloader:
            batch_samples[-1]["labels"] = torch.full_like(batch_samples[-1]["labels"], IGNORED)
        return super()._get_num_items_in_batch(batch_samples, device)

    def prediction_step(self, model, inputs, *args, **kwargs):
        return super().prediction_step(model, _without_repeated_rows(self.accelerator, inputs), *args, **kwargs)

    def evaluated_weight(self, inputs: dict[str, Any]) -> int:
        labels = inputs.get("labels")
        return 0 if labels is None else int((labels[:, 1:] != IGNORED).sum())


IGNORED = -100
"""The label of a token that is not trained on."""


def example_index(position_ids: Tensor, num_examples: int) -> Tensor:
    """Return for each token of packed rows [B, S] the index of its example; padding counts as a part of the last one."""
    starts = example_starts(position_ids)  # [B, S]
    return (starts.flatten().cumsum(0) - 1).view_as(starts).clamp(max=num_examples - 1)


def _without_repeated_rows(accelerator: Accelerator, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a batch in which the labels of repeated rows are ignored; in a packed batch, those of their examples.

    accelerate fills the last batches of an evaluation with rows of the dataset's beginning, so that all processes have the
    same number of full batches. The rows of one round lie side by side, by process.
    """
    labels = inputs.get("labels")
    packed = inputs.get("example_ids")
    state = accelerator.gradient_state
    if labels is None or not state.end_of_dataloader or state.remainder <= 0:  # -1: of a stream of unknown length
        return inputs
    rows = torch.arange(len(labels)) if packed is None else packed[:, 0].cpu()  # [N] of the examples
    repeated = rows >= state.remainder - accelerator.process_index * (int(rows[-1]) + 1)
    # [B, 1 or S]
    of_tokens = rows.unsqueeze(1) if packed is None else example_index(inputs["position_ids"], len(rows)).cpu()
    return {**inputs, "labels": labels.masked_fill(repeated[of_tokens].to(labels.device), IGNORED)}


def deal_by(sampler_class: type[BatchSamplerShard], loader: DataLoader) -> Any:
    """Let batches that accelerate would fill with rows that come twice be dealt by a class below; return their sampler."""
    shard = getattr(loader, "batch_sampler", None)
    if isinstance(shard, BatchSamplerShard) and shard.num_processes > 1 and not shard.drop_last:
        shard.__class__ = sampler_class  # the loader lets nobody replace its sampler
        shard.even_batches = True  # all processes have as many, whatever was asked for
    return shard


class _EveryExampleOnce(BatchSamplerShard):
    """One process's batches of an epoch: as many as any other process has, and as long as they are in one process.

    Attributes:
        ends_with_a_filler: whether this process's last batch is the dataset's first example, because none is left.
    """

    ends_with_a_filler = False

    def __iter__(self) -> Iterator[list[int]]:
        layout = (self.num_processes, self.process_index, self.split_batches)
        own = list(BatchSamplerShard(self.batch_sampler, *layout, even_batches=False))
        self.ends_with_a_filler = len(own) < len(self)
        if self.ends_with_a_filler:
            own.append([0])
        return iter(own)


class EqualShares(BatchSamplerShard):
    """One process's batches of an evaluation in which no row is repeated, and of which all processes have the same sizes.

    Each process has an equal share of the rows. The few that are left over are every process's last batches.
    """

    @property
    def share(self) -> int:
        """Number of rows that are this process's alone."""
        return len(self.batch_sampler.sampler) // self.num_processes

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Sequence[int]]:
        rows = list(chain.from_iterable(self.batch_sampler))
        shared = self.share * self.num_processes
        size = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        for part in (rows[self.process_index : shared : self.num_processes], rows[shared:]):
            for first in range(0, len(part), size):
                yield part[first : first + size]


def float32_adapter(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Keep trained weights in float32 where TRL rounds them to bfloat16, under ZeRO-3 and over quantised weights."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = before.get(name, parameter.data).to(parameter.device, torch.float32)


def float32_state_dict(model: nn.Module, state_dict: dict | None) -> dict[str, Tensor] | None:
    """Return `state_dict` with the trained weights in float32, which DeepSpeed keeps beside its own bfloat16 copies.

    A collective call: all processes must make it, also those that have no `state_dict`.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if all(parameter.dtype == torch.float32 for parameter in trained.values()):
        return state_dict
    from deepspeed.utils import safe_get_full_fp32_param

    full = {name: safe_get_full_fp32_param(parameter) for name, parameter in trained.items()}
    if state_dict is None:
        return None
    return {**state_dict, **{name: tensor.cpu() for name, tensor in full.items() if tensor is not None}}


def check_rows(inputs: dict[str, Tensor]) -> None:
    """Raise ValueError for a micro-batch with several examples in a row, by its positions, which nobody has named."""
    mask = inputs.get("attention_mask")
    starts = example_starts(inputs["position_ids"])[:, 1:]  # [B, S - 1], whether one begins right after another token
    if mask is not None and mask.dim() == 2:
        starts = starts & mask[:, 1:].bool() & mask[:, :-1].bool()  # padding is no token
    if bool(starts.any()):
        raise UserError(
            "`position_ids` start again inside a row, so it holds several examples, but which gates are theirs is not "
            "known: pack with `packing: true` or `padding_free: true` instead of a collator of your own."
        )


def check_quantised_base(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise ValueError over 4-bit weights that bitsandbytes has packed on a CPU, in an evaluation, without gradients."""
    states = (getattr(parameter, "quant_state", None) for parameter in model.parameters())
    packed = any(getattr(state, "packing_format_for_cpu", False) for state in states)
    if packed and accelerator.device.type == "cpu":
        raise UserError(
            "bitsandbytes packed the 4-bit weights for inference on a CPU during an evaluation, and gives no gradients "
            "through them: set `eval_strategy: no`, or train on a GPU."
        )
