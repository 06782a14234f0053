"""Looped model families, written for transformers 5. Importing this package registers them with the Auto classes and PEFT."""

# ruff: noqa: F401  (handed on)

from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from loopdropout_trainer.models import hrm_text  # registers itself
from loopdropout_trainer.models.huginn import HuginnConfig, HuginnForCausalLM, HuginnModel
from loopdropout_trainer.models.loopus import LoopusConfig, LoopusForCausalLM, LoopusModel
from loopdropout_trainer.models.nanbeige import NanbeigeConfig, NanbeigeForCausalLM, NanbeigeModel
from loopdropout_trainer.models.ouro import OuroConfig, OuroForCausalLM, OuroModel


for _config, _backbone, _causal_lm in (
    (OuroConfig, OuroModel, OuroForCausalLM),
    (HuginnConfig, HuginnModel, HuginnForCausalLM),
    (LoopusConfig, LoopusModel, LoopusForCausalLM),
    (NanbeigeConfig, NanbeigeModel, NanbeigeForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _backbone, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)

_LLAMA = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"

# Where PEFT puts an adapter whose LoraConfig has no `target_modules`: on `recurrent_linears`, as regular expressions.
TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.update(
    ouro=rf".*\.({_LLAMA})",
    nanbeige=rf".*\.({_LLAMA})",
    lds=rf".*\breasoning\.layers\..*\.({_LLAMA})",
    huginn_raven=r"(.*\.)?(adapter|core_block\..*\.(Wqkv|proj|fc))",
    hrm_text=r".*\b[LH]_module\..*_proj",
)
