"""Learned gates: K trainable scalars gamma_t that multiply the drawn gates, g_t = gamma_t b_t / q_t.

The adapter stores them as `lora_loop_gates` [K]. PEFT ignores this entry, so load the adapter with `load_adapter`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.lora.gated import GatedLora, adapted_layers


_NAME = "lora_loop_gates"


class LearnedGatesLora(GatedLora, kind="learned"):
    """A gated layer with learned gates, which all layers share.

    `shared` holds the dictionary of gates and the adapter's name, since sharding replaces the tensor.
    """

    description = "learned gates"
    one_depth = True
    shared: tuple[nn.ParameterDict, str]

    @classmethod
    def prepare(cls, model: PeftModel, adapter: str, num_loops: int, seed: int) -> tuple[nn.ParameterDict, str]:
        tuner = model.base_model  # PEFT saves its parameters, and FSDP gathers them
        if not hasattr(tuner, _NAME):
            setattr(tuner, _NAME, nn.ParameterDict())
        gates = getattr(tuner, _NAME)
        if adapter not in gates:
            layer = next(layer for layer in adapted_layers(model) if adapter in layer.lora_A)
            gates[adapter] = nn.Parameter(torch.ones(num_loops, device=layer.lora_A[adapter].weight.device))
        return gates, adapter

    @classmethod
    def is_on(cls, model: PeftModel, adapter: str) -> bool:
        return adapter in getattr(model.base_model, _NAME, ())

    @classmethod
    def saved_num_loops(cls, weights: Mapping[str, Tensor]) -> int | None:
        return next((len(gates) for name, gates in weights.items() if cls.is_own(name)), None)

    @classmethod
    def is_own(cls, name: str) -> bool:
        return _NAME in name.split(".")

    def _gates(self) -> Tensor:
        """Return the current gates [K]."""
        parameters, adapter = self.shared
        return parameters[adapter]

    def gate_factor(self, x: Tensor) -> Tensor:
        loop = self.gate_state.loop
        gates = self._gates()
        if loop >= len(gates):
            raise UserError(
                f"The adapter learned gates for {len(gates)} loops, but loop {loop + 1} runs. Restore `config.num_loops`."
            )
        return gates[loop].to(x.device)

    @classmethod
    def check_mergeable(cls, weights: Mapping[str, Tensor]) -> None:
        for name, gates in weights.items():
            if cls.is_own(name) and (gates != gates[0]).any():
                rounded = [round(gate, 4) for gate in gates.tolist()]
                raise UserError(
                    f"An adapter with learned gates {rounded} cannot be merged, since each loop scales the update "
                    "differently."
                )

    def merged_update(self, module: LoraLayer, adapter: str) -> Tensor:
        gates = self._gates().detach()
        self.check_mergeable({_NAME: gates})
        return super().merged_update(module, adapter) * gates[0]
