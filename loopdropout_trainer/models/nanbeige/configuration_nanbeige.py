"""Configuration of Nanbeige (`model_type: nanbeige`): the hub's fields under the hub's names."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin


# Switches of the published code for what is not implemented here. Every `enable_...` field is one of them too.
_SWITCHES = (
    "attention_bias",
    "emb_neighbor_num",
    "emb_split_num",
    "insert_ngram_layer_idx",
    "loop_middle_layers",
    "loop_share_kv",
    "mlp_bias",
    "ngram_vocab_size_ratio",
    "qk_layernorm",
)


@strict
class NanbeigeConfig(LoopedConfigMixin, PreTrainedConfig):
    """Configuration of a Nanbeige model; the defaults are those of the published class, not of `Nanbeige/Nanbeige4.2-3B`.

    `num_loops` is the recurrence depth K. A list `loop_loss_weights` means K = its length + 1, whatever `num_loops` says
    in config.json; a depth set later counts, and the list is then no longer saved. The weights themselves belong to
    pretraining: the loss here is the final loop's.

    Args:
        skip_loop_final_norm: carry the state before the final norm from loop to loop.
        backprop_depth: number of last loops that gradients flow through; None: all of them.
    """

    model_type = "nanbeige"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    default_theta = 10_000.0
    served_by = {  # each was run: tests/test_hub_elsewhere.py
        "MLX-LM": "mlx_lm.generate --model {name} --prompt 'What is 7 times 8?'",
        "llama.cpp": "python convert_hf_to_gguf.py {name} --outfile model.gguf\nllama-cli -m model.gguf",
    }

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    kv_channels: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int = 1
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    num_loops: int = 1
    loop_loss_weights: list[float] | None = None
    skip_loop_final_norm: bool = False
    backprop_depth: int | None = None

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.kv_channels or self.hidden_size // self.num_attention_heads
        if self.loop_loss_weights:
            self.num_loops = len(self.loop_loss_weights) + 1
        super().__post_init__(**kwargs)
        self._check(kwargs)

    def _check(self, others: dict[str, Any]) -> None:
        fields = {**others, "attention_bias": self.attention_bias}
        for name, value in fields.items():
            if value and (name in _SWITCHES or name.startswith("enable_")):
                raise ValueError(
                    f"`{name}` of a Nanbeige model must be off: what it switches on is not implemented; got {value!r}."
                )
        if self.kv_channels not in (None, self.head_dim):
            raise ValueError(f"`kv_channels` must equal `head_dim` = {self.head_dim}; got {self.kv_channels}.")
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type != "default":
            raise ValueError(f"`rope_scaling` of a Nanbeige model must be null; got one of type {rope_type!r}.")

    @property
    def num_layer_runs(self) -> int:
        """How often an attention layer runs in a forward pass."""
        return self.num_loops * self.num_hidden_layers

    def to_diff_dict(self) -> dict:
        """Return what is saved: RoPE and dtype also under the names that readers other than transformers 5 know."""
        fields = super().to_diff_dict()
        fields["rope_theta"] = self.rope_parameters["rope_theta"]
        fields["rope_scaling"] = None
        if self.loop_loss_weights and self.num_loops != len(self.loop_loss_weights) + 1:
            fields["loop_loss_weights"] = []
        if fields.get("dtype") is not None:
            fields["torch_dtype"] = fields["dtype"]
        return fields
