"""Ouro over transformers' Llama, written from its description: stands for code that a hub repository ships beside its weights.

It shares nothing with the package: no cache, no packing, no adapters.
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm


class PlainOuroConfig(LlamaConfig):
    model_type = "ouro"


class Layer(LlamaDecoderLayer):
    def __init__(self, config, index):
        super().__init__(config, index)
        self.input_layernorm_2 = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm_2 = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, rotation):
        attended, _ = self.self_attn(self.input_layernorm(x), rotation, None)  # causal without a mask
        x = x + self.input_layernorm_2(attended)
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class Backbone(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)


class PlainOuroForCausalLM(LlamaForCausalLM):
    config_class = PlainOuroConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Backbone(config)

    def forward(self, input_ids, **kwargs):
        x = self.model.embed_tokens(input_ids)
        rotation = self.model.rotary_emb(x, torch.arange(input_ids.shape[1])[None])
        for _ in range(self.config.total_ut_steps):
            for layer in self.model.layers:
                x = layer(x, rotation)
            x = self.model.norm(x)
        return CausalLMOutput(logits=self.lm_head(x))
