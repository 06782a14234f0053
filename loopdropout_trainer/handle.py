"""Loop Dropout in any training loop: a forward pass of the model draws its gates, as in `nn.Dropout`.

This module imports torch, transformers and PEFT only.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.utils import logging

from loopdropout_trainer.errors import UserError, closest_match, count, short_repr
from loopdropout_trainer.gate_state import GatedBatch, find_examples
from loopdropout_trainer.gate_values import as_gate_matrix
from loopdropout_trainer.gates import Draw, GateRule, change_p, make_rule
from loopdropout_trainer.gates.rule import as_rule, fields_of
from loopdropout_trainer.keywords import explain_unknown
from loopdropout_trainer.looped import attach_looped_model, find_looped_model
from loopdropout_trainer.lora import (
    adapted_layers,
    add_gates,
    check_trainable,
    gate_new_layers,
    gated_layers,
    physical_layers,
)
from loopdropout_trainer.means import find_fault
from loopdropout_trainer.renames import renamed_attribute
from loopdropout_trainer.reruns import is_checkpointed
from loopdropout_trainer.usual_names import hint_at_p


logger = logging.get_logger(__name__)


@explain_unknown
def loop_dropout(
    model: PeftModel,
    p: float | Sequence[float] | None = None,
    rule: str | GateRule = "loop_dropout",
    seed: int | None = None,
) -> LoopDropoutHandle:
    """Draw gates in each training pass of a PEFT model over a looped model, in any training loop.

    It works like `nn.Dropout`. In training mode with gradients, each forward pass draws new gates for its examples. In
    evaluation mode and under `torch.no_grad` all gates are one. Gradient checkpointing recomputes a pass under its own gates.
    An example is a row of the batch. In a row without attention mask, each restart of `position_ids` begins an example.

    A draw depends on the seed, the number of earlier draws and the process. Only `LoopDropoutSFTTrainer` gives the same draws
    for any number of processes and after a resume. Only it has rules with a schedule and passes without padding.

    Args:
        model: PEFT model over a looped model. Call this after PEFT has added the adapter.
        p: Drop probability, one number or one for each loop. Default: the rule's own value, 0.5 for `loop_dropout`.
        rule: Name of a rule, or an instance such as `make_rule("exactly_m", m=2)`, which has its fields already.
        seed: Seed of the draws. Default: `torch.initial_seed()`, which `torch.manual_seed` sets.

    Returns:
        A handle, whose `remove()` restores the model. Its `p` and its `rule` can be set between passes.

    Raises:
        UserError: If the model has gates already, or the adapter or the rule is not supported.
    """
    if isinstance(rule, str) and p is not None:
        rule = make_rule(rule, p=p)
    elif p is not None and isinstance(rule, GateRule):
        raise UserError(
            f"Set the fields of a rule in one place: in `rule`, got {short_repr(rule)} and `p` {short_repr(p)}."
        )
    rule = _as_drawing_rule(rule)
    find_looped_model(model)  # raises an error for a trainer, or a model without loops
    return LoopDropoutHandle(model, rule, seed)


def _as_drawing_rule(rule: Any, known: Mapping[str, GateRule] | None = None) -> GateRule:
    """Return a rule as `as_rule` does. Raise UserError unless it is a rule that only draws gates."""
    rule = as_rule(rule, known)
    needs_trainer = rule.uses_steps or rule.wants_sensitivity or rule.draws_per_batch > 1
    if rule.lora_kind != "gated" or needs_trainer:
        raise UserError(
            f"`rule` must only draw gates, got {rule.name!r}, which needs `LoopDropoutSFTTrainer` and its training steps."
        )
    return rule


def _check_seed(seed: Any) -> int:
    """Return a seed as an integer of Python, or raise UserError."""
    try:
        if not isinstance(seed, bool):
            return operator.index(seed)
    except TypeError:
        pass
    raise UserError(f"`seed` must be an integer, got {short_repr(seed)}.")


class _UnknownSteps:
    """The number of steps of a training loop, which a handle does not know. Arithmetic with it raises UserError."""

    def __init__(self, rule: GateRule) -> None:
        self.rule = rule

    def __repr__(self) -> str:
        return "unknown"

    def _refuse(self, *operands: Any) -> NoReturn:
        name, class_name = self.rule.name, type(self.rule).__name__
        raise UserError(
            f"The rule {name!r} must not use `draw.num_steps` with `loop_dropout`, which does not know how long it trains. "
            f"Write `uses_steps = True` in the class {class_name}, and train it with `LoopDropoutSFTTrainer`."
        )

    __bool__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


_SETTABLE = ("num_draws", "p", "rule", "sample", "seed")
"""Attributes of a handle that a program can set."""


class LoopDropoutHandle:
    """Gates of a model's training passes. Override `sample` to use other gates.

    Attributes:
        rule: Rule that draws the gates. Another one that only draws gates can be set, also by its name. The name of a rule
            that the handle had before keeps its fields.
        p: Drop probability of the rule, or None. Setting it makes a new rule.
        seed: Seed of the draws.
        num_draws: Number of passes that drew gates.
        last_gates: Gates of the last pass that drew gates, or None before the first one.
    """

    last_gates: GatedBatch | None = None
    num_draws = 0

    drawn = renamed_attribute("drawn", "last_gates")

    def __init__(self, model: PeftModel, rule: GateRule, seed: int | None) -> None:
        self.seed = torch.initial_seed() if seed is None else seed
        self._was_described = any("loop_description" in vars(module) for module in model.modules())
        check_trainable(model)
        self.looped = attach_looped_model(model)
        self._known_rules: dict[str, GateRule] = {}
        self._faulty_rules: set[type[GateRule]] = set()
        self.physical_layers: list[int] = []
        self.rule = rule
        layers = adapted_layers(model)
        self._before = _variants(layers)
        casts_inputs = all(layer.cast_input_dtype_enabled for layer in layers)  # PEFT's arithmetic
        self.gate_state = add_gates(model, in_activation_dtype=not casts_inputs, rule=rule)
        self.gate_state.dropout = self
        for layer in layers:
            for variant in layer.lora_variant.values():
                variant.gate_state = self.gate_state  # gates of the adapters that `set_adapter` activates later
        self.model = model
        self._number_layers()
        self._warn_of_fault()
        backbone = self.looped.base_model
        self._hooks = [
            backbone.register_forward_pre_hook(self._draw_gates, with_kwargs=True, prepend=True),
            backbone.register_forward_hook(self._reset_gates, always_call=True),
        ]

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise UserError for a wrong `sample` or `seed`, and for a mistyped name or a removed handle, without effect."""
        if name in _SETTABLE and vars(self).get("_hooks") == []:
            raise UserError(
                f"`{name}` must be set before `remove()`, which has ended the draws of this handle. Call `loop_dropout` on "
                "the model again."
            )
        if name == "seed":
            value = _check_seed(value)
        if name == "sample" and not callable(value):
            raise UserError(
                f"`sample` must be a function of `example_ids` that returns gates, got {short_repr(value)}."
            )
        is_known = name in _SETTABLE or name.startswith("_") or hasattr(self, name)
        hint = "" if is_known else hint_at_p(name) or closest_match(name, _SETTABLE)
        if hint:
            raise UserError(f"`{name}` is not an attribute of the handle.{hint}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        state = f"{count(self.num_draws, 'draw')} so far" if self._hooks else "removed"
        return f"LoopDropoutHandle of {self.rule}, seed {self.seed}, {state}"

    @property
    def rule(self) -> GateRule:
        """Rule that draws the gates. Another one that only draws gates can be set, also by its name."""
        return self._rule

    @rule.setter
    def rule(self, rule: str | GateRule) -> None:
        rule = _as_drawing_rule(rule, self._known_rules)
        rule.check(self.looped.num_loops)
        self._rule = self._known_rules[rule.name] = rule
        if self.physical_layers:  # else `__init__` finds them first
            self._warn_of_fault()

    def _warn_of_fault(self) -> None:
        """Warn of the faults of a user's rule, once for its class, because a training loop may set `p` at each step."""
        kind = type(self.rule)
        if kind in self._faulty_rules:
            return
        fault = find_fault(self.rule, self.looped.num_loops, self.physical_layers, seed=self.seed)
        if fault is None:
            return
        self._faulty_rules.add(kind)
        if _process_index() == 0:
            logger.warning(fault.warning)

    @property
    def p(self) -> float | tuple[float, ...] | None:
        """Drop probability of the rule, or None. Setting it makes a new rule."""
        return getattr(self.rule, "p", None)

    @p.setter
    def p(self, p: float | Sequence[float]) -> None:
        self.rule = change_p(self.rule, p)

    def sample(self, example_ids: Sequence[tuple[int, int]]) -> Tensor:
        """Return gates [K, N] for the N examples of a pass, each of them a (row, segment)."""
        first_row = _process_index() << 32  # processes draw different gates
        draw = Draw(
            seed=self.seed,
            step=self.num_draws,
            example_ids=[(first_row + row, segment) for row, segment in example_ids],
            num_loops=self.looped.num_loops,
            num_steps=_UnknownSteps(self.rule),
            num_modules=len(self.physical_layers),
            layers=self.physical_layers,
        )
        self.rule.check(draw.num_loops)  # the depth may have changed since the rule was set, as by `use_depth`
        return self.rule.sample(draw)

    def remove(self) -> None:
        """Restore the model: PEFT's LoRA layers without gates. A second call has no effect.

        Call it after the backward pass, because gradient checkpointing computes the layers again with the gates, and raises an
        error without them. HRM-Text and Dory keep hooks for that error if their layers are checkpointed.

        For a Dory that a trainer used before, the head stays a `ScaledHead` (same weights and output).
        """
        if not self._hooks:
            return  # another handle may have set gates since
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for layer, variants, casts_inputs in self._before:
            layer.lora_variant = variants
            layer.cast_input_dtype_enabled = casts_inputs
        self.gate_state.dropout = None
        self.gate_state.is_read = bool(gated_layers(self.model))
        self.gate_state.rule = None  # a trainer that had its own sets it again
        if not self._was_described:
            self.looped.detach()

    def _gate_new_layers(self) -> None:
        """Gate the layers of adapters that were added after the handle."""
        gated = gated_layers(self.model)
        new_layers = [layer for layer in adapted_layers(self.model) if layer not in gated]
        self._before.extend(_variants(new_layers))
        gate_new_layers(self.model)
        self._number_layers()

    def _number_layers(self) -> None:
        """Find the physical layer of each adapted layer, and remember the adapters that they belong to."""
        self.physical_layers = physical_layers(self.model)
        self._layers = adapted_layers(self.model)
        self._adapters = dict(self.model.peft_config)

    @torch.compiler.disable
    def _draw_gates(self, backbone: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Draw the gates of a training pass, before it. `_reset_gates` removes them after it."""
        if not backbone.training or self.gate_state.batch.is_set:
            return  # in evaluation, or inside of `use_gates`
        # Layers that are checkpointed run again with the gates that this pass has stored in them. A checkpoint around the
        # whole model would run this hook again instead, in the backward pass, and draw gates that the loss does not belong to.
        if is_checkpointed():
            raise UserError(
                "The whole model must not be checkpointed, because its recomputation would draw other gates. Checkpoint the "
                "layers by `model.gradient_checkpointing_enable()`."
            )
        if not torch.is_grad_enabled():
            return
        if any(layer.merged for layer in self._layers):
            raise UserError(
                "The adapter must not be merged in a training pass, because it would not train. Call `unmerge_adapter`, or "
                "`model.eval()` for inference."
            )
        if self.model.peft_config != self._adapters:
            self._gate_new_layers()
        signature = inspect.signature(backbone.forward)
        named = signature.bind_partial(*args, **kwargs).arguments  # also those without a keyword
        inputs = {name: x for name, x in {**named, **kwargs}.items() if x is not None}
        ids, token_examples = find_examples(inputs)  # N ids, and [B, S] or None
        num_loops, num_modules = self.looped.num_loops, len(self.physical_layers)
        gates = as_gate_matrix(self.sample(ids), num_loops, num_modules, len(ids), "Gates of `sample`")  # [K, N]
        self.last_gates = GatedBatch(gates, token_examples, num_examples=len(ids))
        self.num_draws += 1
        self.gate_state.set(self.last_gates)
        self._record_rule()

    def _record_rule(self) -> None:
        """Keep the rule with the active adapter, whose card and `loop_dropout.json` then name it."""
        own_loop = fields_of(self.rule)
        if "sample" in vars(self) or type(self).sample is not LoopDropoutHandle.sample:
            own_loop = {"rule": "gates of the program"}
        settings = self.looped.trained_with
        if settings.get("own_loop") != own_loop:
            self.looped.trained_with = {**settings, "own_loop": own_loop}

    @torch.compiler.disable
    def _reset_gates(self, backbone: nn.Module, args: tuple, output: Any) -> None:
        # The backward pass needs no gates here: checkpointed layers have stored them. So the next pass, which may be in
        # evaluation mode, finds unit gates.
        if self.gate_state.batch is self.last_gates:
            self.gate_state.reset()


def _variants(layers: Iterable[LoraLayer]) -> list[tuple[LoraLayer, dict, bool]]:
    """Return the attributes of LoRA layers that gates replace."""
    return [(layer, layer.lora_variant, layer.cast_input_dtype_enabled) for layer in layers]


def _process_index() -> int:
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_distributed else 0
