"""The parts of a layer: pointwise operations, attention, norm and gated MLP, under transformers' parameter names; and layers
of the recurrent block.

The operations are exact, keep little for the backward pass, and pass over memory few times:

    RMS norm  y = w x r,  r = (mean x^2 + eps)^(-1/2):   dx = w dy r - x r^3 mean(w dy x);   keeps x and r [..., 1]
    SwiGLU    y = silu(a) b:                             da = dy b silu'(a),  db = dy silu(a);   keeps a and b
    Rotation  by the angle of each pair of channels:     the rotation by its negative;   keeps cosines and sines

They round where transformers' modules round. Under `torch.compile` they are plain expressions, which it fuses by itself. For
x = [3, 4], w = [1, 1], eps = 0, the norm has r = 1 / sqrt((9 + 16) / 2) = 0.283 and y = [0.849, 1.131].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward


PROJECTIONS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)
"""Names, in a decoder layer of Llama's kind, of its linear projections: where adapters go by default."""


def project(x: Tensor, *linears: nn.Module) -> Sequence[Tensor]:
    """Return the linear maps of one input [..., in], each [..., out].

    What adapts them may compute them together: a callable `project_together(x, linears)` on the first, which returns their
    outputs, or None to leave them alone.
    """
    together = getattr(linears[0], "project_together", None)
    outputs = None if together is None else together(x, linears)
    return [linear(x) for linear in linears] if outputs is None else outputs


class Attention(nn.Module):
    """Attention of any family. A subclass makes its projections and, by `heads`, queries, keys and values of them.

    Args:
        config: with `head_dim`, `num_attention_heads` and `num_key_value_heads`.
        layer_idx: layer of the cache that holds its keys.

    Class attributes:
        output: name of its last projection.
    """

    output = "o_proj"

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True

    def heads(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of states [B, S, H], rotated, each [B, heads, S, d]."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | Any | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention's output [B, S, H], and its weights if the kernel gives them.

        The mask has the form of the kernel that the configuration names, or attends by itself, as packed examples do.
        """
        query, key, value = self.heads(hidden_states, position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        dropout = self.config.attention_dropout if self.training else 0.0
        weights = None
        if hasattr(attention_mask, "attend"):
            output = attention_mask.attend(query, key, value, self.scaling, dropout)  # [B, S, heads, d]
        else:
            if torch.is_tensor(attention_mask) and attention_mask.is_floating_point():
                attention_mask = attention_mask.to(query.dtype)
            kernel = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            options = {"dropout": dropout, "scaling": self.scaling, **kwargs}
            output, weights = kernel(self, query, key, value, attention_mask, **options)
        return project(output.flatten(-2), getattr(self, self.output))[0], weights


class SelfAttention(Attention):
    """Attention with rotary positions and separate projections, as in Llama; with `norms_heads` as in Qwen3.

    Args:
        config: with the fields of transformers' Llama.
        norms_heads: whether queries and keys are normalised, head by head.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int, norms_heads: bool = False) -> None:
        super().__init__(config, layer_idx)
        width = config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        if norms_heads:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def heads(self, hidden_states, position_embeddings):
        projected = project(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)  # [B, S, heads, d]
        if hasattr(self, "q_norm"):
            query = self.q_norm(query)
            key = self.k_norm(key)
        query, key = (rotate_halves(x.transpose(1, 2), *position_embeddings) for x in (query, key))
        return query, key, value.transpose(1, 2)


class RMSNorm(nn.Module):
    """x [..., size] over its root mean square, times a weight; `variance_epsilon` is added to the mean square."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.variance_epsilon)


class GatedMLP(nn.Module):
    """down(act(gate x) * up x) without biases; sizes and activation are the config's."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = None if config.hidden_act in ("silu", "swish") else ACT2FN[config.hidden_act]  # None: SwiGLU

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        return project(self.activation(gate, up), self.down_proj)[0]

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return act(gate) * up."""
        return swiglu(gate, up) if self.act_fn is None else self.act_fn(gate) * up


class StaysFloat32(nn.Module):
    """A module whose float32 weights and buffers a cast of the model, such as `model.bfloat16()`, does not round."""

    def _apply(self, fn, recurse: bool = True):
        def moved_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.dtype != torch.float32 or moved.dtype.itemsize >= tensor.dtype.itemsize:
                return moved
            return moved.float() if tensor.is_meta else tensor.to(moved.device)

        return super()._apply(moved_only, recurse)


class ExactRotaryEmbedding(StaysFloat32, LlamaRotaryEmbedding):
    """transformers' rotary embedding, all its kinds, with frequencies that a cast of the model does not round."""


# Layers of the recurrent block.


class RecurrentLayer(GradientCheckpointingLayer):
    """A transformer layer that may be part of the loop. A subclass defines `layer_forward`.

    Args of `forward`: the hidden states [B, S, H], what announces the running loop (None outside of the loops), and what
    `layer_forward` takes.
    """

    compiled_forward: Callable[..., Tensor] | None = None  # `layer_forward`, compiled, for training

    def forward(self, hidden_states: Tensor, announce: Callable[[], None] | None = None, **kwargs) -> Tensor:
        # First of all, and nowhere else: checkpoint recomputation re-enters here, in reverse order of the loops.
        if announce is not None:
            announce()
        if self.compiled_forward is not None and self.training:
            return self.compiled_forward(self, hidden_states, **kwargs)
        return self.layer_forward(hidden_states, **kwargs)

    def layer_forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        raise NotImplementedError


class DecoderLayer(RecurrentLayer):
    """Llama's layer: x = x + Attn(N1 x);  x = x + MLP(N2 x).

    Args:
        config: with the fields of transformers' Llama.
        layer_idx: layer of the cache that holds its keys.

    Class attributes:
        norms_heads: see `SelfAttention`.
    """

    norms_heads = False

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer_idx, self.norms_heads)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def layer_forward(self, hidden_states, **kwargs):
        attention, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attention
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


# The operations.


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
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
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
