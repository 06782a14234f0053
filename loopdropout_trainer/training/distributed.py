"""Several processes: the same losses and weights as one process, and errors for layouts that would change them silently."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gate_state import find_examples


IGNORED = -100
"""Label of a token that is not trained on."""


def check_processes(accelerator: Accelerator, args: TrainingArguments) -> None:
    """Raise UserError for a launch whose processes would train independently, or share the rows of a batch."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    kind = accelerator.distributed_type
    if launched != accelerator.num_processes:
        raise UserError(
            f"The launch has {launched} processes, but each of them trains with {accelerator.num_processes}. Set "
            "`use_cpu: true` on a machine without accelerators, or unset WORLD_SIZE for a single process."
        )
    if _asks_for_fsdp() and kind != DistributedType.FSDP:
        raise UserError(f"FSDP must have several processes with an accelerator each, got {kind.value}.")
    if kind == DistributedType.FSDP and "SHARDED" in str(accelerator.state.fsdp_plugin.state_dict_type):
        raise UserError("`fsdp_state_dict_type` must be FULL_STATE_DICT, got SHARDED_STATE_DICT.")
    if args.accelerator_config.split_batches and args.per_device_train_batch_size % accelerator.num_processes:
        raise UserError(
            f"`per_device_train_batch_size` must be a multiple of the {accelerator.num_processes} processes with "
            f"`split_batches`, got {args.per_device_train_batch_size}."
        )
    check_parallelism(args)


def check_parallelism(args: TrainingArguments) -> None:
    """Raise UserError if several processes would share an example."""
    if args.parallelism_config is not None and args.parallelism_config.non_data_parallel_size > 1:
        raise UserError("`parallelism_config` must not set `tp_size`, `cp_size` or `sp_size` above 1.")


def check_devices(args: TrainingArguments) -> None:
    """Raise UserError if one process would train on several GPUs, by copies of the model that have no gates of their own."""
    if args.n_gpu > 1:
        raise UserError(
            f"A process must train on one GPU, but {args.n_gpu} are visible. Start the script with `accelerate launch`, which "
            "runs a process for each GPU (`accelerate launch -m loopdropout_trainer sft RECIPE.yaml`), or set the environment "
            "variable CUDA_VISIBLE_DEVICES=0 to train on one."
        )


def reset_accelerator(args: TrainingArguments) -> None:
    """Reset the state that all accelerators of a process share, if another trainer has set it for other arguments.

    accelerate otherwise raises an error about the precision, and a trainer that exists would train in the other precision.
    """
    if not is_initialized():
        return
    state = AcceleratorState()
    if state.distributed_type == DistributedType.DEEPSPEED:  # whose configuration has the precision
        return
    if (state.mixed_precision, state.device.type) == (args.mixed_precision, args.device.type):
        return
    _reset_state(args)


class OwnAcceleratorMixin:
    """The accelerator of a trainer, which works again after another configuration or trainer was made."""

    _accelerator: Accelerator

    @property
    def accelerator(self) -> Accelerator:
        """Accelerator of this trainer. It is made again if a newer configuration has reset the state of all accelerators."""
        reset_accelerator(self.args)
        if not hasattr(self._accelerator.state, "distributed_type"):
            self.create_accelerator_and_postprocess()
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator


def allow_another_deepspeed_trainer(args: TrainingArguments) -> None:
    """Reset the state that all accelerators of a process share, if an earlier trainer has set it for DeepSpeed.

    accelerate otherwise raises an error about a second accelerator, unless the configuration is newer than that trainer. Those
    of `compare_with` are made together, before the first training.
    """
    if is_initialized() and AcceleratorState().distributed_type == DistributedType.DEEPSPEED:
        _reset_state(args)
        if args.deepspeed_plugin is not None:
            args.deepspeed_plugin.set_deepspeed_weakref()  # by which transformers shards a model that it loads


def _reset_state(args: TrainingArguments) -> None:
    # Each new configuration of transformers resets the state, and chooses the devices again.
    fields = ("output_dir", "use_cpu", "bf16", "fp16", "ddp_backend", "ddp_timeout")
    TrainingArguments(**{name: getattr(args, name) for name in fields})


