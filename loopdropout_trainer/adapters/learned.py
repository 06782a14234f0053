"""Learned gates: K trainable scalars gamma_t that multiply the drawn gates, g_t = gamma_t b_t / q_t, and stay at inference.

They are saved with the adapter as `lora_loop_gates` [K]. PEFT alone ignores that entry when it loads an adapter; load it
with `load_adapter`.
"""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import nn

from loopdropout_trainer.adapters.gated import GatedLora, adapted_layers
from loopdropout_trainer.looped import find_looped_model


class LearnedGatesLora(GatedLora, kind="learned"):
    """A gated layer of a model whose gates are learned; the gates themselves are the model's, one set for all layers."""

    @classmethod
    def prepare(cls, model: PeftModel, adapter: str, num_loops: int, seed: int) -> None:
        state = find_looped_model(model).loop_state
        if state.learned is not None:
            return
        device = adapted_layers(model)[0].lora_A[adapter].weight.device
        # Here PEFT saves and loads it with the adapter, and FSDP gathers it for the whole forward pass.
        tuner = model.base_model
        tuner.lora_loop_gates = nn.ParameterDict({adapter: nn.Parameter(torch.ones(num_loops, device=device))})
        state.learned = (tuner.lora_loop_gates, adapter)
