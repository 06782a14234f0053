"""How a LoRA layer uses a gate; one file for each kind of layer that a rule can ask for by its `adapter`."""

# ruff: noqa: F401  (handed on)
from loopdropout_trainer.adapters.compatibility import check_adapter, check_peft_config
from loopdropout_trainer.adapters.gated import (
    ADAPTER_KINDS,
    adapted_layers,
    add_gates,
    gated_layers,
    kind_of,
    merged_update,
    physical_layers,
    remove_gates,
    trained_lora_parameters,
    use_gates,
)
from loopdropout_trainer.adapters.learned import LearnedGatesLora
from loopdropout_trainer.adapters.loading import attach_adapter
from loopdropout_trainer.adapters.lora_dropout import SparseLora
from loopdropout_trainer.adapters.per_loop import PerLoopLora
from loopdropout_trainer.adapters.prepared import PreparedProjections
from loopdropout_trainer.adapters.weight_noise import NoisyLora
