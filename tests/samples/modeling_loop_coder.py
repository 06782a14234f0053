"""IQuest-Coder-Loop, written from its description: two loops over all layers, the second of which also sees the first's keys.

    loop 1:  a = Attn(q, k, v);   loop 2:  a = g Attn(q, k of loop 1, v of loop 1) + (1 - g) Attn(q, k, v; a window back)
    g = sigmoid(q w + b), for each head;   logits = lm_head(norm(state after the last loop))

It stands for a class that belongs to somebody else, and knows nothing of this package.
"""

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)


@strict
class LoopCoderConfig(LlamaConfig):
    model_type = "iquestloopcoder"
    loop_num: int = 2
    loop_window_size: int = 64


class HeadGate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_attention_heads, config.head_dim))
        self.bias = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, query):  # [B, h, S, d] -> [B, h, S, 1]
        return torch.sigmoid(torch.einsum("bhsd,hd->bhs", query, self.weight) + self.bias[:, None])[..., None]


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def forward(self, x, rotation, masks, first, gate):
        split = lambda y, heads: y.unflatten(-1, (heads, self.size)).transpose(1, 2)
        q, k = split(self.q_proj(x), self.heads), split(self.k_proj(x), self.kv_heads)
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        v = split(self.v_proj(x), self.kv_heads)
        attend = lambda k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        if first is None:
            mixed = attend(k, v, masks[0])
        else:
            share = gate(q)
            mixed = share * attend(*first, masks[0]) + (1 - share) * attend(k, v, masks[1])
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), (k, v)


class LoopCoderDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, loop_idx, rotation, masks, first, gate):
        attended, keys = self.self_attn(self.input_layernorm(x), rotation, masks, first, gate)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), keys


class LoopCoderPreTrainedModel(PreTrainedModel):
    config: LoopCoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True


class LoopCoderModel(LoopCoderPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LoopCoderDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gate_projections = nn.ModuleList(HeadGate(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **kwargs):
        x, length = self.embed_tokens(input_ids), input_ids.shape[1]
        place = torch.arange(length, device=x.device)
        rotation = self.rotary_emb(x, place[None])
        back = place[:, None] - place  # how far a key lies behind a query
        seen = (
            (back >= 0)[None, None] if attention_mask is None else (back >= 0) & attention_mask[:, None, None].bool()
        )
        seen = seen | (back == 0)  # so that no row of the softmax is empty
        masks = seen, seen & (back < self.config.loop_window_size)
        first = [None] * len(self.layers)
        for loop in range(self.config.loop_num):
            for index, layer in enumerate(self.layers):
                x, keys = layer(x, loop, rotation, masks, first[index], self.gate_projections[index])
                if loop == 0:
                    first[index] = keys
        return BaseModelOutput(last_hidden_state=self.norm(x))


class LoopCoderForCausalLM(LoopCoderPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = LoopCoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids, attention_mask).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)
