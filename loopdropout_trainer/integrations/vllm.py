"""Looped models for vLLM: each layer of the recurrent block has one cache of keys and values for each loop.

vLLM's Transformers backend runs the classes of this package. It gives each attention layer one cache, which the loops would
overwrite. `integrations.register_vllm_models` registers the class below for the families of the package.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.transformers import VLLM_ATTN_ATTR, TransformersForCausalLM

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gate_state import GateState
from loopdropout_trainer.models.layers import StaysFloat32


class LoopAttention(nn.Module):
    """vLLM's attention of one layer in all loops.

    Args:
        loops: vLLM's `Attention` of each loop, with its cache.
        gate_state: State of the model, which knows the running loop.
    """

    def __init__(self, loops: list[nn.Module], gate_state: GateState) -> None:
        super().__init__()
        self.loops = nn.ModuleList(loops)
        self.gate_state = gate_state

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the output [tokens, heads * d] of the running loop, for queries, keys and values [tokens, heads * d]."""
        return self.loops[self.gate_state.loop](query, key, value)


class LoopedForCausalLM(TransformersForCausalLM):
    """A looped model of this package in vLLM.

    Args:
        vllm_config: Configuration of the engine.
        prefix: Prefix of the names of the layers.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        if (size := vllm_config.parallel_config.pipeline_parallel_size) > 1:
            raise UserError(f"`pipeline_parallel_size` must be 1, because every loop runs all layers, got {size}.")
        size = vllm_config.parallel_config.tensor_parallel_size
        if size > 1 and not config.base_model_tp_plan:
            raise UserError(f"`tensor_parallel_size` must be 1 for `model_type: {config.model_type}`, got {size}.")
        config.caches_by_loop = True
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def recursive_replace(self) -> None:
        """Replace the linear layers by vLLM's, except for modules that stay in float32 and a head inside of the backbone."""
        kept = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, StaysFloat32) or name.endswith("lm_head")
        }
        for name in kept:
            self.model.set_submodule(name, nn.Identity())
        super().recursive_replace()
        for name, module in kept.items():
            if not name.endswith("lm_head"):  # vLLM has a head of its own
                self.model.set_submodule(name, module)

    def _create_attention_instances(self, prefix: str = "") -> None:
        """Create vLLM's attention of all layers once, and of the layers of the recurrent block for each further loop."""
        looped = {id(module) for layer in self.model.recurrent_layers() for module in layer.modules()}
        modules = [self.get_submodule(name) for name, _ in self.attention_fusers.values()]
        registered = self.compilation_config.static_forward_context  # the layers that get a cache
        super()._create_attention_instances(prefix)
        loops = [[getattr(module, VLLM_ATTN_ATTR)] for module in modules]
        for loop in range(1, self.config.num_loops):
            super()._create_attention_instances(f"{prefix}loop{loop}")
            for module, attentions in zip(modules, loops, strict=True):
                attention = getattr(module, VLLM_ATTN_ATTR)
                if id(module) in looped:
                    attentions.append(attention)
                else:
                    del registered[attention.layer_name]
        for module, attentions in zip(modules, loops, strict=True):
            is_looped = id(module) in looped
            attention = LoopAttention(attentions, self.model.gate_state) if is_looped else attentions[0]
            setattr(module, VLLM_ATTN_ATTR, attention)
