"""The gated update as one autograd function: y + (g s A x) B', with the gate and the scaling s in the rank dimension.

It keeps for the backward pass what no derivation can do without: the input x in its own dtype (for which the base layer's
input serves), the factors in theirs, and the rank-r activation; and it adds the update to y while it multiplies:

    z = A x;  u = g s z;  y += B u
    dB = dy u';  du = B' dy;  dz = g s du;  dA = dz x';  dx = A' dz;  d(g s) = sum of du z over what it multiplies
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable


class FusedUpdate(torch.autograd.Function):
    """`FusedUpdate.apply(result, x, a, b, gate, in_place)`: result [..., out] plus the gated update of x [..., in].

    Args:
        result: in the dtype of x; overwritten if `in_place`.
        a, b: factors [r, in] and [out, r] in any dtype; computed with in that of x.
        gate: of a shape that broadcasts with [..., r], times the scaling; float32.
        in_place: whether nothing else reads `result`.
    """

    @staticmethod
    def forward(ctx, result, x, a, b, gate, in_place):
        low_rank = (x.flatten(0, -2) @ a.to(x.dtype).T).unflatten(0, x.shape[:-1])  # [..., r]
        # In float32: a gate such as 1/0.7 rounded to bfloat16 would be 0.2% off for every token alike.
        gated = (low_rank * gate).to(x.dtype)
        ctx.save_for_backward(x, a, b, gate, gated, low_rank if ctx.needs_input_grad[4] else None)
        factors = gated.flatten(0, -2), b.to(x.dtype).T
        if in_place:
            ctx.mark_dirty(result)
            result.flatten(0, -2).addmm_(*factors)
            return result
        return torch.addmm(result.flatten(0, -2), *factors).view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, a, b, gate, gated, low_rank = ctx.saved_tensors
        _, needs_x, needs_a, needs_b, needs_gate, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        grad_x = grad_a = grad_b = grad_gate = None
        if needs_b:
            grad_b = (rows.T @ gated.flatten(0, -2)).to(b.dtype)
        grad_gated = (rows @ b.to(grad.dtype)).view_as(gated)
        if needs_gate:
            grad_gate = (grad_gated.to(gate.dtype) * low_rank).sum_to_size(gate.shape)
        grad_low = (grad_gated * gate).to(x.dtype).flatten(0, -2)
        if needs_a:
            grad_a = (grad_low.T @ x.flatten(0, -2)).to(a.dtype)
        if needs_x:
            grad_x = (grad_low @ a.to(x.dtype)).view_as(x)
        return grad, grad_x, grad_a, grad_b, grad_gate, None
