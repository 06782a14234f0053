"""Gates that a user or a rule gives, as a matrix, and the checks of their shape and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loopdropout_trainer.errors import UserError, short_repr


def check_token_examples(token_examples: Any, num_examples: int) -> None:
    """Raise UserError unless `token_examples` is None or an integer tensor [B, S] with values from 0 to N - 1."""
    if token_examples is None:
        return
    is_index = torch.is_tensor(token_examples) and token_examples.dtype in (torch.int64, torch.int32)
    if not is_index or token_examples.dim() != 2:
        got = short_repr(token_examples)
        if torch.is_tensor(token_examples):
            got = f"{token_examples.dtype} of shape {[*token_examples.shape]}"
        raise UserError(f"`token_examples` must be a tensor [B, S] of integers, got {got}.")
    low, high = int(token_examples.min()), int(token_examples.max())
    if num_examples > 1 and not 0 <= low <= high < num_examples:
        raise UserError(
            f"`token_examples` must be from 0 to {num_examples - 1}, because `gates` have {num_examples} columns, got values "
            f"from {low} to {high}."
        )


def as_gate_matrix(
    gates: Any, num_loops: int, num_modules: int, num_examples: int | None = None, name: str = "`gates`"
) -> Tensor:
    """Return gates as a finite floating-point tensor [K, N] or [K, N, M].

    Args:
        gates: Gates [K], [K, N] or [K, N, M], where N may be 1 for all examples.
        num_loops: Recurrence depth K.
        num_modules: Number M of adapted modules.
        num_examples: Number N of examples. None: any number.
        name: Subject of the error messages.

    Raises:
        UserError: If the gates have another shape, or are not finite real numbers.
    """
    value = gates
    try:
        gates = torch.as_tensor(gates)
    except (TypeError, ValueError, RuntimeError):
        example = [1] + [0] * (num_loops - 1)
        raise UserError(
            f"{name} must be a list of numbers, one for each of the K = {num_loops} loops, such as {example}, got "
            f"{short_repr(value)}."
        ) from None
    if gates.dim() == 0:
        number = short_repr(value)
        raise UserError(
            f"{name} must have one number for each of the K = {num_loops} loops, got {number}. For one gate in all loops, "
            f"write `[{number}] * {num_loops}`. A drop probability belongs in `loop_dropout(model, p)`."
        )
    if gates.is_complex() or gates.is_meta:
        raise UserError(f"{name} must be real numbers, got {gates.dtype} on the device {gates.device}.")
    if not gates.is_floating_point():
        gates = gates.to(torch.float32)
    shape = [*gates.shape]
    if gates.dim() == 1:
        gates = gates.unsqueeze(1)
    if not _is_gate_shape(gates.shape, num_loops, num_modules, num_examples):
        examples = "N examples" if num_examples is None else f"N = {num_examples} examples"
        raise UserError(
            f"{name} must have shape [K], [K, 1], [K, N] or [K, N, M] with K = {num_loops} loops, {examples} and "
            f"M = {num_modules} adapted modules, got the shape {shape}."
        )
    if not bool(torch.isfinite(gates.detach()).all()):
        raise UserError(f"{name} must be finite numbers, got {short_repr(value)}.")
    return gates


def _is_gate_shape(shape: Sequence[int], num_loops: int, num_modules: int, num_examples: int | None) -> bool:
    """Return whether a shape is [K, N] or [K, N, M]. `num_examples`: as in `as_gate_matrix`."""
    if len(shape) not in (2, 3) or 0 in shape:
        return False
    if shape[0] != num_loops:
        return False
    if len(shape) == 3 and shape[2] != num_modules:
        return False
    return num_examples is None or shape[1] in (1, num_examples)
