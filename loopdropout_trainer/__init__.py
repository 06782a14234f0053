"""Fine-tune looped language models with Loop Dropout.

Importing this package registers the model families with transformers' Auto classes.
"""

from loopdropout_trainer.lazy import import_models_in_time, late_imports


__version__ = "0.1.0"

_HOMES = {
    "GateSamplingMixin": "training.gate_sampling",
    "LoopDescription": "looped.described",
    "LoopDropoutConfig": "training.config",
    "LoopDropoutDPOConfig": "training.config",
    "LoopDropoutDPOTrainer": "training.dpo_trainer",
    "LoopDropoutGRPOConfig": "experimental.grpo_config",
    "LoopDropoutGRPOTrainer": "experimental.grpo_trainer",
    "LoopDropoutSFTTrainer": "training.sft_trainer",
    "check_loops": "looped.described",
    "default_peft_config": "training.preflight",
    "load_adapter": "saving.adapter_files",
    "merge_and_save": "saving.hub",
    "push_merged_to_hub": "saving.hub",
    "register_looped": "looped.described",
    "use_gates": "adapters",
}

__all__ = list(_HOMES)

__getattr__ = late_imports(__name__, _HOMES)
import_models_in_time(__name__)
