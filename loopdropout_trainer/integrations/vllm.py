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
        # `RecurrentLayer.forward` has set the loop. vLLM's own signature has no place for it.
        return self.loops[self.gate_state.loop](query, key, value)


class LoopedForCausalLM(TransformersForCausalLM):
    """A looped model of this package in vLLM.

    Args:
        vllm_config: Configuration of the engine.
        prefix: Prefix of the names of the layers.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        pipeline_size = vllm_config.parallel_config.pipeline_parallel_size
        if pipeline_size > 1:
            raise UserError(
                f"`pipeline_parallel_size` must be 1, because every loop runs all layers, got {pipeline_size}."
            )
        tensor_size = vllm_config.parallel_config.tensor_parallel_size
        if tensor_size > 1 and not config.base_model_tp_plan:
            raise UserError(
                f"`tensor_parallel_size` must be 1 for `model_type: {config.model_type}`, got {tensor_size}."
            )
        config.caches_by_loop = True  # the backbone raises an error in an engine without this promise
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def recursive_replace(self) -> None:
        """Replace the linear layers by vLLM's, except for modules that stay in float32 and a head inside of the backbone."""
        kept = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, StaysFloat32) or name.endswith("lm_head")
        }
        # vLLM replaces every linear layer that it finds, at any depth of the module tree, by a layer of the engine's dtype. So
        # empty modules take the place of these modules meanwhile.
        for name in kept:
            self.model.set_submodule(name, nn.Identity())
        super().recursive_replace()
        for name, module in kept.items():
            if not name.endswith("lm_head"):  # vLLM has a head of its own
                self.model.set_submodule(name, module)

    def _create_attention_instances(self, prefix: str = "") -> None:
        """Create vLLM's attention of all layers once, and of the layers of the recurrent block for each further loop.

        An instance of vLLM's attention adds itself under its name to a registry, the engine gives one cache of keys and
        values [blocks, ...] to each entry, and a module runs the instance in its attribute `attn`. For layers 0 to 2, of
        which layer 1 is looped, and K = 2:

            registry           layer 0, layer 1, layer 2, loop1.layer 1        4 caches
            `attn` of layer 1  LoopAttention([layer 1, loop1.layer 1])         loop t writes into cache t
        """
        # `attention_fusers` has the name of each layer's attention module, and its fuser.
        modules = [self.get_submodule(name) for name, _ in self.attention_fusers.values()]
        recurrent = set()  # all modules of the layers that run in each loop
        for layer in self.model.recurrent_layers():
            recurrent.update(layer.modules())
        super()._create_attention_instances(prefix)
        loops = {module: [getattr(module, VLLM_ATTN_ATTR)] for module in modules}  # the attention of each loop
        # vLLM creates the instances of all layers together, under names that must be new, and takes the layer's number from
        # the only integer between the dots of a name. So the prefix is "loop1", not "1".
        registered = self.compilation_config.static_forward_context
        for loop in range(1, self.config.num_loops):
            super()._create_attention_instances(f"{prefix}loop{loop}")
            for module in modules:
                attention = getattr(module, VLLM_ATTN_ATTR)  # which the call has just replaced
                if module in recurrent:
                    loops[module].append(attention)
                else:
                    del registered[attention.layer_name]  # the layer runs once, so a second cache would stay empty
        for module, attentions in loops.items():
            attention = attentions[0]
            if module in recurrent:
                attention = LoopAttention(attentions, self.model.gate_state)
            setattr(module, VLLM_ATTN_ATTR, attention)
