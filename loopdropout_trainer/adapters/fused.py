"""Adapted linear maps of one input as one autograd function: y_i = W_i x + B_i (g s_i A_i x), with a frozen W_i.

The gate g and the scaling s are in the rank dimension, and only the tokens whose gate is not zero take part in the update.
The backward pass needs the input in its own dtype and the rank-r activations, and adds everything up in place:

    z = [A_1; A_2; ..] x;  u = g s z;  y_i = W_i x;  y_i += B_i u_i
    dx = sum of W_i' dy_i;  dB_i = dy_i u_i';  dz_i = g s_i B_i' dy_i;  dA = dz x';  dx += A' dz
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.autograd.function import once_differentiable

from loopdropout_trainer.looped import LoopState


class FusedUpdate(torch.autograd.Function):
    """`FusedUpdate.apply(x, gate, scalings, *tensors)`: the outputs [n, out_i] of x [n, in].

    Args:
        gate: float32, [m, 1] for the first m <= n tokens, whose update is added, or None for a gate of one for all.
        scalings: of the updates.
        tensors: for each map its weight [out_i, in] and its bias or None, in the dtype of x, and its factors A [r_i, in]
            and B [out_i, r_i] in any dtype, computed with in that of x. Neither weights nor gates get a gradient.
    """

    @staticmethod
    def forward(ctx, x, gate, scalings, *tensors):
        weights, biases, down, up = (tensors[start::4] for start in range(4))
        ranks = [a.shape[0] for a in down]
        first = x if gate is None else x[: len(gate)]
        low_rank = first @ torch.cat([a.to(x.dtype) for a in down]).T  # [m, sum of r]
        # In float32: a gate such as 1/0.7 rounded to bfloat16 would be 0.2% off for every token alike.
        factor = _factor(gate, scalings, ranks, x.device)
        updates = (low_rank * factor).to(x.dtype).split(ranks, dim=1)
        outputs = []
        for weight, bias, b, update in zip(weights, biases, up, updates, strict=True):
            y = nn.functional.linear(x, weight, bias)
            y[: len(first)].addmm_(update, b.to(x.dtype).T)
            outputs.append(y)
        ctx.save_for_backward(x, gate, *weights, *down, *up, *updates)
        ctx.scalings = scalings
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, gate, *saved = ctx.saved_tensors
        count = len(grads)
        weights, down, up, updates = (saved[start : start + count] for start in range(0, 4 * count, count))
        ranks = [a.shape[0] for a in down]
        active = len(x) if gate is None else len(gate)
        needed = ctx.needs_input_grad
        result: list[torch.Tensor | None] = [None] * len(needed)

        grad_low = torch.cat([grad[:active] @ b.to(x.dtype) for grad, b in zip(grads, up, strict=True)], dim=1)
        grad_low = (grad_low * _factor(gate, ctx.scalings, ranks, x.device)).to(x.dtype)  # [m, sum of r]
        for index, (grad, update) in enumerate(zip(grads, updates, strict=True)):
            if needed[3 + 4 * index + 3]:
                result[3 + 4 * index + 3] = (grad[:active].T @ update).to(up[index].dtype)
        if any(needed[3 + 4 * index + 2] for index in range(count)):
            grad_down = (grad_low.T @ x[:active]).split(ranks)
            for index, grad in enumerate(grad_down):
                result[3 + 4 * index + 2] = grad.to(down[index].dtype)
        if needed[0]:
            grad_x = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
            grad_x[:active].addmm_(grad_low, torch.cat([a.to(x.dtype) for a in down]))
            result[0] = grad_x
        return tuple(result)


def _factor(
    gate: torch.Tensor | None, scalings: Sequence[float], ranks: Sequence[int], device: torch.device
) -> torch.Tensor | float:
    """Return what multiplies the rank-r activations [m, sum of r]: gate times scaling."""
    if len(set(scalings)) == 1:
        return scalings[0] if gate is None else gate * scalings[0]
    columns = torch.repeat_interleave(torch.tensor(scalings), torch.tensor(ranks)).to(device)
    return columns if gate is None else gate * columns


class FusedProjection:
    """Computes adapted layers that share their input together, where nothing in them asks to be called by itself.

    Args:
        loop_state: of the model.
        adapter: name of the gated adapter.
    """

    def __init__(self, loop_state: LoopState, adapter: str) -> None:
        self.loop_state = loop_state
        self.adapter = adapter

    def __call__(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> Sequence[torch.Tensor] | None:
        """Return the outputs [..., out_i] of x [..., in], or None if the layers must run one by one."""
        if not self._applies(x, layers):
            return None
        gate = self.loop_state.gate_for(x)
        rows = x.reshape(-1, x.shape[-1])
        if gate is not None:
            if gate.requires_grad:
                return None
            gate = gate.expand(*x.shape[:-1], 1).reshape(-1, 1)
            if self.loop_state.part is not None:
                gate = gate[: self.loop_state.part.active]
        tensors = []
        for layer in layers:
            base = layer.get_base_layer()
            tensors += [
                base.weight,
                base.bias,
                *(factor[self.adapter].weight for factor in (layer.lora_A, layer.lora_B)),
            ]
        scalings = tuple(layer.scaling[self.adapter] for layer in layers)
        outputs = FusedUpdate.apply(rows, gate, scalings, *tensors)
        return [y.view(*x.shape[:-1], -1) for y in outputs]

    def _applies(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> bool:
        state = self.loop_state
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or state.off or state.is_off(0):
            return False
        if state.gates is not None and state.gates.dim() == 3:
            return False
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return dtype == x.dtype and all(self._is_plain(layer, dtype) for layer in layers)

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
