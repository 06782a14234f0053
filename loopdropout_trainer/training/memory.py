"""What a training step keeps in memory, by arithmetic; and whether layers need be computed twice.

    step = weights + 16 bytes x trained + kept + work

A trained float32 parameter comes with its gradient and Adam's two moments. For the backward pass a loop keeps about one and
a half times the inputs and outputs of the projections in the recurrent block, and the frozen layers after the loop keep theirs
once; or, where layers are computed again, the states before each layer and three more a loop. The work is what is held for a
moment, the larger of two: in the backward pass a few tensors as wide as the widest projection, and where layers are computed
again all that one layer keeps; in the head, the logits of one of TRL's tiles, of the most tokens that can have a label.

It is the worst step: of the longest examples, all of which have an active gate in the first loop already. What the process
holds before it, its libraries, comes on top.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from pyarrow import compute
from torch import nn
from transformers import PreTrainedConfig, TrainingArguments
from transformers.utils import logging

from loopdropout_trainer.lora import physical_layers
from loopdropout_trainer.checks import shown_bytes, shown_parts
from loopdropout_trainer.looped import LoopedModelMixin, find_looped_model
from loopdropout_trainer.training.config import LoopDropoutArguments
from loopdropout_trainer.training.distributed import CHECKPOINTING_FIELDS, shards_weights
from loopdropout_trainer.training.preflight import model_to_train


try:
    import resource
except ImportError:  # Windows
    resource = None

logger = logging.get_logger(__name__)

USABLE = 0.8
"""Share of a device's memory that an estimate may fill; the rest is for what it does not know."""

TRAINED_BYTES = 16
"""Of a trained parameter: itself, its gradient and Adam's two moments, in float32."""

# Measured on all families (tests/test_memory.py), and rounded up.
KEPT, KEPT_OUTSIDE, WIDEST_TENSORS = 1.5, 3, 4

KEPT_PART, WORK_PART = "kept for the backward pass", "for a moment"
"""Parts of the estimate."""

TILE = (4096, 32768)
"""Tokens and part of the vocabulary that TRL's fused head computes together."""

HEAD_TENSORS = 8
"""Float32 tensors of a tile's size that the head holds where TRL's kernel for GPUs cannot run."""


# What this process has taken.


def peak_memory_gb() -> float | None:
    """Return the most memory that this process has held so far, in 10^9 bytes: of its GPU, or where there is none its own."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, on a Mac in bytes
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def forget_peak_memory() -> None:
    """Count a GPU's peak from here on; the peak of a process cannot be taken back."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def device_name() -> str:
    """Return the name of the GPU that this process uses, or `cpu`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


# What a step will take.


def step_memory(
    model: PeftModel, rows: int, length: int, num_loops: int, checkpointing: bool = False
) -> dict[str, int]:
    """Return the bytes that the worst training step holds, by what they are for.

    Args:
        model: as it will be trained; it may be on the meta device.
        rows: of the micro-batch, each of `length` tokens.
        num_loops: that the step runs.
    """
    looped = find_looped_model(model)
    layers = len(set(physical_layers(model)))
    config = looped.config
    itemsize = looped.dtype.itemsize
    names = looped.recurrent_linears()
    inside = _widths(map(looped.get_submodule, names))
    before, after = linears_around(looped, set(names))
    loops = min(num_loops, getattr(config, "backprop_depth", None) or num_loops)
    # Numbers for each token.
    one_loop = KEPT * sum(inside)
    if config._attn_implementation == "eager":  # it keeps its scores, in float32
        one_loop += layers * config.num_attention_heads * length * 4 / itemsize
    if checkpointing:
        hidden = looped.get_input_embeddings().embedding_dim
        outside = len(before + after) * layers / len(names)  # layers, by their projections
        kept = ((layers + KEPT_OUTSIDE) * loops + outside) * hidden
        work = WIDEST_TENSORS * max(inside) + one_loop / layers
    else:
        kept = one_loop * loops + sum(_widths(after))
        work = WIDEST_TENSORS * max(inside)
    tokens = rows * length
    parameters = list(model.parameters())
    tile = tile_memory(tokens, looped.get_output_embeddings().out_features, itemsize)
    return {
        "weights": sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad),
        "adapter with gradients and Adam's states": sum(
            p.numel() * TRAINED_BYTES for p in parameters if p.requires_grad
        ),
        KEPT_PART: int(tokens * itemsize * kept),
        WORK_PART: int(max(tokens * itemsize * work, tile)),
    }


def _widths(linears: Iterable[nn.Module]) -> list[int]:
    return [width for linear in linears for width in (linear.in_features, linear.out_features)]


def linears_around(looped: LoopedModelMixin, inside: set[str]) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """Return the projections before the loop and those after it, without the head; models register them as they run."""
    head = looped.get_output_embeddings()
    before = []
    after = []
    side = before
    for name, module in looped.named_modules():
        name = name.removesuffix(".base_layer")  # PEFT keeps the model's own layer under this name
        if name in inside:
            side = after
        elif isinstance(module, nn.Linear) and module is not head and ".lora_" not in name:
            side.append(module)
    return before, after


def tile_memory(tokens: int, vocabulary: int, itemsize: int) -> int:
    """Return the bytes that TRL's fused head holds for one tile of logits."""
    tokens = min(tokens, TILE[0])
    if torch.cuda.is_available():  # one buffer, as wide for any vocabulary
        return tokens * TILE[1] * itemsize
    return tokens * min(vocabulary, TILE[1]) * 4 * HEAD_TENSORS


