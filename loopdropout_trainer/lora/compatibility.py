"""Check that a PEFT adapter can be gated: W + g * Delta in the recurrent block and no update elsewhere."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, PeftType, TaskType
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.lora.variants import MiCALinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from loopdropout_trainer.bounds import ADAPTER_BOUNDS, Bounds
from loopdropout_trainer.errors import UserError, check_type, choose_advice, closest_match, first_line, short_repr
from loopdropout_trainer.looped import check_not_compiled, find_looped_model


# Fields of LoraConfig that change more than the low-rank update, with the conflict with gates.
_REFUSED_FIELDS = {
    "modules_to_save": "it trains copies of base modules, which no gate can switch off",
    "trainable_token_indices": "it trains embeddings, which run outside the loops",
    "target_parameters": "it adapts parameters that are not linear layers",
    "layer_replication": "it copies layers, which looped models share",
    "lora_bias": "a gate multiplies A x and not the bias of B",
    "megatron_config": "Megatron's layers are not supported",
    "use_qalora": "it pools the layer's input, which the gated layer does not",
}
_INITS_THAT_KEEP_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica")
_SAVED_TYPES = {
    "r": int,
    "lora_alpha": int | float,
    "lora_dropout": int | float,
    "use_rslora": bool,
    "target_modules": list[str] | str | None,
    "rank_pattern": dict[str, int] | None,
    "alpha_pattern": dict[str, int | float] | None,
    "layers_to_transform": list[int] | int | None,
    "layers_pattern": list[str] | str | None,
    "base_model_name_or_path": str | None,
    "revision": str | None,
}
"""Types of the fields of an `adapter_config.json` that PEFT uses unchecked."""

_PLAIN_VARIANTS = (MiCALinearVariant,)  # plain LoRA with a frozen B


def default_peft_config(
    model: PreTrainedModel | None = None, peft_config: PeftConfig | None = None, **fields: Any
) -> PeftConfig:
    """Return the configuration of an adapter on the recurrent block, by default the paper's: rank 16 and alpha 32.

    Args:
        model: Looped model. None lets PEFT find the linear projections when it adds the adapter.
        peft_config: Configuration to complete. If `target_modules` is None or "all-linear", it gets the linear projections of
            the recurrent block. PEFT's own "all-linear" also has layers outside of it, which gates do not support. A name such
            as `q_proj` means the projections of the recurrent block. A `task_type` of None becomes "CAUSAL_LM".
        **fields: Other fields of `LoraConfig`, without a `peft_config`.

    Raises:
        UserError: If a field is unknown or has a wrong type or value, or `peft_config` is not a LoraConfig.
    """
    if peft_config is None:
        peft_config = _make_config(fields)
    elif fields:
        raise UserError(f"Set `{next(iter(fields))}` in the given `peft_config`, not next to it.")
    if not isinstance(peft_config, LoraConfig):
        raise UserError(
            f"`peft_config` must be a LoraConfig, such as `LoraConfig(r=16)`, got {short_repr(peft_config)}."
        )
    if model is not None:
        find_looped_model(model)  # raises an error for a trainer
    peft_config = copy.copy(peft_config)  # another model may use it
    _check_values(peft_config)
    targets = peft_config.target_modules
    if peft_config.task_type is None:  # PEFT then saves the module of the model's class, and does not import it
        peft_config.task_type = TaskType.CAUSAL_LM
    if is_default_target(targets):
        peft_config.target_modules = _default_targets(model, peft_config)
    elif model is not None and isinstance(targets, str):
        _check_pattern(model, targets)
    elif model is not None:
        peft_config.target_modules = _targets_inside(model, peft_config)
    return peft_config


def _make_config(fields: Mapping[str, Any]) -> LoraConfig:
    """Return the paper's adapter with other fields, or raise UserError for an unknown one."""
    known = [field.name for field in dataclasses.fields(LoraConfig) if field.init]
    for name in fields:
        if name not in known:
            meant = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}.get(name, name)
            raise UserError(f"`{name}` is not a field of `LoraConfig`.{closest_match(meant, known)}")
    return LoraConfig(**{"r": 16, "lora_alpha": 32, "task_type": "CAUSAL_LM", **fields})


def _check_values(config: LoraConfig) -> None:
    """Raise UserError for a field whose type or value PEFT finds wrong only in its layers."""
    for name, limits in ADAPTER_BOUNDS.items():
        value, bounds = getattr(config, name), Bounds(**limits)
        check_type(f"`{name}`", value, _SAVED_TYPES[name])
        if not bounds.allow(value):
            raise UserError(f"`{name}` must be {bounds}, got {value}.")
    targets = config.target_modules
    if targets is not None and (not isinstance(targets, str | list | set | tuple) or len(targets) == 0):
        raise UserError(
            f"`target_modules` must be a list of names, a pattern or None for all projections of the recurrent block, got "
            f"{short_repr(targets)}."
        )


