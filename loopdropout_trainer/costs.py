"""The costs of trainings before they start: tokens, hours of a GPU, memory and disk, for the plans of trainings and of sweeps.

Nobody has measured a training of this package on a GPU. So the hours are computed from a model's operations, and every line
about them says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loopdropout_trainer.arguments import ModelArguments
from loopdropout_trainer.errors import count
from loopdropout_trainer.memory import count_operations, count_parameters, estimate_memory, read_depth
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

NOT_COMPUTED = "not computed"
"""Begin of the line about the time if there are no hours."""

SHORT_TRAINING = (
    f"{NOT_COMPUTED}. `loopdropout {{}}` with `--max_steps 20 --output_dir outputs/try` measures it (`step_seconds` in "
    "results.jsonl)"
)
"""Way to measure the time of a command's training if it cannot be computed. `loopdropout sweep` has no `max_steps`."""

AS_IF_LONG = "as if each example had `max_length` tokens"
"""Assumption of the upper bounds that are known before the data are loaded."""


class Training(NamedTuple):
    """Everything that the cost of a training depends on.

    Attributes:
        args: Settings of the training.
        recipe: Recipe of the training.
        model: Base model.
        config: Content of the base model's config.json, or an empty mapping.
        rank: Rank of the adapter, or None if it is not known.
    """

    args: GateConfig
    recipe: Mapping[str, Any]
    model: ModelArguments
    config: Mapping[str, Any]
    rank: int | None

    @property
    def depth(self) -> int | None:
        """Recurrence depth K, or None if only the loaded model tells it."""
        return self.model.num_loops or read_depth(self.config)

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
        if self.rank is None or self.recipe.get("lora_target_modules"):
            return None
        number = count_parameters(self.config, self.rank)
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
    return math.ceil(num_rows / args.examples_per_step)


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


def describe_costs(
    trainings: Sequence[tuple[Training, int]],
    whose: str = "",
    num_tokens: int | None = None,
    num_rows: int | None = None,
) -> dict[str, str]:
    """Return the lines of a plan about the costs of trainings by their titles.

    Args:
        trainings: Kinds of trainings, and the number of trainings of each kind.
        whose: End of the line about tokens, such as " in all trainings".
        num_tokens: Counted tokens of each training. Default: the upper bound that is known before the data are loaded.
        num_rows: Number of rows of each training if its data are loaded.
    """
    kinds = [training for training, _ in trainings]
    if num_tokens is None:
        numbers = [bound_tokens(training) for training in kinds]
        tokens = _describe_bound(trainings, numbers, whose)
    else:
        numbers = [num_tokens] * len(kinds)
        tokens = f"about {num_tokens:,}{whose}"
    return {
        "tokens": tokens,
        "time": _describe_time(trainings, numbers, "at most" if num_tokens is None else "about"),
        "memory": _describe_memory(kinds),
        "disk": _describe_disk(trainings, num_rows),
    }


def _describe_bound(trainings: Sequence[tuple[Training, int]], bounds: Sequence[int | None], whose: str) -> str:
    """Return the largest number of tokens of trainings, or "" if their tokens are not read once in an epoch."""
    if None not in bounds:
        total = sum(bound * number for bound, (_, number) in zip(bounds, trainings, strict=True))
        return f"at most {total:,}{whose}, {AS_IF_LONG}"
    if trainings[0][0].is_supervised:
        return "known after the data are loaded"
    return ""


def _describe_time(trainings: Sequence[tuple[Training, int]], numbers: Sequence[int | None], how_exact: str) -> str:
    """Return the computed hours of trainings on one GPU with the assumptions, or how to measure the time.

    Args:
        trainings: Kinds of trainings, and the number of trainings of each kind.
        numbers: Number of tokens of a training of each kind.
        how_exact: Whether these numbers are bounds, such as "at most".
    """
    kinds = [training for training, _ in trainings]
    first = kinds[0]
    costs = [training.operations for training in kinds]  # of one token
    are_on_gpu = all(training.may_use_gpu for training in kinds)
    if None in costs or not first.is_supervised or not are_on_gpu:
        return SHORT_TRAINING.format(first.args.command)
    if None in numbers:
        amount = f"{describe_hours(first, max(costs) * 1e7)} for each 10 million tokens"
    else:
        operations = 0
        for (training, num_trainings), num_tokens in zip(trainings, numbers, strict=True):
            operations += training.operations * num_tokens * num_trainings
        amount = f"{how_exact} {describe_hours(first, operations)}"
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
    """Return the range of the hours that one GPU takes for a number of operations, with the name of the card.

    Less than three minutes are 0.1 hours.
    """
    card, peak = _find_card(training.args)
    low = operations / (ASSUMED_SHARE * peak) / 3600
    high = operations / (MEASURED_SHARE * peak) / 3600
    if high < 0.05:
        return f"0.1 hours of one {card}"
    return f"{_hours_text(low)} to {_hours_text(high)} hours of one {card}"


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


def describe_tokens(training: Training, num_tokens: int) -> str:
    """Return the tokens of a training whose data are loaded, and its hours if they can be computed."""
    text = f"{num_tokens:,} tokens"
    if training.may_use_gpu and training.is_supervised and training.operations:
        text += f", so {describe_hours(training, training.operations * num_tokens)} by the same computation"
    return text


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
    )


def _describe_disk(trainings: Sequence[tuple[Training, int]], num_rows: int | None = None) -> str:
    """Return the size of the files of trainings, or "" if the number of trained parameters is not known.

    An adapter is saved in float32.
    """
    if any(training.num_parameters is None for training, _ in trainings):
        return ""
    adapters = sum(4 * training.num_parameters * number for training, number in trainings)
    parts = [f"{_name_size(adapters)} for adapters", _describe_checkpoints(trainings, num_rows)]
    merged = sum(_weights(training) * number for training, number in trainings if training.recipe.get("merge"))
    if merged:
        parts.append(f"{_name_size(merged)} for merged models")
    return f"about {', '.join(parts)}"


def _describe_checkpoints(trainings: Sequence[tuple[Training, int]], num_rows: int | None = None) -> str:
    """Return the size and the number of the checkpoints that trainings leave on the disk, and the field that limits them."""
    limits = {training.args.save_total_limit for training, _ in trainings}
    has_limit = limits != {None}
    field = "set `save_total_limit` to keep fewer"
    if has_limit:
        field = f"`save_total_limit: {', '.join(sorted(map(str, limits)))}`"
    kept = [_count_checkpoints(training, num_rows) for training, _ in trainings]
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


def _count_checkpoints(training: Training, num_rows: int | None = None) -> int | None:
    """Return the number of checkpoints that a training keeps, or None if it depends on a number that is not known.

    Args:
        training: The training.
        num_rows: Number of its rows. Default: the recipe's number of examples.
    """
    args, num_examples = training.args, num_rows or training.recipe.get("num_train_examples")
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
