"""Model names of the server: `run`, `run@K=8`, `run@gates=1-0-0-0` and `run@K=2,gates=1-0`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from peft import PeftModel
from transformers import PreTrainedModel

from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.gate_texts import parse_gates
from loopdropout_trainer.looped import check_num_loops, use_depth
from loopdropout_trainer.lora import use_gates
from loopdropout_trainer.saving.facts import Source


class UnknownModelError(UserError):
    """A request names a model that the server does not have."""


@dataclass(frozen=True)
class Variant:
    """A recurrence depth K, and the gates [K] of the adapter. None: unit gates."""

    num_loops: int
    gates: tuple[float, ...] | None = None

    @contextmanager
    def applied(self, model: PreTrainedModel | PeftModel) -> Iterator[None]:
        """Run a model at this depth and under these gates inside the block."""
        with use_depth(model, self.num_loops), use_gates(model, self.gates):
            yield


class ModelNames:
    """Names of one model at different depths and gates.

    Args:
        source: Source of the model, whose name is the model's at its own depth and gates.
        num_loops: Own depth.
        gates: Own gates, such as "1-0-0-0". Default: unit gates.
    """

    def __init__(self, source: Source, num_loops: int, gates: str | None = None) -> None:
        self.source, self.name, self.num_loops = source, source.name, num_loops
        self.own_variant = self._make_variant(num_loops, gates)

    def find(self, name: str) -> Variant:
        """Return the depth and the gates of a name.

        Raises:
            UnknownModelError: If it names another model.
            UserError: If the model cannot run at the depth or the gates.
        """
        if name == self.name:
            return self.own_variant
        text = name.removeprefix(f"{self.name}@")
        options = dict(option.partition("=")[::2] for option in text.split(","))
        if text == name or not options.keys() <= {"K", "gates"} or "" in options.values():
            raise UnknownModelError(
                f"`model` must be {self.name}, {self.name}@K=8, {self.name}@gates=1-0-0-0 or another name of /v1/models, got "
                f"{short_repr(name)}."
            )
        depth = options.get("K", str(self.num_loops))
        if not re.fullmatch("[0-9]{1,9}", depth):
            raise UserError(f"`K` must be a recurrence depth in the name of a model, got {short_repr(depth)}.")
        return self._make_variant(int(depth), options.get("gates"))

    def listed(self) -> list[str]:
        """Return names with the depths 1, 2, 4, ... up to twice the own depth, and with the adapter in one loop or none."""
        depths = [2**power for power in range(11) if 2**power <= 2 * self.num_loops]
        names = [self.name]
        if not self.source.has_one_depth:
            names += [f"{self.name}@K={depth}" for depth in depths]
        if self.source.gates != "none":
            none = ["0"] * self.num_loops
            for loop in range(self.num_loops):
                gates = [*none]
                gates[loop] = "1"
                names.append(f"{self.name}@gates={'-'.join(gates)}")
            names.append(f"{self.name}@gates={'-'.join(none)}")
        return names

    def _make_variant(self, num_loops: int, gates: str | None) -> Variant:
        check_num_loops(num_loops)
        self.source.check_run(num_loops, gates)
        numbers = parse_gates(gates, num_loops)
        return Variant(num_loops, None if numbers is None else tuple(numbers))
