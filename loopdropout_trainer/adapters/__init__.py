"""How a LoRA layer uses a gate; one file for each kind of layer that a rule can ask for by its `adapter`."""

from loopdropout_trainer.adapters.gated import (
    ADAPTER_KINDS,
    adapted_layers,
    add_gates,
    add_unit_gates,
    has_gates,
    merged_update,
    physical_layers,
    remove_gates,
    sole_trained_factors,
    use_gates,
)
from loopdropout_trainer.adapters.loading import attach_adapter
from loopdropout_trainer.adapters.lora_dropout import SparseLora
from loopdropout_trainer.adapters.prepared import PreparedProjections
from loopdropout_trainer.adapters.refusals import check_adapter, check_peft_config
from loopdropout_trainer.adapters.weight_noise import NoisyLora


__all__ = [
    "ADAPTER_KINDS",
    "NoisyLora",
    "PreparedProjections",
    "SparseLora",
    "adapted_layers",
    "add_gates",
    "add_unit_gates",
    "attach_adapter",
    "check_adapter",
    "check_peft_config",
    "has_gates",
    "merged_update",
    "physical_layers",
    "remove_gates",
    "sole_trained_factors",
    "use_gates",
]
