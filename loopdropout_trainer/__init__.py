"""Fine-tune looped language models with Loop Dropout (Zhu et al. 2026, arXiv 2609.34218).

The model families register with transformers' Auto classes: at once if transformers is imported already, else as it is.
"""

# ruff: noqa: F401  (handed on)

from typing import TYPE_CHECKING

from loopdropout_trainer.startup import import_with_transformers, late_names


if TYPE_CHECKING:  # so that type checkers and editors know the names below
    from loopdropout_trainer.adapters import use_gates
    from loopdropout_trainer.experimental.grpo_config import LoopDropoutGRPOConfig
    from loopdropout_trainer.experimental.grpo_trainer import LoopDropoutGRPOTrainer
    from loopdropout_trainer.looped.described import LoopDescription, check_loops, register_looped
    from loopdropout_trainer.saving.adapter_files import load_adapter
    from loopdropout_trainer.saving.hub import merge_and_save, push_merged_to_hub
    from loopdropout_trainer.training.config import LoopDropoutConfig, LoopDropoutDPOConfig
    from loopdropout_trainer.training.dpo_trainer import LoopDropoutDPOTrainer
    from loopdropout_trainer.training.gate_sampling import GateSamplingMixin
    from loopdropout_trainer.training.preflight import default_peft_config
    from loopdropout_trainer.training.sft_trainer import LoopDropoutSFTTrainer
else:
    __getattr__, __dir__, __all__ = late_names(
        __name__,
        {
            "adapters": "use_gates",
            "experimental.grpo_config": "LoopDropoutGRPOConfig",
            "experimental.grpo_trainer": "LoopDropoutGRPOTrainer",
            "looped.described": "LoopDescription check_loops register_looped",
            "saving.adapter_files": "load_adapter",
            "saving.hub": "merge_and_save push_merged_to_hub",
            "training.config": "LoopDropoutConfig LoopDropoutDPOConfig",
            "training.dpo_trainer": "LoopDropoutDPOTrainer",
            "training.gate_sampling": "GateSamplingMixin",
            "training.preflight": "default_peft_config",
            "training.sft_trainer": "LoopDropoutSFTTrainer",
        },
    )

__version__ = "0.1.0"

import_with_transformers("loopdropout_trainer.models")