def _asks_for_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def shards_weights(args: TrainingArguments) -> bool:
    """Return whether each process holds only a part of the frozen weights, as under ZeRO-3 and FSDP."""
    plugin = args.deepspeed_plugin
    return _asks_for_fsdp() or (plugin is not None and plugin.zero_stage == 3)


def may_skip_loops(accelerator: Accelerator, args: TrainingArguments) -> bool:
    """Return whether an example may run its frozen loops without gradient: in one process, and in DDP without a static graph.

    Then the backward pass of one process runs the layers of the block less often than that of another one. DDP only asks that
    every adapter takes part in every backward pass, but ZeRO-3 and FSDP2 hang or crash, and ZeRO-2 is silently wrong.
    """
    kind = accelerator.distributed_type
    is_one_process = kind == DistributedType.NO
    is_ddp = kind.value.startswith("MULTI_")  # "MULTI_GPU", "MULTI_CPU", ...
    return (is_one_process or is_ddp) and not args.ddp_static_graph


def float32_adapter(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Keep trained weights in float32 where TRL rounds them to bfloat16, under ZeRO-3 and over quantized weights.

    Args:
        model: Model with its adapter.
        before: Trained weights by name, as they were before TRL rounded them.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = before.get(name, parameter.data).to(parameter.device, torch.float32)


_TOKEN_MEANS = ("mean_token_accuracy", "entropy")
"""Values of a batch that TRL's `SFTTrainer` takes as means over the batch's target tokens in all processes."""


class EveryExampleOnceMixin:
    """Train and evaluate on each example once, in any number of processes. The batches must have labels.

    accelerate fills the last batches of an epoch with examples of its beginning, so that all processes have the same number
    of full batches. Here the last batches stay as short as in one process. A process without a batch takes part with an
    example whose labels are all ignored, since the loss is a sum over labels divided by their number in all processes.
    Streamed datasets, whose end is not known, keep accelerate's behavior. The loss of an evaluation, its accuracy and its
    entropy are means over tokens.
    """

    _train_batches: Any = None
    _is_evaluating = False  # the next step's tokens are counted while the model is still in evaluation mode
    _evaluated: list[tuple[float, int]]  # of each batch of this process: sum of its losses, and number of their tokens

    def get_train_dataloader(self) -> DataLoader:
        """Return the training batches of this process, none of which repeats an example."""
        loader = super().get_train_dataloader()
        batches = getattr(loader, "batch_sampler", None)
        counts_labels = self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs
        if counts_labels and isinstance(batches, BatchSamplerShard) and batches.num_processes > 1:
            if not batches.drop_last:
                batches.__class__ = _EveryExampleOnce  # a DataLoader does not accept another sampler
                batches.even_batches = True
            self._train_batches = batches
        return loader

    def _get_num_items_in_batch(self, batch_samples, device):
        if self._is_evaluating:
            return None  # the loss of an evaluation step is the mean over this process's tokens
        is_uneven = isinstance(self._train_batches, _EveryExampleOnce)
        if is_uneven and batch_samples and self.accelerator.gradient_state.end_of_dataloader:
            self._leave_out_filler(batch_samples[-1])
        return super()._get_num_items_in_batch(batch_samples, device)

    def _leave_out_filler(self, batch: dict[str, Any]) -> None:
        """Train and count no token of the last batch of an epoch if it is the filler of a process without an example.

        All processes call it, because they add up the number of tokens that are not counted.
        """
        num_tokens = 0
        if self._train_batches.ends_with_filler:
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            mask = batch.get("attention_mask")
            if mask is None:  # a packed row has no padding
                num_tokens = batch["position_ids"].shape[1]
            else:
                num_tokens = int(mask.sum())
        device = self.accelerator.device
        self._total_train_tokens -= int(self.accelerator.reduce(torch.tensor(num_tokens, device=device), "sum"))
        # TRL leaves repeated rows out of its metrics by this number, but no row is repeated.
        self.accelerator.gradient_state.active_dataloader.remainder = 0

    def prediction_step(self, model, inputs, *args, **kwargs):
        """Evaluate a batch without the examples that accelerate repeats, and count its tokens."""
        inputs = dict(_without_repeated_rows(self.accelerator, inputs))
        inputs.pop("example_ids", None)  # for the gates of training
        self._is_evaluating = True
        try:
            loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self._is_evaluating = False
        num_tokens = 0 if loss is None else self._count_targets(inputs)
        self._evaluated.append((loss.item() * num_tokens if num_tokens else 0.0, num_tokens))
        return loss, *others

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        """Evaluate, with the mean loss over the tokens of all processes."""
        self._evaluated = []
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        name = f"{metric_key_prefix}_loss"
        is_own = type(self).prediction_step is not EveryExampleOnceMixin.prediction_step  # its losses are the user's
        if name in output.metrics and not is_own:
            total, num_tokens = self._gather_evaluated().sum(axis=0).tolist()
            if num_tokens:
                output.metrics[name] = total / num_tokens
        return output

    def _gather_evaluated(self) -> np.ndarray:
        """Return the sum of the losses and the number of tokens of each round of batches of all processes, [R, 2]."""
        return np.sum(gather_object([self._evaluated]), axis=0).reshape(-1, 2)

    def _mean_metrics(self):
        """Return the means of an evaluation, those of TRL's means over the tokens of a round by its number of tokens."""
        recorded = self._metrics["eval"]
        num_tokens = self._gather_evaluated()[:, 1]  # [R]
        for name in _TOKEN_MEANS:
            values = recorded.get(name, [])
            if len(values) == len(num_tokens) and num_tokens.sum():
                recorded[name] = [float(np.average(values, weights=num_tokens))]
        return super()._mean_metrics()

    def _count_targets(self, inputs: dict[str, Any]) -> int:
        """Return the number of target tokens in a batch."""
        labels = inputs.get("labels")  # [B, S], which the loss shifts, so that no token predicts the first one
        if labels is None:
            return 0
        return int((labels[:, 1:] != IGNORED).sum())


def _without_repeated_rows(accelerator: Accelerator, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a batch in which the labels of repeated rows are ignored.

    accelerate fills the last batches of an evaluation with rows of the dataset's beginning, until each process has the same
    number of rows. The rows of one round, a batch of each process, come from the processes in their order.
    """
    labels = inputs.get("labels")
    state = accelerator.gradient_state
    if labels is None or not state.end_of_dataloader or state.remainder <= 0:  # 0: none are repeated, -1: unknown
        return inputs
    if "example_ids" in inputs:
        ids, index = find_examples(inputs)  # N ids (row, segment), and [B, S] example of each token
        rows, index = torch.tensor([row for row, _ in ids]), index.cpu()
    else:
        rows = torch.arange(len(labels))  # [B], each row is an example
        index = rows.unsqueeze(1)  # [B, 1] example of each token
    # `remainder` is the number of rows of the last round that are not repeated, over all processes in their order. Each
    # process has as many rows as this one.
    num_rows = int(rows[-1]) + 1
    rows_before = accelerator.process_index * num_rows  # of the processes before this one
    repeated = rows >= state.remainder - rows_before  # [N]
    return {**inputs, "labels": labels.masked_fill(repeated[index].to(labels.device), IGNORED)}


class _EveryExampleOnce(BatchSamplerShard):
    """Batches of one process in an epoch. Each process has the same number of batches, and the last one may be short.

    Attributes:
        ends_with_filler: Whether this process's last batch is the dataset's first example, because none is left.
    """

    ends_with_filler = False

    def __iter__(self) -> Iterator[list[int]]:
        # The processes must have the same number of batches, because each backward pass waits for the others. Without
        # `even_batches`, accelerate stops instead of repeating examples, so this process may have one batch less.
        layout = (self.num_processes, self.process_index, self.split_batches)
        batches = list(BatchSamplerShard(self.batch_sampler, *layout, even_batches=False))
        self.ends_with_filler = len(batches) < len(self)
        if self.ends_with_filler:
            batches.append([0])
        return iter(batches)
