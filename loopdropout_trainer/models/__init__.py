"""Families of looped models. Importing this package registers them with transformers' Auto classes."""

# ruff: noqa: F401

import functools
from collections.abc import Callable
from importlib.metadata import version

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from loopdropout_trainer.looped import UNSUPPORTED
from loopdropout_trainer.models import hrm_text  # registers itself
from loopdropout_trainer.models.huginn import HuginnConfig, HuginnForCausalLM
from loopdropout_trainer.models.loopus import LoopusConfig, LoopusForCausalLM
from loopdropout_trainer.models.nanbeige import NanbeigeConfig, NanbeigeForCausalLM
from loopdropout_trainer.models.ouro import OuroConfig, OuroForCausalLM
from loopdropout_trainer.models.parcae import ParcaeConfig, ParcaeForCausalLM


try:
    from loopdropout_trainer.models import dory
except (
    ImportError,
    AttributeError,
    TypeError,
) as error:  # an older transformers, or a newer one that moved a private name
    _reason = f"{version('transformers')} is installed: {str(error).partition(' (')[0]}"
    UNSUPPORTED["dory"] = ("Dory", f"it needs the interface of transformers 5.24, but {_reason}")

MODEL_CLASSES = {
    "OuroForCausalLM": OuroForCausalLM,
    "RavenForCausalLM": HuginnForCausalLM,
    "LDSForCausalLM": LoopusForCausalLM,
    "NanbeigeForCausalLM": NanbeigeForCausalLM,
    "ParcaeForCausalLM": ParcaeForCausalLM,
}
"""Native classes by their names in `config.json`, which are the published ones."""

for _model in MODEL_CLASSES.values():
    AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
    AutoModel.register(_model.config_class, _model.backbone_class, exist_ok=True)
    AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)


def _add_model_type(read: Callable) -> classmethod:
    @functools.wraps(read)
    def get_config_dict(cls, *args, **kwargs):
        fields, rest = read(cls, *args, **kwargs)
        if fields.get("_class_name") == ParcaeConfig.__name__:  # AutoConfig needs a `model_type`
            fields.setdefault("model_type", ParcaeConfig.model_type)
        return fields, rest

    return classmethod(get_config_dict)


PreTrainedConfig.get_config_dict = _add_model_type(PreTrainedConfig.get_config_dict.__func__)
