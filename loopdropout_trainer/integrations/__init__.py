"""Plugins for other programs, with one module for each program. See docs/integrations.md and docs/serving.md."""


def register_vllm_models() -> None:
    """Register the families with vLLM, which calls this in each of its processes by the entry point `vllm.general_plugins`."""
    from vllm import ModelRegistry

    for architecture in ("OuroForCausalLM", "RavenForCausalLM", "LDSForCausalLM", "NanbeigeForCausalLM"):
        ModelRegistry.register_model(architecture, "loopdropout_trainer.integrations.vllm:LoopedForCausalLM")
