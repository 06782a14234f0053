"""Trainers that were made with one configuration, and share its fields."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.training.fixed_fields import RULE_FIELDS, changed_field, copy_fields, find_changed


@dataclass(eq=False)
class Sharing:
    """What the trainers of one configuration know of each other.

    Attributes:
        num_trainers: Number of trainers that were made with the configuration.
        setter: Trainer whose `p` or `rule` was set last, or None.
        fields: Fields of the rule after that.
    """

    num_trainers: int = 0
    setter: weakref.ref[Any] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def note_setter(self, trainer: Any) -> None:
        """Note that `p` or `rule` of a trainer was set, which has changed the fields of its configuration."""
        self.setter, self.fields = weakref.ref(trainer), copy_fields(trainer.args, RULE_FIELDS)

    def is_set_by_another(self, trainer: Any) -> bool:
        """Return whether another trainer has set the present fields of the rule."""
        if self.setter is None or self.setter() is trainer:
            return False
        return not find_changed(trainer.args, self.fields)  # else a program has set `args` since


def sharing_of(args: Any) -> Sharing:
    """Return what the trainers of a configuration know of each other. A copy of the configuration has other trainers."""
    attributes = vars(args)  # which also has what is no field
    if attributes.get("_sharing") is None:
        attributes["_sharing"] = Sharing()
    return attributes["_sharing"]


def changed_since_made(trainer: Any, made_with: Mapping[str, Any], changed: Sequence[str]) -> UserError:
    """Return the error about fields that have changed since a trainer was made, which says if another trainer has set them.

    Args:
        trainer: Trainer that cannot use the present values.
        made_with: Values that it was made with, by the names of the fields.
        changed: Names of the fields that differ.
    """
    sharing, name = sharing_of(trainer.args), changed[-1]
    if "rule" in changed:  # which explains its fields, too
        name = "rule"
    separate = f"give each trainer a {type(trainer.args).__name__} of its own"
    if name in RULE_FIELDS and sharing.is_set_by_another(trainer):
        attribute = name if name in ("p", "rule") else "rule"
        before, now = short_repr(made_with[name]), short_repr(getattr(trainer.args, name))
        return UserError(
            f"`{name}` must keep its value {before} in this trainer, got {now}, which was set on another trainer of the same "
            f"`args`. Set it again by `trainer.{attribute} = ...`, or {separate}."
        )
    hint = ""
    if sharing.num_trainers > 1:
        hint = f" If it was set for another trainer of the same `args`, {separate}."
    return changed_field(trainer.args, made_with, name, hint)
