"""What a training step keeps in memory, without weights or a device; and whether layers need be computed twice.

The forward pass runs with shapes only, on the path that training takes, for one and two loops; each further loop keeps as
much again. What it keeps for the backward pass is counted, each storage once:

    step = weights + 16 bytes x trained + kept + work

A trained float32 parameter comes with its gradient and Adam's two moments. The work is what the backward pass holds for a
moment: a few tensors as wide as the widest layer, and one layer's kept activations where layers are computed again.

It is the worst step: of the longest examples, all of which have an active gate in the first loop already.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.compute
import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, TrainingArguments
from transformers.utils import logging

from loopdropout_trainer.adapters import add_gates, physical_layers
from loopdropout_trainer.gates import Draw
from loopdropout_trainer.looped import GatePlan, LoopedModelMixin, TrainingPolicy, find_looped_model
from loopdropout_trainer.training.config import LoopDropoutArguments
from loopdropout_trainer.training.distributed import CHECKPOINTING_FIELDS, shards_weights


try:
    import resource
except ImportError:  # Windows
    resource = None

logger = logging.get_logger(__name__)

USABLE = 0.8
"""Share of a device's memory that an estimate may fill; the rest is for what it does not know."""

TRAINED_BYTES = 16
"""Of a trained parameter: itself, its gradient and Adam's two moments, in float32."""

WIDEST_TENSORS = 4
"""Tensors [tokens, widest layer] that a backward pass holds for a moment."""

GENEROUS = 3
"""Float32 tensors, as wide as a projection's input and output, of which no layer keeps as many for each projection."""


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


@dataclass(frozen=True)
class StepMemory:
    """Bytes that the worst training step holds."""

    weights: int
    trained: int
    kept: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.trained + self.kept + self.work


@dataclass(frozen=True)
class StepSettings:
    """What the memory of a step depends on, beside the model: rows and tokens of the largest micro-batch, loops, arguments."""

    rows: int
    length: int
    num_loops: int
    remove_padding: bool = True
    recompute_pointwise: bool = False
    checkpointing: bool = False


