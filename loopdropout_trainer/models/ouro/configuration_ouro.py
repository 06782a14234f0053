"""Configuration of Ouro (`model_type: ouro`): the hub's fields under the hub's names."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin


@strict
class OuroConfig(LoopedConfigMixin, PreTrainedConfig):
    """Configuration of an Ouro model; the defaults are those of `ByteDance/Ouro-1.4B`.

    `total_ut_steps` is the recurrence depth K, also readable and settable as `num_loops`, on a loaded model too. The
    published code chooses a readout by `early_exit_threshold`; this implementation stores the field and never exits early.
    """

    model_type = "ouro"
    attribute_map = {"num_loops": "total_ut_steps"}
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
    attention_bias = False  # Ouro has none
    default_theta = 1_000_000.0
    served_by = {  # vLLM 0.27 has it no longer; its reader takes the config's class from the base's code
        "vLLM, in releases up to 0.26": "vllm serve {name} --trust-remote-code"
    }

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 65536
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_dropout: float = 0.0
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    total_ut_steps: int = 4
    early_exit_threshold: float | None = 1.0
    backprop_depth: int | None = None

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.use_sliding_window or set(self.layer_types) != {"full_attention"}:
            raise ValueError("Only full attention is implemented for Ouro; set `use_sliding_window` to false.")
        super().__post_init__(**kwargs)

    @property
    def num_layer_runs(self) -> int:
        """How often an attention layer runs in a forward pass."""
        return self.num_loops * self.num_hidden_layers

    def to_diff_dict(self) -> dict:
        """Return what is saved: RoPE and dtype also under the names that readers other than transformers 5 know."""
        fields = super().to_diff_dict()
        rope = self.rope_parameters
        fields["rope_theta"] = rope["rope_theta"]
        fields["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else dict(rope)
        if fields.get("dtype") is not None:
            fields["torch_dtype"] = fields["dtype"]
        return fields
