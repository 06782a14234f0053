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
    tokens: torch.Tensor  # [n] index of each token's gates


class PackedLoops:
    """A packed micro-batch on its way through the loops.

    Args:
        inputs: of the first loop, with all examples.
        loop_state: of the model.
        mask_of: returns the attention's mask for examples of these lengths, packed in this order.
        lora_parameters: see `TrainingPolicy`; None: no loop runs as the frozen model.
    """

    def __init__(
        self,
        inputs: LoopInputs,
        loop_state: LoopState,
        mask_of: Callable[[Sequence[int]], object],
        lora_parameters: Sequence[torch.nn.Parameter] | None,
    ) -> None:
        self.loop_state = loop_state
        self.plan = loop_state.plan
        self.prepared = {}
        self.mask_of = mask_of
        self.lora_parameters = lora_parameters
        self.packing = inputs.packing
        self.lengths, self.examples = inputs.packing.lengths, inputs.packing.examples
        self.all = list(range(len(self.lengths)))
        self.pieces = inputs.split(self.lengths)
        self.groups = [_Group(self.all, inputs, self.packing.tokens())]
        self.active = None if lora_parameters is None else self.plan.active  # [K][N or 1]
        self.joined: set[int] = set() if self.active is not None else set(self.all)

    def run(self, recurrent_step: Callable[[LoopInputs], torch.Tensor], loop: int) -> None:
        """Run one loop, a function from inputs to the state after it, on all examples."""
        # Three kinds of examples, by their gates up to this loop: 0 .. 0 g, 0 .. g .. 0 and 0 .. 0 0.
        active = [index for index in self.all if self._is_active(index, loop)]
        self.joined.update(active)
        inactive = sorted(self.joined.difference(active))
        waiting = [index for index in self.all if index not in self.joined]
        groups = []
        if waiting:
            # [1, tokens of the waiting, H], without a graph: nothing trained has touched their state yet.
            with torch.no_grad():
                groups.append(self._after(self._group(waiting), recurrent_step, loop, 0, frozen=True))
        if self.joined:
            # [1, tokens of the active, then of the inactive, H]: the gradient of the inactive passes through the frozen
            # weights to an earlier loop, and the adapter computes the first tokens only.
            groups.append(self._after(self._group(active + inactive), recurrent_step, loop, len(active)))
        self.groups = groups

    def finish(self) -> LoopInputs:
        """Return the inputs with the state [1, T, H] after the loops so far, in their first order."""
        inputs = self._group(self.all).inputs
        if not self.joined:
            # Nothing has a gradient, but the loss must have one, and in DDP so must every adapter.
            zero = 0 * sum(parameter.flatten()[0] for parameter in self.lora_parameters)
            inputs = replace(inputs, state=inputs.state + zero)
        return inputs

    def _is_active(self, index: int, loop: int) -> bool:
        if self.active is None:
            return True
        gates = self.active[loop]
        return gates[self.examples[index] if len(gates) > 1 else 0]

    def _after(
        self, group: _Group, recurrent_step: Callable, loop: int, num_active: int, frozen: bool = False
    ) -> _Group:
        """Return the group after a loop in which only its first `num_active` examples have an active gate."""
        num_active_tokens = sum(self.lengths[index] for index in group.order[:num_active])
        step = self.plan.step(loop, group.tokens.device, group.tokens, num_active_tokens, frozen, self.prepared)
        self.loop_state.announce(step)  # for what runs outside of a layer; layers announce it themselves
        state = recurrent_step(replace(group.inputs, step=step))
        return replace(group, inputs=replace(group.inputs, state=state))

    def _group(self, order: list[int]) -> _Group:
        """Return examples with the state that they have come to."""
        for group in self.groups:
            if group.order == order:
                return group  # as it lies, without a copy
        states: dict[int, torch.Tensor] = {}  # of each example, [1, length, H]
        for group in self.groups:
            lengths = [self.lengths[index] for index in group.order]
            states.update(zip(group.order, group.inputs.state.split(lengths, dim=1), strict=True))
        pieces = [replace(self.pieces[index], state=states[index]) for index in order]
        inputs = LoopInputs.join(pieces)
        mask = self.mask_of([self.lengths[index] for index in order])
        return _Group(order, replace(inputs, attention_mask=mask), self.packing.tokens(order))
