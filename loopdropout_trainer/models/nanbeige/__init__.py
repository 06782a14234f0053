from loopdropout_trainer.models.nanbeige.configuration_nanbeige import NanbeigeConfig
from loopdropout_trainer.models.nanbeige.modeling_nanbeige import NanbeigeForCausalLM, NanbeigeModel


__all__ = ["NanbeigeConfig", "NanbeigeForCausalLM", "NanbeigeModel"]
