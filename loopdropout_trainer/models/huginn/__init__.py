# ruff: noqa: F401  (handed on)
from loopdropout_trainer.models.huginn.configuration_huginn import HuginnConfig
from loopdropout_trainer.models.huginn.modeling_huginn import HuginnForCausalLM, HuginnModel
