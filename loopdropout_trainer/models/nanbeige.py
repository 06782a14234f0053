"""Nanbeige: all decoder layers form the recurrent block; the final norm ends every loop.

    x = embed(ids);   for t = 1..K:  x = norm(layers(x));   readout of loop t = x_t;   logits = lm_head(x_K)

A layer is Llama's, with fewer key and value heads, and heads that together are wider than the hidden state. With
`skip_loop_final_norm` the norm belongs to the readout only: x = layers(x), readout of loop t = norm(x_t).
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.backbone import DecoderBackbone, LoopInputs
from loopdropout_trainer.models.layers import DecoderLayer
from loopdropout_trainer.models.looped_modeling import DecoderConfigMixin, DecoderForCausalLM


# Switches of the published code for what is not implemented here. Every `enable_...` field is one of them too.
_SWITCHES = {
    *("attention_bias", "mlp_bias", "qk_layernorm", "emb_neighbor_num", "emb_split_num", "insert_ngram_layer_idx"),
    *("ngram_vocab_size_ratio", "loop_middle_layers", "loop_share_kv"),
}


@strict
class NanbeigeConfig(DecoderConfigMixin, LlamaConfig):
    """Configuration of a Nanbeige model: Llama's fields, with the defaults of the published class, and those below.

    `num_loops` is the recurrence depth K. A list `loop_loss_weights` means K = its length + 1, whatever `num_loops` says
    in config.json; a depth set later counts, and the list is then no longer saved. The weights themselves belong to
    pretraining: the loss here is the final loop's.

    Args:
        skip_loop_final_norm: carry the state before the final norm from loop to loop.
        backprop_depth: number of last loops that gradients flow through; None: all of them.
    """

    model_type = "nanbeige"
    served_by = {  # each was run: tests/test_hub_elsewhere.py
        "MLX-LM": "mlx_lm.generate --model {name} --prompt 'What is 7 times 8?'",
        "llama.cpp, with its source in the folder `llama.cpp`": (
            "python llama.cpp/convert_hf_to_gguf.py {remote}{name} --outfile model.gguf\nllama-cli -m model.gguf"
        ),
    }

    kv_channels: int | None = None
    num_loops: int = 1
    loop_loss_weights: list[float] | None = None
    skip_loop_final_norm: bool = False
    backprop_depth: int | None = None

    def __post_init__(self, **kwargs):
        self.head_dim = self.head_dim or self.kv_channels
        if self.loop_loss_weights:
            self.num_loops = len(self.loop_loss_weights) + 1
        super().__post_init__(**kwargs)
        for name, value in vars(self).items():
            if value and (name in _SWITCHES or name.startswith("enable_")):
                raise UserError(
                    f"`{name}` of a Nanbeige model must be off: what it switches on is not implemented; got {value!r}."
                )
        if self.kv_channels not in (None, self.head_dim):
            raise UserError(f"`kv_channels` must equal `head_dim` = {self.head_dim}; got {self.kv_channels}.")
        if (rope_type := self.rope_parameters["rope_type"]) != "default":
            raise UserError(f"`rope_scaling` of a Nanbeige model must be null; got one of type {rope_type!r}.")

    def validate_architecture(self) -> None:
        """Take heads of any width: Llama's own check wants a hidden size that is a multiple of their number."""

    def hub_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        fields = super().hub_fields(fields)
        if self.loop_loss_weights and self.num_loops != len(self.loop_loss_weights) + 1:
            fields["loop_loss_weights"] = []
        return fields


class NanbeigeDecoderLayer(DecoderLayer):
    """One layer of the recurrent block."""


class NanbeigeModel(DecoderBackbone):
    """The looped backbone."""

    config_class = NanbeigeConfig
    layer_class = NanbeigeDecoderLayer
    _no_split_modules = ["NanbeigeDecoderLayer"]

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__(config)
        self.post_init()

    def recurrent_step(self, inputs: LoopInputs, **layer_kwargs) -> torch.Tensor:
        hidden_states = inputs.run(self.layers, **layer_kwargs)
        return hidden_states if self.config.skip_loop_final_norm else self.norm(hidden_states)

    def readout(self, inputs: LoopInputs, **layer_kwargs) -> torch.Tensor:
        return self.norm(inputs.state) if self.config.skip_loop_final_norm else inputs.state


class NanbeigeForCausalLM(DecoderForCausalLM):
    """Nanbeige with its head. Logits are float32."""

    config_class = NanbeigeConfig
    backbone_class = NanbeigeModel
    float32_logits = True