class ShapeModel:
    """A looped model with its adapter as it is trained, without weights: with shapes only.

    Args:
        config: of the base model.
        dtype: of the frozen weights.
        peft_config: of the adapter.
        args: training arguments: the rule, and whether layers are fused.
    """

    def __init__(
        self, config: PreTrainedConfig, dtype: torch.dtype, peft_config: PeftConfig, args: LoopDropoutArguments
    ) -> None:
        self.rule = args.make_rule()
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(copy.deepcopy(config), dtype=dtype)
            self.model: PeftModel = get_peft_model(model, copy.copy(peft_config)).train()
            add_gates(self.model, in_activation_dtype=True, rule=self.rule, seed=0, fused=args.fused_lora)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:  # on a CPU without memory, since autocast does not know the meta device
            self.model.to_empty(device="cpu")
        self.looped: LoopedModelMixin = find_looped_model(self.model)
        self.num_loops = self.looped.config.num_loops  # of the model; runs at fewer loops change its config
        self._kept_at = functools.cache(self._measure)

    def step(self, settings: StepSettings) -> StepMemory:
        """Return the memory of a step."""
        parameters = list(self.model.parameters())
        frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
        trained = sum(p.numel() * TRAINED_BYTES for p in parameters if p.requires_grad)
        widest = max(max(linear.in_features, linear.out_features) for linear in _recurrent(self.looped))
        work = WIDEST_TENSORS * settings.rows * settings.length * widest * self.looped.dtype.itemsize
        kept = plain = self.kept_bytes(replace(settings, checkpointing=False))
        if settings.checkpointing:
            kept = self.kept_bytes(settings)
            work += plain // (settings.num_loops * len(set(physical_layers(self.model))))
        return StepMemory(frozen, trained, kept, work)

    def kept_bytes(self, settings: StepSettings) -> int:
        """Return what the forward pass keeps for the backward pass, weights left out."""
        loops = min(settings.num_loops, getattr(self.looped.config, "backprop_depth", None) or settings.num_loops)
        if self.looped.trains_at_one_depth:
            return self._kept_at(replace(settings, num_loops=loops))
        one, two = (self._kept_at(replace(settings, num_loops=depth)) for depth in (1, 2))
        return one + (loops - 1) * (two - one)

    def _measure(self, settings: StepSettings) -> int:
        """Return what a forward pass keeps, by running it."""
        looped, rows, length, num_loops = self.looped, settings.rows, settings.length, settings.num_loops
        if not looped.trains_at_one_depth:
            looped.config.num_loops = num_loops
        packs = settings.remove_padding and looped.can_pack
        looped.training_policy = TrainingPolicy(packs)
        if packs:
            looped.recompute_pointwise(settings.recompute_pointwise)
        if settings.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        with self.mode:
            inputs = {
                "input_ids": torch.zeros(rows, length, dtype=torch.long),
                "position_ids": torch.arange(length).expand(rows, length),
                "attention_mask": torch.ones(rows, 1, length, length, dtype=torch.bool),  # in the form that none reads
                "use_cache": False,
            }
        if packs:  # lengths are read from the mask, which needs values
            inputs["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
        held = HeldBytes(self.model)
        looped.loop_state.apply(self._worst_gates(rows, num_loops))
        try:
            with held:
                output = looped.base_model(**inputs)  # what hangs on it is kept
            kept = held.total
            del output
        finally:
            if settings.checkpointing:
                self.model.gradient_checkpointing_disable()
                looped.disable_input_require_grads()  # which enabling it has switched on
            looped.loop_state.unit_gates()
            looped.training_policy = TrainingPolicy()
        return kept

    def _worst_gates(self, rows: int, num_loops: int) -> GatePlan:
        """Return gates as the rule shapes them, all of them active."""
        layers = physical_layers(self.model)
        ids = [(row, 0) for row in range(rows)]
        draw = Draw(0, 0, ids, num_loops, num_steps=1, num_modules=len(layers), layers=layers)
        gates = torch.full_like(self.rule.sample(draw), 2.0).requires_grad_(self.rule.wants_sensitivity)
        return GatePlan(gates, seeds=self.rule.seeds(draw), draw=draw)


def memory_bound(model: PeftModel, settings: StepSettings) -> float:
    """Return more bytes than a step can hold, without running anything; infinity for attention that keeps its scores.

    Args:
        model: as it will be trained, or its shapes.
    """
    looped = find_looped_model(model)
    if looped.config._attn_implementation == "eager":
        return float("inf")
    widths = sum(linear.in_features + linear.out_features for linear in _recurrent(looped))
    weights = TRAINED_BYTES * sum(parameter.numel() for parameter in model.parameters())
    return weights + GENEROUS * 4 * widths * settings.rows * settings.length * settings.num_loops


def _recurrent(looped: LoopedModelMixin) -> list[nn.Linear]:
    return [looped.get_submodule(name) for name in looped.recurrent_linears()]


class HeldBytes(TorchDispatchMode):
    """Knows the bytes of all storages that operations in the block have made and that are still held, weights left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        weights = [*model.parameters(), *model.buffers()]
        self._storages = {StorageWeakRef(weight.untyped_storage()): 0 for weight in weights}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages.setdefault(StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def total(self) -> int:
        return sum(size for storage, size in self._storages.items() if not storage.expired())


# What fits, and what to do about it.


def leaves_checkpointing_open(args: TrainingArguments) -> bool:
    """Return whether nobody has said if layers are computed twice, and put TRL's answer, yes, where it is not ours to give.

    That is where weights or steps are sharded (DeepSpeed, FSDP), and where a compiler decides what is computed again.
    """
    said = [value for value in (getattr(args, name) for name in CHECKPOINTING_FIELDS) if value is not None]
    if not said and (args.deepspeed or shards_weights(args) or args.torch_compile):
        said = [True]
    _set_checkpointing(args, any(said) if said else None)
    return not said


def choose_checkpointing(model: PeftModel, dataset: Any, args: LoopDropoutArguments) -> None:
    """Compute layers twice only if what a training step keeps does not fit the device, and say so in one line of the log.

    Args:
        model: as it will be trained; dataset: as the trainer has prepared it.
        args: training arguments, which are changed.
    """
    fits, reason = False, "how much memory it takes is not known"
    shape, usable = row_shape(dataset, args), usable_memory(args)
    if args.recompute_pointwise:
        fits, reason = True, "`recompute_pointwise` takes its place"
    elif shape is not None and usable is not None:
        try:
            base, adapter = model.get_base_model(), model.peft_config[model.active_adapter]
            settings = StepSettings(*shape, args.depth_limits(base.config.num_loops)[1], args.remove_padding)
            needed = memory_bound(model, settings)
            if needed > usable:  # by more than it takes
                needed = ShapeModel(base.config, base.dtype, adapter, args).step(settings).total
            fits = needed <= usable
            reason = f"a step of {shape[0]} rows of {shape[1]:,} tokens takes at most {_gb(needed)} of {_gb(usable / USABLE)}"
        except Exception as error:  # of a model that cannot be run by its shapes; an estimate must not end a training
            reason = f"what a step takes cannot be estimated ({type(error).__name__}: {error})".splitlines()[0]
    _set_checkpointing(args, not fits)
    logger.info(f"`gradient_checkpointing` is {'off' if fits else 'on'}: {reason}.")


def _set_checkpointing(args: TrainingArguments, enabled: bool | None) -> None:
    for name in CHECKPOINTING_FIELDS:
        setattr(args, name, enabled)


def row_shape(dataset: Any, args: TrainingArguments) -> tuple[int, int] | None:
    """Return the rows of a micro-batch and the tokens of its longest row; None if nothing says how long rows get.

    Args:
        dataset: tokenised examples, or preference pairs, which are two rows each.
    """
    columns = dataset.column_names if isinstance(dataset, Dataset) else ()
    longest = lambda column: pyarrow.compute.max(
        pyarrow.compute.list_value_length(dataset.data.column(column))
    ).as_py()
    if "input_ids" in columns:
        rows, tokens = 1, longest("input_ids")
    elif "chosen_ids" in columns:
        rows, tokens = 2, longest("prompt_ids") + max(longest("chosen_ids"), longest("rejected_ids"))
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
        if Path(file).exists() and (text := Path(file).read_text().strip()).isdigit():
            limits.append(int(text))
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
    shapes = ShapeModel(config, getattr(torch, dtype), peft_config, args)
    usable, rows, depth = usable_memory(args), args.per_device_train_batch_size, args.depth_limits(shapes.num_loops)[1]
    now = StepSettings(
        rows, longest, depth, args.remove_padding, args.recompute_pointwise, bool(args.gradient_checkpointing)
    )
    step = shapes.step(now)
    text = (
        f"at most {_gb(step.total)} in a step of {rows} rows of {longest:,} tokens (estimate): weights {_gb(step.weights)}, "
        f"adapter with gradients and Adam's states {_gb(step.trained)}, kept for the backward pass {_gb(step.kept)}"
    )
    if usable is None:
        return text
    device = f"{device_name()} with {_gb(usable / USABLE)}"
    if step.total <= usable:
        open_choice = ", so that `gradient_checkpointing` stays off" if args.gradient_checkpointing is None else ""
        return f"{text}\nfits {device}{open_choice}"
    lines = [text, f"too much for {device}; in this order:"]
    for words, fields in _changes(now, shapes.looped.can_pack):
        now = replace(now, **fields)
        total = shapes.step(now).total
        lines.append(f"  {words}: {_gb(total)}{', which fits' if total <= usable else ''}")
        if total <= usable:
            break
    return "\n".join(lines)


def _changes(now: StepSettings, can_pack: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what lowers the memory of a step, what costs least time first."""
    if can_pack and not now.remove_padding:
        yield "`remove_padding: true`", {"remove_padding": True}
    if not now.checkpointing:
        if can_pack and not now.recompute_pointwise:
            yield "`recompute_pointwise: true`", {"recompute_pointwise": True}
        layers = {"checkpointing": True, "recompute_pointwise": False}
        yield "`gradient_checkpointing: true`, without `recompute_pointwise`", layers
    while (now := replace(now, rows=now.rows // 2)).rows:
        more = "with more `gradient_accumulation_steps`"
        yield f"`per_device_train_batch_size: {now.rows}`, {more}", {"rows": now.rows}


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
