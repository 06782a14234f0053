"""IQuest-Coder-Loop, written from its description: two loops over all layers, the second of which also sees the first's keys.

    loop 1:  a = Attn(q, k, v);   loop 2:  a = g Attn(q, k of loop 1, v of loop 1) + (1 - g) Attn(q, k, v; a window back)
    g = sigmoid(q w + b), for each head;   logits = lm_head(norm(state after the last loop))

It stands for a class that belongs to somebody else, and knows nothing of this package.
"""

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.llama import modeling_llama as llama


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


class Attention(llama.LlamaAttention):
    def forward(self, x, rotation, masks, first, gate):
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = llama.apply_rotary_pos_emb(q, k, *rotation)
        attend = lambda k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        if first is None:
            mixed = attend(k, v, masks[0])
        else:
            share = gate(q)
            mixed = share * attend(*first, masks[0]) + (1 - share) * attend(k, v, masks[1])
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), (k, v)


class LoopCoderDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, index):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, index), llama.LlamaMLP(config)
        self.input_layernorm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, loop_idx, rotation, masks, first, gate):
        attended, keys = self.self_attn(self.input_layernorm(x), rotation, masks, first, gate)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), keys


class LoopCoderModel(llama.LlamaPreTrainedModel):
    config_class = LoopCoderConfig

    def __init__(self, config):
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LoopCoderDecoderLayer(config, index) for index in layers)
        self.norm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = llama.LlamaRotaryEmbedding(config)
        self.gate_projections = nn.ModuleList(HeadGate(config) for _ in layers)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **kwargs):
        x, place = self.embed_tokens(input_ids), torch.arange(input_ids.shape[1], device=input_ids.device)
        rotation = self.rotary_emb(x, place[None])
        back = (place[:, None] - place)[None, None]  # how far a key lies behind a query
        seen = back >= 0
        if attention_mask is not None:
            seen = (seen & attention_mask[:, None, None].bool()) | (back == 0)  # no row of the softmax is empty
        masks = seen, seen & (back < self.config.loop_window_size)
        first = [None] * len(self.layers)
        for loop in range(self.config.loop_num):
            for index, layer in enumerate(self.layers):
                x, keys = layer(x, loop, rotation, masks, first[index], self.gate_projections[index])
                if loop == 0:
                    first[index] = keys
        return BaseModelOutput(last_hidden_state=self.norm(x))


class LoopCoderForCausalLM(llama.LlamaPreTrainedModel, GenerationMixin):
    config_class = LoopCoderConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LoopCoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids, attention_mask).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)
