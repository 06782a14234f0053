"""Configuration of Huginn (`model_type: huginn_raven`): the hub's fields under the hub's names."""

from __future__ import annotations

import math

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin


# What is implemented of fields that would change the architecture.
_IMPLEMENTED = {
    "block_class_name": ("SandwichBlock",),
    "norm_class_name": ("RMSNorm_llama",),
    "mlp_class_name": ("GatedMLP",),
    "nonlin_name": ("SiLU",),
    "injection_type": ("linear",),
    "state_init": ("like-init", "zero"),
    "bias": (False,),
}


@strict
class HuginnConfig(LoopedConfigMixin, PreTrainedConfig):
    """Configuration of a Huginn model; the defaults are those of `tomg-group-umd/huginn-0125`.

    `mean_recurrence` is the recurrence depth K, also readable and settable as `num_loops`, on a loaded model too: in
    training as in evaluation every forward runs exactly K loops. The hub's `sampling_scheme`, `mean_backprop_depth` and
    `test_time_noise` describe how the model was pretrained; they are stored and never acted upon.

    Args:
        state_init: what the first loop starts from: "like-init" (random, see `state_seed`) or "zero".
        state_seed: seed of the random initial states.
        redraw_state: draw other initial states for every training step and example; False: in training the same ones as
            in evaluation, where they depend on `state_seed` and the token's position alone.
        backprop_depth: number of last loops that gradients flow through; None: all of them.
    """

    model_type = "huginn_raven"
    attribute_map = {
        "num_loops": "mean_recurrence",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "block_size",
    }
    keys_to_ignore_at_inference = ["past_key_values"]

    n_embd: int = 5280
    n_heads: int = 55
    n_layers: int | None = None
    block_size: int = 4096
    vocab_size: int = 65536
    padded_vocab_size: int | None = None
    padding_multiple: int = 4096
    tie_embeddings: bool = True
    intermediate_size: int = 17920
    bias: bool = False
    architecture_class_name: str = "RecurrentGPT"
    block_class_name: str = "SandwichBlock"
    norm_class_name: str = "RMSNorm_llama"
    norm_eps: float = 1e-6
    mlp_class_name: str = "GatedMLP"
    nonlin_name: str = "SiLU"
    init_strategy: str = "takase"
    init_orthogonal: bool = False
    state_init: str = "like-init"
    injection_type: str = "linear"
    n_layers_in_prelude: int = 2
    n_layers_in_recurrent_block: int = 4
    n_layers_in_coda: int = 2
    mean_recurrence: int = 32
    sampling_scheme: str = "poisson-lognormal-filling"
    mean_backprop_depth: int = 8
    qk_bias: bool = True
    activation_checkpoint_impl: str = "per-iteration"
    rope_base: int | float = 50_000
    test_time_noise: int | float = 0
    test_time_noise_type: str = "fixed"
    head_dim: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    effective_expected_depth: int | None = None
    init_values: dict | None = None
    tie_word_embeddings: bool | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    state_seed: int = 0
    redraw_state: bool = True
    backprop_depth: int | None = None

    def __post_init__(self, **kwargs):
        layers = self.n_layers_in_prelude + self.n_layers_in_recurrent_block + self.n_layers_in_coda
        depth = (
            self.n_layers_in_prelude + self.n_layers_in_recurrent_block * self.mean_recurrence + self.n_layers_in_coda
        )
        std = math.sqrt(2 / (5 * self.n_embd))
        derived = {
            "n_layers": layers,
            "padded_vocab_size": self.vocab_size,
            "head_dim": self.n_embd // self.n_heads,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_heads,
            "effective_expected_depth": depth,
            "tie_word_embeddings": self.tie_embeddings,
        }
        if self.vocab_size == 65536:  # the published tokenizer, whose ids config.json leaves out
            derived.update(bos_token_id=65504, eos_token_id=65505, pad_token_id=65509)
        for name, value in derived.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.init_values is None:
            self.init_values = {
                "std": std,
                "out_proj": std / math.sqrt(2 * self.effective_expected_depth),
                "embedding": std,
                "embed_scale": math.sqrt(self.n_embd),
            }
        self._check(layers)
        super().__post_init__(**kwargs)

    def _check(self, layers: int) -> None:
        for name, implemented in _IMPLEMENTED.items():
            if getattr(self, name) not in implemented:
                valid = " or ".join(map(repr, implemented))
                raise ValueError(f"`{name}` of a Huginn model must be {valid}; got {getattr(self, name)!r}.")
        same = (
            ("n_layers", layers, "the sum of prelude, recurrent block and coda"),
            ("num_attention_heads", self.n_heads, "`n_heads`"),
            ("num_key_value_heads", self.n_heads, "`n_heads`: Huginn has multi-head attention only"),
            ("head_dim", self.n_embd / self.n_heads, "`n_embd` / `n_heads`"),
            ("tie_word_embeddings", self.tie_embeddings, "`tie_embeddings`"),
        )
        for name, value, meaning in same:
            if getattr(self, name) != value:
                raise ValueError(f"`{name}` must be {value} ({meaning}); got {getattr(self, name)}.")

    def to_diff_dict(self) -> dict:
        """Return what is saved: class and dtype under the names that the published code knows."""
        fields = super().to_diff_dict()
        fields["architectures"] = ["RavenForCausalLM"]
        if fields.get("dtype") is not None:
            fields["torch_dtype"] = fields["dtype"]
        return fields
