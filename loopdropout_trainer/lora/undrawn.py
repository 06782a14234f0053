"""The warning about a training that draws no gates, although a rule was to draw them."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.utils import logging

from loopdropout_trainer.gate_state import GateState


logger = logging.get_logger(__name__)

_warned: weakref.WeakKeyDictionary[GateState, weakref.WeakSet[Optimizer]] = weakref.WeakKeyDictionary()
"""Models of which a warning was given, with the optimizers that have stepped since."""


@torch.compiler.disable
def warn_in_backward(state: GateState, activation: Tensor) -> None:
    """Warn once in each training, when the backward pass reaches an activation [B, S, r], that it trains plain LoRA.

    A pass with gradient may also be a look at the loss, so the warning waits for the backward pass.
    """
    if not activation.requires_grad:
        return

    def warn(gradient: Tensor) -> None:
        if not state.has_warned:
            state.has_warned = True
            _watch_optimizers(state)
            logger.warning(
                f"The adapter now trains at unit gates, which is plain LoRA, although {state.rule.name!r} is its rule. "
                f"{_describe_fix(state)}"
            )

    activation.register_hook(warn)


def _describe_fix(state: GateState) -> str:
    if state.dropout is not None:
        return (
            "`loop_dropout` draws gates in training mode only, and the base model is in evaluation mode. Call `model.train()` "
            "before the training passes."
        )
    return (
        "Only `train()` of the trainer that was made for this rule draws gates. For another trainer or training loop, call "
        "`loop_dropout(model)` first."
    )


def _watch_optimizers(state: GateState) -> None:
    """Let the warning come again in the next training, which a model knows by nothing but its new optimizer."""
    _register_hook()
    _warned.setdefault(state, weakref.WeakSet())


@functools.cache
def _register_hook() -> None:
    """Note the steps of all optimizers. Programs without such a training have no hook."""
    register_optimizer_step_pre_hook(_note_step)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Expect the warning again if another optimizer takes its first step. Its next backward pass then gives it."""
    for state, optimizers in [*_warned.items()]:
        if optimizers and optimizer not in optimizers:
            state.has_warned = False
        optimizers.add(optimizer)