def is_default_target(targets: Any) -> bool:
    """Return whether `target_modules` names the default, also by PEFT's word or, as on a command line, in a list of it."""
    if targets is None or targets == "all-linear":
        return True
    return isinstance(targets, list | set | tuple) and [*targets] == ["all-linear"]


def _default_targets(model: PreTrainedModel | None, peft_config: LoraConfig) -> set[str] | None:
    """Return the targets of a configuration that names none. None: PEFT's table for the type of the model."""
    if model is None:
        return None
    names = find_looped_model(model).default_targets()
    if peft_config.layers_to_transform is None:
        return set(names)
    return {_last_part(name) for name in names}  # because PEFT ignores `layers_to_transform` for full names


def _check_pattern(model: PreTrainedModel, pattern: str) -> None:
    """Raise UserError unless the names of some modules match a pattern, as PEFT reads `target_modules` that is a text."""
    try:
        found = any(re.fullmatch(pattern, name) for name, _ in model.named_modules())
    except re.error as error:
        raise UserError(f"`target_modules` must be a list of names or a pattern, got {pattern!r} ({error}).") from None
    if not found:
        names = find_looped_model(model).recurrent_linears()
        known = ", ".join(sorted({_last_part(name) for name in names}))
        raise UserError(
            f"The pattern `target_modules` must match full names such as {names[0]!r}, got {pattern!r}. For a list of names "
            f"such as {known}, write `[{pattern!r}]`."
        )


def _targets_inside(model: PreTrainedModel, peft_config: LoraConfig) -> Collection[str]:
    """Return the named targets, with full names instead of a name that other modules than the recurrent block have, too."""
    targets = peft_config.target_modules
    inside = set(find_looped_model(model).recurrent_linears())
    modules = dict(model.named_modules())
    matches = {}
    for target in targets:
        matches[target] = {name for name in modules if f".{name}".endswith(f".{target}")}
    unknown = [target for target, found in matches.items() if not found]  # PEFT ignores them if it knows others
    if unknown:
        known = sorted({_last_part(name) for name in inside})
        hint = closest_match(unknown[0], known)
        if "all-linear" in unknown:
            hint = " `all-linear` must be the only target module."
        raise UserError(
            f"{_name_targets()} must be modules of the model, such as {', '.join(known)}, got {', '.join(unknown)}.{hint}"
        )
    if peft_config.layers_to_transform is not None:  # which PEFT ignores for full names
        return targets
    chosen = set()
    for target, found in matches.items():
        is_outside_too = any(hasattr(modules[name], "in_features") for name in found - inside)
        if found & inside and is_outside_too:
            chosen |= found & inside
        else:
            chosen.add(target)
    return chosen


def _last_part(name: str) -> str:
    """Return `q_proj` of `model.layers.0.self_attn.q_proj`."""
    return name.rpartition(".")[2]


def parse_peft_config(fields: Mapping[str, Any], file: Path) -> LoraConfig:
    """Return the LoRA configuration in an `adapter_config.json`.

    Args:
        fields: JSON object in the file.
        file: Path of the file.

    Raises:
        UserError: If the file does not describe an adapter, or a field has another type.
    """
    if fields.get("peft_type") != PeftType.LORA:
        raise UserError(f"`peft_type` in {file} must be 'LORA', got {short_repr(fields.get('peft_type'))}.")
    for name, hint in _SAVED_TYPES.items():
        if name in fields:
            check_type(f"`{name}` in {file}", fields[name], hint)
    try:
        return PeftConfig.from_pretrained(str(file.parent))
    except (TypeError, ValueError) as error:
        raise UserError(f"{file} does not describe an adapter: {first_line(error)}") from None


def _name_targets() -> str:
    """Return the name of the field that chooses the modules, which is another one in a recipe."""
    return choose_advice("`lora_target_modules`", "`target_modules`")


def check_peft_config(config: PeftConfig) -> None:
    """Raise UserError if gates do not support the adapter described by `config`."""
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        name = type(config).__name__
        raise UserError(f"The adapter's configuration must be a LoraConfig, got {name}.")
    # PEFT marks fields that change the forward of a layer, such as `use_dora`.
    variants = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    own_forward = dict.fromkeys(variants, "it changes the forward of the layer")
    for field, reason in {**own_forward, **_REFUSED_FIELDS}.items():
        if getattr(config, field, None):
            raise UserError(f"`{field}` cannot be combined with gated LoRA: {reason}.")
    if config.bias != "none":
        raise UserError(f"`bias` must be 'none', got {config.bias!r}. Gates do not apply to biases.")
    if config.init_lora_weights not in _INITS_THAT_KEEP_BASE:
        raise UserError(
            f"`init_lora_weights` must be one of {', '.join(map(repr, _INITS_THAT_KEEP_BASE))}, got "
            f"{config.init_lora_weights!r}. Other initializations change the base weights."
        )


def check_variant(variant: LoraVariant | None) -> None:
    """Raise UserError if PEFT's variant computes more than W x + s B A x. None is plain LoRA."""
    if type(variant).__module__.startswith("peft.") and not isinstance(variant, _PLAIN_VARIANTS):
        raise UserError(f"PEFT's {type(variant).__name__} has its own forward, which gates do not support.")


