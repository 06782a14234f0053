"""What one loop of a looped model reads: of a batch, row by row, or of examples packed in one row."""

from __future__ import annotations

from collections.abc import Sequence
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

    def split(self, lengths: Sequence[int]) -> list[LoopInputs]:
        """Return the inputs of each packed example."""
        pieces = zip(*(x.split(lengths, dim=1) for x in self._tensors()), strict=True)
        return [self._with(*piece) for piece in pieces]

    @staticmethod
    def join(examples: Sequence[LoopInputs]) -> LoopInputs:
        """Return the inputs of examples in one row; the attention mask is still to be set."""
        tensors = zip(*(example._tensors() for example in examples), strict=True)
        # Autocast to bfloat16 knows no float16 here: states may be float32 beside a float16 base's embeddings.
        with torch.autocast(examples[0].state.device.type, enabled=False):
            return examples[0]._with(*(torch.cat(pieces, dim=1) for pieces in tensors))

    def _tensors(self) -> list[torch.Tensor]:
        tensors = [self.state, self.position_ids, *self.position_embeddings]
        return tensors if self.injected is None else [*tensors, self.injected]

    def _with(
        self,
        state: torch.Tensor,
        position_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        injected: torch.Tensor | None = None,
    ) -> LoopInputs:
        return replace(self, state=state, position_ids=position_ids, position_embeddings=(cos, sin), injected=injected)

    def layer_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that every layer takes; in a loop they name it."""
        return {
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
            "position_embeddings": self.position_embeddings,
            "step": self.step,
            **self.attention_kwargs,
        }
