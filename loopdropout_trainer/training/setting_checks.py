"""Errors about settings that a training refuses with every model. A dry run asks for all of them before it loads a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.utils import is_liger_kernel_available

from loopdropout_trainer.errors import UserError, first_line, short_repr
from loopdropout_trainer.training.distributed import check_parallelism
from loopdropout_trainer.training.evaluation_fields import check_best_metric, word_of
from loopdropout_trainer.training.rule_checks import check_draws


if TYPE_CHECKING:
    from loopdropout_trainer.gates import GateRule
    from loopdropout_trainer.training.config import GateConfig


def check_settings(args: GateConfig, rule: GateRule, runs_several_draws: bool) -> None:
    """Raise UserError for settings that a training refuses with every model.

    Args:
        args: Settings of the training.
        rule: Rule that draws the gates.
        runs_several_draws: Whether the trainer runs rules with several draws for a micro-batch.
    """
    check_draws(args, rule, runs_several_draws)
    check_parallelism(args)
    check_kernels(args)
    check_best_metric(args)
    _check_optimizer(args)
    _check_schedule(args)


def check_kernels(args: GateConfig) -> None:
    """Raise UserError if the fused kernels need a package that is not installed."""
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise UserError("`use_liger_kernel` needs a missing package. Install it with `pip install liger-kernel`.")


@contextmanager
def explain_optimizer(args: GateConfig) -> Iterator[None]:
    """Raise UserError if the optimizer that is looked up in this block needs a package that is not installed."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"`optim` {word_of(args.optim)} needs a missing package. {first_line(error)}") from error


@contextmanager
def explain_schedule(args: GateConfig) -> Iterator[None]:
    """Raise UserError if a learning rate schedule cannot be made in this block, as of missing or unknown fields."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UserError(
            f"`lr_scheduler_kwargs` must fit `lr_scheduler_type` {word_of(args.lr_scheduler_type)}, got "
            f"{short_repr(args.lr_scheduler_kwargs)} ({first_line(error)})."
        ) from error


def check_warmup(args: GateConfig, schedule: LRScheduler) -> None:
    """Raise UserError if `warmup_from_first_step` is set for a schedule whose warmup cannot be replaced."""
    if args.warmup_from_first_step and not isinstance(schedule, LambdaLR):
        raise UserError(
            f"`warmup_from_first_step` must be false for `lr_scheduler_type` {word_of(args.lr_scheduler_type)}, which has "
            "a warmup of its own."
        )


def _check_optimizer(args: GateConfig) -> None:
    """Raise UserError if the optimizer needs a package that is not installed."""
    if word_of(args.optim).startswith("adamw_torch"):  # which need none, and the import below takes time
        return
    from transformers import Trainer

    # Some optimizers also need the model, which a dry run does not load.
    with explain_optimizer(args), suppress(ValueError, RuntimeError):
        Trainer.get_optimizer_cls_and_kwargs(args)


def _check_schedule(args: GateConfig) -> None:
    """Raise UserError if the fields of the learning rate schedule do not fit its type, or each other."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    with explain_schedule(args):
        schedule = get_scheduler(args.lr_scheduler_type, optimizer, 1, 10_000, args.lr_scheduler_kwargs)
    check_warmup(args, schedule)
