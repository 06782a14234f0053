"""Which examples run together in a loop, in which order, and which of them with gradient.

Until its first active gate an example's loops are plain frozen computation. In loop t the examples whose first active gate
is in a loop up to t have *joined*; the others *wait*:

    h_t = recurrent_step(h_{t-1}) with adapter and gradient, for those that have joined
    h_t = recurrent_step(h_{t-1}) with neither, for those that wait

Those of the joined that have an active gate in loop t come first, so that the adapter can leave the others alone. Both are
worth more launches where they save enough arithmetic: where few tokens would wait they join early, and where few would be
left alone the adapter adds zero to them.

Nothing is approximated: a gate of zero removes the update, and what no trained weight has touched has no gradient. With
independent gates of drop probability p, sum_{t=1..K} p^t of an example's K loops wait: 0.94 of 4 at p = 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from loopdropout_trainer.looped import LoopState
from loopdropout_trainer.models.loop_inputs import LoopInputs
from loopdropout_trainer.models.operations import take_rows


@dataclass(frozen=True)
class Part:
    """Examples that run together in one loop.

    Attributes:
        order: their indices, as they lie in the row.
        num_active: how many of them, counted from the first, the adapter adds its update to.
        frozen: whether they run without adapter and gradient.
    """

    order: tuple[int, ...]
    num_active: int
    frozen: bool = False


@dataclass(frozen=True)
class Worth:
    """From how many tokens on it takes less time to treat examples apart.

    Attributes:
        waiting: to run those that wait in launches of their own, beside others that have joined.
        resting: to leave the update of those alone that have joined and have no active gate.
    """

    waiting: float = 0
    resting: float = 0


def schedule(active: Sequence[Sequence[bool]], lengths: Sequence[int], worth: Worth) -> list[list[Part]]:
    """Return the parts of each loop.

    Args:
        active: [K][N], whether an example has an active gate in a loop.
        lengths: [N], in tokens.
        worth: from how many tokens on the examples of a part are worth it.
    """
    everyone, joined, parts = set(range(len(lengths))), set(), []
    tokens = lambda examples: sum(lengths[index] for index in examples)
    for gates in active:
        # Three kinds of examples, by their gates up to this loop: 0 .. 0 g, 0 .. g .. 0 and 0 .. 0 0.
        running = [index for index in sorted(everyone) if gates[index]]
        joined.update(running)
        if joined and tokens(everyone - joined) < worth.waiting:
            joined = set(everyone)
        waiting, resting = sorted(everyone - joined), sorted(joined.difference(running))
        parts.append([])
        if waiting:
            parts[-1].append(Part(tuple(waiting), 0, frozen=True))
        if joined and running and tokens(resting) < worth.resting:
            parts[-1].append(Part(tuple(sorted(joined)), len(joined)))
        elif joined:
            parts[-1].append(Part((*running, *resting), len(running)))
    return parts


@dataclass
class _Layout:
    """Examples in one order: what a loop reads of them besides their state, and the index of each token's gates [n]."""

    inputs: LoopInputs
    tokens: torch.Tensor


class PackedLoops:
    """A packed micro-batch on its way through the loops. What a loop reads of it is made once for all loops.

    Args:
        inputs: of the first loop, with all examples.
        loop_state: of the model.
        mask_of: returns the attention's mask for examples of these lengths, packed in this order.
        lora_parameters: see `TrainingPolicy`; None: no loop runs as the frozen model.
        worth: see `schedule`.
    """

    def __init__(
        self,
        inputs: LoopInputs,
        loop_state: LoopState,
        mask_of: Callable[[Sequence[int]], object],
        lora_parameters: Sequence[torch.nn.Parameter] | None,
        worth: Worth,
    ) -> None:
        self.loop_state = loop_state
        self.plan = loop_state.plan
        self.prepared = {}
        self.mask_of = mask_of
        self.lora_parameters = lora_parameters
        self.packing, self.lengths = inputs.packing, inputs.packing.lengths
        self.all = tuple(range(len(self.lengths)))
        self.layouts = {self.all: _Layout(inputs, self.packing.tokens())}
        self.parts: dict[tuple[int, ...], torch.Tensor] = {
            self.all: inputs.state
        }  # states [1, n, H] after the last loop
        self.schedule = None
        if lora_parameters is not None and self.plan.active is not None:
            examples = self.packing.examples
            active = [
                [gates[e] for e in examples] if len(gates) > 1 else gates * len(examples) for gates in self.plan.active
            ]
            self.schedule = schedule(active, self.lengths, worth)
        self.has_gradient = self.schedule is None

    def run(self, recurrent_step: Callable[[LoopInputs], torch.Tensor], loop: int) -> None:
        """Run one loop, a function from inputs to the state after it, on all examples."""
        parts = [Part(self.all, len(self.all))] if self.schedule is None else self.schedule[loop]
        states = {}
        for part in parts:
            layout, state = self._layout(part.order), self._state(part.order)
            num_active = sum(self.lengths[index] for index in part.order[: part.num_active])
            step = self.plan.step(loop, state.device, layout.tokens, num_active, part.frozen, self.prepared)
            self.loop_state.announce(step)  # for what runs outside of a layer; layers announce it themselves
            # Nothing trained has touched the state of those that wait. The gradient of those that rest passes through the
            # frozen weights to an earlier loop.
            with torch.set_grad_enabled(torch.is_grad_enabled() and not part.frozen):
                states[part.order] = recurrent_step(replace(layout.inputs, state=state, step=step))
            self.has_gradient |= not part.frozen
        self.parts = states

    def finish(self) -> LoopInputs:
        """Return the inputs with the state [1, T, H] after the loops so far, in their first order."""
        state = self._state(self.all)
        if not self.has_gradient:
            # Nothing has a gradient, but the loss must have one, and in DDP so must every adapter.
            state = state + 0 * sum(parameter.flatten()[0] for parameter in self.lora_parameters)
        return replace(self.layouts[self.all].inputs, state=state)

    def _state(self, order: tuple[int, ...]) -> torch.Tensor:
        """Return the state [1, n, H] that examples have come to, in this order."""
        if order in self.parts:
            return self.parts[order]  # as it lies, without a copy
        wanted = set(order)
        sources = [part for part in self.parts if wanted.intersection(part)]
        lie = [index for part in sources for index in part]
        states = [self.parts[part] for part in sources]
        # Autocast to bfloat16 knows no float16 here: states may be float32 beside a float16 base's embeddings.
        with torch.autocast(states[0].device.type, enabled=False):
            state = states[0] if len(states) == 1 else torch.cat(states, dim=1)
            return state if tuple(lie) == order else take_rows(state[0], self._rows(lie, order)).unsqueeze(0)

    def _layout(self, order: tuple[int, ...]) -> _Layout:
        if order not in self.layouts:
            rows = self._rows(self.all, order)
            inputs = self.layouts[self.all].inputs.take(rows)
            mask = self.mask_of([self.lengths[index] for index in order])
            self.layouts[order] = _Layout(replace(inputs, attention_mask=mask), self.packing.tokens(order))
        return self.layouts[order]

    def _rows(self, lie: Sequence[int], order: Sequence[int]) -> torch.Tensor:
        """Return where the tokens of examples in `order` are in a row of examples that lie as in `lie`, [n]."""
        starts, start = {}, 0
        for index in lie:
            starts[index] = start
            start += self.lengths[index]
        lengths = torch.tensor([self.lengths[index] for index in order])
        firsts = torch.tensor([starts[index] for index in order])
        rows = torch.arange(int(lengths.sum())) + (firsts - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
        return rows.to(self.packing.device, non_blocking=True)
