"""Ouro in plain torch, written from its description: stands for code that a hub repository ships beside its weights.

It shares nothing with the package: no cache, no packing, no adapters.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class PlainOuroConfig(PretrainedConfig):
    model_type = "ouro"


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.dim, self.theta = c.num_attention_heads, c.head_dim, c.rope_theta
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(c.hidden_size, self.heads * self.dim, bias=False))
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        split = lambda y: y.view(batch, length, self.heads, self.dim).transpose(1, 2)
        q, k, v = (split(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        half = self.dim // 2
        angles = torch.arange(length)[:, None] * self.theta ** (-2 * torch.arange(half) / self.dim)
        cos, sin = angles.cos(), angles.sin()
        turn = lambda y: torch.cat(
            [y[..., :half] * cos - y[..., half:] * sin, y[..., half:] * cos + y[..., :half] * sin], -1
        )
        scores = turn(q) @ turn(k).transpose(-1, -2) / self.dim**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        for name in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"):
            setattr(self, name, Norm(c.hidden_size, c.rms_norm_eps))

    def forward(self, x):
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x)))
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class Backbone(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.early_exit_gate = nn.Linear(c.hidden_size, 1)


class PlainOuroForCausalLM(PreTrainedModel):
    config_class = PlainOuroConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        x = self.model.embed_tokens(input_ids)
        for _ in range(self.config.total_ut_steps):
            for layer in self.model.layers:
                x = layer(x)
            x = self.model.norm(x)
        return CausalLMOutput(logits=self.lm_head(x))
