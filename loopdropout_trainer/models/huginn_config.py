"""Configuration of Huginn and of converted models (`model_type: huginn_raven`): the hub's fields under the hub's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin


# What is implemented of fields that would change the architecture; absent, they mean the first.
_IMPLEMENTED = {
    "block_class_name": ("SandwichBlock",),
    "norm_class_name": ("RMSNorm_llama",),
    "mlp_class_name": ("GatedMLP",),
    "nonlin_name": ("SiLU",),
    "injection_type": ("linear",),
    "state_init": ("like-init", "zero"),
    "bias": (False,),
    "block_layout": (None, "huginn", "llama", "olmo"),
    "initial_state_mode": ("random",),
}
# Of Huginn's tokenizer. Conversions inherit them in their config, where they are ids of ordinary tokens, or of none.
_HUGINN_IDS = {"bos_token_id": 65504, "eos_token_id": 65505, "pad_token_id": 65509}


def drop_huginn_ids(config: PreTrainedConfig | GenerationConfig) -> None:
    """Take Huginn's special ids out of a converted model's configuration, so that the tokenizer's are used."""
    for name, stale in _HUGINN_IDS.items():
        if getattr(config, name, None) == stale:
            setattr(config, name, None)


@strict
class HuginnConfig(LoopedConfigMixin, PreTrainedConfig):
    """Configuration of a Huginn model; the defaults are those of `tomg-group-umd/huginn-0125`.

    Llama and OLMo-2 models that were converted to Huginn's frame have the same `model_type` and other blocks, and no field
    of the hub's says which: `from_pretrained` finds out by the names of the checkpoint's tensors.

    `mean_recurrence` is the recurrence depth K, also readable and settable as `num_loops`, on a loaded model too: in
    training as in evaluation every forward runs exactly K loops. The hub's other fields, which describe how the model was
    pretrained (`sampling_scheme`, `mean_backprop_depth`, `test_time_noise`), are stored and never acted upon.

    Args:
        block_layout: whose blocks these are: "huginn", "llama" or "olmo". None: to be found out; saved models have it.
        state_init: what the first loop starts from: "like-init" (random, see `state_seed`) or "zero".
        state_seed: seed of the random initial states.
        redraw_state: draw other initial states for every training step and example; False: in training the same ones as
            in evaluation, where they depend on `state_seed` and the token's position alone.
        backprop_depth: number of last loops that gradients flow through; None: all of them.
    """

    model_type = "huginn_raven"
    attribute_map = {"num_loops": "mean_recurrence", "hidden_size": "n_embd", "num_hidden_layers": "n_layers"}
    keys_to_ignore_at_inference = ["past_key_values"]
    attention_dropout = 0.0  # it has none

    n_embd: int = 5280
    n_heads: int = 55
    n_layers: int | None = None
    block_size: int = 4096
    vocab_size: int = 65536
    padded_vocab_size: int | None = None
    tie_embeddings: bool = True
    intermediate_size: int = 17920
    norm_eps: float = 1e-6
    state_init: str = "like-init"
    n_layers_in_prelude: int = 2
    n_layers_in_recurrent_block: int = 4
    n_layers_in_coda: int = 2
    mean_recurrence: int = 32
    qk_bias: bool = True
    rope_base: int | float = 50_000
    head_dim: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    effective_expected_depth: int | None = None
    init_values: dict | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: int | None = None
    rope_parameters: dict | None = None
    block_layout: str | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    state_seed: int = 0
    redraw_state: bool = True
    backprop_depth: int | None = None

    def __post_init__(self, **kwargs):
        outside = self.n_layers_in_prelude + self.n_layers_in_coda
        layers = outside + self.n_layers_in_recurrent_block
        std = math.sqrt(2 / (5 * self.n_embd))
        derived = {
            "n_layers": layers,
            "padded_vocab_size": self.vocab_size,
            "head_dim": self.n_embd // self.n_heads,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_heads,
            "effective_expected_depth": outside + self.n_layers_in_recurrent_block * self.mean_recurrence,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.block_size,
        }
        if self.vocab_size == 65536:  # the published tokenizer, whose ids config.json leaves out
            derived.update(_HUGINN_IDS)
        for name, value in derived.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.init_values is None:
            out_proj = std / math.sqrt(2 * self.effective_expected_depth)
            scale = math.sqrt(self.n_embd)
            self.init_values = {"std": std, "out_proj": out_proj, "embedding": std, "embed_scale": scale}
        is_converted = "rope_theta" in kwargs or kwargs.get("rope_scaling") or self.rope_parameters
        if kwargs.get("rope_scaling"):
            kwargs["rope_scaling"] = dict(kwargs["rope_scaling"])  # transformers writes to it
        super().__post_init__(**kwargs)
        if not is_converted:
            self.rope_parameters = None  # Huginn has `rope_base`
        for name, implemented in _IMPLEMENTED.items():
            if (value := getattr(self, name, implemented[0])) not in implemented:
                valid = " or ".join(repr(value) for value in implemented if value is not None)
                raise UserError(f"`{name}` of a Huginn model must be {valid}; got {value!r}.")
        self._check_equal("n_layers", layers, "the sum of prelude, recurrent block and coda")
        self._check_equal("num_attention_heads", self.n_heads, "`n_heads`")
        self._check_equal("tie_word_embeddings", self.tie_embeddings, "`tie_embeddings`")
        if self.block_layout is not None or self.rope_parameters is None:
            self.set_layout()

    def _check_equal(self, name: str, value: float | bool, meaning: str) -> None:
        if getattr(self, name) != value:
            raise UserError(f"`{name}` must be {value} ({meaning}); got {getattr(self, name)}.")

    def set_layout(self, layout: str | None = None) -> None:
        """Settle whose blocks the model has, and check the fields that depend on it.

        Args:
            layout: "huginn", "llama" or "olmo"; None: the field's, or Huginn's if nothing points to a conversion.

        Raises:
            ValueError: if the fields do not fit, or the layout is left open.
        """
        layout = layout or self.block_layout
        if layout is None and self.rope_parameters is not None:
            raise UserError(
                "This configuration is of a Llama or OLMo-2 model converted to Huginn's frame, and does not say of which: "
                "set `block_layout` to 'llama' or 'olmo', or load the model with `from_pretrained`, which finds out."
            )
        self.block_layout = layout = layout or "huginn"
        if layout != "olmo":
            self._check_equal("head_dim", self.n_embd / self.n_heads, "`n_embd` / `n_heads`")
        if layout == "huginn":
            self._check_equal("num_key_value_heads", self.n_heads, "`n_heads`: Huginn has multi-head attention only")
            return
        self._check_equal("qk_bias", False, "converted models have none")
        if "rope_theta" not in (self.rope_parameters or {}):
            raise UserError("`rope_theta` is missing: a converted model has that of the model it was made of.")
        if self.n_heads % (groups := self.num_key_value_heads):
            raise UserError(f"`n_heads` must be a multiple of `num_key_value_heads`; got {self.n_heads}, {groups}.")
        drop_huginn_ids(self)

    def complete(self, weight_names: Callable[[], Collection[str] | None]) -> None:
        if self.block_layout is None:
            endings = {".".join(name.split(".")[-2:]) for name in weight_names() or ()}
            if "norm_1.weight" in endings:  # else there are no blocks of this kind
                huginn = "huginn" if "norm_3.weight" in endings else "llama"
                self.set_layout("olmo" if "q_norm.weight" in endings else huginn)

    @property
    def num_recurrent_layers(self) -> int:
        return self.n_layers_in_recurrent_block

    def hub_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return what the published code knows, under its names, and whose blocks these are."""
        fields["architectures"] = ["RavenForCausalLM"]
        # The published class derives it from `tie_embeddings`, and stops at a second value.
        fields.pop("tie_word_embeddings", None)
        fields["tie_embeddings"] = self.tie_word_embeddings
        rope = dict(fields.pop("rope_parameters", None) or {})
        if rope:
            fields["rope_theta"] = rope.pop("rope_theta")
            if rope.get("rope_type", "default") != "default":
                fields["rope_scaling"] = rope
        else:
            fields.pop("max_position_embeddings", None)
        return fields
