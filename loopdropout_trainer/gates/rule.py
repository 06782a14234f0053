"""Gate rules turn stateless draws into the gates of a micro-batch, and a registry holds all rules.

Most rules implement `sample` only. `lora_kind` names another kind of LoRA layer from `loopdropout_trainer.lora`, which reads
the gates, the rule's fields and its `seeds`. `GateRule` documents the other optional attributes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor

from loopdropout_trainer.errors import (
    UserError,
    closest_match,
    hint_at_number,
    hint_at_own_file,
    short_repr,
)
from loopdropout_trainer.gates.streams import Streams
from loopdropout_trainer.renames import renamed_attribute, take_old_attribute
from loopdropout_trainer.usual_names import hint_at_p


@dataclass(frozen=True)
class Draw(Streams):
    """Examples that need gates, with their random numbers.

    Args:
        num_loops: Recurrence depth K.
        num_steps: Total number of optimizer steps, for schedules. Only trainers know it.
        num_modules: Number M of adapted linear maps.
        layers: Index of the physical layer of each adapted map, [M].
        draw_index: Index of this draw among the rule's `draws_per_batch` of a micro-batch.
    """

    num_loops: int
    num_steps: int = 0
    num_modules: int = 1
    layers: Sequence[int] = ()
    draw_index: int = 0

    pass_index = renamed_attribute("pass_index", "draw_index")

    def event_uniforms(self) -> Tensor:
        """Return event uniforms [K, N], which pair the masks of rules with the same seed."""
        return self.uniforms("events", self.num_loops).T

    def module_event_uniforms(self) -> Tensor:
        """Return [K, N, M] event uniforms, which equal `event_uniforms` for module 0."""
        u = self.uniforms("events", self.num_modules * self.num_loops)
        return u.view(-1, self.num_modules, self.num_loops).permute(2, 0, 1)

    def removals(self, p: float | Sequence[float]) -> Tensor:
        """Return the removal events a ~ Bernoulli(p), [K, N] booleans. A larger p removes a superset."""
        return self.event_uniforms() < torch.as_tensor(p, dtype=torch.float64).view(-1, 1)


class GateRule:
    """Base of all rules. A subclass is a dataclass whose fields are the rule's fields in YAML.

    The docstring of a rule has lines `Gate:`, `Mean:`, `Covariance:` (over loops, of one example) and `Paper:`, which
    `python -m loopdropout_trainer.gates` prints. The class attributes below are its options, such as `has_unit_mean = False`.

    Attributes:
        name: Name of the rule in `rule` of a configuration or a recipe. Each rule must set it.
        title: Name of the method in tables. Default: `name` with a capital, and spaces for underscores.
        lora_kind: Kind of the LoRA layers that read the gates, a key of `loopdropout_trainer.lora.ADAPTER_KINDS`. Default:
            `"gated"`, whose update is multiplied by the gate.
        uses_steps: Whether the gates depend on the optimizer step (`draw.step` and `draw.num_steps`). Default: False.
        wants_sensitivity: Whether `observe` gets the derivatives of the loss by the gates after each optimizer step. Default:
            False.
        has_unit_mean: Whether the mean gate of each loop is 1, as inference with gates of 1 needs it. A training warns about
            another measured mean, and about draws that differ if they are repeated. With False, nothing is checked, and
            `sample` is called in training passes only. Default: True.
        mergeable: Whether every loop uses the same update at gates of 1, so that it can be merged. Default: True.
        alpha_factor: Factor on the `lora_alpha` of a new adapter. Default: 1.
        draws_per_batch: Number of draws for each micro-batch, each with a forward and a backward pass, whose mean loss is
            trained. More than one needs `LoRADropoutSFTTrainer`. Default: 1.
        adapter: Old name of `lora_kind`.
        passes: Old name of `draws_per_batch`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    lora_kind: ClassVar[str] = "gated"
    uses_steps: ClassVar[bool] = False
    wants_sensitivity: ClassVar[bool] = False
    has_unit_mean: ClassVar[bool] = True
    mergeable: ClassVar[bool] = True
    alpha_factor: ClassVar[float] = 1.0
    draws_per_batch: ClassVar[int] = 1

    adapter = renamed_attribute("adapter", "lora_kind")
    passes = renamed_attribute("passes", "draws_per_batch")

    @property
    def draws_gates(self) -> bool:
        """Whether a training can have other gates than 1, as it has with all rules but `lora`."""
        return self.name != "lora"

    def check(self, num_loops: int) -> None:
        """Raise UserError if the rule's fields do not fit a model of `num_loops` loops."""
        p = getattr(self, "p", None)
        if isinstance(p, tuple) and len(p) != num_loops:
            raise UserError(
                f"`p` has {len(p)} values, but the model runs {num_loops} loops. Set one value for each loop."
            )

    def sample(self, draw: Draw) -> Tensor:
        """Return float32 gates [K, N], or [K, N, M] for adapted modules. N may be 1 if all examples share the gates."""
        raise NotImplementedError

    def seeds(self, draw: Draw) -> Tensor | None:
        """Return int64 seeds of the random factors that the rule's LoRA layers expand, in the shape that they take."""
        return None

    def observe(self, sensitivity: Tensor) -> None:
        """Update the rule from sum |d loss / d g_t| over all examples and processes of a step, [K]."""

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state as JSON values. Stateless rules return {}."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""


