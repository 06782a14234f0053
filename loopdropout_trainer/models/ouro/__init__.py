from loopdropout_trainer.models.ouro.configuration_ouro import OuroConfig
from loopdropout_trainer.models.ouro.modeling_ouro import OuroForCausalLM, OuroModel


__all__ = ["OuroConfig", "OuroForCausalLM", "OuroModel"]
