"""Looped model families, written for transformers 5. Importing this package registers them with the Auto classes."""

# ruff: noqa: F401  (handed on)

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from loopdropout_trainer.models import hrm_text  # registers itself
from loopdropout_trainer.models.huginn import HuginnForCausalLM
from loopdropout_trainer.models.huginn_config import HuginnConfig
from loopdropout_trainer.models.loopus import LoopusConfig, LoopusForCausalLM
from loopdropout_trainer.models.nanbeige import NanbeigeConfig, NanbeigeForCausalLM
from loopdropout_trainer.models.ouro import OuroConfig, OuroForCausalLM


for _model in (OuroForCausalLM, HuginnForCausalLM, LoopusForCausalLM, NanbeigeForCausalLM):
    AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
    AutoModel.register(_model.config_class, _model.backbone_class, exist_ok=True)
    AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)
