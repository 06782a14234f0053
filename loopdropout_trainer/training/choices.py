"""What a recipe chooses by a name and a mapping of fields: `depth_sampling: uniform`, `depth_sampling_args: {low: 2}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loopdropout_trainer.gates.rule import field_names


def make_choice(field: str, choices: Mapping[str, type], name: str, fields: Mapping[str, Any] | None) -> Any:
    """Build the choice `name` from its fields, the value of `<field>_args`.

    Args:
        field: what the recipe calls it.
        choices: dataclasses by name.

    Raises:
        ValueError: for an unknown name, a field that the choice does not take, or a value that it refuses.
    """
    if name not in choices:
        raise ValueError(f"`{field}` must be one of {', '.join(sorted(choices))}; got {name!r}.")
    fields = {} if fields is None else fields
    if not isinstance(fields, Mapping):
        raise ValueError(f"`{field}_args` must be a mapping of the fields of `{field}: {name}`; got {fields!r}.")
    valid = field_names(choices[name])
    for key in fields:
        if key not in valid:
            takes = f"takes {', '.join(valid)}" if valid else "takes no fields"
            raise ValueError(f"`{field}: {name}` has no field {key!r} in `{field}_args`; it {takes}.")
    return choices[name](**fields)


def relative_weights(weights: Sequence[float] | None, name: str) -> tuple[float, ...]:
    """Return weights divided by their sum.

    Raises:
        ValueError: unless they are a list of finite numbers from 0, not all of them 0.
    """
    values = list(weights) if isinstance(weights, Sequence) and not isinstance(weights, str) else []
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    if not numbers or any(not 0 <= value < float("inf") for value in values) or not sum(values) > 0:
        raise ValueError(f"`{name}` must be a list of numbers of at least 0, one of them above 0; got {weights!r}.")
    return tuple(value / sum(values) for value in values)
