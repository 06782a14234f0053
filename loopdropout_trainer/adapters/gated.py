"""A LoRA layer with a gate: y = W x + g[t, b] * (alpha / r) * B A x (Eq. 3), one g for all tokens of an example.

The gate multiplies the r-dimensional activation A x, never a full-width one, and is folded into the scaling: it costs
nothing. With unit gates the layer evaluates PEFT's own expression, bit for bit.

PEFT calls a layer with another forward a `LoraVariant`. That interface is private: all use of it is in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import nn
from torch.nn import functional as F

from loopdropout_trainer.adapters.refusals import check_adapter
from loopdropout_trainer.looped import LoopState, applied_gates, as_gate_matrix, find_looped_model


class GatedLora(LoraVariant):
    """PEFT variant of one LoRA layer that multiplies its update by the running loop's gate.

    Args:
        loop_state: of the looped model that the layer is part of.
        in_activation_dtype: compute the update in the dtype of the layer's output, with the float32 factors cast to it,
            as the paper does. False: in the factors' dtype, as PEFT does. Under autocast the two agree.
    """

    def __init__(self, loop_state: LoopState, in_activation_dtype: bool) -> None:
        self.loop_state = loop_state
        self.in_activation_dtype = in_activation_dtype

    def forward(
        self, module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs
    ) -> torch.Tensor:
        """Return `result` [B, S, out] plus the gated update of `x` [B, S, in]."""
        lora_A, lora_B = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scaling = module.scaling[active_adapter]
        x = module.lora_dropout[active_adapter](x)
        if self.in_activation_dtype and x.dtype != result.dtype:
            x = x.to(result.dtype)
        gate = self.loop_state.gate_for(x)

        low_rank = _linear(lora_A, x)  # [B, S, r]
        if gate is None:
            return result + _linear(lora_B, low_rank) * scaling
        # In float32: a gate such as 1/0.7 rounded to bfloat16 would be 0.2% off for every token alike.
        low_rank = (low_rank * (gate * scaling)).to(low_rank.dtype)
        return result + _linear(lora_B, low_rank)

    # Merging happens at unit gates, where the layer is plain LoRA.

    def merge_safe(self, module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        return orig_weight + module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    def merge_unsafe(self, module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> None:
        orig_weight.data += module.get_delta_weight(active_adapter)

    def unmerge(self, module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        return orig_weight - module.get_delta_weight(active_adapter).to(orig_weight.dtype)


def _linear(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Apply a bias-free factor in the dtype of x; through its own call where that does it, for the sake of its hooks."""
    if linear.weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return linear(x)
    return F.linear(x, linear.weight.to(x.dtype))


def adapted_layers(model: nn.Module) -> list[LoraLayer]:
    """Return the LoRA layers of a PEFT model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def add_gates(model: PeftModel, in_activation_dtype: bool = False) -> LoopState:
    """Make every LoRA layer of the active adapter multiply its update by the running loop's gate; unit gates at first.

    Consumes no randomness and changes no weight.

    Returns:
        The object that holds the gates.

    Raises:
        NotLoopedError: if the model is not looped.
        ValueError: if the adapter uses a PEFT feature whose gated meaning is not W + g * Delta.
    """
    loop_state = find_looped_model(model).loop_state
    adapter = check_adapter(model)
    for layer in adapted_layers(model):
        layer.lora_variant[adapter] = GatedLora(loop_state, in_activation_dtype)
        layer.cast_input_dtype_enabled = not in_activation_dtype
    return loop_state


def add_unit_gates(model: PeftModel, adapter: str) -> None:
    """Let the inactive `adapter` run as ordinary LoRA, in the same dtype as a gated one, whatever gates that one has."""
    for layer in adapted_layers(model):
        layer.lora_variant[adapter] = GatedLora(LoopState(), in_activation_dtype=not layer.cast_input_dtype_enabled)


def remove_gates(model: PeftModel) -> None:
    """Give PEFT its own LoRA layers back."""
    for layer in adapted_layers(model):
        for adapter, variant in list(layer.lora_variant.items()):
            if isinstance(variant, GatedLora):
                del layer.lora_variant[adapter]
                layer.cast_input_dtype_enabled = True


def has_gates(model: nn.Module) -> bool:
    """Return whether the model's LoRA layers are gated."""
    return any(
        isinstance(variant, GatedLora) for layer in adapted_layers(model) for variant in layer.lora_variant.values()
    )


@contextmanager
def _gated(model: PeftModel) -> Iterator[None]:
    add_gates(model)
    try:
        yield
    finally:
        remove_gates(model)


@contextmanager
def use_gates(
    model: PeftModel, gates: torch.Tensor | Sequence, segments: torch.Tensor | None = None
) -> Iterator[LoopState]:
    """Apply given gates to a PEFT model over a looped model, with or without a trainer.

    They hold in every forward inside the block, and in the backward that follows inside it (with gradient checkpointing
    the backward recomputes under the gates, so it must be inside). Gates may be any real numbers and may require
    gradients. `use_gates(model, one_hot)` activates the adapter in a single loop; all zeros is the frozen model.

    Args:
        model: PEFT model over a looped model.
        gates: [K] or [K, 1] for all examples alike, or [K, N] for N examples.
        segments: [B, S] index (0..N-1) of each token's example, for rows that hold several examples.

    Raises:
        NotLoopedError, ValueError: for a model without loops, an adapter that cannot be gated, or gates of a wrong shape.
    """
    looped = find_looped_model(model)
    gates = as_gate_matrix(gates, looped.config.num_loops)
    with nullcontext() if has_gates(model) else _gated(model), applied_gates(looped.loop_state, gates, segments):
        yield looped.loop_state
