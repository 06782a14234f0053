"""Which PEFT adapters have a gated meaning: W + g * Delta in the recurrent block and nothing anywhere else."""

from __future__ import annotations

import math

from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from loopdropout_trainer.looped import find_looped_model


# Fields of LoraConfig that change more than the low-rank update, with what goes wrong under a gate.
_REFUSED_FIELDS = {
    "modules_to_save": "it trains whole modules, which no gate can switch off",
    "trainable_token_indices": "it trains embeddings, which run outside the loops",
    "target_parameters": "it adapts parameters that are not linear layers",
    "layer_replication": "it copies layers, which a looped model shares instead",
    "lora_bias": "the bias could not be merged: the base layers have none",
    "use_dora": "it renormalises the adapted weight, so that a gate would not multiply the update",
    "megatron_config": "Megatron's layers are not supported",
}
_INIT_KEEPS_BASE = (True, False, "gaussian", "orthogonal")


def check_peft_config(config: PeftConfig) -> None:
    """Raise ValueError if the adapter described by `config` has no gated meaning; one sentence says why."""
    if not isinstance(config, LoraConfig):
        raise ValueError(f"Loop Dropout gates LoRA adapters; got a {type(config).__name__} ({config.peft_type}).")
    if not isinstance(config.r, int) or config.r < 1:
        raise ValueError(f"The adapter's rank `r` must be a whole number of at least 1; got {config.r!r}.")
    if not isinstance(config.lora_alpha, (int, float)) or not 0 < config.lora_alpha < math.inf:
        raise ValueError(f"The adapter's `lora_alpha` must be a number above 0; got {config.lora_alpha!r}.")
    if not isinstance(config.lora_dropout, (int, float)) or not 0 <= config.lora_dropout < 1:
        raise ValueError(f"The adapter's `lora_dropout` must lie in [0, 1); got {config.lora_dropout!r}.")
    for field, reason in _REFUSED_FIELDS.items():
        if getattr(config, field, None):
            raise ValueError(f"`{field}` cannot be combined with gated LoRA: {reason}.")
    if config.bias != "none":
        raise ValueError(
            f"`bias` must be 'none' with gated LoRA, since a gate cannot switch biases off; got {config.bias!r}."
        )
    if config.init_lora_weights not in _INIT_KEEPS_BASE:
        raise ValueError(
            f"`init_lora_weights` must be one of {', '.join(map(repr, _INIT_KEEPS_BASE))}, which leave the base weights "
            f"alone: gate 0 is the pretrained model; got {config.init_lora_weights!r}."
        )


def check_adapter(model: nn.Module) -> str:
    """Return the name of the one active adapter of a PEFT model if all of it can be gated.

    Raises:
        ValueError: naming the feature or module that cannot, in one sentence.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(
            f"Gates multiply a LoRA adapter, and {type(model).__name__} has none: wrap it with peft.get_peft_model first."
        )
    if len(model.active_adapters) != 1:
        raise ValueError(
            f"Exactly one adapter must be active with gated LoRA; got {list(model.active_adapters)}. "
            "Merge the others, or choose one with `set_adapter`."
        )
    adapter = model.active_adapters[0]
    check_peft_config(model.peft_config[adapter])

    recurrent = set(find_looped_model(model).recurrent_linears())
    for name, layer in model.get_base_model().named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if name not in recurrent:
            raise ValueError(
                f"The adapted module `{name}` is not a linear projection of the recurrent block, so no loop's gate applies "
                "to it; leave it out of `target_modules`."
            )
        variant = layer.lora_variant.get(adapter)
        if variant is not None and type(variant).__module__.startswith("peft."):
            raise ValueError(
                f"PEFT's {type(variant).__name__} has its own forward, whose gated meaning is not defined."
            )
    return adapter
