"""What a diagnostic is: something measured on one model.

A subclass of `Diagnostic` with a name is found by that name: one file is one diagnostic, and nothing else has to know it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from loopdropout_trainer.lora import kind_of
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.training.scores import Batch, Scores, score


DIAGNOSTICS: dict[str, type[Diagnostic]] = {}

Row = dict[str, Any]
"""Fields of a `Measurement`: `metric`, `value`, `unit`, and where the number was measured."""


def by_loop(metric: str, values: Iterable[float], unit: str = "") -> list[Row]:
    """Return a row for each loop's number, from loop 1 on."""
    return [{"metric": metric, "value": value, "unit": unit, "loop": t} for t, value in enumerate(values, start=1)]


def by_two_loops(metric: str, matrix: Iterable[Iterable[float]], unit: str = "") -> list[Row]:
    """Return a row for each number of a matrix [K, K]."""
    rows = enumerate(matrix, start=1)
    return [
        {**row, "loop": t, "other_loop": row["loop"]} for t, values in rows for row in by_loop(metric, values, unit)
    ]


@dataclass
class Context:
    """One model, and what it is measured on.

    Attributes:
        model: the looped model, with its adapter if it has one.
        kind: `base`, `adapter` or `merged`.
        batches: teacher-forced rows, as model inputs with `labels` [B, S].
        depths: that the depth diagnostics run at.
    """

    model: nn.Module
    kind: str
    batches: Sequence[Batch]
    depths: Sequence[int]

    @property
    def num_loops(self) -> int:
        """Depth K that the model runs at."""
        return find_looped_model(self.model).config.num_loops

    def scores(self, gates: Sequence[float] | torch.Tensor | None = None) -> Scores:
        """Return the final loop's scores on all rows, under gates [K] or at unit gates."""
        return score(self.model, self.batches, gates)


class Diagnostic:
    """One thing that is measured, alike on the base model, on adapters and on merged models.

    Class attributes:
        name: of its figures, and on the command line.
        needs_adapter: whether it gates an update, which the base and a merged model do not have apart from the weights.
        runs_at_depths: whether it runs the model at all `context.depths`.
    """

    name: ClassVar[str] = ""
    needs_adapter: ClassVar[bool] = False
    runs_at_depths: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            if not re.fullmatch(r"\w[\w-]*", cls.name):
                raise UserError(f"`name` of a diagnostic must be letters, digits, - and _; got {cls.name!r}.")
            if DIAGNOSTICS.get(cls.name, cls).__module__ != cls.__module__:
                raise UserError(f"There is a diagnostic `{cls.name}` already: choose another name.")
            DIAGNOSTICS[cls.name] = cls

    def skip_reason(self, context: Context) -> str | None:
        """Return why this model cannot be measured, or None if it can."""
        if context.kind != "adapter":
            return "it has no update that could be gated apart from the weights" if self.needs_adapter else None
        if self.runs_at_depths and kind_of(context.model, context.model.active_adapters[0]).one_depth:
            return "each of its loops has parameters of its own, for one depth only"
        return None

    def measure(self, context: Context) -> list[Row]:
        """Measure one model, in all processes at once; return a row for each number, the same in each of them."""
        raise NotImplementedError
