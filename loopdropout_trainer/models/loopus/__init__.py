from loopdropout_trainer.models.loopus.configuration_loopus import LoopusConfig
from loopdropout_trainer.models.loopus.modeling_loopus import LoopusForCausalLM, LoopusModel


__all__ = ["LoopusConfig", "LoopusForCausalLM", "LoopusModel"]
