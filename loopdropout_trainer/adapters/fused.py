"""Adapted linear maps of one input as one autograd function: y_i = W_i x + B_i (g s_i A_i x), with a frozen W_i.

The gate g and the scaling s are in the rank dimension, and only the tokens whose gate is not zero take part in the update.
The backward pass needs the input in its own dtype and the rank-r activations, and adds everything up in place:

    z = [A_1; A_2; ..] x;  u = g s z;  y_i = W_i x;  y_i += B_i u_i
    dx = sum of W_i' dy_i;  dB_i = dy_i u_i';  dz_i = g s_i B_i' dy_i;  dA = dz x';  dx += A' dz
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from loopdropout_trainer.looped import LoopState


class Projections(NamedTuple):
    """Adapted maps of one input, as they are during one micro-batch: I maps of ranks r_i.

    Attributes:
        weights, biases: frozen, [out_i, in] and [out_i] or None.
        factors: the trained A_1, B_1, A_2, B_2, ... [r_i, in] and [out_i, r_i].
        down, up: the stacked A [sum of r, in] and each B, cast to the dtype of the activations.
        scaling: of the updates, a number or [sum of r].
    """

    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    factors: list[torch.Tensor]
    down: torch.Tensor
    up: list[torch.Tensor]
    scaling: float | torch.Tensor

    @classmethod
    def prepare(
        cls,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        factors: list[torch.Tensor],
        scalings: Sequence[float],
    ) -> Projections:
        """Cast and stack the factors, once for all loops of a micro-batch."""
        dtype, down = weights[0].dtype, factors[::2]
        scaling: float | torch.Tensor = scalings[0]
        if len(set(scalings)) > 1:
            ranks = torch.tensor([len(a) for a in down])
            scaling = torch.tensor(scalings).repeat_interleave(ranks).to(weights[0].device)
        stacked = torch.cat([a.detach().to(dtype) for a in down])
        return cls(weights, biases, factors, stacked, [b.detach().to(dtype) for b in factors[1::2]], scaling)


class FusedUpdate(torch.autograd.Function):
    """`FusedUpdate.apply(x, gate, maps, *maps.factors)`: the outputs [n, out_i] of x [n, in].

    Args:
        gate: float32, [m, 1] for the first m <= n tokens, whose update is added, or None for a gate of one for all.
        maps: `Projections`. Neither their weights nor the gates get a gradient.
    """

    @staticmethod
    def forward(ctx, x, gate, maps, *factors):
        first = x if gate is None else x[: len(gate)]
        # In float32: a gate such as 1/0.7 rounded to bfloat16 would be 0.2% off for every token alike.
        factor = maps.scaling if gate is None else gate * maps.scaling
        updates = ((first @ maps.down.T) * factor).to(x.dtype).split([b.shape[1] for b in maps.up], dim=1)
        outputs = []
        for weight, bias, b, update in zip(maps.weights, maps.biases, maps.up, updates, strict=True):
            y = F.linear(x, weight, bias)
            y[: len(first)].addmm_(update, b.T)
            outputs.append(y)
        ctx.save_for_backward(x, *updates)
        ctx.maps, ctx.active, ctx.factor = maps, len(first), factor
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, *updates = ctx.saved_tensors
        maps = ctx.maps
        first = [grad[: ctx.active] for grad in grads]
        grad_low = torch.cat([grad @ b for grad, b in zip(first, maps.up, strict=True)], dim=1)
        grad_low = (grad_low * ctx.factor).to(x.dtype)  # [m, sum of r]
        needs_x, _, _, *needed = ctx.needs_input_grad
        result: list[torch.Tensor | None] = [None] * len(needed)
        if any(needed[::2]):
            ranks = [b.shape[1] for b in maps.up]
            result[::2] = (grad_low.T @ x[: ctx.active]).split(ranks)
        if any(needed[1::2]):
            result[1::2] = [grad.T @ update for grad, update in zip(first, updates, strict=True)]
        result = [
            grad.to(factor.dtype) if need else None
            for grad, factor, need in zip(result, maps.factors, needed, strict=True)
        ]
        grad_x = None
        if needs_x:
            grad_x = grads[0] @ maps.weights[0]
            for grad, weight in zip(grads[1:], maps.weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
            grad_x[: ctx.active].addmm_(grad_low, maps.down)
        return grad_x, None, None, *result


class FusedProjection:
    """Computes adapted layers that share their input together, where nothing in them asks to be called by itself.

    What that takes is found out once in every micro-batch.

    Args:
        loop_state: of the model.
        adapter: name of the gated adapter.
    """

    def __init__(self, loop_state: LoopState, adapter: str) -> None:
        self.loop_state = loop_state
        self.adapter = adapter
        self._found: dict[int, Projections | None] = {}  # by the first layer
        self._found_at: tuple | None = None

    def __call__(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> Sequence[torch.Tensor] | None:
        """Return the outputs [..., out_i] of x [..., in], or None if the layers must run one by one."""
        state = self.loop_state
        if torch.compiler.is_compiling() or state.off or layers[0].disable_adapters:
            return None
        if not (torch.is_grad_enabled() or state.frozen):
            return None
        maps = self._maps(x, layers)
        if maps is None:
            return None
        if state.is_off(0):
            return [F.linear(x, weight, bias) for weight, bias in zip(maps.weights, maps.biases, strict=True)]
        gate = state.gate_for(x)
        if gate is not None:
            if gate.requires_grad:
                return None
            gate = gate.expand(*x.shape[:-1], 1).reshape(-1, 1)
            if state.part is not None:
                gate = gate[: state.part.active]
        outputs = FusedUpdate.apply(x.reshape(-1, x.shape[-1]), gate, maps, *maps.factors)
        return [y.view(*x.shape[:-1], -1) for y in outputs]

    def _maps(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> Projections | None:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        now = (self.loop_state.version, dtype)
        if self._found_at != now:
            self._found, self._found_at = {}, now
        key = id(layers[0])
        if key not in self._found:
            plain = dtype == x.dtype and all(self._is_plain(layer, dtype) for layer in layers)
            self._found[key] = self._prepare(layers) if plain else None
        return self._found[key]

    def _prepare(self, layers: Sequence[nn.Module]) -> Projections:
        bases = [layer.get_base_layer() for layer in layers]
        return Projections.prepare(
            [base.weight for base in bases],
            [base.bias for base in bases],
            [factor[self.adapter].weight for layer in layers for factor in (layer.lora_A, layer.lora_B)],
            [layer.scaling[self.adapter] for layer in layers],
        )

    def _is_plain(self, layer: nn.Module, dtype: torch.dtype) -> bool:
        """Return whether the layer does nothing but multiply by frozen weights and by this adapter's factors."""
        if not isinstance(layer, LoraLayer) or layer.active_adapters != [self.adapter]:
            return False
        if layer.disable_adapters or layer.merged or getattr(layer, "project_together", None) is None:
            return False
        base = layer.get_base_layer()
        parts = (layer, base, layer.lora_A[self.adapter], layer.lora_B[self.adapter])
        if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in parts):
            return False
        dropout = layer.lora_dropout[self.adapter]
        frozen = type(base) is nn.Linear and base.weight.dtype == dtype and not base.weight.requires_grad
        return frozen and (base.bias is None or not base.bias.requires_grad) and not getattr(dropout, "p", 0.0)
