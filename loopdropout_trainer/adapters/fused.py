"""Adapted linear maps of one input as one autograd function: y_i = W_i x + B_i (g s_i A_i x), with a frozen W_i.

The gate g and the scaling s are in the rank dimension, and only the tokens whose gate is not zero take part in the update.
The backward pass needs the input in its own dtype and the rank-r activations, and adds everything up in place:

    z = [A_1; A_2; ..] x;  u = g s z;  y_i = W_i x;  y_i += B_i u_i
    dx = sum of W_i' dy_i;  dB_i = dy_i u_i';  dz_i = g s_i B_i' dy_i;  dA = dz x';  dx += A' dz

(A token is a column here, and a row in the code.) For q, k and v of a hidden size of 32 with rank 4, and 10 tokens of which 6
have an active gate: x [10, 32], z = x[:6] A' [6, 12], u_q, u_k, u_v [6, 4] each, y_q[:6] += u_q B_q'. Autograd keeps x and u.

Where kernel launches take longer than the arithmetic, the maps are stacked as well, W = [W_1; W_2; ..] with the B_i
as blocks on the diagonal of one matrix: they are one map then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from loopdropout_trainer.looped import LoopState, RunningLoop, launches_pay


class Projections(NamedTuple):
    """Adapted maps of one input, as they are during one forward pass: I maps of ranks r_i, or all stacked into one.

    Attributes:
        weights, biases: frozen, [out_i, in] and [out_i] or None.
        factors: stacked A [sum of r, in], then each B [out_i, r_i], in the trained parameters' dtype and part of their graph:
            all loops add their gradients up here, and the parameters get the sum.
        down, up: the same, cast to the dtype of the activations.
        scaling: of the updates, a number or [sum of r].
        widths: of the outputs that the caller wants.
    """

    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    factors: list[torch.Tensor]
    down: torch.Tensor
    up: list[torch.Tensor]
    scaling: float | torch.Tensor
    widths: list[int]

    @classmethod
    @torch.enable_grad()  # the first to ask for them may be a loop without gradient
    def prepare(
        cls,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        lora_parameters: Sequence[torch.Tensor],
        scalings: Sequence[float],
        stacked: bool = False,
    ) -> Projections:
        """Cast and stack the trained A_1, B_1, A_2, B_2, ..., once for all loops of a forward pass; `stacked`: as one map."""
        dtype, down, up = weights[0].dtype, lora_parameters[::2], lora_parameters[1::2]  # A_i, B_i
        widths = [len(weight) for weight in weights]
        scaling: float | torch.Tensor = scalings[0]
        if len(set(scalings)) > 1:  # one number for each channel of z, [sum of r]
            ranks = torch.tensor([len(a) for a in down])
            scaling = torch.tensor(scalings).repeat_interleave(ranks).to(weights[0].device)
        if stacked:  # W [sum of out, in], B [sum of out, sum of r] with zeros beside the blocks: one map, I = 1
            if any(bias is not None for bias in biases):
                pairs = zip(weights, biases, strict=True)
                biases = [torch.cat([w.new_zeros(len(w)) if bias is None else bias for w, bias in pairs])]
            weights, biases = [torch.cat(weights)], biases[:1]
            up = [torch.block_diag(*up)]
        # The factors stay in the graph of the parameters, their casts do not: `FusedUpdate` returns gradients of the factors.
        factors = [torch.cat(down) if len(down) > 1 else down[0], *up]
        down, *up = (factor.detach().to(dtype) for factor in factors)
        return cls(weights, biases, factors, down, up, scaling, widths)


class FusedUpdate(torch.autograd.Function):
    """`FusedUpdate.apply(x, scale, num_active, maps, *maps.factors)`: the outputs [..., out_i] of x [..., in], n tokens.

    Args:
        scale: gate times scaling, in float32: a number, [sum of r], [m, 1] or [m, sum of r].
        num_active: m <= n, the number of tokens, counted from the first, whose update is added.
        maps: `Projections`. Neither their weights nor the gates get a gradient.
    """

    @staticmethod
    def forward(ctx, x, scale, num_active, maps, *factors):
        rows = x.reshape(-1, x.shape[-1])  # [n, in]
        first = rows if num_active == len(rows) else rows[:num_active]  # [m, in], the tokens with an update
        # In float32: a gate such as 1/0.7 rounded to bfloat16 would be 0.2% off for every token alike.
        low = (first @ maps.down.T) * scale
        low = low if low.dtype == x.dtype else low.to(x.dtype)
        updates = low.split([b.shape[1] for b in maps.up], dim=1)  # u_i = g s_i A_i x, each [m, r_i]
        outputs = []
        for weight, bias, b, update in zip(maps.weights, maps.biases, maps.up, updates, strict=True):
            y = F.linear(rows, weight, bias)  # [n, out_i], a new tensor: its first m rows get the update in place
            (y if num_active == len(y) else y[:num_active]).addmm_(update, b.T)
            outputs.append(y.view(*x.shape[:-1], len(weight)))
        ctx.save_for_backward(x, *updates)
        ctx.maps, ctx.num_active, ctx.scale = maps, num_active, scale
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        # grads: dy_i [..., out_i]. Only the first m rows have reached A and B.
        x, *updates = ctx.saved_tensors
        maps, m, shape = ctx.maps, ctx.num_active, x.shape
        x = x.reshape(-1, shape[-1])
        grads = [grad.reshape(len(x), -1) for grad in grads]  # [n, out_i]
        needs_x, _, _, _, needs_a, *needed = ctx.needs_input_grad
        first = grads if m == len(x) else [grad[:m] for grad in grads]  # [m, out_i]
        # dz = g s B' dy, side by side for all maps. It is rounded to the dtype of x, as autograd would round it.
        low = [grad @ b for grad, b in zip(first, maps.up, strict=True)]
        low = (torch.cat(low, dim=1) if len(low) > 1 else low[0]) * ctx.scale
        low = low if low.dtype == x.dtype else low.to(x.dtype)  # [m, sum of r]
        grad_a = grad_x = None
        if needs_a:  # dA = dz' x, one product for all maps, [sum of r, in]
            grad_a = (low.T @ (x if m == len(x) else x[:m])).to(maps.factors[0].dtype)
        grad_b = [  # dB_i = dy_i' u_i, [out_i, r_i]; u holds gate and scaling already
            (grad.T @ update).to(b.dtype) if need else None
            for grad, update, b, need in zip(first, updates, maps.factors[1:], needed, strict=True)
        ]
        if needs_x:  # dx = sum of dy_i W_i, [n, in]; dz A is added to its first rows in place
            grad_x = grads[0] @ maps.weights[0]
            for grad, weight in zip(grads[1:], maps.weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
            (grad_x if m == len(x) else grad_x[:m]).addmm_(low, maps.down)
            grad_x = grad_x.view(shape)
        return grad_x, None, None, None, grad_a, *grad_b


class FusedProjection:
    """Computes adapted layers with the same input together, unless one has hooks, dropout or a forward of its own.

    Whether it can is checked anew in every forward pass: between two passes weights are updated, merged or loaded, and
    adapters are switched.

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
        state, running = self.loop_state, self.loop_state.running
        # The maps must share one gate. Without gradient PEFT's own expression is evaluated, bit for bit, except in loops that
        # run as the frozen model, which have no update at all.
        if state.batch.per_module or layers[0].disable_adapters or not (torch.is_grad_enabled() or running.frozen):
            return None
        if running.gate is not None and running.gate.requires_grad:
            return None
        maps = self._maps(x, layers)
        if maps is None:
            return None
        if running.skips_updates:
            outputs = [F.linear(x, weight, bias) for weight, bias in zip(maps.weights, maps.biases, strict=True)]
        else:
            n = x.numel() // x.shape[-1]
            m = n if running.gate is None or running.num_active is None else running.num_active
            outputs = FusedUpdate.apply(x, self._scale(x, running, maps), m, maps, *maps.factors)
        return outputs if len(outputs) == len(maps.widths) else outputs[0].split(maps.widths, dim=-1)

    def _scale(self, x: torch.Tensor, running: RunningLoop, maps: Projections) -> float | torch.Tensor:
        """Return gate times scaling of the tokens with an update, made once for all layers of a loop."""
        if running.gate is None:
            return maps.scaling
        key = (maps.scaling if isinstance(maps.scaling, float | int) else id(maps), x.shape[:-1], x.device)
        if key not in running.scales:
            gate = self.loop_state.gate_for(x).expand(*x.shape[:-1], 1).reshape(-1, 1)  # [n, 1], of each token
            running.scales[key] = (
                gate[: running.num_active] * maps.scaling
            )  # all of them where their number is not known
        return running.scales[key]

    def _maps(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> Projections | None:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        # `prepared` lives as long as the forward pass, all K loops of it: no weight changes meanwhile.
        prepared, key = self.loop_state.running.prepared, (id(layers[0]), dtype)
        if prepared is None:
            return None
        if key not in prepared:
            prepared[key] = None
            if dtype == x.dtype and all(self._is_plain(layer, dtype) for layer in layers):
                bases, name = [layer.get_base_layer() for layer in layers], self.adapter
                weights, biases = [base.weight for base in bases], [base.bias for base in bases]
                factors = [linear[name].weight for layer in layers for linear in (layer.lora_A, layer.lora_B)]
                stacked = len(layers) > 1 and _stacking_pays(x, weights, factors[::2])
                scalings = [layer.scaling[name] for layer in layers]
                prepared[key] = Projections.prepare(weights, biases, factors, scalings, stacked)
        return prepared[key]

    def _is_plain(self, layer: nn.Module, dtype: torch.dtype) -> bool:
        """Return whether the layer does nothing but multiply by frozen weights and by this adapter's A and B."""
        if not isinstance(layer, LoraLayer) or layer.active_adapters != [self.adapter]:
            return False
        if layer.disable_adapters or layer.merged or getattr(layer, "project_together", None) is not self:
            return False
        base = layer.get_base_layer()
        frozen = base.weight.dtype == dtype and not any(p.requires_grad for p in base.parameters())
        return frozen and only_multiplies(layer, self.adapter)


def only_multiplies(layer: LoraLayer, adapter: str) -> bool:
    """Return whether a layer's forward is y = W x + s B A x without bias in B, dropout or hooks."""
    linears = [layer.get_base_layer(), layer.lora_A[adapter], layer.lora_B[adapter]]
    hooked = any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in (layer, *linears))
    dropped = layer.training and getattr(layer.lora_dropout[adapter], "p", 0.0) > 0
    plain = all(type(linear) is nn.Linear for linear in linears) and linears[2].bias is None
    return plain and not (hooked or dropped or layer.fan_in_fan_out)


def _stacking_pays(x: torch.Tensor, weights: Sequence[torch.Tensor], down: Sequence[torch.Tensor]) -> bool:
    """Return whether one map instead of I takes less time for tokens x: fewer launches, but a copy of W and zeros in B."""
    # Each map after the first saves 10 launches. But of the products in z B', [tokens, sum of r] by [sum of r, sum of out],
    # all but a share of 1 / I are with zeros of B. A product counts 2 FLOP forward and 4 backward.
    others, tokens = len(weights) - 1, x.numel() // x.shape[-1]
    width, rank = sum(map(len, weights)), sum(map(len, down))
    zeros = 6 * tokens * width * rank * others // len(weights)  # FLOP with the zeros in B, forward and backward
    return launches_pay(10 * others, zeros, copied=sum(weight.numel() for weight in weights), like=x)
