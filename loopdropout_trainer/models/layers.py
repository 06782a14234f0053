"""Layers of looped models, and pointwise operations that keep little for the backward pass.

    RMS norm  y = w x r,  r = (mean x^2 + eps)^(-1/2):   dx = w dy r - x r^3 mean(w dy x),   keeps x and r [..., 1]
    SwiGLU    y = silu(a) b:                             da = dy b silu'(a),  db = dy silu(a),   keeps a and b
    Rotation  by the angle of each pair of channels:     the rotation by its negative,   keeps cosines and sines

The operations are exact and round where transformers' modules round.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Attention(nn.Module):
    """Attention of any family. A subclass creates the projections, and queries, keys and values in `project`.

    Args:
        config: Configuration with `head_dim`, `num_attention_heads` and `num_key_value_heads`.
        layer_idx: Layer of the cache that holds the keys.

    Class attributes:
        output: Name of the last projection.
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

    def project(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, each [B, heads, S, d], of hidden states [B, S, H]."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | Any | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, S, H], and the attention weights if the kernel returns them.

        Args:
            hidden_states: [B, S, H].
            position_embeddings: Cosines and sines of the positions.
            attention_mask: Mask for the kernel that the configuration names, or a `PackedAttention`.
            cache: Cache of keys and values.
            **kwargs: Further arguments of the kernel.
        """
        query, key, value = self.project(hidden_states, position_embeddings)
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
            # vLLM reads the scale of this call from the source, and its output is [tokens, heads * d].
            output, weights = kernel(
                self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        return getattr(self, self.output)(output.reshape(*hidden_states.shape[:-1], -1)), weights


class SelfAttention(Attention):
    """Llama's attention, with rotary positions and separate projections.

    Args:
        config: Configuration with the fields of Llama.
        layer_idx: Layer of the cache that holds the keys.
        norms_heads: Whether each head's queries and keys are normalized, as in Qwen3.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int, norms_heads: bool = False) -> None:
        super().__init__(config, layer_idx)
        width = config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps) if norms_heads else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps) if norms_heads else nn.Identity()

    def project(self, hidden_states, position_embeddings):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (linear(hidden_states).unflatten(-1, (-1, self.head_dim)) for linear in projections)
        query = rotate_halves(self.q_norm(query).transpose(1, 2), *position_embeddings)
        key = rotate_halves(self.k_norm(key).transpose(1, 2), *position_embeddings)
        return query, key, value.transpose(1, 2)


class RMSNorm(nn.Module):
    """Divide x [..., size] by its root mean square, and multiply it by a weight."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.variance_epsilon)


class GatedMLP(nn.Module):
    """Return down(act(gate x) * up x), without biases."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = None if config.hidden_act in ("silu", "swish") else ACT2FN[config.hidden_act]  # None: SwiGLU

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.act_fn is None:
            return self.down_proj(swiglu(gate, up))
        return self.down_proj(self.act_fn(gate) * up)


class StaysFloat32(nn.Module):
    """A module whose float32 weights and buffers keep their type when the model is cast, as in `model.bfloat16()`."""

    def _apply(self, fn, recurse: bool = True):
        # `model.bfloat16()`, `model.cuda()` and `model.to(...)` all call this method with a function of a tensor. Its result
        # tells where a tensor goes. The tensor goes there, too, but not to a narrower type.
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.dtype != torch.float32 or moved.dtype.itemsize >= tensor.dtype.itemsize:
                return moved
            if tensor.is_meta:
                return moved.float()
            return tensor.to(moved.device)  # the original numbers, which `moved` has rounded

        return super()._apply(move, recurse)


class ExactRotaryEmbedding(StaysFloat32, LlamaRotaryEmbedding):
    """transformers' rotary embedding with frequencies that stay in float32."""


