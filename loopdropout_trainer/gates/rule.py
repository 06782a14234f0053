"""What a rule is: a small object that turns stateless draws into the gates of a micro-batch, and the registry of all rules.

Most rules are only that: a class here with `sample`. A rule that is more plugs into the same registry at several points,
each of them optional:

- `adapter` names the kind of LoRA layer (a file of `loopdropout_trainer.lora`) that applies the rule. The two
  meet in numbers only: the layer gets the gates, the rule's public fields, and the `seeds` from which it expands random
  factors too large to pass around (weight noise, sparse factors).
- `passes`, `wants_sensitivity`, `state_dict`, `alpha_factor` and `mergeable` say what is more than `sample`: see `GateRule`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from loopdropout_trainer.errors import UserError, closest_match, short_repr
from loopdropout_trainer.gates.streams import Streams


@dataclass(frozen=True)
class Draw(Streams):
    """The examples that need gates, and the random numbers that belong to them.

    Attributes, besides those of `Streams`:
        num_loops: recurrence depth K.
        num_steps: total number of optimizer steps, for rules that follow a schedule.
        num_modules: number M of adapted linear maps.
        layers: [M] index of the physical layer that each of them is part of.
        pass_index: of this pass among the rule's `passes` over one micro-batch.
    """

    num_loops: int
    num_steps: int = 0
    num_modules: int = 1
    layers: Sequence[int] = ()
    pass_index: int = 0

    def event_uniforms(self) -> Tensor:
        """Return the [K, N] uniforms behind every rule's events, so that two rules of one seed see paired masks."""
        return self.uniforms("events", self.num_loops).T

    def module_event_uniforms(self) -> Tensor:
        """Return [K, N, M] event uniforms, one for each adapted module; those of module 0 are `event_uniforms`."""
        u = self.uniforms("events", self.num_modules * self.num_loops)
        return u.view(-1, self.num_modules, self.num_loops).permute(2, 0, 1)

    def removals(self, p: float | Sequence[float]) -> Tensor:
        """Return the removal events a ~ Bernoulli(p), [K, N] booleans; with p < p', those of p are among those of p'."""
        return self.event_uniforms() < torch.as_tensor(p, dtype=torch.float64).view(-1, 1)


class GateRule:
    """Base of all rules. A subclass is a dataclass whose fields are the rule's fields in YAML.

    The docstring of a rule has lines `Gate:`, `Mean:`, `Covariance:` (over loops, of one example) and `Paper:`, which
    `python -m loopdropout_trainer.gates` prints.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # name of the method in tables, by default the capitalized name
    adapter: ClassVar[str] = "gated"
    wants_sensitivity: ClassVar[bool] = False  # gates then require gradients, for `observe`
    mergeable: ClassVar[bool] = True  # at unit gates every loop uses the same update

    @property
    def alpha_factor(self) -> float:
        """What the `lora_alpha` of a new adapter is multiplied by; it is then trained, saved and merged so."""
        return 1.0

    @property
    def passes(self) -> int:
        """Forward and backward passes per micro-batch, over which the loss is averaged."""
        return 1

    def check(self, num_loops: int) -> None:
        """Raise ValueError if the rule's fields do not fit a model of `num_loops` loops."""

    def sample(self, draw: Draw) -> Tensor:
        """Return float32 gates [K, N], or [K, N, M] with one for each adapted module; N may be 1 for all examples alike."""
        raise NotImplementedError

    def seeds(self, draw: Draw) -> Tensor | None:
        """Return int64 seeds of the random factors that the rule's adapter expands itself; the adapter says their shape."""
        return None

    def observe(self, sensitivity: Tensor) -> None:
        """Take the step's sum over all examples and processes of |d loss / d g_t|, [K], if `wants_sensitivity`."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of the rule, as JSON-able values; empty for a rule without memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""


RULES: dict[str, type[GateRule]] = {}


def register_rule(cls: type[GateRule]) -> type[GateRule]:
    """Add a rule to the registry under its `name`."""
    cls.title = vars(cls).get("title", cls.name.replace("_", " ").capitalize())
    RULES[cls.name] = cls
    return cls


def make_rule(name: str, **fields: Any) -> GateRule:
    """Build the rule `name` from its fields; raise ValueError, with what is valid, for what it does not take."""
    if name not in RULES:
        choices = ", ".join(sorted(RULES))
        raise UserError(f"`rule` must be one of {choices}, got {name!r}.{closest_match(name, RULES)}")
    return build(RULES[name], fields, f"The rule {name!r}")


def build(cls: type, fields: Mapping[str, Any], name: str, place: str = "") -> Any:
    """Return a dataclass made of these fields; raise ValueError for one that it does not take.

    Args:
        name: of the dataclass, as the sentence begins with; place: where its fields stand, as it goes on.
    """
    valid = [field.name for field in dataclasses.fields(cls) if field.init]
    for field in fields:
        if field not in valid:
            raise UserError(f"{name} has no field {field!r}{place}; it takes {', '.join(valid) or 'no fields'}.")
    return cls(**fields)


def check_number(name: str, value: Any, low: float, high: float, kind: type | tuple[type, ...] = (int, float)) -> None:
    """Raise UserError unless a field is a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        noun = "an integer" if kind is int else "a number"
        raise UserError(f"`{name}` must be {noun} from {low:g} to {high:g}, got {short_repr(value)}.")


# Drop probabilities p: one number for all loops, or one for each.


def check_p(p: float | Sequence[float], name: str = "p") -> float | tuple[float, ...]:
    """Return p as a float or a tuple of floats; raise ValueError if one is not a number in [0, 1)."""
    values = p if isinstance(p, (list, tuple)) else [p]
    for value in values:
        check_number(name, value, 0, 1)
        if value == 1:
            raise UserError(f"`{name}` must be below 1, got {value!r}.")
    if not values:
        raise UserError(f"`{name}` must be one drop probability, or one for each loop; got an empty list.")
    return float(values[0]) if len(values) == 1 else tuple(map(float, values))


def check_one_p(p: float | Sequence[float], name: str = "p") -> float:
    """Return p as one float for all loops; raise ValueError if it is not one number in [0, 1)."""
    p = check_p(p, name)
    if isinstance(p, tuple):
        raise UserError(f"`{name}` must be one drop probability for all loops with this rule; got {list(p)}.")
    return p
