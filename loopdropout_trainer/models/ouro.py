"""Ouro: all decoder layers form the recurrent block, applied K times; the normed state is what the next loop starts from.

    x = embed(ids);   for t = 1..K:  x = norm(layers(x));   readout of loop t = x_t;   logits = lm_head(x_K)

A layer normalises before and after each sublayer, inside the residual branch:

    x = x + N2(Attn(N1 x));   x = x + N4(MLP(N3 x))
"""

from __future__ import annotations

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2Config

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.backbone import DecoderBackbone, LoopInputs
from loopdropout_trainer.models.layers import DecoderLayer, RMSNorm
from loopdropout_trainer.models.looped_modeling import DecoderConfigMixin, DecoderForCausalLM


@strict
class OuroConfig(DecoderConfigMixin, Qwen2Config):
    """Configuration of an Ouro model: Qwen2's fields, and those below; the defaults are those of `ByteDance/Ouro-1.4B`.

    `total_ut_steps` is the recurrence depth K, also readable and settable as `num_loops`, on a loaded model too. The
    published code chooses a readout by `early_exit_threshold`; this implementation stores the field and never exits early.
    """

    model_type = "ouro"
    attribute_map = {"num_loops": "total_ut_steps"}
    attention_bias = False  # Ouro has none
    default_theta = 1_000_000.0
    served_by = {"vLLM 0.11 to 0.26": "vllm serve {name} --trust-remote-code"}  # later ones have it no longer

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 65536
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    total_ut_steps: int = 4
    early_exit_threshold: float | None = 1.0
    backprop_depth: int | None = None

    def __post_init__(self, **kwargs):
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        if self.use_sliding_window or set(self.layer_types) != {"full_attention"}:
            raise UserError("Only full attention is implemented for Ouro; set `use_sliding_window` to false.")


class OuroDecoderLayer(DecoderLayer):
    """One layer of the recurrent block."""

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.input_layernorm_2 = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm_2 = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def layer_forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        attention, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.input_layernorm_2(attention)
        feed_forward = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.post_attention_layernorm_2(feed_forward)


class OuroModel(DecoderBackbone):
    """The looped backbone. The normed state is carried on, and it is the readout."""

    config_class = OuroConfig
    layer_class = OuroDecoderLayer
    _no_split_modules = ["OuroDecoderLayer"]

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)  # kept for the checkpoint; see exit_distribution
        self.post_init()

    def recurrent_step(self, inputs: LoopInputs, **layer_kwargs) -> Tensor:
        return self.norm(inputs.run(self.layers, **layer_kwargs))

    def exit_distribution(self, readouts: tuple[Tensor, ...]) -> Tensor:
        """Return the exit gate's distribution over loops, [B, S, K], for K readouts [B, S, H].

        Nothing in this package exits by it. The published code mixes the loops' losses with it when it is given labels.
        """
        logits = torch.cat([self.early_exit_gate(readout) for readout in readouts], dim=-1)
        stop = torch.sigmoid(logits[..., :-1])  # [B, S, K - 1], once loop t is reached; nothing comes after the last
        reached = F.pad(torch.cumprod(1 - stop, dim=-1), (1, 0), value=1.0)
        return reached * F.pad(stop, (0, 1), value=1.0)


class OuroForCausalLM(DecoderForCausalLM):
    """Ouro with its head."""

    config_class = OuroConfig
    backbone_class = OuroModel
