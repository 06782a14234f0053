"""The costs of trainings before they start: tokens, hours of a GPU, memory and disk, for the plans of trainings and of sweeps.

Nobody has measured a training of this package on a GPU. So the hours are computed from a model's operations, and every line
about them says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loopdropout_trainer.errors import count
from loopdropout_trainer.memory import count_operations, estimate_memory
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.training.config import GateConfig, LoopDropoutConfig
from loopdropout_trainer.training.evaluation_fields import word_of


PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bfloat16 FLOP/s by a part of the device name, from the data sheets of the cards."""

MEASURED_SHARE, ASSUMED_SHARE = 0.07, 0.3
"""Shares of a card's peak: of the paper's run on an H100, the only measured one, and one that nobody has measured."""

SHORT_TRAINING = (
    "`loopdropout {}` with `--max_steps 20 --output_dir outputs/try` measures it (`step_seconds` in results.jsonl)"
)
"""Way to measure the time of a command's training if it cannot be computed. `loopdropout sweep` has no `max_steps`."""

AS_IF_LONG = "as if each example had `max_length` tokens"
"""Assumption of the upper bounds that are known before the data are loaded."""


class Sizes(NamedTuple):
    """Sizes of a base model and of an adapter on it. Each of them is None if it is not known.

    Attributes:
        num_loops: The model's own recurrence depth K.
        num_parameters: Number of parameters of the adapter, which all loops share.
        smallest_projection: Smallest dimension of the adapted projections.
        layers: Index of the physical layer of each adapted projection, [M], or () if they are not known.
        one_depth_type: `model_type` of a model that trains only at the depth it was built for, else None.
    """

    num_loops: int | None = None
    num_parameters: int | None = None
    smallest_projection: int | None = None
    layers: tuple[int, ...] = ()
    one_depth_type: str | None = None


class Training(NamedTuple):
    """Everything that the cost of a training depends on.

    Attributes:
        args: Settings of the training.
        recipe: Recipe of the training.
        model: Base model.
        config: Content of the base model's config.json, or an empty mapping.
        rank: Rank of the adapter, or None if it is not known.
        sizes: Sizes of the base model and of the adapter.
        num_tokens: Counted tokens of the training, or None before the data are loaded and if they are not counted.
        num_rows: Number of rows of the training, or None before the data are loaded.
    """

    args: GateConfig
    recipe: Mapping[str, Any]
    model: ModelArguments
    config: Mapping[str, Any]
    rank: int | None
    sizes: Sizes
    num_tokens: int | None = None
    num_rows: int | None = None

    @property
    def depth(self) -> int | None:
        """Recurrence depth K, or None if only the loaded model tells it."""
        return self.model.num_loops or self.sizes.num_loops

    @property
    def is_supervised(self) -> bool:
        """Whether a training reads each token of its examples once in an epoch. In DPO and GRPO there are further passes."""
        return isinstance(self.args, LoopDropoutConfig)

    @property
    def may_use_gpu(self) -> bool:
        """Whether the training is in bfloat16, as on a GPU, also if this machine has none."""
        return self.args.bf16 and not self.recipe.get("use_cpu")

    @property
    def num_passes(self) -> int:
        """Number of forward and backward passes of a micro-batch, which the rule decides."""
        return self.args.make_rule().draws_per_batch

    @property
    def operations(self) -> float | None:
        """Floating point operations of a token in all passes, or None if they are not known."""
        operations = count_operations(self.config, self.model.num_loops, self.args.gradient_checkpointing)
        return None if operations is None else operations * self.num_passes

    @property
    def num_parameters(self) -> int | None:
        """Number of trained parameters without learned gates, or None if it is not known."""
        number = self.sizes.num_parameters
        if number is not None and self.args.make_rule().lora_kind == "per_loop":
            number *= self.depth
        return number


def count_steps(args: GateConfig, num_rows: int | None) -> int | None:
    """Return the number of optimizer steps of a training on some rows, or None if it depends on a number that is not known."""
    if args.max_steps > 0:
        return args.max_steps
    if not num_rows:
        return None
    return math.ceil(args.num_train_epochs * _count_steps_per_epoch(args, num_rows))


def count_epochs(args: GateConfig, num_rows: int | None) -> float | None:
    """Return the number of epochs of a training, or None if it follows from `max_steps` and a number that is not known."""
    if args.max_steps <= 0:
        return args.num_train_epochs
    if not num_rows:
        return None
    return args.max_steps / _count_steps_per_epoch(args, num_rows)


