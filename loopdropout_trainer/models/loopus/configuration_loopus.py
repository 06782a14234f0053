"""Configuration of LoopUS (`model_type: lds`): a Qwen3 configuration with a split into stacks and a number of loops."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, Qwen3Config

from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin


_COMMON_FIELDS = {field.name for field in fields(PreTrainedConfig)}
_QWEN3_FIELDS = [field.name for field in fields(Qwen3Config) if field.init and field.name not in _COMMON_FIELDS]
_SPLIT = ("encoder_layer_indices", "reasoning_layer_indices", "decoder_layer_indices")


@strict
class LoopusConfig(LoopedConfigMixin, Qwen3Config):
    """Configuration of a LoopUS model: the fields of `Qwen3Config`, and those below.

    The hub nests the Qwen3 fields in `base_config_dict`. Here they are the configuration's own fields; `base_config_dict`
    is read if given, and written when the configuration is saved.

    `N` is the recurrence depth K, also readable and settable as `num_loops`, on a loaded model too: every forward runs
    exactly K loops. The hub's `q_threshold`, `q_eval_interval`, `halting_strategy` and `convergence_epsilon` say when the
    published code stops early; they are stored and never acted upon.

    Args:
        encoder_layer_indices, reasoning_layer_indices, decoder_layer_indices: base layers of each stack, a partition of
            0 .. `num_hidden_layers` - 1. Default: the first two, all others, the last.
        backprop_depth: number of last loops that gradients flow through; None: all of them.
    """

    model_type = "lds"
    attribute_map = {"num_loops": "N"}
    base_model_tp_plan = {}
    base_model_pp_plan = {}

    base_config_dict: dict | None = None
    base_model_name_or_path: str | None = None
    encoder_layer_indices: list[int] | None = None
    reasoning_layer_indices: list[int] | None = None
    decoder_layer_indices: list[int] | None = None
    N: int = 6
    q_threshold: float = 0.9
    q_eval_interval: int = 1
    halting_strategy: str = "threshold"
    convergence_epsilon: float = 1e-2
    backprop_depth: int | None = None

    def __post_init__(self, **kwargs):
        if self.base_config_dict is not None:
            nested = dict(self.base_config_dict)
            if nested.get("model_type", "qwen3") != "qwen3":
                raise ValueError(
                    f"LoopUS is implemented over Qwen3; `base_config_dict` is of a {nested['model_type']!r} model."
                )
            base = Qwen3Config(**{key: value for key, value in nested.items() if key != "model_type"})
            for name in _QWEN3_FIELDS:
                if name in nested or name == "rope_parameters":
                    setattr(self, name, getattr(base, name))
        self.tie_word_embeddings = False  # embedding and head are two tensors, whatever the base model had
        last = self.num_hidden_layers - 1
        if all(getattr(self, name) is None for name in _SPLIT):
            self.encoder_layer_indices, self.decoder_layer_indices = list(range(min(2, last - 1))), [last]
            self.reasoning_layer_indices = list(range(min(2, last - 1), last))
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        split = [getattr(self, name) or [] for name in _SPLIT]
        if sorted(sum(split, [])) != list(range(self.num_hidden_layers)) or not split[1]:
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in _SPLIT)} must share the {self.num_hidden_layers} base layers among "
                f"them, with at least one to loop; got {split[0]}, {split[1]}, {split[2]}."
            )
        if self.use_sliding_window or set(self.layer_types) != {"full_attention"}:
            raise ValueError("Only full attention is implemented for LoopUS; set `use_sliding_window` to false.")

    @property
    def num_layer_runs(self) -> int:
        """How often an attention layer runs in a forward pass."""
        return self.num_hidden_layers + (self.num_loops - 1) * len(self.reasoning_layer_indices)

    def nested(self) -> dict[str, Any]:
        """Return `base_config_dict` with the present values."""
        if self.base_config_dict is None:
            base = Qwen3Config(**{name: getattr(self, name) for name in _QWEN3_FIELDS})
            stored = {**base.to_dict(), "model_type": "qwen3"}
        else:
            stored = dict(self.base_config_dict)
        kept_as_stored = ("rope_parameters", "rope_scaling", "rope_theta", "model_type")
        for name in stored:
            if name in _QWEN3_FIELDS and name not in kept_as_stored:
                stored[name] = getattr(self, name)
        return stored

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "base_config_dict": self.nested()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is saved: the hub's form."""
        saved = {**super().to_diff_dict(), "base_config_dict": self.nested()}
        for name in _QWEN3_FIELDS:
            saved.pop(name, None)
        saved["architectures"] = ["LDSForCausalLM"]  # the published class
        return {**saved, "hidden_size": self.hidden_size, "vocab_size": self.vocab_size}
