"""What one loop of a looped model reads: of a batch, row by row, or of examples packed in one row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from loopdropout_trainer.looped import LoopStep
from loopdropout_trainer.models.packing import Packing


@dataclass
class LoopInputs:
    """All that a loop reads besides weights and cache. Nothing about the rows of a batch is passed in any other way.

    Attributes:
        state: [B, S, H], carried from loop to loop; [1, T, H] if the examples are packed.
        attention_mask: in the attention kernel's own form: None, [B, 1, S, cached + S], a block mask, or `Lengths`.
        position_ids: [B or 1, S].
        position_embeddings: cosines and sines, each [B or 1, S, ...].
        injected: [B, S, H] that every loop mixes in again, or None.
        attention_kwargs: further arguments of the attention kernel.
        packing: where packed examples come from, or None.
        step: the loop that runs, which its layers announce; None before and after the loops.
    """

    state: torch.Tensor
    attention_mask: Any
    position_ids: torch.Tensor
    position_embeddings: tuple[torch.Tensor, torch.Tensor]
    injected: torch.Tensor | None = None
    attention_kwargs: dict[str, Any] = field(default_factory=dict)
    packing: Packing | None = None
    step: LoopStep | None = None

    def take(self, rows: torch.Tensor) -> LoopInputs:
        """Return the inputs of some packed tokens, in another order; state and attention mask are still to be set."""
        with torch.no_grad():  # examples are put in another order only where none of this needs a gradient
            return replace(
                self,
                position_ids=self.position_ids[:, rows],
                position_embeddings=tuple(x[:, rows] for x in self.position_embeddings),
                injected=None if self.injected is None else self.injected[:, rows],
            )

    def layer_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that every layer takes; in a loop they name it."""
        return {
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
            "position_embeddings": self.position_embeddings,
            "step": self.step,
            **self.attention_kwargs,
        }
