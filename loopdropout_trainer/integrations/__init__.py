"""Plugins for other programs, with one module for each program. See docs/integrations.md and docs/serving.md."""

VLLM_PLUGIN = "loop_dropout"
"""Name of the plugin for vLLM, which the environment variable `VLLM_PLUGINS` selects."""


def register_vllm_models() -> None:
    """Register the families with vLLM, which calls this in each of its processes by the entry point `vllm.general_plugins`."""
    from vllm import ModelRegistry

    from loopdropout_trainer.models import MODEL_CLASSES

    for architecture in MODEL_CLASSES:
        ModelRegistry.register_model(architecture, "loopdropout_trainer.integrations.vllm:LoopedForCausalLM")
