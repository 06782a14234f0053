"""Parts of a layer, under transformers' parameter names: its norm and its gated MLP."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from loopdropout_trainer.looped import project
from loopdropout_trainer.models.operations import rms_norm, swiglu
from loopdropout_trainer.models.recomputation import recomputable


PROJECTIONS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)
"""Names, in a decoder layer of Llama's kind, of its linear projections: where adapters go by default."""


class RMSNorm(nn.Module):
    """x [..., size] over its root mean square, times a weight; `variance_epsilon` is added to the mean square."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return recomputable(rms_norm, x, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.variance_epsilon}"


class GatedMLP(nn.Module):
    """down(act(gate x) * up x) without biases; sizes and activation are the config's."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = None if config.hidden_act in ("silu", "swish") else ACT2FN[config.hidden_act]  # None: SwiGLU

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        return project(recomputable(self.activation, gate, up), self.down_proj)[0]

    def activation(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return act(gate) * up."""
        return swiglu(gate, up) if self.act_fn is None else self.act_fn(gate) * up


class StaysFloat32(nn.Module):
    """A module whose float32 weights and buffers a cast of the whole model, such as `model.bfloat16()`, does not round."""

    def _apply(self, fn, recurse: bool = True):
        before = [(tensor, tensor.detach()) for tensor in self.parameters()]
        buffers = [(module, dict(module.named_buffers(recurse=False))) for module in self.modules()]
        super()._apply(fn, recurse)
        for parameter, exact in before:
            parameter.data = _restored(parameter.data, exact)
        for module, exact in buffers:
            for name, buffer in exact.items():
                module._buffers[name] = _restored(module._buffers[name], buffer)
        return self


def _restored(moved: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor where it was moved to, without the rounding of a cast."""
    if exact.dtype != torch.float32 or moved.dtype.itemsize >= exact.dtype.itemsize:
        return moved
    return moved.float() if exact.is_meta else exact.to(moved.device)
