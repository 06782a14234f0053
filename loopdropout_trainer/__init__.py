"""Fine-tune looped language models with Loop Dropout (Zhu et al. 2026, arXiv 2609.34218).

Importing this package registers the model families with transformers' Auto classes.
"""

# ruff: noqa: F401  (handed on)
import loopdropout_trainer.announcement
import loopdropout_trainer.models  # registers the families
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


__version__ = "0.1.0"
