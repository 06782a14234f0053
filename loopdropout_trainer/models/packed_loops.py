"""Which examples run together in a loop, in which order, and which of them with gradient.

Until its first active gate an example's loops are plain frozen computation. In loop t the examples whose first active gate
is in a loop up to t have *joined*; the others *wait*:

    h_t = recurrent_step(h_{t-1}) with adapter and gradient, for those that have joined
    h_t = recurrent_step(h_{t-1}) with neither, for those that wait

Those of the joined that have an active gate in loop t come first, so that the adapter can leave the others alone.

Nothing is approximated: a gate of zero removes the update, and what no trained weight has touched has no gradient. With
independent gates of drop probability p, sum_{t=1..K} p^t of an example's K loops wait: 0.94 of 4 at p = 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from loopdropout_trainer.looped import LoopState
from loopdropout_trainer.models.loop_inputs import LoopInputs


@dataclass
class _Group:
    """Examples that run together: their indices, in the order in which they lie in `inputs`."""

    order: list[int]
    inputs: LoopInputs


class PackedLoops:
    """A packed micro-batch on its way through the loops.

    Args:
        inputs: of the first loop, with all examples.
        loop_state: of the model.
        mask_of: returns the attention's mask for examples of these lengths, packed in this order.
        may_wait: whether loops before an example's first active gate run as the frozen model.
    """

    def __init__(
        self,
        inputs: LoopInputs,
        loop_state: LoopState,
        mask_of: Callable[[Sequence[int]], object],
        may_wait: bool,
    ) -> None:
        self.loop_state = loop_state
        self.mask_of = mask_of
        self.packing = inputs.packing
        self.lengths, self.examples = inputs.packing.lengths, inputs.packing.examples
        self.all = list(range(len(self.lengths)))
        self.pieces = inputs.split(self.lengths)
        self.groups = [_Group(self.all, inputs)]
        self.active = loop_state.active if may_wait else None  # [K][N or 1]
        self.joined: set[int] = set() if self.active is not None else set(self.all)

    def run(self, recurrent_step: Callable[[LoopInputs], torch.Tensor], loop: int) -> None:
        """Run one loop, a function from inputs to the state after it, on all examples."""
        active = [index for index in self.all if self._is_active(index, loop)]
        self.joined.update(active)
        silent = sorted(self.joined.difference(active))
        waiting = [index for index in self.all if index not in self.joined]
        groups = []
        if waiting:
            group = self._group(waiting)
            self.loop_state.frozen = True
            try:
                with torch.no_grad():
                    groups.append(self._after(group, recurrent_step, loop, 0))
            finally:
                self.loop_state.frozen = False
        if self.joined:
            groups.append(self._after(self._group(active + silent), recurrent_step, loop, len(active)))
        self.groups = groups

    def finish(self) -> LoopInputs:
        """Return the inputs with the final state, in their first order."""
        inputs = self._group(self.all).inputs
        if not self.joined:
            # Nothing has a gradient, but the loss must have one, and in DDP so must every adapter.
            zero = 0 * sum(factor.flatten()[0] for factor in self.loop_state.factors)
            inputs = replace(inputs, state=inputs.state + zero)
        self.loop_state.announce(self.loop_state.loop, self.packing.part(self.loop_state, self.loop_state.loop))
        return inputs

    def _is_active(self, index: int, loop: int) -> bool:
        if self.active is None:
            return True
        gates = self.active[loop]
        return gates[self.examples[index] if len(gates) > 1 else 0]

    def _after(self, group: _Group, recurrent_step: Callable, loop: int, num_active: int) -> _Group:
        part = self.packing.part(self.loop_state, loop, group.order, num_active)
        self.loop_state.announce(loop, part)
        return _Group(group.order, replace(group.inputs, state=recurrent_step(replace(group.inputs, part=part))))

    def _group(self, order: list[int]) -> _Group:
        """Return examples with the state that they have come to."""
        for group in self.groups:
            if group.order == order:
                return group
        states: dict[int, torch.Tensor] = {}
        for group in self.groups:
            lengths = [self.lengths[index] for index in group.order]
            states.update(zip(group.order, group.inputs.state.split(lengths, dim=1), strict=True))
        pieces = [replace(self.pieces[index], state=states[index]) for index in order]
        inputs = LoopInputs.join(pieces)
        mask = self.mask_of([self.lengths[index] for index in order])
        return _Group(order, replace(inputs, attention_mask=mask))