def _count_steps_per_epoch(args: GateConfig, num_rows: int) -> int:
    """Return the number of optimizer steps in an epoch, of which the last one may have fewer examples."""
    return max(1, math.ceil(args.count_micro_batches(num_rows) / args.gradient_accumulation_steps))


def count_step_rows(args: GateConfig, num_rows: int | None = None) -> int:
    """Return the number of rows of an optimizer step. It has all rows of the data if they are fewer than asked for.

    Args:
        args: Settings of the training.
        num_rows: Number of rows of the data, or None before they are loaded.
    """
    if num_rows is None or args.command == "grpo":  # a step of GRPO has several completions of a prompt
        return args.examples_per_step
    return min(args.examples_per_step, num_rows)


def name_epochs(number: float) -> str:
    """Return a number of epochs with its noun, in full: `g` alone would write a thousand as 1e+03."""
    if number == 1:
        return "1 epoch"
    return f"{number:,g} epochs"


def bound_tokens(training: Training) -> int | None:
    """Return the largest number of tokens of a training, or None if the recipe does not say it before the data are loaded."""
    args, num_examples = training.args, training.recipe.get("num_train_examples")
    max_length = getattr(args, "max_length", None)
    if not training.is_supervised or not max_length:
        return None
    if args.max_steps > 0:
        return args.max_steps * args.examples_per_step * max_length
    if not num_examples:
        return None
    return math.ceil(args.num_train_epochs * num_examples) * max_length


def name_trainings(number: int) -> str:
    """Return the end of the line about the tokens of a job with several trainings."""
    return "" if number == 1 else f" in {number} trainings"


def describe_costs(trainings: Sequence[tuple[Training, int]], whose: str = "") -> dict[str, str]:
    """Return the lines of a plan about the costs of trainings by their titles.

    The tokens are the counted ones of each training, or their upper bound before its data are loaded.

    Args:
        trainings: Kinds of trainings, and the number of trainings of each kind.
        whose: End of the line about the tokens of all trainings, such as " in all trainings".
    """
    kinds = [training for training, _ in trainings]
    return {
        "tokens": _describe_tokens(trainings, whose),
        "time": _describe_time(trainings),
        "memory": _describe_memory(kinds),
        "disk": _describe_disk(trainings),
    }


def _find_tokens(training: Training) -> int | None:
    """Return the counted tokens of a training, or their upper bound, or None if both are not known."""
    return bound_tokens(training) if training.num_tokens is None else training.num_tokens


def _are_counted(trainings: Sequence[tuple[Training, int]]) -> bool:
    return all(training.num_tokens is not None for training, _ in trainings)


def _describe_tokens(trainings: Sequence[tuple[Training, int]], whose: str) -> str:
    """Return the number of tokens of trainings, or "" if their tokens are not read once in an epoch."""
    numbers = [_find_tokens(training) for training, _ in trainings]
    if None in numbers:
        return "known after the data are loaded" if trainings[0][0].is_supervised else ""
    num_trainings = [number for _, number in trainings]
    total = sum(number * times for number, times in zip(numbers, num_trainings, strict=True))
    if not _are_counted(trainings):
        return f"at most {total:,}{whose}, {AS_IF_LONG}{_name_counted(trainings)}"
    if sum(num_trainings) == 1:
        return f"about {total:,}"
    each = name_range([f"{number:,}" for number in sorted(numbers)])
    return f"about {each} in each training, {total:,}{whose}"


def _name_counted(trainings: Sequence[tuple[Training, int]]) -> str:
    """Return the remark about an upper bound if the examples of some of its trainings are counted."""
    if all(training.num_tokens is None for training, _ in trainings):
        return ""
    return " where they are not counted"


def find_obstacle(trainings: Sequence[Training]) -> str | None:
    """Return why the hours of trainings are not computed, as the end of "not computed, because", or None if they are."""
    if not trainings[0].is_supervised:
        return f"a step of `{trainings[0].args.command}` has further forward passes"
    if any(training.recipe.get("use_cpu") for training in trainings):
        return "`use_cpu` is set"
    if not all(training.may_use_gpu for training in trainings):
        return "the training is not in bfloat16, as on a GPU"
    if any(training.operations is None for training in trainings):
        return "the sizes of the model are not known"
    return None


