"""Autograd functions that are differentiated once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function's backward pass be differentiated no further; free of charge where nobody asks for it."""
    refusing = once_differentiable(backward)

    def choose(ctx, *grads):
        return refusing(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return choose