def check_layers(model: nn.Module) -> None:
    """Raise UserError unless gates reach every adapter of a PEFT model, active or not.

    The forward of a layer must call its LoRA variant. PEFT's LoRA layers do so over linear and most quantized weights, unless
    their adapters are merged. Other tuners' layers and quantized layers with their own forward are not supported.
    """
    check_not_compiled(model)
    check_present(model)
    if isinstance(model.get_base_model(), PeftModel):
        raise UserError(
            "`model` must be a PEFT model over a looped model, got one over another PEFT model. Call `get_peft_model` once, "
            "on the base model, and add other adapters by `model.add_adapter`."
        )
    for config in model.peft_config.values():
        check_peft_config(config)
    merged = set()
    recurrent = set(find_looped_model(model).recurrent_linears())
    for name, module in model.get_base_model().named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if name not in recurrent:
            raise UserError(
                f"`{name}` is not a linear projection of the recurrent block. Remove it from {_name_targets()}, or write "
                "`get_peft_model(model, default_peft_config(model, your_config))`, which leaves it out."
            )
        # PEFT's forward reads `lora_variant` if the update can be replaced.
        reads = inspect.unwrap(type(module).forward).__code__.co_names
        if not isinstance(module, LoraLayer) or "lora_variant" not in reads:
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise UserError(
                f"`{name}` is a {kind}, whose forward computes the update without a LoRA variant. Gates do not support it."
            )
        merged.update(module.merged_adapters)
    if merged:
        raise UserError(
            f"Adapters must not be merged into the weights, got {sorted(merged)}. Call `unmerge_adapter` first."
        )


def describe_high_rank(ranks: Collection[int], smallest_dimension: int) -> str:
    """Return a sentence if a rank is above the smallest dimension of the adapted layers, else "". It is allowed."""
    rank = max(ranks, default=0)
    if rank <= smallest_dimension:
        return ""
    return (
        f"Rank {rank:,} is above {smallest_dimension:,}, the smallest dimension of these layers, so their update needs no "
        "such rank. Lower it (`lora_r` in a recipe, `r` in Python)."
    )


def find_smallest_dimension(model: nn.Module) -> int:
    """Return the smallest width of an input or an output of the adapted layers of a model."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return min(min(layer.in_features, layer.out_features) for layer in layers)


def check_present(model: PeftModel) -> None:
    """Raise UserError if the model or its layers have no adapter, without which nothing trains or is saved."""
    if not isinstance(model, PeftModel):
        fix = "Wrap it with peft.get_peft_model first, as in `get_peft_model(model, default_peft_config(model))`."
        if any(isinstance(module, PeftModel) for module in model.modules()):  # in DDP
            fix = "Give the PEFT model that it wraps, which is its `module` in DDP."
        raise UserError(f"{type(model).__name__} has no adapter to gate. {fix}")
    if model.peft_config and not any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise UserError(
            f"The layers of the adapter {next(iter(model.peft_config))!r} must be in the model, but `merge_and_unload` or "
            "`unload` has removed them. Load the model again, and merge with `merge_and_save`, which keeps the layers."
        )


def is_enabled(model: nn.Module) -> bool:
    """Return whether a model has an adapter that is not disabled, as by `disable_adapter`."""
    return any(isinstance(module, LoraLayer) and not module.disable_adapters for module in model.modules())


def check_enabled(model: nn.Module, reason: str) -> None:
    """Raise UserError if a model has no adapter, or a disabled one. `reason`: end of the sentence about the latter."""
    find_looped_model(model)  # raises an error for a trainer
    if is_enabled(model):
        return
    check_present(model)
    raise UserError(
        f"The adapter must not be disabled, because {reason}. Leave the block of `model.disable_adapter()`, or call "
        "`model.enable_adapter_layers()`."
    )


def check_trainable(model: PeftModel) -> None:
    """Raise UserError if the active adapter is disabled or has only frozen weights."""
    adapter = find_active_adapter(model)
    check_enabled(model, "nothing would train")
    weights = [x for name, x in model.named_parameters() if "lora_" in name and adapter in name.split(".")]
    if weights and not any(weight.requires_grad for weight in weights):
        raise UserError(
            f"The adapter {adapter!r} must not be frozen, because nothing would train. Load it with `is_trainable=True`, as "
            "in `load_adapter(model, folder, is_trainable=True)`, or set `inference_mode=False` in the LoraConfig of a new "
            "adapter."
        )


def find_active_adapter(model: nn.Module) -> str:
    """Return the name of the active adapter, or raise UserError if it cannot be gated."""
    if isinstance(model, PeftModel) and len(model.active_adapters) != 1:
        raise UserError(
            f"Exactly one adapter must be active for training or merging (`set_adapter`), got {model.active_adapters}."
        )
    check_layers(model)
    return model.active_adapters[0]