def _describe_time(trainings: Sequence[tuple[Training, int]]) -> str:
    """Return the computed hours of trainings on one GPU with the assumptions, or how to measure the time."""
    kinds = [training for training, _ in trainings]
    first, obstacle = kinds[0], find_obstacle(kinds)
    if obstacle is not None:
        return f"not computed, because {obstacle}\n{SHORT_TRAINING.format(first.args.command)}"
    costs = [training.operations for training in kinds]  # of one token
    numbers = [_find_tokens(training) for training in kinds]
    if None in numbers:
        amount = f"{describe_hours(first, max(costs) * 1e7)} for each 10 million tokens"
    else:
        operations = [cost * number for cost, number in zip(costs, numbers, strict=True)]
        num_trainings = [number for _, number in trainings]
        total = sum(cost * times for cost, times in zip(operations, num_trainings, strict=True))
        amount = f"at most {describe_hours(first, total)}"
        if _are_counted(trainings):
            amount = f"about {describe_hours(first, total)}"
            of_one, of_all = _name_hours(first, max(operations)), _name_hours(first, total)
            if of_one != of_all:
                amount += f" ({of_one} for one training)"
    per_token = name_range([f"{cost / 1e9:.3g}" for cost in sorted(costs)])
    passes = name_range([str(number) for number in sorted(training.num_passes for training in kinds)])
    in_passes = "" if passes == "1" else f" in {passes} passes"
    return (
        f"{amount}, without evaluations\ncomputed, not measured: {per_token} GFLOP for a token{in_passes}, at "
        f"{ASSUMED_SHARE:.0%} (assumed) and {MEASURED_SHARE:.0%} (as in the paper's run) of the card's peak"
    )


def name_range(numbers: Sequence[str]) -> str:
    """Return the first and the last of sorted numbers, or the only one."""
    if numbers[0] == numbers[-1]:
        return numbers[0]
    return f"{numbers[0]} to {numbers[-1]}"


def describe_hours(training: Training, operations: float) -> str:
    """Return the range of the hours that one GPU takes for a number of operations, with the name of the card."""
    card, _ = _find_card(training.args)
    return f"{_name_hours(training, operations)} of one {card}"


def _name_hours(training: Training, operations: float) -> str:
    """Return the range of the hours that one GPU takes for a number of operations. Less than three minutes are 0.1 hours."""
    _, peak = _find_card(training.args)
    low = operations / (ASSUMED_SHARE * peak) / 3600
    high = operations / (MEASURED_SHARE * peak) / 3600
    if high < 0.05:
        return "0.1 hours"
    return f"{_hours_text(low)} to {_hours_text(high)} hours"


def _hours_text(hours: float) -> str:
    if hours < 10:
        return f"{hours:.1f}"
    return f"{hours:,.0f}"


def _find_card(args: GateConfig) -> tuple[str, float]:
    """Return the name and the peak of this machine's GPU, or an H100's without a GPU whose peak is known."""
    import torch

    if args.device.type == "cuda":
        name = torch.cuda.get_device_name()
        for part, peak in PEAK_FLOPS.items():
            if part in name:
                return part, peak
    return "H100", PEAK_FLOPS["H100"]


def _describe_memory(trainings: Sequence[Training]) -> str:
    """Return the largest estimated GPU memory of trainings, or "" without an estimate or for trainings on the CPU."""
    largest, sizes = None, {"total": 0.0}
    for training in trainings:
        estimate = estimate_training_memory(training)
        if estimate and estimate["total"] > sizes["total"]:
            largest, sizes = training, estimate
    if largest is None:
        return ""
    parts = ", ".join(f"{size:.1f} {part}" for part, size in sizes.items() if part != "total")
    lines = [f"at most about {sizes['total']:.1f} GB on a GPU in bfloat16, {AS_IF_LONG}", f"({parts})"]
    if sizes["activations"] > sizes["total"] / 2:  # else the settings below would save little
        lines += _name_savings(largest)
    return "\n".join(lines)


def _name_savings(training: Training) -> list[str]:
    """Return a line for each setting that lowers the memory of activations and changes nothing else but the speed."""
    args, lines = training.args, []
    if not args.gradient_checkpointing:
        total = estimate_training_memory(training, checkpointing=True)["total"]
        lines.append(f"{total:.1f} GB with `gradient_checkpointing: true`")
    half, odd = divmod(args.per_device_train_batch_size, 2)
    if half and not odd:
        total = estimate_training_memory(training, batch_size=half)["total"]
        lines.append(
            f"{total:.1f} GB with `per_device_train_batch_size: {half}` and `gradient_accumulation_steps: "
            f"{2 * args.gradient_accumulation_steps}`"
        )
    return lines


