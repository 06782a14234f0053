"""Projections made ready for many calls without gradient: one matrix product for all maps of an input, adapters included.

    at unit gates, in float32 and float64:   y = [W_1 + s_1 B_1 A_1; W_2 + s_2 B_2 A_2; ..] x
    otherwise:                               [y; z] = [W_1; W_2; ..; A_1; A_2; ..] x,   y_i += B_i (g s_i z_i)

A low-rank update is not merged into a matrix in bfloat16, whose rounding is as large as the update itself. The model's own
weights and factors stay as they are; the matrices are copies, for as long as they are of use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.nn import functional as F

from loopdropout_trainer.looped import GateState, LoopedModelMixin


LARGE = 2**24
"""Weights of a recurrent block from which copies in 16 bits on a CPU are no faster than the maps are where they lie.

Measured on one core with 1 to 32 rows: joined 0.6 to 0.9 times the time of the maps of one input themselves up to 0.4 million
weights in them, 1.1 to 1.5 times from 3 million on. In float32 the copy was 1.0 to 1.3 times faster at every size.
"""


class PreparedProjections:
    """The projections of a looped model's recurrent block, each prepared when it is first called in a block of `in_use`.

    Args:
        looped: model; whatever adapters are active when a projection is called.

    Attributes:
        copied_bytes: what the copies take when all are made; 0 where there are none, since they would not be faster.
    """

    def __init__(self, looped: LoopedModelMixin) -> None:
        self.state = looped.loop_state
        self.layers = [looped.get_submodule(name) for name in looped.recurrent_linears()]
        self.copied_bytes = _copied_bytes([layer.weight for layer in self.layers])
        self._made: dict[tuple[nn.Module, bool], _Matrix | None] = {}  # by the first layer, and whether gates are one

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Answer the model's calls inside the block, without gradient; its weights must not change there, but may outside."""
        self._made = {}
        former = [getattr(layer, "project_together", None) for layer in self.layers]
        for layer in self.layers if self.copied_bytes else ():
            layer.project_together = self
        try:
            with torch.no_grad():
                yield
        finally:
            for layer, together in zip(self.layers, former, strict=True):
                layer.project_together = together

    def __call__(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> Sequence[torch.Tensor] | None:
        """Return the outputs [..., out_i] of x [..., in], or None if the layers must run one by one."""
        state = self.state
        if state.batch.per_module or torch.is_autocast_enabled(x.device.type):
            return None
        unit = state.gates is None
        key = (layers[0], unit)
        if key not in self._made:
            self._made[key] = _Matrix.of(layers, state, unit)
        matrix = self._made[key]
        if matrix is None or matrix.weight.dtype != x.dtype:
            return None
        return matrix(x, state.gate_for(x))


@dataclass
class _Matrix:
    """Some maps of one input as one product, and what is added to it.

    Attributes:
        weight: [in, sum of out_i + sum of r_i], in the order in which memory is read in a product with few rows.
        bias: [sum of out_i + sum of r_i], or None.
        up: s_i B_i' in blocks, [sum of r_i, sum of out_i]; None without a low-rank part.
        widths: out_i.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    up: torch.Tensor | None
    widths: list[int]

    def __call__(self, x: torch.Tensor, gate: torch.Tensor | None) -> Sequence[torch.Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        y = F.linear(rows, self.weight.T, self.bias)
        if self.up is not None:
            y, low_rank = y.tensor_split([sum(self.widths)], dim=1)
            if gate is not None:  # in float32, as in training
                low_rank = (low_rank * gate.flatten(0, -2)).to(x.dtype)
            y.addmm_(low_rank, self.up)
        return y.view(*x.shape[:-1], -1).split(self.widths, dim=-1)

    @classmethod
    def of(cls, layers: Sequence[nn.Module], state: GateState, unit: bool) -> _Matrix | None:
        """Return the matrix of some layers, or None if one of them does something else, or memory does not suffice."""
        if not all(_is_plain(layer, state, unit) for layer in layers):
            return None
        bases = [linear_maps(layer)[0] for layer in layers]
        weights = [base.weight for base in bases]
        biases = [base.bias for base in bases]
        widths = [len(weight) for weight in weights]
        up = None
        try:
            downs, ups = zip(*map(_factors, layers), strict=True)
            if unit and weights[0].dtype in (torch.float32, torch.float64):
                weights = list(map(torch.addmm, weights, ups, downs))
            elif any(map(len, downs)):
                up = torch.block_diag(*(b.T for b in ups))
                weights += downs
                biases += [None] * len(downs)
            return cls(torch.cat(weights).T.contiguous(), stacked_bias(weights, biases), up, widths)
        except torch.OutOfMemoryError:
            return None


def _copied_bytes(weights: Sequence[torch.Tensor]) -> int:
    numbers = sum(weight.numel() for weight in weights)
    dtype = weights[0].dtype
    if weights[0].device.type == "cpu" and dtype.itemsize == 2 and numbers >= LARGE:
        return 0
    return numbers * dtype.itemsize


def _factors(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [r, in] and s B [out, r] of a layer in its dtype; r = 0 where it has no adapter in use."""
    base, *factors = linear_maps(layer)
    if not factors:
        return base.weight.new_empty(0, base.in_features), base.weight.new_empty(base.out_features, 0)
    down, up = factors
    scaled = up.weight * layer.scaling[layer.active_adapters[0]]
    return down.weight.to(base.weight.dtype), scaled.to(base.weight.dtype)


def _is_plain(layer: nn.Module, state: GateState, unit: bool) -> bool:
    """Return whether a layer is a linear map with at most one shared LoRA pair, in the same precision and of these gates."""
    maps = linear_maps(layer)
    if maps is None or len(maps) == 1:
        return maps is not None
    if layer.cast_input_dtype_enabled and maps[1].weight.dtype != layer.weight.dtype:
        return False
    variant = layer.lora_variant.get(layer.active_adapters[0])
    if variant is None:
        return unit  # PEFT's own forward, which knows no gates
    # A `GatedLora` of these gates; variants of PEFT's own know none.
    return getattr(variant, "loop_state", None) is state and variant.is_plain()


def linear_maps(layer: nn.Module) -> list[nn.Linear] | None:
    """Return [W], or [W, A, B] with a LoRA adapter in use, of a layer whose forward is these products alone; else None.

    None, then, for a layer with hooks, dropout, several adapters at once, quantised weights or a bias in B.
    """
    maps = [layer]
    if isinstance(layer, LoraLayer):
        maps = [layer.get_base_layer()]
        if not (layer.disable_adapters or layer.merged):
            maps += _factors_in_use(layer)
    if any(type(linear) is not nn.Linear for linear in maps):
        return None
    for part in (layer, *maps):
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks:
            return None
    return maps


def _factors_in_use(layer: LoraLayer) -> list[nn.Module | None]:
    """Return A and B of the one active adapter, [None] if they are not all that it does."""
    if len(layer.active_adapters) != 1 or layer.fan_in_fan_out:
        return [None]
    (adapter,) = layer.active_adapters
    if adapter not in layer.lora_A:
        return [None]
    up = layer.lora_B[adapter]
    dropout = layer.lora_dropout[adapter]
    is_dropped = layer.training and getattr(dropout, "p", 0.0) > 0
    has_bias = getattr(up, "bias", None) is not None
    return [None] if is_dropped or has_bias else [layer.lora_A[adapter], up]


def stacked_bias(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the bias [sum of out_i] of maps as one, with zeros where a map has none; None if none has."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs])
