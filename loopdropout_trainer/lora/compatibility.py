"""Which PEFT adapters have a gated meaning: W + g * Delta in the recurrent block and nothing anywhere else."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.lora.variants import MiCALinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import find_looped_model


# Further fields of LoraConfig that change more than the low-rank update, with what goes wrong under a gate.
_REFUSED_FIELDS = {
    "modules_to_save": "it trains copies of base modules, which no gate can switch off",
    "trainable_token_indices": "it trains embeddings, which run outside the loops",
    "target_parameters": "it adapts parameters that are not linear layers",
    "layer_replication": "it copies layers, which a looped model shares instead",
    "lora_bias": "a gate multiplies A x, so that it could not switch the bias of B off",
    "megatron_config": "Megatron's layers are not supported",
    "use_qalora": "it pools the layer's input, which the gated layer does not",
}
_INITS_THAT_KEEP_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica")
_PLAIN_VARIANTS = (MiCALinearVariant,)  # whose forward and merge are plain LoRA's; it only freezes B


def default_peft_config(
    model: PreTrainedModel | None = None, peft_config: PeftConfig | None = None, **fields: Any
) -> PeftConfig:
    """Return the configuration of an adapter on the recurrent block, by default the paper's: rank 16 and alpha 32.

    Args:
        model: Looped model, which names its linear projections. None: PEFT asks the model when it adds the adapter.
        peft_config: Configuration to complete. Without `target_modules`, or with "all-linear", it gets all linear projections
            of the recurrent block, the only ones that gates apply to.
        **fields: Other fields of `LoraConfig`.
    """
    if peft_config is None:
        peft_config = LoraConfig(**{"r": 16, "lora_alpha": 32, "task_type": "CAUSAL_LM", **fields})
    peft_config = copy.copy(peft_config)  # another model may use it, too
    if isinstance(peft_config, LoraConfig) and peft_config.target_modules in (None, "all-linear"):
        names = None if model is None else set(find_looped_model(model).recurrent_linears())
        if (
            names is not None and peft_config.layers_to_transform is not None
        ):  # which PEFT does not read for full names
            names = {name.rpartition(".")[2] for name in names}
        peft_config.target_modules = names
    return peft_config


def check_peft_config(config: PeftConfig) -> None:
    """Raise ValueError if the adapter described by `config` has no gated meaning; one sentence says why."""
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        name = type(config).__name__
        raise UserError(f"Loop Dropout gates LoRA adapters; got a configuration of another kind, {name}.")
    # PEFT marks the fields that give a layer another forward, such as `use_dora`: also those that it adds later.
    variants = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    own_forward = dict.fromkeys(variants, "it gives the layer a forward of its own, which a gate would not multiply")
    for field, reason in {**own_forward, **_REFUSED_FIELDS}.items():
        if getattr(config, field, None):
            raise UserError(f"`{field}` cannot be combined with gated LoRA: {reason}.")
    if config.bias != "none":
        raise UserError(f"`bias` must be 'none': a gate cannot switch biases off; got {config.bias!r}.")
    if config.init_lora_weights not in _INITS_THAT_KEEP_BASE:
        raise UserError(
            f"`init_lora_weights` must be one of {', '.join(map(repr, _INITS_THAT_KEEP_BASE))}, which leave the base "
            f"weights alone: gate 0 is the pretrained model; got {config.init_lora_weights!r}."
        )


def check_variant(variant: LoraVariant | None) -> None:
    """Raise ValueError if a layer's forward by PEFT is more than W x + s B A x, which a gate could scale; None: it is not."""
    if type(variant).__module__.startswith("peft.") and not isinstance(variant, _PLAIN_VARIANTS):
        raise UserError(f"PEFT's {type(variant).__name__} has its own forward, whose gated meaning is not defined.")


def check_layers(model: nn.Module) -> None:
    """Check that every adapter of a PEFT model, active or not, would pass through the gate wherever it is.

    A layer passes if its forward leaves the update to the variant that is put on it. PEFT's LoRA layers do, over linear and
    most quantised weights; what does not is refused whatever it is: another tuner's layer, a quantised layer with a forward
    of its own, a wrapper that trains a copy of a module.

    Raises:
        ValueError: naming the field or module, in one sentence.
    """
    if not isinstance(model, PeftModel):
        raise UserError(f"{type(model).__name__} has no adapter to gate: wrap it with peft.get_peft_model first.")
    for config in model.peft_config.values():
        check_peft_config(config)
    recurrent = set(find_looped_model(model).recurrent_linears())
    for name, module in model.get_base_model().named_modules():
        if not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            continue
        if name not in recurrent:
            raise UserError(
                f"`{name}` is not a linear projection of the recurrent block: leave it out of `target_modules`."
            )
        # PEFT's forward reads `lora_variant` where the update can be replaced.
        reads = inspect.unwrap(type(module).forward).__code__.co_names
        if not isinstance(module, LoraLayer) or "lora_variant" not in reads:
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise UserError(f"`{name}` is a {kind}, whose forward computes the update itself: no gate reaches it.")
        for variant in module.lora_variant.values():
            check_variant(variant)


def check_adapter(model: nn.Module) -> str:
    """Return the name of the one active adapter of a PEFT model if everything adapted can be gated; else raise ValueError."""
    if isinstance(model, PeftModel) and len(model.active_adapters) != 1:
        raise UserError(
            f"Exactly one adapter must be active to be trained or merged (`set_adapter`); got {model.active_adapters}."
        )
    check_layers(model)
    return model.active_adapters[0]
