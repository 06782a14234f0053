"""Gated LoRA layers, with one file for each kind that a rule selects by its `lora_kind`."""

# ruff: noqa: F401  (re-exported)
from loopdropout_trainer.lora.compatibility import (
    check_enabled,
    check_peft_config,
    check_present,
    check_trainable,
    default_peft_config,
    find_active_adapter,
    is_default_target,
    is_enabled,
    parse_peft_config,
)
from loopdropout_trainer.lora.gated import (
    ADAPTER_KINDS,
    GatedLora,
    adapted_layers,
    add_gates,
    check_kind,
    gate_new_layers,
    gated_layers,
    index_layers,
    is_gated_by,
    kind_of,
    merged_update,
    physical_layers,
    remove_gates,
    trained_lora_parameters,
    use_gates,
)
from loopdropout_trainer.lora.learned import LearnedGatesLora
from loopdropout_trainer.lora.loading import attach_adapter, check_saved_depth
from loopdropout_trainer.lora.per_loop import PerLoopLora
from loopdropout_trainer.lora.sparse import SparseLora
from loopdropout_trainer.lora.weight_noise import NoisyLora
