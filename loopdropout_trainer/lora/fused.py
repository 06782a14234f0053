"""Adapted linear maps of one input as one autograd function: y_i = W_i x + B_i (g s A_i x), with a frozen W_i.

The gate g and the scaling s are in the rank dimension, and only the tokens whose gate is not zero take part in the update.
The backward pass needs the input in its own dtype and the rank-r activations, and adds everything up in place:

    z = [A_1; A_2; ..] x;  u = g s z;  y_i = W_i x;  y_i += B_i u_i
    dx = sum of W_i' dy_i;  dB_i = dy_i u_i';  dz_i = g s B_i' dy_i;  dA = dz x';  dx += A' dz

(A token is a column here, and a row in the code.) For q, k and v of a hidden size of 32 with rank 4, and 10 tokens of which 6
have an active gate: x [10, 32], z = x[:6] A' [6, 12], u_q, u_k, u_v [6, 4] each, y_q[:6] += u_q B_q'. Autograd keeps x and u.

Where kernel launches take longer than the arithmetic, the maps are stacked as well, W = [W_1; W_2; ..] with the B_i
as blocks on the diagonal of one matrix: they are one map then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from loopdropout_trainer.looped import GateState, RunningLoop, launches_pay
from loopdropout_trainer.lora.prepared import linear_maps, stacked_bias


class Projections(NamedTuple):
    """Adapted maps of one input, as they are during one forward pass: I maps of ranks r_i, or all stacked into one.

    Attributes:
        weights, biases: frozen, [out_i, in] and [out_i] or None.
        factors: stacked A [sum of r, in], then each B [out_i, r_i], in the trained parameters' dtype and part of their graph:
            all loops add their gradients up here, and the parameters get the sum.
        down, up: the same, cast to the dtype of the activations.
        scaling: of the updates.
        widths: of the outputs that the caller wants.
    """

    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    factors: list[torch.Tensor]
    down: torch.Tensor
    up: list[torch.Tensor]
    scaling: float
    widths: list[int]

    @classmethod
    @torch.enable_grad()  # the first to ask for them may be a loop without gradient
    def prepare(cls, x: torch.Tensor, layers: Sequence[LoraLayer]) -> Projections:
        """Cast and stack the A_i and B_i in use, once for all loops of a forward pass whose input is like x."""
        bases, downs, ups = zip(*map(linear_maps, layers), strict=True)
        weights = [base.weight for base in bases]
        biases = [base.bias for base in bases]
        down = [linear.weight for linear in downs]
        up = [linear.weight for linear in ups]
        widths = [len(weight) for weight in weights]
        scaling = layers[0].scaling[layers[0].active_adapters[0]]
        if len(layers) > 1 and _stacking_pays(x, weights, down):
            # W [sum of out, in], B [sum of out, sum of r] with zeros beside the blocks: one map, I = 1
            biases = [stacked_bias(weights, biases)]
            weights = [torch.cat(weights)]
            up = [torch.block_diag(*up)]
        # The factors stay in the graph of the parameters, their casts do not: `FusedUpdate` returns gradients of the factors.
        factors = [torch.cat(down) if len(down) > 1 else down[0], *up]
        cast_down, *cast_up = (factor.detach().to(x.dtype) for factor in factors)
        return cls(weights, biases, factors, cast_down, cast_up, scaling, widths)


def _first(x: torch.Tensor, number: int) -> torch.Tensor:
    return x if number == len(x) else x[:number]


class FusedUpdate(torch.autograd.Function):
    """`FusedUpdate.apply(x, scale, num_active, maps, *maps.factors)`: the outputs [..., out_i] of x [..., in], n tokens.

    Args:
        scale: gate times scaling, in float32: a number or [m, 1].
        num_active: m <= n, the number of tokens, counted from the first, whose update is added.
        maps: `Projections`. Neither their weights nor the gates get a gradient.
    """

    @staticmethod
    def forward(ctx, x, scale, num_active, maps, *factors):
        rows = x.reshape(-1, x.shape[-1])  # [n, in]
        # Of the tokens with an update, [m, in]. In float32: a gate such as 1/0.7 rounded to bfloat16 would be 0.2% off for
        # every token alike.
        low = _first(rows, num_active) @ maps.down.T
        low = (low * scale).to(x.dtype)
        updates = low.split([b.shape[1] for b in maps.up], dim=1)  # u_i = g s A_i x, each [m, r_i]
        outputs = []
        for weight, bias, b, update in zip(maps.weights, maps.biases, maps.up, updates, strict=True):
            y = F.linear(rows, weight, bias)  # [n, out_i], a new tensor: its first m rows get the update in place
            _first(y, num_active).addmm_(update, b.T)
            outputs.append(y.view(*x.shape[:-1], len(weight)))
        ctx.save_for_backward(x, *updates)
        ctx.maps = maps
        ctx.num_active = num_active
        ctx.scale = scale
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        # grads: dy_i [..., out_i]. Only the first m rows have reached A and B.
        x, *updates = ctx.saved_tensors
        maps = ctx.maps
        m = ctx.num_active
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        grads = [grad.reshape(len(x), -1) for grad in grads]  # [n, out_i]
        needs_x, _, _, _, needs_a, *needs_b = ctx.needs_input_grad
        low = []
        grad_b = []
        _, *factors = maps.factors
        for grad, b, update, factor, need in zip(grads, maps.up, updates, factors, needs_b, strict=True):
            grad = _first(grad, m)  # [m, out_i]
            low.append(grad @ b)
            # dB_i = dy_i' u_i, [out_i, r_i]; u holds gate and scaling already
            grad_b.append((grad.T @ update).to(factor.dtype) if need else None)
        # dz = g s B' dy, side by side for all maps, [m, sum of r]; rounded to the dtype of x, as autograd would round it.
        low = torch.cat(low, dim=1) if len(low) > 1 else low[0]
        low = (low * ctx.scale).to(x.dtype)
        grad_a = grad_x = None
        if needs_a:  # dA = dz' x, one product for all maps, [sum of r, in]
            grad_a = (low.T @ _first(x, m)).to(maps.factors[0].dtype)
        if needs_x:  # dx = sum of dy_i W_i, [n, in]; dz A is added to its first rows in place
            grad_x = grads[0] @ maps.weights[0]
            for grad, weight in zip(grads[1:], maps.weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
            _first(grad_x, m).addmm_(low, maps.down)
            grad_x = grad_x.view(shape)
        return grad_x, None, None, None, grad_a, *grad_b


@dataclass(eq=False)
class FusedProjection:
    """Computes adapted layers with the same input together, unless one has hooks, dropout or a forward of its own.

    Whether it can is checked anew in every forward pass: between two passes weights are updated, merged or loaded, and
    adapters are switched.

    Args:
        loop_state: of the model.
        adapter: name of the gated adapter.
    """

    loop_state: GateState
    adapter: str

    def __call__(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> Sequence[torch.Tensor] | None:
        """Return the outputs [..., out_i] of x [..., in], or None if the layers must run one by one."""
        if torch.compiler.is_compiling():
            return None
        state = self.loop_state
        state.check_drawn(layers[0])
        running = self.loop_state.running
        # The maps must share one gate. Without gradient PEFT's own expression is evaluated, bit for bit, except in loops that
        # run as the frozen model, which have no update at all.
        if state.batch.per_module or layers[0].disable_adapters:
            return None
        if not (torch.is_grad_enabled() or running.frozen):
            return None
        if running.gate is not None and running.gate.requires_grad:
            return None
        maps = self._maps(x, layers)
        if maps is None:
            return None
        if running.skips_updates:
            frozen = zip(maps.weights, maps.biases, strict=True)
            outputs = [F.linear(x, weight, bias) for weight, bias in frozen]
        else:
            num_active = running.num_active
            if running.gate is None or num_active is None:
                num_active = x.shape[:-1].numel()
            scale = self._scale(x, running, maps)
            outputs = FusedUpdate.apply(x, scale, num_active, maps, *maps.factors)
        if len(outputs) < len(maps.widths):  # stacked
            outputs = outputs[0].split(maps.widths, dim=-1)
        return outputs

    def _scale(self, x: torch.Tensor, running: RunningLoop, maps: Projections) -> float | torch.Tensor:
        """Return gate times scaling of the tokens with an update, made once for all layers of a loop."""
        if running.gate is None:
            return maps.scaling
        shape = x.shape[:-1]
        key = (maps.scaling, shape, x.device)
        if key not in running.scales:
            gate = self.loop_state.gate_for(x)
            gate = gate.expand(*shape, 1).reshape(-1, 1)  # [n, 1], of each token
            gate = gate[: running.num_active]  # all of them where their number is not known
            running.scales[key] = gate * maps.scaling
        return running.scales[key]

    def _maps(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> Projections | None:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        # `prepared` lives as long as the forward pass, all K loops of it: no weight changes meanwhile.
        prepared = self.loop_state.running.prepared
        key = (id(layers[0]), dtype)
        if prepared is None:
            return None
        if key not in prepared:
            are_mine = dtype == x.dtype and all(self._is_mine(layer, dtype) for layer in layers)
            are_scaled_alike = are_mine and len({layer.scaling[self.adapter] for layer in layers}) == 1
            prepared[key] = Projections.prepare(x, layers) if are_scaled_alike else None
        return prepared[key]

    def _is_mine(self, layer: nn.Module, dtype: torch.dtype) -> bool:
        """Return whether the layer does nothing but multiply by frozen weights and by this adapter's A and B."""
        maps = linear_maps(layer)
        if maps is None or len(maps) == 1 or layer.active_adapters != [self.adapter]:
            return False
        base = maps[0]
        is_trained = any(parameter.requires_grad for parameter in base.parameters())
        return base.weight.dtype == dtype and not is_trained and layer.project_together is self


def _stacking_pays(x: torch.Tensor, weights: list[torch.Tensor], down: list[torch.Tensor]) -> bool:
    """Return whether one map instead of I takes less time for tokens x: fewer launches, but a copy of W and zeros in B."""
    # Each map after the first saves 10 launches. But of the products in z B', [tokens, sum of r] by [sum of r, sum of out],
    # all but a share of 1 / I are with zeros of B. A product counts 2 FLOP forward and 4 backward.
    others = len(weights) - 1
    tokens = x.shape[:-1].numel()
    width = sum(map(len, weights))
    lora_ranks = sum(map(len, down))
    copied = sum(weight.numel() for weight in weights)
    zeros = 6 * tokens * width * lora_ranks * others // len(weights)  # FLOP with the zeros in B, forward and backward
    return launches_pay(10 * others, zeros, copied=copied, like=x)
