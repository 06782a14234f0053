"""How a LoRA layer uses a gate."""

from loopdropout_trainer.adapters.gated import (
    adapted_layers,
    add_gates,
    add_unit_gates,
    has_gates,
    remove_gates,
    use_gates,
)
from loopdropout_trainer.adapters.refusals import check_adapter, check_peft_config


__all__ = [
    "adapted_layers",
    "add_gates",
    "add_unit_gates",
    "check_adapter",
    "check_peft_config",
    "has_gates",
    "remove_gates",
    "use_gates",
]