RULES: dict[str, type[GateRule]] = {}


def is_packaged(cls: type[GateRule]) -> bool:
    """Return whether a rule belongs to this package, and not to its user."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def has_same_code(first: type[GateRule], second: type[GateRule]) -> bool:
    """Return whether two classes of rules are one, or surely come from two runs of the same code, as of a notebook cell.

    The compiled functions decide, because the text of a module may have changed since it was imported.
    """
    if first is second:
        return True
    if (first.__bases__, first.__module__, first.__qualname__) != (
        second.__bases__,
        second.__module__,
        second.__qualname__,
    ):
        return False
    try:
        return _describe_class(first) == _describe_class(second)
    except (RuntimeError, ValueError):  # tensors and arrays among the attributes are not compared
        return False


def _describe_class(cls: type[GateRule]) -> dict[str, Any]:
    """Return what decides the behavior of a class: its fields, its functions and its other attributes, by their names."""
    attributes: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        attributes[f"field {field.name}"] = (field.type, field.default, field.default_factory, field.init)
    for name, value in vars(cls).items():
        if inspect.isfunction(value):
            if name != "__repr__":  # which prints only, and is made anew for each class
                attributes[name] = _describe_function(value)
        elif not name.startswith(("__", "_abc_")):  # such as `__doc__`
            attributes[name] = value
    return attributes


def _describe_function(function: FunctionType) -> tuple[Any, ...]:
    """Return what decides the behavior of a function: its code, its defaults and the variables that it reads elsewhere."""
    outer = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":  # of `super()`, which differs between two runs of the same code
            outer[name] = cell.cell_contents
    return function.__code__, function.__defaults__, function.__kwdefaults__, id(function.__globals__), outer


def _check_class(cls: type[GateRule]) -> None:
    """Raise UserError unless the class of a rule is a dataclass with a name of its own, and its options are no fields."""
    name = vars(cls).get("name")
    example = f"`name = {cls.__name__.lower()!r}`"
    if name is None:
        raise UserError(f"The rule {cls.__name__} must have a `name` of its own. Write {example} in the class.")
    if not isinstance(name, str) or not name:
        raise UserError(
            f"The `name` of the rule {cls.__name__} must be a text such as {example}, got {short_repr(name)}."
        )
    if "__dataclass_fields__" not in vars(cls):
        raise UserError(f"The rule {cls.__name__} must be a dataclass. Write `@dataclass` under `@register_rule`.")
    for own in dataclasses.fields(cls):
        if own.name in GateRule.__annotations__:  # else recipes would have it in `rule_args`
            raise UserError(
                f"`{own.name}` of the rule {cls.__name__} must not be a field. Write it without a type, as in {example}."
            )


def register_rule(cls: type[GateRule]) -> type[GateRule]:
    """Add a rule to the registry under its `name`. The class must be a dataclass, whose fields are those of `rule_args`.

    A user's rule replaces a former one of its name, as when a notebook cell runs again, but no rule of this package.
    """
    if not isinstance(cls, type) or not issubclass(cls, GateRule):
        raise UserError(f"`register_rule` takes a subclass of `GateRule`, got {short_repr(cls)}.")
    _check_class(cls)
    if cls.name in RULES and is_packaged(RULES[cls.name]) and not is_packaged(cls):
        raise UserError(
            f"The rule {cls.__name__} must have a `name` of its own, got {cls.name!r}, which is a rule of this package."
        )
    if cls.sample is GateRule.sample:
        raise UserError(
            f"The rule {cls.__name__} must have a method `sample(self, draw)`. Write one that returns the gates [K, N] of the "
            "`draw.num_loops` loops and the `draw.example_ids`."
        )
    take_old_attribute(cls, "adapter", "lora_kind")
    take_old_attribute(cls, "passes", "draws_per_batch")
    cls.title = vars(cls).get("title", cls.name.replace("_", " ").capitalize())
    RULES[cls.name] = cls
    return cls


_USUAL_RULES = {"dropout": "loop_dropout"}
"""Names that people type for a rule, although another rule's name is more similar."""