class RecurrentLayer(GradientCheckpointingLayer):
    """A transformer layer that may run in a loop. A subclass defines `layer_forward`."""

    def forward(self, hidden_states: Tensor, set_loop: Callable[[], None] | None = None, **kwargs) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: [B, S, H].
            set_loop: Function that sets the running loop. It is called here because gradient checkpointing recomputes this
                function, with the loops in reverse order. None: outside of the loops.
            **kwargs: Further arguments of `layer_forward`.
        """
        if set_loop is not None:
            set_loop()
        return self.layer_forward(hidden_states, **kwargs)

    def layer_forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        """Return the hidden states [B, S, H] after the layer."""
        raise NotImplementedError


class DecoderLayer(RecurrentLayer):
    """Llama's layer: x = x + Attn(N1 x),  x = x + MLP(N3 x). With `norms_outputs`, N2 and N4 normalize both outputs.

    Args:
        config: Configuration with the fields of Llama.
        layer_idx: Layer of the cache that holds the keys.

    Class attributes:
        norms_heads: Whether each head's queries and keys are normalized, as in Qwen3.
        norms_outputs: Whether the outputs of attention and MLP are normalized, too, as in Ouro.
    """

    norms_heads = False
    norms_outputs = False

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer_idx, self.norms_heads)
        self.mlp = GatedMLP(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.input_layernorm_2 = RMSNorm(size, eps) if self.norms_outputs else nn.Identity()
        self.post_attention_layernorm_2 = RMSNorm(size, eps) if self.norms_outputs else nn.Identity()

    def layer_forward(self, hidden_states, **kwargs):
        attention, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.input_layernorm_2(attention)
        feed_forward = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.post_attention_layernorm_2(feed_forward)


# Operations.


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., H] over its root mean square, times weight [H], computed in float32 or float64."""
    # On a CPU, `F.rms_norm` rounds differently. With its backward pass it takes 1.2 times as long for x [512, 64], and 2.8 to
    # 4.2 times as long for [512, 768] to [4096, 2048]. A step of the tiny Ouro takes equally long.
    if x.device.type == "cpu" and x.dtype == weight.dtype and x.dtype.itemsize >= 4:
        return _RMSNorm.apply(x, weight, eps)
    return weight * F.rms_norm(x, weight.shape, None, eps).to(x.dtype)  # one kernel on a GPU


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) * b for a and b of one shape."""
    return _SwiGLU.apply(a, b)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels (i, i + d / 2) of x [B, heads, S, d] by the angles of cos and sin, [B or 1, S, d].

    Both channels of a pair have the same cosine and the same sine. Cosines and sines get no gradient.
    """
    return _Rotation.apply(x, cos.unsqueeze(1), sin.unsqueeze(1))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        # mean x^2 = |x|^2 / H, without a tensor x^2 [..., H]. One operation divides and adds.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        eps = torch.scalar_tensor(eps, dtype=x.dtype, device=x.device)
        reciprocal = torch.add(eps, norm.square_(), alpha=1 / x.shape[-1]).rsqrt_()
        ctx.save_for_backward(x, weight, reciprocal)
        return (x * reciprocal).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, reciprocal = ctx.saved_tensors
        size = x.shape[-1]
        # This calls the backward kernel of layer norm. With g = w dy, n = x r and a mean of zero the kernel gives
        # dx = r (g - mean(g) - n mean(n g)), and RMS norm needs dx = r (g - n mean(n g)). So r mean(g) is added again.
        inputs = (grad, x, [size], torch.zeros_like(reciprocal), reciprocal, weight, None)
        mask = [True, ctx.needs_input_grad[1], False]
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(*inputs, mask)
        mean = (grad @ weight).unsqueeze(-1).mul_(reciprocal)  # H r mean(g), [..., 1]
        return grad_x.add_(mean, alpha=1 / size), grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a).mul_(b)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        grad_a = grad * b
        # The kernel writes into the memory of its first argument, and the product below into that of silu(a).
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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int = 1) -> Tensor:
    # [a, b] in channels (i, i + d / 2) becomes [a cos - b sin, b cos + a sin], with the negative angle for direction -1.
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-direction)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return rotated
