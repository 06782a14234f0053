"""Compilation of a model's repeated layer for training: one program for all its layers, loops, lengths and gates."""

from __future__ import annotations

import types
from collections.abc import Iterable

import torch
from torch import nn


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Give each layer the compiled `layer_forward` of its class as `compiled_forward`."""
    layers = list(layers)
    compiled = {cls: torch.compile(_copied(cls.layer_forward), dynamic=True) for cls in set(map(type, layers))}
    for layer in layers:
        layer.compiled_forward = compiled[type(layer)]


def _copied(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of a function, for one model.

    torch keeps the programs of a function with its code, allows few, and after them runs the function uncompiled: the
    trainings of one process, each with a rule of its own, would use up each other's.
    """
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
