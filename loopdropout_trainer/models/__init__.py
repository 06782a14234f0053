"""Looped model families, written for transformers 5. Importing this package registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from loopdropout_trainer.models.ouro import OuroConfig, OuroForCausalLM, OuroModel


AutoConfig.register(OuroConfig.model_type, OuroConfig, exist_ok=True)
AutoModel.register(OuroConfig, OuroModel, exist_ok=True)
AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)

__all__ = ["OuroConfig", "OuroForCausalLM", "OuroModel"]