def make_rule(name: str, **fields: Any) -> GateRule:
    """Return the rule `name` with its fields, or raise UserError with the valid choices.

    A command line and YAML may give p as a list of one number. A rule gets p as a float, or as a tuple with a float for each
    loop if its own field is not declared as one `float`.
    """
    check_rule_name("rule", name)
    if "p" in fields and "p" in RULES[name].__dataclass_fields__:
        fields["p"] = _read_p(RULES[name], fields["p"])
    return make_from_fields(RULES, "rule", name, fields)


def check_rule_name(option: str, name: str) -> None:
    """Raise UserError unless an option that takes the name of a rule has one that is known. Its fields are not checked."""
    if not isinstance(name, str):
        raise not_a_rule(name)
    if name in RULES:
        return
    probability = find_probability(name)
    if probability is not None:
        raise UserError(
            f"`{option}` must be the name of a rule, got {name!r}. A drop probability is the field `p`: set `rule: "
            f"loop_dropout` and `p: {probability}`."
        )
    check_name(RULES, option, name, _hint_at_code())  # the hint reads files


def find_probability(name: Any) -> str | None:
    """Return the drop probability that people write as a name, such as 0.9 of `p_0.9` or `loop_dropout_0.9`, or None."""
    if not isinstance(name, str):
        return None
    match = re.fullmatch(r"(?:p|dropout|loop_?dropout)?[_=:\s-]*(0?\.\d+)", name, re.IGNORECASE)
    return None if match is None else match[1]


def _hint_at_code() -> str:
    """Return the end of a message about an unknown rule: the file that its code is in, or that its code must run first."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        is_imported = f"{__package__}.{path.stem}" in sys.modules
        if not is_imported and "@register_rule" in path.read_text(encoding="utf-8"):
            return (
                f" The rules in `gates/{path.name}` are not known, because `gates/__init__.py` does not import them."
            )
    return hint_at_own_file()


def as_rule(rule: str | GateRule, known: Mapping[str, GateRule] | None = None) -> GateRule:
    """Return the rule of a name, or the given rule. Raise UserError for another value.

    Args:
        rule: Name, or rule.
        known: The present rule and the rules before it by their names, which keep their fields. Another name gives a rule with
            its own default values.
    """
    if isinstance(rule, str):
        if known is not None and rule in known:
            fields = fields_of(known[rule])
            own_p = {} if fields["p"] is None else {"p": fields["p"]}
            return make_rule(rule, **own_p, **(fields["rule_args"] or {}))
        return make_rule(rule)
    if not isinstance(rule, GateRule):
        raise not_a_rule(rule)
    return rule


def not_a_rule(value: Any) -> UserError:
    """Return the error about a value of `rule` that is neither a name nor a rule, such as a function or a class."""
    hint = ""
    if isinstance(value, type) and issubclass(value, GateRule):
        hint = f" Make an instance, `{value.__name__}(...)`."
    elif callable(value):
        hint = " Write the function as the method `sample` of a class with `@register_rule`."
    return UserError(
        "`rule` must be a name, or a rule such as `ExactlyM(m=2)`, which is an instance of `GateRule`, got "
        f"{short_repr(value)}.{hint}"
    )


def change_p(rule: GateRule, p: float | Sequence[float]) -> GateRule:
    """Return a rule that has another drop probability, or raise UserError."""
    check_has_p(rule)
    return dataclasses.replace(rule, p=_read_p(type(rule), p))


def check_has_p(rule: GateRule) -> None:
    """Raise UserError if a rule has no field `p` that could be set."""
    if "p" not in type(rule).__dataclass_fields__:
        raise UserError(f"`p` must not be set, because the rule {rule.name!r} has no such field.")


def _read_p(rule_class: type[GateRule], p: float | Sequence[float]) -> float | tuple[float, ...]:
    """Return p as the rule's own field `p` is declared, a float or a tuple."""
    takes_one = rule_class.__dataclass_fields__["p"].type in (float, "float")
    return as_probability(p) if takes_one else as_probabilities(p)


