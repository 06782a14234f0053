"""Fine-tune looped language models with Loop Dropout.

Importing this package registers the model families with transformers' Auto classes.
"""

import loopdropout_trainer.announcement
import loopdropout_trainer.models  # noqa: F401  (registers the families)
from loopdropout_trainer.adapters import use_gates as use_gates
from loopdropout_trainer.experimental.grpo_config import LoopDropoutGRPOConfig as LoopDropoutGRPOConfig
from loopdropout_trainer.experimental.grpo_trainer import LoopDropoutGRPOTrainer as LoopDropoutGRPOTrainer
from loopdropout_trainer.looped.described import LoopDescription as LoopDescription
from loopdropout_trainer.looped.described import check_loops as check_loops
from loopdropout_trainer.looped.described import register_looped as register_looped
from loopdropout_trainer.saving.adapter_files import load_adapter as load_adapter
from loopdropout_trainer.saving.hub import merge_and_save as merge_and_save
from loopdropout_trainer.saving.hub import push_merged_to_hub as push_merged_to_hub
from loopdropout_trainer.training.config import LoopDropoutConfig as LoopDropoutConfig
from loopdropout_trainer.training.config import LoopDropoutDPOConfig as LoopDropoutDPOConfig
from loopdropout_trainer.training.dpo_trainer import LoopDropoutDPOTrainer as LoopDropoutDPOTrainer
from loopdropout_trainer.training.gate_sampling import GateSamplingMixin as GateSamplingMixin
from loopdropout_trainer.training.preflight import default_peft_config as default_peft_config
from loopdropout_trainer.training.sft_trainer import LoopDropoutSFTTrainer as LoopDropoutSFTTrainer


__version__ = "0.1.0"
