"""The frozen prefix: until its first active gate, an example's loops are plain frozen computation, and need no gradient.

In loop t the examples whose first active gate is in a loop up to t have *joined*; the others *wait*:

    h_t = one_loop(h_{t-1}) with adapter and gradient, for those that have joined
    h_t = one_loop(h_{t-1}) with neither, for those that wait

Nothing is approximated: a gate of zero removes the update, and what no trained weight has touched has no gradient. With
independent gates of drop probability p, sum_{t=1..K} p^t of an example's K loops wait: 0.94 of 4 at p = 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from loopdropout_trainer.looped import LoopState


if TYPE_CHECKING:
    from loopdropout_trainer.models.looped_modeling import LoopInputs

_ROWS, _TOKENS = 0, 1


class FrozenPrefix:
    """A micro-batch, ordered by the loop in which its parts join: rows, or in a packed row the tokens of its examples.

    Args:
        inputs: of the first loop.
        loop_state: of the model.
        joins: first active loop of each row (`dim` 0) or of each token of the only row (`dim` 1); K: none.
    """

    def __init__(self, inputs: LoopInputs, loop_state: LoopState, joins: list[int], dim: int) -> None:
        self.loop_state = loop_state
        self.joins = sorted(joins)
        self.dim = dim
        self.order = None  # of the parts, None as long as they stay where they are
        self.inputs = self.sorted = inputs
        if self.joins[0] != self.joins[-1]:
            order = torch.tensor(sorted(range(len(joins)), key=joins.__getitem__))
            self.order = order.to(inputs.state.device, non_blocking=True)
            self.sorted = inputs.take(self.order, dim)
        self.num_joined = 0
        self.joined: LoopInputs | None = None
        self.waiting: LoopInputs | None = self.sorted

    def run(self, one_loop: Callable[[LoopInputs], torch.Tensor], loop: int) -> None:
        """Run one loop, a function from inputs to the state after it, on those that have joined and on those that wait."""
        self._admit(sum(first <= loop for first in self.joins))
        if self.waiting is not None:
            self.loop_state.frozen = True
            try:
                with torch.no_grad():
                    self.waiting = replace(self.waiting, state=one_loop(self.waiting))
            finally:
                self.loop_state.frozen = False
        if self.joined is not None:
            self.loop_state.part = self.joined.part
            self.joined = replace(self.joined, state=one_loop(self.joined))

    def finish(self) -> LoopInputs:
        """Return the inputs in their first order, with the final state."""
        self.loop_state.part = None
        state = _joined_states([part for part in (self.joined, self.waiting) if part is not None], self.dim)
        if self.order is not None:
            state = state.index_select(self.dim, self.order.argsort())
        if self.joined is None:
            # Nothing has a gradient, but the loss must have one, and in DDP so must every adapter.
            state = state + 0 * sum(factor.flatten()[0] for factor in self.loop_state.factors)
        return replace(self.inputs, state=state)

    def _admit(self, count: int) -> None:
        """Let the first `count` parts have joined."""
        new = count - self.num_joined
        if not new:
            return
        coming = self.waiting.take(slice(0, new), self.dim)
        state = _joined_states([part for part in (self.joined, coming) if part is not None], self.dim)
        part = None if self.order is None else self.order[:count]
        self.joined = replace(self.sorted.take(slice(0, count), self.dim), state=state, part=part)
        left = len(self.joins) - count
        self.waiting = self.waiting.take(slice(new, None), self.dim) if left else None
        self.num_joined = count


def _joined_states(parts: list[LoopInputs], dim: int) -> torch.Tensor:
    return parts[0].state if len(parts) == 1 else torch.cat([part.state for part in parts], dim)


def frozen_prefix(inputs: LoopInputs, loop_state: LoopState) -> FrozenPrefix | None:
    """Return the micro-batch with its frozen loops set apart, or None if it has none, or if they may not be left out.

    What cannot be cut into parts joins as a whole, when its first example does.
    """
    first_loops = loop_state.first_loops
    if loop_state.factors is None or not first_loops or max(first_loops) == 0:
        return None
    if inputs.state.requires_grad or (inputs.injected is not None and inputs.injected.requires_grad):
        return None
    num_rows, dim = len(inputs.state), _ROWS
    joins = [min(first_loops)] * num_rows
    dense = inputs.attention_mask is None or torch.is_tensor(inputs.attention_mask)
    if loop_state.segments is not None and len(first_loops) > 1:
        if num_rows == 1 and torch.is_tensor(inputs.attention_mask) and inputs.attention_mask.dim() == 4:
            segments = loop_state.segments[0]
            joins, dim = torch.tensor(first_loops, device=segments.device)[segments].tolist(), _TOKENS
    elif len(first_loops) == num_rows and dense and not any(map(torch.is_tensor, inputs.attention_kwargs.values())):
        joins = first_loops
    return FrozenPrefix(inputs, loop_state, joins, dim) if max(joins) > 0 else None
