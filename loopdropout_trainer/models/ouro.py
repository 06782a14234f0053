"""Ouro: all decoder layers form the recurrent block. The next loop starts from the normalized state.

    x = embed(ids),   for t = 1..K:  x = norm(layers(x)),   readout of loop t = x_t,   logits = lm_head(x_K)

A layer normalizes before and after each sublayer, inside the residual branch:

    x = x + N2(Attn(N1 x)),   x = x + N4(MLP(N3 x))
"""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import Qwen2Config

from loopdropout_trainer.models.backbone import DecoderBackbone
from loopdropout_trainer.models.layers import DecoderLayer
from loopdropout_trainer.models.looped_modeling import DecoderConfigMixin, DecoderForCausalLM
from loopdropout_trainer.models.passes import LoopInputs


@strict
class OuroConfig(DecoderConfigMixin, Qwen2Config):
    """Configuration of an Ouro model. It has Qwen2's fields and the following. The defaults are Ouro-1.4B's.

    The published field `early_exit_threshold` is stored and not used: every forward pass runs K loops.

    Args:
        total_ut_steps: Recurrence depth K, also named `num_loops`. You can set it on a loaded model.
    """

    model_type = "ouro"
    attribute_map = {"num_loops": "total_ut_steps"}
    attention_bias = False  # Ouro has none
    default_theta = 1_000_000.0

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

    def __post_init__(self, **kwargs):
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        self.check_full_attention()


class OuroDecoderLayer(DecoderLayer):
    """Layer of the recurrent block."""

    norms_outputs = True


class OuroModel(DecoderBackbone):
    """Backbone of Ouro."""

    config_class = OuroConfig
    layer_class = OuroDecoderLayer
    _no_split_modules = ["OuroDecoderLayer"]

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)  # part of the checkpoint, not used
        self.post_init()

    def recurrent_step(self, inputs: LoopInputs) -> Tensor:
        return self.norm(inputs.run(self.layers))


class OuroForCausalLM(DecoderForCausalLM):
    """Ouro with its head."""

    config_class = OuroConfig
    backbone_class = OuroModel
