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
    """Adapted maps of one input, as they are during one forward pass: I maps of ranks r_i.

    Attributes:
        weights, biases: frozen, [out_i, in] and [out_i] or None.
        lora_parameters: the trained A_1, B_1, A_2, B_2, ... [r_i, in] and [out_i, r_i].
        down, up: the stacked A [sum of r, in] and each B, cast to the dtype of the activations.
        scaling: of the updates, a number or [sum of r].
    """

    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    lora_parameters: list[torch.Tensor]
    down: torch.Tensor
    up: list[torch.Tensor]
    scaling: float | torch.Tensor

    @classmethod
    def prepare(
        cls,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        lora_parameters: list[torch.Tensor],
        scalings: Sequence[float],
    ) -> Projections:
        """Cast and stack A and B, once for all loops of a forward pass."""
        dtype, down = weights[0].dtype, lora_parameters[::2]
        scaling: float | torch.Tensor = scalings[0]
        if len(set(scalings)) > 1:
            ranks = torch.tensor([len(a) for a in down])
            scaling = torch.tensor(scalings).repeat_interleave(ranks).to(weights[0].device)
        stacked = torch.cat([a.detach().to(dtype) for a in down])
        up = [b.detach().to(dtype) for b in lora_parameters[1::2]]
        return cls(weights, biases, lora_parameters, stacked, up, scaling)


class FusedUpdate(torch.autograd.Function):
    """`FusedUpdate.apply(x, gate, maps, *maps.lora_parameters)`: the outputs [n, out_i] of x [n, in].

    Args:
        gate: float32, [m, 1] for the first m <= n tokens, whose update is added, or None for a gate of one for all.
        maps: `Projections`. Neither their weights nor the gates get a gradient.
    """

    @staticmethod
    def forward(ctx, x, gate, maps, *lora_parameters):
        first = x if gate is None else x[: len(gate)]  # [m, in], the tokens with an update
        # In float32: a gate such as 1/0.7 rounded to bfloat16 would be 0.2% off for every token alike.
        scale = maps.scaling if gate is None else gate * maps.scaling  # a number, [sum of r], [m, 1] or [m, sum of r]
        ranks = [b.shape[1] for b in maps.up]
        updates = ((first @ maps.down.T) * scale).to(x.dtype).split(ranks, dim=1)  # u_i = g s_i A_i x, each [m, r_i]
        outputs = []
        for weight, bias, b, update in zip(maps.weights, maps.biases, maps.up, updates, strict=True):
            y = F.linear(x, weight, bias)  # [n, out_i]
            y[: len(first)].addmm_(update, b.T)
            outputs.append(y)
        ctx.save_for_backward(x, *updates)
        ctx.maps, ctx.num_active, ctx.scale = maps, len(first), scale
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        # grads: dy_i [n, out_i]. Only the first m rows have reached A and B.
        x, *updates = ctx.saved_tensors
        maps, m = ctx.maps, ctx.num_active
        needs_x, _, _, *needed = ctx.needs_input_grad
        first = [grad[:m] for grad in grads]  # [m, out_i]
        # dz = g s B' dy, side by side for all maps. It is rounded to the dtype of x, as autograd would round it.
        grad_low = torch.cat([grad @ b for grad, b in zip(first, maps.up, strict=True)], dim=1)
        grad_low = (grad_low * ctx.scale).to(x.dtype)  # [m, sum of r]
        result: list[torch.Tensor | None] = [None] * len(needed)
        if any(needed[::2]):  # dA = dz' x, one product for all maps, [sum of r, in]
            result[::2] = (grad_low.T @ x[:m]).split([b.shape[1] for b in maps.up])
        if any(needed[1::2]):  # dB_i = dy_i' u_i, [out_i, r_i]; u holds gate and scaling already
            result[1::2] = [grad.T @ update for grad, update in zip(first, updates, strict=True)]
        result = [
            grad.to(parameter.dtype) if need else None
            for grad, parameter, need in zip(result, maps.lora_parameters, needed, strict=True)
        ]
        grad_x = None
        if needs_x:  # dx = sum of dy_i W_i, [n, in]; dz A is added to its first rows in place
            grad_x = grads[0] @ maps.weights[0]
            for grad, weight in zip(grads[1:], maps.weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
            grad_x[:m].addmm_(grad_low, maps.down)
        return grad_x, None, None, *result


class FusedProjection:
    """Computes adapted layers that share their input together, where nothing in them asks to be called by itself.

    What that takes is found out once in every forward pass, and forgotten with it: between two passes weights are stepped,
    merged or loaded, and adapters are switched.

    Args:
        loop_state: of the model.
        adapter: name of the gated adapter.
    """

    def __init__(self, loop_state: LoopState, adapter: str) -> None:
        self.loop_state = loop_state
        self.adapter = adapter

    def __call__(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> Sequence[torch.Tensor] | None:
        """Return the outputs [..., out_i] of x [..., in], or None if the layers must run one by one."""
        if torch.compiler.is_compiling():
            return None
        state, step = self.loop_state, self.loop_state.step
        if state.plan.per_module or layers[0].disable_adapters or not (torch.is_grad_enabled() or step.frozen):
            return None
        maps = self._maps(x, layers)
        if maps is None:
            return None
        if step.skips_updates:
            return [F.linear(x, weight, bias) for weight, bias in zip(maps.weights, maps.biases, strict=True)]
        gate = state.gate_for(x)
        if gate is not None:
            if gate.requires_grad:
                return None
            gate = gate.expand(*x.shape[:-1], 1).reshape(-1, 1)  # [n, 1], of each token
            if step.num_active is not None:
                gate = gate[: step.num_active]
        outputs = FusedUpdate.apply(x.reshape(-1, x.shape[-1]), gate, maps, *maps.lora_parameters)
        return [y.view(*x.shape[:-1], -1) for y in outputs]

    def _maps(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> Projections | None:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        prepared, key = self.loop_state.step.prepared, (id(layers[0]), dtype)
        if prepared is None:
            return None
        if key not in prepared:
            plain = dtype == x.dtype and all(self._is_plain(layer, dtype) for layer in layers)
            prepared[key] = self._prepare(layers) if plain else None
        return prepared[key]

    def _prepare(self, layers: Sequence[nn.Module]) -> Projections:
        bases = [layer.get_base_layer() for layer in layers]
        return Projections.prepare(
            [base.weight for base in bases],
            [base.bias for base in bases],
            [linear[self.adapter].weight for layer in layers for linear in (layer.lora_A, layer.lora_B)],
            [layer.scaling[self.adapter] for layer in layers],
        )

    def _is_plain(self, layer: nn.Module, dtype: torch.dtype) -> bool:
        """Return whether the layer does nothing but multiply by frozen weights and by this adapter's A and B."""
        if not isinstance(layer, LoraLayer) or layer.active_adapters != [self.adapter]:
            return False
        if layer.disable_adapters or layer.merged or getattr(layer, "project_together", None) is not self:
            return False
        base = layer.get_base_layer()
        parts = (layer, base, layer.lora_A[self.adapter], layer.lora_B[self.adapter])
        if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in parts):
            return False
        dropout = layer.lora_dropout[self.adapter]
        frozen = type(base) is nn.Linear and base.weight.dtype == dtype and not base.weight.requires_grad
        no_bias_trained = base.bias is None or not base.bias.requires_grad
        return frozen and no_bias_trained and not (isinstance(dropout, nn.Dropout) and dropout.p)
