"""Families of looped models. Importing this package registers them with transformers' Auto classes."""

# ruff: noqa: F401

from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from loopdropout_trainer.looped import UNSUPPORTED
from loopdropout_trainer.models import hrm_text  # registers itself
from loopdropout_trainer.models.huginn import HuginnConfig, HuginnForCausalLM
from loopdropout_trainer.models.loopus import LoopusConfig, LoopusForCausalLM
from loopdropout_trainer.models.nanbeige import NanbeigeConfig, NanbeigeForCausalLM
from loopdropout_trainer.models.ouro import OuroConfig, OuroForCausalLM


if "dory" in CONFIG_MAPPING:  # of transformers 5.24 and newer
    from loopdropout_trainer.models import dory
else:
    UNSUPPORTED["dory"] = ("Dory", "it needs transformers 5.24 or newer")

for _model in (OuroForCausalLM, HuginnForCausalLM, LoopusForCausalLM, NanbeigeForCausalLM):
    AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
    AutoModel.register(_model.config_class, _model.backbone_class, exist_ok=True)
    AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)
