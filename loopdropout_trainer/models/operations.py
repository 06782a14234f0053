"""The pointwise operations of a layer, exact: they keep little for the backward pass and pass over memory few times.

    RMS norm  y = w x r,  r = (mean x^2 + eps)^(-1/2):   dx = w dy r - x r^3 mean(w dy x);   keeps x and r [..., 1]
    SwiGLU    y = silu(a) b:                             da = dy b silu'(a),  db = dy silu(a);   keeps a and b
    Rotation  by the angle of each pair of channels:     the rotation by its negative;   keeps cosines and sines

They round where transformers' modules round. Under `torch.compile` they are plain expressions, which it fuses by itself. For
x = [3, 4], w = [1, 1], eps = 0, the norm has r = 1 / sqrt((9 + 16) / 2) = 0.283 and y = [0.849, 1.131].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., H] over its root mean square in the last dimension, times weight [H]; computed in float32 at least.

    The quotient is rounded to the dtype of x before it is multiplied.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return weight * F.rms_norm(x, weight.shape, None, eps).to(x.dtype)  # one kernel each way on a GPU
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    return _rms_norm(x, weight, eps)[0]


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) * b for a and b of one shape."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _SwiGLU.apply(a, b)
    return F.silu(a) * b


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels (i, i + d / 2) of x [B, heads, S, d] by the angles of cos, sin [B or 1, S, d], which get no gradient.

    Both channels of a pair have the same cosine and the same sine.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if torch.compiler.is_compiling():
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * cos + turned * sin
    if torch.is_grad_enabled():
        return _Rotation.apply(x, cos, sin)
    return _rotate(x, cos, sin)


# The forward passes, by themselves where nothing has a gradient: a function of autograd takes as long as small tensors do.


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the result, and the reciprocal root [..., 1]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # mean x^2 = |x|^2 / H, so that no tensor x^2 of full width is made.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    eps = torch.scalar_tensor(eps, dtype=wide, device=x.device)  # so that one operation divides and adds
    reciprocal = torch.add(eps, norm.square_(), alpha=1 / x.shape[-1]).rsqrt_()
    quotient = (x * reciprocal).to(x.dtype)
    return quotient.mul_(weight) if weight.dtype == x.dtype else quotient * weight, reciprocal


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int = 1) -> Tensor:
    # [a, b] in channels (i, i + d / 2) becomes [a cos - b sin, b cos + a sin]; by the negative angle for direction -1.
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-direction)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return rotated


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        result, reciprocal = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, reciprocal)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, reciprocal = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[1]:  # not of a frozen norm
            quotient = (x * reciprocal).to(x.dtype)
            grad_weight = (grad * quotient).sum_to_size(weight.shape).to(weight.dtype)
        if x.dtype == weight.dtype == reciprocal.dtype:
            # Layer norm's own kernel, told that the mean is zero, takes the mean of its gradient off: that is put back.
            size = [x.shape[-1]]
            zero = torch.zeros_like(reciprocal)
            grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
                grad, x, size, zero, reciprocal, weight, None, [True, False, False]
            )
            mean = (grad @ weight).unsqueeze(-1).mul_(reciprocal)
            grad_x.add_(mean, alpha=1 / x.shape[-1])
        else:
            # The formula above, in float32: w dy r - x r^3 (w dy . x) / H, the second term from one dot product [..., 1].
            wide = x.to(reciprocal.dtype)
            weighted = (grad * weight).to(reciprocal.dtype)
            along = torch.linalg.vecdot(weighted, wide).unsqueeze(-1).mul_(reciprocal.pow(3)).div_(x.shape[-1])
            grad_x = weighted.mul_(reciprocal).addcmul_(wide, along, value=-1).to(x.dtype)
        return grad_x, grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a).mul_(b)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        grad_a = grad * b  # dy b, which the next line multiplies by silu'(a) in place
        torch.ops.aten.silu_backward.grad_input(grad_a, a, grad_input=grad_a)
        return grad_a, F.silu(a).mul_(grad)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, direction=-1), None, None
