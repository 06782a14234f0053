"""The fields of the commands that train, and the defaults of those that a recipe does not name."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

from loopdropout_trainer.files import recipes_folder
from loopdropout_trainer.settings.fields import default_of


TRAININGS = ("sft", "dpo", "grpo")
"""Commands that train."""

CHOSEN_DEFAULTS = {"bf16": True}
"""Values that a training takes for fields whose default is None. `bf16` is true unless `fp16` is set, which is rare."""


def find_fields(dataclass_types: Sequence[type]) -> tuple[dict[str, dataclasses.Field], dict[str, Any]]:
    """Return the fields of some dataclasses that can be set, and their types, by name."""
    fields, hints = {}, {}
    for cls in dataclass_types:
        types = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.init:
                fields[field.name], hints[field.name] = field, types[field.name]
    return fields, hints


@cache
def find_command_fields(command: str) -> dict[str, dataclasses.Field]:
    """Return the fields of a command that trains, by name. Its script is in a folder of scripts, which are no modules."""
    types = runpy.run_path(str(recipes_folder() / f"{command}.py"))["ARGUMENTS"]
    return find_fields(types)[0]


def find_default(fields: Mapping[str, dataclasses.Field], name: str, rule: str | None = None) -> Any:
    """Return the value of a field that a recipe does not name, or None if only the training finds it.

    Args:
        fields: Fields of a command by name.
        name: Name of a field.
        rule: Rule of the training, whose own `p` is the default of `p`. Default: the fields' own default.
    """
    if name == "p":
        return _find_own_p(fields["rule"].default if rule is None else rule)
    if name in CHOSEN_DEFAULTS:
        return CHOSEN_DEFAULTS[name]
    return default_of(fields[name])


def _find_own_p(rule: str) -> float | None:
    """Return the drop probability that a rule has by default, or None without one. The file of a rule may not be imported."""
    from loopdropout_trainer.gates import RULES

    own = RULES[rule].__dataclass_fields__ if rule in RULES else {}
    return default_of(own["p"]) if "p" in own else None