def estimate_training_memory(
    training: Training, length: int | None = None, batch_size: int | None = None, checkpointing: bool | None = None
) -> dict[str, float]:
    """Return the estimated GB of the GPU memory of a training by part, or an empty dict.

    Args:
        training: The training.
        length: Number of tokens of each example. Default: `max_length`.
        batch_size: Number of examples of a micro-batch. Default: `per_device_train_batch_size`.
        checkpointing: Whether the backward pass computes the layers again. Default: `gradient_checkpointing`.
    """
    args = training.args
    max_length = getattr(args, "max_length", None)  # GRPO has none
    if not training.may_use_gpu or max_length is None or training.rank is None:
        return {}
    if length is None:
        length = max_length
    if batch_size is None:
        batch_size = args.per_device_train_batch_size
    if checkpointing is None:
        checkpointing = args.gradient_checkpointing
    return estimate_memory(
        training.config,
        batch_size * length,
        num_loops=training.model.num_loops,
        rank=training.rank,
        checkpointing=checkpointing,
        four_bit="load_in_4bit" in str(args.model_init_kwargs),
        num_parameters=training.num_parameters,
    )


def _describe_disk(trainings: Sequence[tuple[Training, int]]) -> str:
    """Return the size of the files of trainings, or why it is not computed. An adapter is saved in float32."""
    for training, _ in trainings:
        if training.num_parameters is None:
            whose = "adapter" if training.rank is None else "model"
            return f"not computed, because the sizes of the {whose} are not known"
    adapters = sum(4 * training.num_parameters * number for training, number in trainings)
    parts = [f"{_name_size(adapters)} for adapters", _describe_checkpoints(trainings)]
    merged = sum(_weights(training) * number for training, number in trainings if training.recipe.get("merge"))
    if merged:
        parts.append(f"{_name_size(merged)} for merged models")
    return f"about {', '.join(parts)}"


def _describe_checkpoints(trainings: Sequence[tuple[Training, int]]) -> str:
    """Return the size and the number of the checkpoints that trainings leave on the disk, and the field that limits them."""
    limits = {training.args.save_total_limit for training, _ in trainings}
    has_limit = limits != {None}
    field = "set `save_total_limit` to keep fewer"
    if has_limit:
        field = f"`save_total_limit: {', '.join(sorted(map(str, limits)))}`"
    kept = [_count_checkpoints(training) for training, _ in trainings]
    if None in kept:
        return f"{_describe_single_checkpoints(trainings)} ({field})"
    total_number, total_size = 0, 0
    for (training, num_trainings), num_kept in zip(trainings, kept, strict=True):
        total_number += num_trainings * num_kept
        total_size += num_trainings * num_kept * _checkpoint_size(training)
    if total_number == 0:
        return "no checkpoints"
    text = f"{_name_size(total_size)} for {count(total_number, 'checkpoint')}"
    if max(kept) == 1 and not has_limit:  # there is nothing to limit
        return text
    return f"{text} ({field})"


def _describe_single_checkpoints(trainings: Sequence[tuple[Training, int]]) -> str:
    """Return the size of one checkpoint of each training, for trainings whose number of checkpoints is not known."""
    total_size, total_trainings = 0, 0
    for training, num_trainings in trainings:
        total_size += num_trainings * _checkpoint_size(training)
        total_trainings += num_trainings
    whose = "each checkpoint" if total_trainings == 1 else "a checkpoint of each training"
    return f"{_name_size(total_size)} for {whose}"


def _checkpoint_size(training: Training) -> int:
    """Return the bytes of a checkpoint: the adapter and two moments of AdamW, all in float32."""
    return 12 * training.num_parameters


def _count_checkpoints(training: Training) -> int | None:
    """Return the number of checkpoints that a training keeps, or None if it depends on a number that is not known."""
    args, num_examples = training.args, training.num_rows or training.recipe.get("num_train_examples")
    strategy, limit = word_of(args.save_strategy), args.save_total_limit
    if strategy == "no":
        return 0
    if strategy == "best":  # at the evaluations that were better than all before
        return limit
    if strategy == "epoch":
        number = count_epochs(args, num_examples)
    elif strategy == "steps" and args.save_steps < 1:
        number = 1 / args.save_steps
    else:
        num_steps = count_steps(args, num_examples)
        number = None if num_steps is None else num_steps / args.save_steps
    if number is None:
        return limit
    if limit:
        return min(math.ceil(number), limit)
    return math.ceil(number)


def _weights(training: Training) -> float:
    """Return the bytes of the merged model, or 0 if they are not known."""
    sizes = estimate_memory(training.config, 0, rank=training.rank)
    bytes_of_weight = 4 if training.model.dtype == "float32" else 2
    return 1e9 * sizes.get("frozen weights", 0) / 2 * bytes_of_weight


def _name_size(size: float) -> str:
    """Return a number of bytes in GB or MB."""
    if size >= 1e8:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB"