def fields_of(rule: GateRule) -> dict[str, Any]:
    """Return the fields `rule`, `p` and `rule_args` of a configuration or a recipe that make a rule."""
    values = {own.name: getattr(rule, own.name) for own in dataclasses.fields(rule) if own.init}
    p = values.pop("p", None)
    if isinstance(p, tuple):
        p = list(p)
    return {"rule": rule.name, "p": p, "rule_args": values or None}


def join_fields(name: str, p: Any, rule_args: Any) -> dict[str, Any]:
    """Return the fields of a rule from those of a configuration, of which `p` may be None, or raise UserError."""
    fields = rule_args or {}
    if not isinstance(fields, Mapping):
        raise UserError(f"`rule_args` must be a mapping, got {short_repr(fields)}.")
    if "p" in fields:
        raise UserError("Set the field `p`, not `rule_args.p`.")
    if p is None:
        return dict(fields)
    if name in RULES and "p" not in RULES[name].__dataclass_fields__:
        raise UserError(
            f"`rule: {name}` has no field 'p', got {short_repr(p)}. Leave `p` out, or set it to None, also in "
            "`dataclasses.replace`, which copies the `p` of the former rule."
        )
    return {"p": p, **fields}


def make_from_fields(classes: Mapping[str, type], option: str, name: str, fields: Mapping[str, Any]) -> Any:
    """Return the dataclass of a name with its fields, or raise UserError for an unknown name or field.

    Args:
        classes: Dataclasses by name.
        option: Field of the configuration that holds the name.
        name: Name of a dataclass.
        fields: Values by field name.
    """
    check_name(classes, option, name)
    own_fields = [field for field in dataclasses.fields(classes[name]) if field.init]
    valid = [field.name for field in own_fields]
    for field in fields:
        if field not in valid:
            takes = ", ".join(valid) or "no fields"
            hint = closest_match(field, valid)
            if "p" in valid and (field != "q" or is_packaged(classes[name])):  # an own rule says what its `p` means
                hint = hint_at_p(field) or hint
            raise UserError(f"`{option}: {name}` has no field {field!r}. It takes {takes}.{hint}")
    for field in own_fields:
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if not has_default and field.name not in fields:
            place = "`p`" if field.name == "p" else f"`{option}_args={{'{field.name}': ...}}`"
            raise UserError(
                f"`{option}: {name}` must have a value of its field {field.name!r}, got none. Set {place}."
            )
    return classes[name](**fields)


def check_name(classes: Mapping[str, type], option: str, name: str, hint: str = "") -> None:
    """Raise UserError unless a name is one of the classes.

    Args:
        classes, option, name: As in `make_from_fields`.
        hint: End of the message.
    """
    if name not in classes:
        choices = ", ".join(sorted(classes))
        meant = _USUAL_RULES.get(name, name)
        raise UserError(f"`{option}` must be one of {choices}, got {name!r}.{closest_match(meant, classes)}{hint}")


def check_number(name: str, value: Any, low: float, high: float, kind: type | tuple[type, ...] = (int, float)) -> None:
    """Raise UserError unless a field is a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        noun = "an integer" if kind is int else "a number"
        raise UserError(
            f"`{name}` must be {noun} from {low:g} to {high:g}, got {short_repr(value)}.{hint_at_number(value)}"
        )


def as_probabilities(p: float | Sequence[float], name: str = "p") -> float | tuple[float, ...]:
    """Return p as a float or a tuple of floats. Every value must be in [0, 1)."""
    if hasattr(p, "tolist"):  # of torch or numpy
        p = p.tolist()
    values = p if isinstance(p, (list, tuple)) else [p]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise UserError(f"`{name}` must be a number in [0, 1), got {short_repr(value)}.{hint_at_number(value)}")
    if not values:
        raise UserError(f"`{name}` must be one drop probability or one for each loop, got an empty list.")
    if len(values) == 1:
        return float(values[0])
    return tuple(map(float, values))


def as_probability(p: float | Sequence[float], name: str = "p") -> float:
    """Return p as one float for all loops. It must be one number in [0, 1)."""
    p = as_probabilities(p, name)
    if isinstance(p, tuple):
        raise UserError(f"`{name}` must be one drop probability for all loops with this rule, got {list(p)}.")
    return p
