"""What a gate rule is: a small object that turns stateless draws into the gates of a micro-batch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from loopdropout_trainer.gates.streams import Place, normals, uniforms


@dataclass(frozen=True)
class Draw:
    """The examples that need gates, and the random numbers that belong to them.

    Attributes:
        seed: of all streams of the run.
        step: optimizer step, from 0; `num_steps` is their total number, for rules that follow a schedule.
        places: of the N examples in the step's global batch.
        num_loops: recurrence depth K.
        num_modules: number M of adapted linear maps.
    """

    seed: int
    step: int
    places: Sequence[Place]
    num_loops: int
    num_steps: int = 0
    num_modules: int = 1

    def uniforms(self, purpose: str, num_draws: int) -> torch.Tensor:
        """Return [N, num_draws] uniforms of the stream `purpose`."""
        return uniforms(self.seed, purpose, self.step, self.places, num_draws)

    def normals(self, purpose: str, num_draws: int) -> torch.Tensor:
        """Return [N, num_draws] standard normals of the stream `purpose`."""
        return normals(self.seed, purpose, self.step, self.places, num_draws)

    def event_uniforms(self) -> torch.Tensor:
        """Return the [K, N] uniforms behind every rule's events, so that two rules of one seed see paired masks."""
        return self.uniforms("events", self.num_loops).T

    def removals(self, p: float | Sequence[float]) -> torch.Tensor:
        """Return the removal events a ~ Bernoulli(p), [K, N] booleans; with p < p', those of p are among those of p'."""
        return self.event_uniforms() < torch.as_tensor(p, dtype=torch.float64).view(-1, 1)


class GateRule:
    """Base of all rules. A subclass is a frozen dataclass whose fields are the rule's fields in YAML.

    The docstring of a rule states its formula, mean, covariance and place in the paper.
    """

    name: ClassVar[str]

    def check(self, num_loops: int) -> None:
        """Raise ValueError if the rule's fields do not fit a model of `num_loops` loops."""

    def sample(self, draw: Draw) -> torch.Tensor:
        """Return gates [K, N], float32."""
        raise NotImplementedError


RULES: dict[str, type[GateRule]] = {}


def register_rule(cls: type[GateRule]) -> type[GateRule]:
    """Add a rule to the registry under its `name`."""
    RULES[cls.name] = cls
    return cls


def make_rule(name: str, **fields: Any) -> GateRule:
    """Build the rule `name` from its fields.

    Raises:
        ValueError: for an unknown rule, a field that the rule does not take, or a value that it refuses; the message
            lists what is valid.
    """
    if name not in RULES:
        near = difflib.get_close_matches(str(name), RULES, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise ValueError(f"Unknown rule {name!r}.{hint} Valid rules: {', '.join(sorted(RULES))}.")
    cls = RULES[name]
    valid = [field.name for field in dataclasses.fields(cls)]
    for field in fields:
        if field not in valid:
            takes = f"takes {', '.join(valid)}" if valid else "takes no fields"
            raise ValueError(f"The rule {name!r} has no field {field!r}; it {takes}.")
    return cls(**fields)
