"""A LoRA layer with a gate: y = W x + g[t, b] * (alpha / r) * B A x (Eq. 3), one g for all tokens of an example.

The gate multiplies the r-dimensional activation A x together with the scaling. With unit gates the layer equals PEFT's layer
bit for bit, unless float32 factors are cast to the activation's 16 bits (`in_activation_dtype`). Only this folder uses PEFT's
private interface `LoraVariant`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import logging

from loopdropout_trainer.blocks import as_block
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gate_state import GateState, applied_gates
from loopdropout_trainer.gate_texts import parse_gates
from loopdropout_trainer.gate_values import as_gate_matrix, check_token_examples
from loopdropout_trainer.looped import attach_looped_model, find_looped_model
from loopdropout_trainer.lora.compatibility import check_layers, check_variant, find_active_adapter
from loopdropout_trainer.lora.undrawn import warn_in_backward


logger = logging.get_logger(__name__)


@dataclass(eq=False)
class GatedLora(LoraVariant):
    """PEFT variant of one LoRA layer that multiplies its update by the running loop's gate.

    A subclass is another kind of layer (`class Kind(GatedLora, kind="name")`), which rules select by `lora_kind = "name"`. It
    overrides the gate or the use of A and B. A kind with additional parameters also implements `prepare`, `is_on`,
    `saved_num_loops`, `is_own` and `check_mergeable`.

    Class attributes:
        description: Name of the kind's parameters in messages.
        one_depth: Whether the parameters fit one recurrence depth K only.

    Args:
        gate_state: Gates of the looped model.
        module: Index of the layer among the adapted layers.
        rule: Training rule, whose fields the kind reads. None outside of training.
        in_activation_dtype: Whether to cast float32 factors to the dtype of the layer's output, as the paper does. PEFT
            computes in the factors' dtype. Both agree under autocast.
        shared: Return value of `prepare`.
        replaced: PEFT's variant that this variant replaces.
    """

    description = "a shared adapter"
    one_depth = False

    gate_state: GateState
    module: int
    rule: Any = None
    in_activation_dtype: bool = False
    shared: Any = None
    replaced: LoraVariant | None = None

    def __init_subclass__(cls, kind: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ADAPTER_KINDS[kind] = cls

    @classmethod
    def prepare(cls, model: PeftModel, adapter: str, num_loops: int, seed: int) -> Any:
        """Add the kind's missing parameters to the model without the global random state, and return the shared state."""

    @classmethod
    def adds_parameters(cls) -> bool:
        """Return whether an adapter of the kind has other parameters than A and B, which are those of plain LoRA."""
        return cls.prepare.__func__ is not GatedLora.prepare.__func__

    @classmethod
    def is_on(cls, model: PeftModel, adapter: str) -> bool:
        """Return whether the adapter has parameters of this kind."""
        return False

    @classmethod
    def saved_num_loops(cls, weights: Mapping[str, Tensor]) -> int | None:
        """Return the depth of this kind's saved parameters, or None without such parameters."""
        return None

    @classmethod
    def is_own(cls, name: str) -> bool:
        """Return whether a saved parameter is of this kind and neither A nor B."""
        return False

    @classmethod
    def check_mergeable(cls, weights: Mapping[str, Tensor]) -> None:
        """Raise UserError if the kind's own parameters among the weights of an adapter make the loops' updates differ."""

    def forward(self, module: LoraLayer, active_adapter: str, x: Tensor, result: Tensor, **kwargs) -> Tensor:
        """Return `result` [B, S, out] plus the gated update of `x` [B, S, in]."""
        # Three ways to the same sum. If no token has an active gate here, the update is left out. Unit gates run PEFT's
        # operations in PEFT's order, so that they round as PEFT does. Only the last way multiplies by a gate.
        self.gate_state.check_drawn(module)
        if self.gate_state.is_unused(self.module):
            return self._unused(module, active_adapter, x, result)
        scaling = module.scaling[active_adapter]  # alpha / r
        x = self._cast(module.lora_dropout[active_adapter](x), result)
        gate = self.gate_state.gate_for(x, self.module, self.gate_factor(x))  # [N, 1, 1] or [B, S, 1], or None for one
        low_rank = self.down(module, active_adapter, x)  # [B, S, r]
        if self.module == 0 and self._trains_without_rule(module):
            warn_in_backward(self.gate_state, low_rank)
        if gate is None:
            return result + self.up(module, active_adapter, low_rank) * scaling
        # Gate and scaling multiply the r numbers of a token between A and B, and not the many more numbers after B. The
        # package's gates are float32, since rounding one to bfloat16 gives all tokens an error of up to 0.2%, as for 1/0.75.
        low_rank = (low_rank * (gate * scaling)).to(low_rank.dtype)
        return result + self.up(module, active_adapter, low_rank)

    def _trains_without_rule(self, module: LoraLayer) -> bool:
        """Return whether a pass can train the layer at unit gates, although a rule was to draw its gates."""
        state = self.gate_state
        if state.has_warned or state.rule is None or not state.rule.draws_gates:
            return False
        if state.dropout is not None:  # which draws gates only if the base model is in training mode
            return torch.is_grad_enabled() and not state.running.batch.is_set
        return state.is_undrawn(module)

    def gate_factor(self, x: Tensor) -> Tensor | None:
        """Return a further factor of the gate in the running loop, or None."""
        return None

    def down(self, module: LoraLayer, adapter: str, x: Tensor) -> Tensor:
        """Return A x, [B, S, r]."""
        return _linear(module.lora_A[adapter], x)

    def up(self, module: LoraLayer, adapter: str, low_rank: Tensor) -> Tensor:
        """Return B of [B, S, r], [B, S, out]."""
        return _linear(module.lora_B[adapter], low_rank)

    def _cast(self, x: Tensor, result: Tensor) -> Tensor:
        if self.in_activation_dtype:
            return x.to(result.dtype)
        return x

    def _unused(self, module: LoraLayer, adapter: str, x: Tensor, result: Tensor) -> Tensor:
        """Skip the update. With several processes, add 0 times the update of one token unless the loop is frozen.

        DDP raises an error for a parameter without gradient, and ZeRO-3 applies its previous gradient.
        """
        has_other_processes = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not has_other_processes or self.gate_state.running.frozen:
            return result
        token = self._cast(x.flatten(0, -2)[:1], result)  # [1, in]
        return result + 0 * self.up(module, adapter, self.down(module, adapter, token))

    def init(self, module: LoraLayer, adapter_name: str, **kwargs) -> None:
        """Finish the adapter that PEFT has just added to a gated layer."""
        if self.replaced is not None:
            self.replaced.init(module, adapter_name=adapter_name, **kwargs)

    # Merging happens at unit gates, where the layer is plain LoRA.

    def merge_safe(self, module: LoraLayer, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight + self.merged_update(module, active_adapter).to(orig_weight.dtype)

    def merge_unsafe(self, module: LoraLayer, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data += self.merged_update(module, active_adapter)

    def unmerge(self, module: LoraLayer, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight - self.merged_update(module, active_adapter).to(orig_weight.dtype)

    def supports_lora_conversion(self) -> bool:
        if self.one_depth:
            logger.warning_once("An adapter with %s cannot be converted to plain LoRA.", self.description)
        return not self.one_depth

    def merged_update(self, module: LoraLayer, adapter: str) -> Tensor:
        """Return the update [out, in] at unit gates, or raise UserError if it differs between loops."""
        return module.get_delta_weight(adapter)


ADAPTER_KINDS: dict[str, type[GatedLora]] = {"gated": GatedLora}


class GatedVariants(dict[str, LoraVariant]):
    """Gated variants of a layer by adapter, including adapters that PEFT adds later.

    PEFT runs plain LoRA for adapters that are not in `layer.lora_variant`. This dictionary contains every adapter. It replaces
    PEFT's variants and raises UserError for a variant that cannot be gated.
    """

    def __init__(self, gate_state: GateState, module: int, in_activation_dtype: bool) -> None:
        super().__init__()
        self.options = (gate_state, module, None, in_activation_dtype)

    def __contains__(self, adapter: object) -> bool:
        return True

    def __missing__(self, adapter: str) -> GatedLora:
        self[adapter] = None  # plain LoRA, of which `__setitem__` makes a `GatedLora`
        return self[adapter]

    def __setitem__(self, adapter: str, variant: LoraVariant | None) -> None:
        if not isinstance(variant, GatedLora):
            check_variant(variant)
            variant = GatedLora(*self.options, replaced=variant)
        super().__setitem__(adapter, variant)


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """Apply a factor without bias in the dtype of x, through its call (and hooks) if the dtypes agree."""
    if linear.weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return linear(x)
    return F.linear(x, linear.weight.to(x.dtype))


def adapted_layers(model: nn.Module) -> list[LoraLayer]:
    """Return the M LoRA layers of a PEFT model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def merged_update(layer: LoraLayer, adapter: str) -> Tensor:
    """Return the update [out, in] of a layer at unit gates, or raise UserError if it differs between loops."""
    variant = layer.lora_variant.get(adapter)
    if isinstance(variant, GatedLora):
        return variant.merged_update(layer, adapter)
    return layer.get_delta_weight(adapter)


def trained_lora_parameters(model: PeftModel) -> tuple[nn.Parameter, ...] | None:
    """Return the trained A and B, or None if other parameters are trained or the input has dropout."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    are_factors = all(".lora_A." in name or ".lora_B." in name for name in trained)
    if not trained or not are_factors or any(map(_has_input_dropout, adapted_layers(model))):
        return None
    return tuple(trained.values())


def _has_input_dropout(layer: LoraLayer) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in layer.lora_dropout.modules())


def physical_layers(model: nn.Module) -> list[int]:
    """Return the index of the physical layer of each adapted layer, [M]."""
    return index_layers([name for name, module in model.named_modules() if isinstance(module, LoraLayer)])


def index_layers(names: Sequence[str]) -> list[int]:
    """Return the index of the physical layer of each name of a module or of its weight, [M].

    Modules whose names agree up to the first number (`layers.3`) belong to one physical layer.
    """
    prefixes = [re.sub(r"(\.\d+)\..*", r"\1", name) for name in names]
    order = list(dict.fromkeys(prefixes))
    return [order.index(prefix) for prefix in prefixes]


def add_gates(model: PeftModel, in_activation_dtype: bool = False, rule: Any = None, seed: int = 0) -> GateState:
    """Make every LoRA layer multiply its update by the running loop's gate. All gates are one at first.

    This includes adapters that are added to these layers later. The global random state and all weights stay unchanged.

    Args:
        model: PEFT model over a looped model.
        in_activation_dtype: See `GatedLora`.
        rule: Rule that the active adapter is trained with. Its `lora_kind` names the kind of LoRA layer. The other adapters
            keep unit gates. None: gates apply to all adapters, and each adapter keeps its kind.
        seed: Seed of the initial weights that a kind adds.

    Returns:
        The object that holds the gates.

    Raises:
        NotLoopedError: If the model is not looped.
        UserError: If an adapter is merged, uses a PEFT feature without a gated meaning, or does not fit the rule.
    """
    looped = attach_looped_model(model)
    trained = None if rule is None else find_active_adapter(model)
    check_layers(model)
    num_loops = looped.num_loops
    state = looped.gate_state
    if rule is not None and state.dropout is not None:
        raise UserError(
            "`loop_dropout` draws gates on this model already. Call `remove()` of its handle first, or load "
            "the model again. If nothing keeps the handle, call `find_looped_model(model).gate_state.dropout.remove()`, with "
            "`from loopdropout_trainer.looped import find_looped_model`."
        )
    looped.prepare_fused_loss()
    state.is_read = True
    state.rule = rule
    rules = dict.fromkeys(model.peft_config)  # None for all adapters that the rule does not train
    if trained is not None:
        rules[trained] = rule
    kinds = {adapter: kind_of(model, adapter, own_rule) for adapter, own_rule in rules.items()}
    if trained is not None and kinds[trained].one_depth and len(kinds) > 1:
        raise UserError(
            f"`rule` must have a shared adapter if the model has other adapters ({', '.join(kinds)}), got {rule.name!r}."
        )
    make_variant = {}  # by adapter. Only `module` and `replaced` differ between layers.
    for adapter, kind in kinds.items():
        # A trainer gates the adapter that it trains. Others, such as TRL's frozen reference "ref", keep unit gates: they read
        # a `GateState` of their own, in which nobody sets gates.
        is_gated = trained is None or adapter == trained
        make_variant[adapter] = functools.partial(
            kind,
            gate_state=state if is_gated else GateState(),
            rule=rules[adapter],
            in_activation_dtype=in_activation_dtype,
            shared=kind.prepare(model, adapter, num_loops, seed),
        )
    for module, layer in enumerate(adapted_layers(model)):
        _gate_layer(layer, state, module, in_activation_dtype)
        for adapter, variant in layer.lora_variant.items():
            layer.lora_variant[adapter] = make_variant[adapter](module=module, replaced=variant.replaced)
    _guard_parameters(model, kinds.values())
    return state


def _guard_parameters(model: PeftModel, kinds: Iterable[type[GatedLora]]) -> None:
    """Make functions of PEFT that read A and B only raise an error, where they would lose other parameters silently."""
    if any(kind.one_depth for kind in kinds):
        model.base_model.add_weighted_adapter = functools.partial(_combine_adapters, model)
    if not getattr(model.base_model, "refuses_unread", False):
        model.base_model.register_load_state_dict_pre_hook(_refuse_unread)
        model.base_model.refuses_unread = True


def _refuse_unread(tuner: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
    """Raise UserError for parameters that PEFT's `load_adapter` would silently drop."""
    parameters = {prefix + name for name, _ in tuner.named_parameters()}
    for kind in ADAPTER_KINDS.values():
        for name in filter(kind.is_own, state_dict.keys() - parameters):
            raise UserError(
                f"The adapter has {kind.description} (`{name}`), which PEFT's `load_adapter` does not read. Load it on "
                "a new model with `loopdropout_trainer.load_adapter`."
            )


def _combine_adapters(model: PeftModel, adapters: Sequence[str], *args: Any, **kwargs: Any) -> None:
    """Add a weighted adapter as PEFT does, which reads A and B only."""
    for adapter in adapters:
        kind = kind_of(model, adapter)
        if kind.one_depth:
            raise UserError(
                f"`adapters` must have no parameters for each loop, but {adapter!r} has {kind.description}."
            )
    type(model.base_model).add_weighted_adapter(model.base_model, adapters, *args, **kwargs)


def kind_of(model: PeftModel, adapter: str, rule: Any = None) -> type[GatedLora]:
    """Return the kind of an existing adapter, or the kind that a rule selects."""
    present = next((kind for kind in ADAPTER_KINDS.values() if kind.is_on(model, adapter)), GatedLora)
    if rule is None:
        return present
    return check_kind(present, rule)


def check_kind(present: type[GatedLora], rule: Any) -> type[GatedLora]:
    """Return the kind that a rule trains. Raise UserError if an adapter that is there, or saved, has another kind."""
    kind = ADAPTER_KINDS[rule.lora_kind]
    if present not in (GatedLora, kind):
        raise UserError(
            f"The rule {rule.name!r} trains {kind.description}, but the model's adapter has {present.description}. Use the "
            "rule that trained the adapter, or start from another adapter."
        )
    return kind


def _gate_layer(layer: LoraLayer, gate_state: GateState, module: int, in_activation_dtype: bool) -> None:
    """Gate all present and future adapters of a layer. Adapters that are gated already keep their gates."""
    variants = GatedVariants(gate_state, module, in_activation_dtype)
    for adapter in layer.lora_A:
        variants[adapter] = layer.lora_variant.get(adapter)
        variants[adapter].module = module
        variants[adapter].in_activation_dtype = in_activation_dtype
    layer.lora_variant = variants
    layer.cast_input_dtype_enabled = not in_activation_dtype


def remove_gates(model: PeftModel) -> None:
    """Restore PEFT's LoRA layers."""
    for layer in gated_layers(model):
        variants = layer.lora_variant.items()
        layer.lora_variant = {adapter: own.replaced for adapter, own in variants if own.replaced is not None}
        layer.cast_input_dtype_enabled = True
    state = find_looped_model(model).gate_state
    state.is_read = False
    state.rule = None


def is_gated_by(model: PeftModel, rule: Any) -> bool:
    """Return whether a rule gates the active adapters in all of their layers."""
    variants = []
    for layer in adapted_layers(model):
        variants += [layer.lora_variant.get(adapter) for adapter in layer.active_adapters if adapter in layer.lora_A]
    return bool(variants) and all(isinstance(variant, GatedLora) and variant.rule is rule for variant in variants)


def gated_layers(model: nn.Module) -> list[LoraLayer]:
    """Return the gated LoRA layers of a model."""
    return [layer for layer in adapted_layers(model) if isinstance(layer.lora_variant, GatedVariants)]


def gate_new_layers(model: PeftModel) -> None:
    """Gate the layers of adapters that were added to a gated model later, and number all layers again."""
    check_layers(model)
    state = find_looped_model(model).gate_state
    in_activation_dtype = not gated_layers(model)[0].cast_input_dtype_enabled
    for module, layer in enumerate(adapted_layers(model)):
        _gate_layer(layer, state, module, in_activation_dtype)


@as_block
def use_gates(
    model: PeftModel, gates: Tensor | Sequence | str | None, token_examples: Tensor | None = None
) -> Iterator[GateState]:
    """Apply given gates to a PEFT model over a looped model, with or without a trainer.

    For example, this generates with the adapter in the first of K = 4 loops:

        with use_gates(model, [1, 0, 0, 0]):
            model.generate(**inputs)

    Gates may be any real numbers and may require gradients. A one-hot vector activates the adapter in a single loop. Zeros
    give the frozen model. Gates apply to all active adapters, and also to `adapter_names`. On a model that a trainer gated,
    they apply to the adapter that it trains only. The backward pass may run after the block, also if the layers are
    checkpointed. If the whole model is, it raises an error, because it would run again without the gates. After the block, the
    former gates apply again. Layers that it gated stay gated, unless it runs under `torch.no_grad`. Use a model in one thread
    at a time, and end blocks in the reverse order of their beginnings, also those of generators and of `use_depth`.

    Args:
        model: PEFT model over a looped model.
        gates: Gates [K] or [K, 1] for all examples, [K, N] for N examples, or [K, N, M] for M adapted modules. A text
            such as "1-0-0-0" or "loop 1" has the gates [K], as in `loopdropout chat --gates`. None: the current gates stay,
            and the model may have no adapter.
        token_examples: Index (0..N-1) of each token's example, [B, S], for packed examples.

    Raises:
        NotLoopedError: If the model is not looped.
        UserError: If the adapter cannot be gated or is merged, or if the gates have a wrong shape, and at the end of a block
            inside of which a later one still runs.
    """
    looped = attach_looped_model(model)
    if gates is None:
        yield looped.gate_state
        return
    if isinstance(gates, str):
        gates = parse_gates(gates, looped.num_loops) or [1.0] * looped.num_loops
    gates = as_gate_matrix(gates, looped.num_loops, len(adapted_layers(model)))
    check_token_examples(token_examples, gates.shape[1])
    was_gated = bool(gated_layers(model))
    has_gradient = torch.is_grad_enabled()
    if was_gated:
        gate_new_layers(model)
    else:
        add_gates(model)
    state = looped.gate_state
    try:
        with state.reruns.counting(has_gradient), applied_gates(state, gates, token_examples):
            yield state
    finally:
        # With a gradient, a backward pass may run after the block. Gradient checkpointing then runs the layers again under the
        # gates that the pass has stored, and layers without gates would ignore them: a wrong gradient without an error.
        if not was_gated and not has_gradient:
            remove_gates(model)
