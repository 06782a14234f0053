"""The frozen copy of a pretrained adapter, which TRL's trainers keep under another name as their reference.

TRL makes a plain LoRA adapter of the same configuration and copies the weights that it finds there. What a kind of adapter
has beyond that (a pair of factors for each loop, learned gates) is given to the copy here, before TRL runs it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from loopdropout_trainer.lora.gated import adapted_layers, kind_of
from loopdropout_trainer.looped import UNIT_GATES, GateState, find_looped_model


class UnitGatesView(GateState):
    """The running loop of another `GateState`, at unit gates whatever gates are in force there."""

    batch = UNIT_GATES
    loop = property(lambda self: self.state.loop)

    def __init__(self, state: GateState) -> None:
        self.state = state

    def gate_for(self, hidden_states: torch.Tensor, module: int = 0) -> None:
        return None

    def is_unused(self, module: int) -> bool:
        return False


@contextmanager
def references_like_the_policy(model: Any, rule: Any, shares_gates: bool = False) -> Iterator[None]:
    """Make each adapter that is added to a PEFT model inside the block a copy of the active one; nothing for other models.

    The copy runs at unit gates, or with `shares_gates` under those of the active adapter, which is trained by `rule`.
    """
    if not isinstance(model, PeftModel):
        yield
        return

    def add_adapter(name: str, config: Any, *args: Any, **kwargs: Any) -> None:
        PeftModel.add_adapter(model, name, config, *args, **kwargs)
        source = model.active_adapters[0]
        looped = find_looped_model(model)
        layers = adapted_layers(model)
        kind = kind_of(model, source)
        for layer in layers:
            for factors in (layer.lora_A, layer.lora_B):
                factors[name] = copy.deepcopy(factors[source]).requires_grad_(False)
        for parameters in model.base_model.children():  # a kind's own, by the name of their adapter
            if isinstance(parameters, nn.ParameterDict) and source in parameters:
                parameters[name] = nn.Parameter(parameters[source].detach().clone(), requires_grad=False)
        state = looped.loop_state if shares_gates else UnitGatesView(looped.loop_state)
        shared = kind.prepare(model, name, looped.config.num_loops, seed=0)
        for module, layer in enumerate(layers):
            layer.lora_variant[name] = kind(state, module, rule, in_activation_dtype=True, shared=shared)
            layer.cast_input_dtype_enabled = False

    model.add_adapter = add_adapter
    try:
        yield
    finally:
        del model.add_adapter