# What fits, and what to do about it.


def leaves_checkpointing_open(args: TrainingArguments) -> bool:
    """Return whether nobody has said if layers are computed twice, and put TRL's answer, yes, where it is not ours to give.

    That is where weights or steps are sharded (DeepSpeed, FSDP), and where a compiler decides what is computed again.
    """
    said = {getattr(args, name) for name in CHECKPOINTING_FIELDS} - {None}
    if not said and (args.deepspeed or shards_weights(args) or args.torch_compile):
        said = {True}
    _set_checkpointing(args, True in said if said else None)
    return not said


def choose_checkpointing(model: PeftModel, dataset: Any, args: LoopDropoutArguments) -> None:
    """Compute layers twice (in `args`) only if what a training step keeps does not fit the device, and log why."""
    fits = False
    reason = "how much memory it takes is not known"
    shape = row_shape(dataset, args)
    usable = usable_memory(args)
    if shape is not None and usable is not None:
        depth = args.depth_limits(find_looped_model(model).config.num_loops)[1]
        step = step_memory(model, *shape, depth)
        fits = sum(step.values()) <= usable
        reason = f"{_sentence(step, *shape)}; the device has {shown_bytes(usable / USABLE)}"
    _set_checkpointing(args, not fits)
    logger.info(f"`gradient_checkpointing` is {'off' if fits else 'on'}: {reason}.")


def _sentence(step: dict[str, int], rows: int, longest: int) -> str:
    return f"a step of {rows} rows of {longest:,} tokens takes at most {shown_parts(step)}"


def _set_checkpointing(args: TrainingArguments, enabled: bool | None) -> None:
    for name in CHECKPOINTING_FIELDS:
        setattr(args, name, enabled)


def row_shape(dataset: Any, args: TrainingArguments) -> tuple[int, int] | None:
    """Return the rows of a micro-batch and the tokens of its longest row; None if nothing says how long rows get.

    Args:
        dataset: tokenised examples, or preference pairs, which are two rows each.
    """
    columns = dataset.column_names if isinstance(dataset, Dataset) else ()
    longest = lambda column: compute.max(compute.list_value_length(dataset.data.column(column))).as_py()
    if "input_ids" in columns:
        rows = 1
        tokens = longest("input_ids")
    elif "chosen_ids" in columns:
        rows = 2
        tokens = longest("prompt_ids") + max(longest("chosen_ids"), longest("rejected_ids"))
    else:
        return None
    return rows * args.per_device_train_batch_size, min(tokens, getattr(args, "max_length", None) or tokens)


def usable_memory(args: TrainingArguments) -> float | None:
    """Return the bytes of this process's device that a step may fill; None for a kind of device whose memory is not known."""
    if args.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(args.device)
        return USABLE * (free + torch.cuda.memory_reserved(args.device))
    if args.device.type != "cpu":
        return None
    limits = [psutil.virtual_memory().available]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # of a container
        limit = Path(file).read_text().strip() if Path(file).exists() else ""
        if limit.isdigit():
            limits.append(int(limit))
    return USABLE * min(limits) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def memory_advice(
    config: PreTrainedConfig, dtype: str, peft_config: PeftConfig, args: LoopDropoutArguments, longest: int
) -> str:
    """Return in some lines what the worst step of a run takes, whether that fits, and what to change first if it does not.

    Args:
        config: of the base model; dtype: of its weights, such as `bfloat16`; peft_config: of the adapter.
        args: training arguments.
        longest: tokens of the longest example.
    """
    model = model_to_train(config, peft_config, args.make_rule()).to(getattr(torch, dtype))
    usable = usable_memory(args)
    depth = args.depth_limits(config.num_loops)[1]
    rows = args.per_device_train_batch_size
    checkpointing = args.gradient_checkpointing
    step = step_memory(model, rows, longest, depth, bool(checkpointing))
    text = _sentence(step, rows, longest)
    if args.device.type == "cpu":
        text += f"; beside {shown_bytes(psutil.Process().memory_info().rss)} that the process holds already"
    if usable is None:
        return text
    device = f"{device_name()} with {shown_bytes(usable / USABLE)}"
    if sum(step.values()) <= usable:
        open_choice = ", so that `gradient_checkpointing` stays off" if checkpointing is None else ""
        return f"{text}\nfits {device}{open_choice}"
    lines = [text, f"too much for {device}; in this order:"]
    changes = {} if checkpointing else {"`gradient_checkpointing: true`": rows}  # what costs least time first
    while rows := rows // 2:
        changes[f"`per_device_train_batch_size: {rows}`, with more `gradient_accumulation_steps`"] = rows
    for change, rows in changes.items():
        needed = sum(step_memory(model, rows, longest, depth, checkpointing=True).values())
        fits = needed <= usable
        lines.append(f"  {change}: {shown_bytes(needed)}{', which fits' if fits else ''}")
        if fits:
            break
    return "\n".join(lines)
