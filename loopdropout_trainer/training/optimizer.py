"""The optimizer and the schedule of an adapter: LoRA+, and the warmup of the authors' program."""

from __future__ import annotations

import functools
from collections.abc import Callable

from peft.optimizers import create_loraplus_optimizer
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.utils import logging

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.training.setting_checks import (
    check_kernels,
    check_warmup,
    explain_optimizer,
    explain_schedule,
)


logger = logging.get_logger(__name__)

_OPTIMIZER_FIELDS = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim",
    "optim_args",
    "loraplus_lr_ratio",
)
"""Fields that an optimizer is made with. transformers keeps the first optimizer, so that later changes have no effect."""


class OptimizerMixin:
    """Optimizer and learning rate schedule of a TRL trainer, by the fields of `GateConfig`."""

    _optimized_adapter: str | None = None
    """Name of the adapter that an optimizer of this trainer was made for, or None for an optimizer of the user."""

    def _forget_other_optimizer(self) -> None:
        """Let the next training make a new optimizer if the active adapter or a field of the optimizer has changed."""
        if self._optimized_adapter is None:
            return
        changed = [name for name in _OPTIMIZER_FIELDS if getattr(self.args, name) != self._optimized_with[name]]
        if changed:
            names = ", ".join(f"`{name}`" for name in changed)
            logger.warning(f"The training begins with a new optimizer, because {names} of `args` changed.")
        if changed or self._optimized_adapter != self.model.active_adapters[0]:
            self.optimizer = self.lr_scheduler = self._optimized_adapter = None

    def _keeps_optimizer(self) -> bool:
        """Return whether the next training continues with the optimizer of the last one, and so with its momentum."""
        if self.optimizer is None or self.is_deepspeed_enabled:  # which makes another one in each training
            return False
        return bool(self.optimizer.state)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create the optimizer, with LoRA+ if `loraplus_lr_ratio` is set."""
        args = self.args
        if self.optimizer is None:
            self._optimized_adapter = self.model.active_adapters[0]
            self._optimized_with = {name: getattr(args, name) for name in _OPTIMIZER_FIELDS}
        if args.loraplus_lr_ratio is None or self.optimizer is not None:
            return super().create_optimizer(model)
        model = model or self.model
        optimizer_class, fields = self.get_optimizer_cls_and_kwargs(args, model)
        fields |= {"loraplus_lr_ratio": args.loraplus_lr_ratio, "loraplus_weight_decay": args.weight_decay}
        self.optimizer = create_loraplus_optimizer(model, optimizer_class, **fields)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Create the learning rate schedule, with its warmup one step ahead if `warmup_from_first_step` is set."""
        is_given = self.lr_scheduler is not None
        with explain_schedule(self.args):
            scheduler = super().create_scheduler(num_training_steps, optimizer)
        if is_given or not self.args.warmup_from_first_step:
            return scheduler
        check_warmup(self.args, scheduler)
        num_warmup = self.args.get_warmup_steps(num_training_steps)
        factors = [functools.partial(_warm_up, num_warmup=num_warmup, after=after) for after in scheduler.lr_lambdas]
        self.lr_scheduler = LambdaLR(scheduler.optimizer, factors)
        return self.lr_scheduler

    def _check_optimizer(self) -> None:
        """Raise UserError if a given optimizer would not train the adapter as the arguments say."""
        if self.args.loraplus_lr_ratio is not None:
            raise UserError("Set either `loraplus_lr_ratio` or `optimizers` with an optimizer of your own, not both.")
        given = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in given for parameter in self.model.parameters() if parameter.requires_grad):
            raise UserError(
                "`optimizers` must have an optimizer of trained weights, but it has none of the adapter. Give a model with "
                "its adapter (`get_peft_model`), and make the optimizer from its parameters."
            )

    def _check_packages(self) -> None:
        """Raise UserError if the optimizer or the fused kernels need a package that is not installed."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            with explain_optimizer(self.args):
                self.get_optimizer_cls_and_kwargs(self.args, self.model)
        check_kernels(self.args)


def _warm_up(step: int, num_warmup: int, after: Callable[[int], float]) -> float:
    """Return the factor of the learning rate in a step from 0: 1/w, 2/w, ..., 1, then that of the schedule `after`."""
    if step < num_warmup:
        return (step + 1) / num_warmup
    return after(step)
