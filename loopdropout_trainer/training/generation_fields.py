"""Fields of GRPO about the completions of a batch. TRL's errors name others than those that the user has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from loopdropout_trainer.errors import UserError


if TYPE_CHECKING:
    from loopdropout_trainer.training.config import LoopDropoutGRPOConfig


_MOST_COMPLETIONS = 64
"""Largest number of completions of a prompt that a message proposes."""


@contextmanager
def explain_generations(args: LoopDropoutGRPOConfig) -> Iterator[None]:
    """Name the fields to change if TRL completes the settings in this block, and their batches do not fit.

    Args:
        args: Settings as the user has given them. TRL sets the fields that are None in the block.
    """
    is_batch_given = args.generation_batch_size is not None
    try:
        yield
    except UserError:
        raise
    except ValueError:
        _check_batch(args, is_batch_given)
        _check_evaluation(args)
        raise


def _check_batch(args: LoopDropoutGRPOConfig, is_batch_given: bool) -> None:
    """Raise UserError unless the completions that are sampled together are those of whole micro-batches and prompts."""
    batch_size, num_generations = args.generation_batch_size, args.num_generations
    micro_batch = args.per_device_train_batch_size * args.world_size
    if is_batch_given and batch_size % micro_batch:
        raise UserError(
            f"`generation_batch_size` must be a multiple of {micro_batch}, the `per_device_train_batch_size` in all "
            f"processes, got {batch_size}."
        )
    if batch_size is None or batch_size % num_generations == 0:
        return
    if is_batch_given:
        raise UserError(
            f"`generation_batch_size` must be a multiple of `num_generations` ({num_generations}), so that the completions of "
            f"a prompt are in one batch, got {batch_size}."
        )
    sizes = f"`per_device_train_batch_size` {args.per_device_train_batch_size}"
    if args.world_size > 1:
        sizes += f" in {args.world_size} processes"
    if args.steps_per_generation > 1:
        sizes += f" and `gradient_accumulation_steps` or `steps_per_generation` {args.steps_per_generation}"
    raise UserError(
        f"`num_generations` must divide the number of completions that are sampled together, {batch_size} ({sizes}), got "
        f"{num_generations}. Set `per_device_train_batch_size`, which counts completions, to a multiple of {num_generations}"
        f"{_name_divisors('num_generations', batch_size)}."
    )


def _check_evaluation(args: LoopDropoutGRPOConfig) -> None:
    """Raise UserError unless an evaluation's batch has whole prompts."""
    name = "num_generations_eval" if args.num_generations_eval else "num_generations"
    batch_size, num_generations = args.per_device_eval_batch_size * args.world_size, getattr(args, name)
    if args.eval_strategy == "no" or batch_size % num_generations == 0:
        return
    sizes = f"`per_device_eval_batch_size` {args.per_device_eval_batch_size}"
    if args.world_size > 1:
        sizes += f" in {args.world_size} processes"
    raise UserError(
        f"`{name}` must divide the number of completions in a batch of the evaluation, {batch_size} ({sizes}), got "
        f"{num_generations}. Set `per_device_eval_batch_size`, which counts completions, to a multiple of {num_generations}"
        f"{_name_divisors('num_generations_eval', batch_size)}."
    )


def _name_divisors(name: str, batch_size: int) -> str:
    """Return the other fix, such as ", or `num_generations` to 2, 4 or 8", or "" for a batch of one completion."""
    most = min(batch_size, _MOST_COMPLETIONS)
    divisors = [str(number) for number in range(2, most + 1) if batch_size % number == 0]
    if not divisors:
        return ""
    if len(divisors) == 1:
        return f", or `{name}` to {divisors[0]}"
    return f", or `{name}` to {', '.join(divisors[:-1])} or {divisors[-1]}"


def check_reuse(args: LoopDropoutGRPOConfig) -> None:
    """Raise UserError if completions are trained on several times.

    Old log-probabilities are computed at unit gates, so that the importance ratio would start far from 1.
    """
    if args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations):
        raise UserError(
            "`num_iterations` must be 1, and `steps_per_generation` must divide `gradient_accumulation_steps`, got "
            f"{args.num_iterations}, {args.steps_per_generation} and {args.gradient_accumulation_steps}."
        )
