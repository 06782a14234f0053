"""Which examples run together in a loop, in which order, and which of them with gradient.

Up to its first active gate an example's loops are plain frozen computation. By its gates up to loop t an example is

    frozen      0 .. 0 0    no active gate yet:          h_t = recurrent_step(h_{t-1}) with neither adapter nor gradient
    active      .. g        an active gate in loop t:    h_t = recurrent_step(h_{t-1}) with adapter and gradient
    inactive    .. g .. 0   one earlier, none in loop t: h_t = recurrent_step(h_{t-1}) with gradient, the update left out

Active and inactive examples run in one part, active ones first, so that the adapter can leave the others alone. Frozen ones
run in a part of their own. Either costs kernel launches, and pays only for enough tokens: too few frozen examples run with
the others before their first active gate, and too few inactive ones get an update times zero. For gates [K, N] of 3
examples, all of them long enough:

    loop 1   0 2 0    part (0, 2) frozen;   part (1), 1 active
    loop 2   0 0 2    part (0)    frozen;   part (2, 1), 1 active
    loop 3   0 2 2    part (0)    frozen;   part (1, 2), 2 active

Nothing is approximated: a gate of zero removes the update, and what no trained weight has touched has no gradient. With
independent gates of drop probability p, sum_{t=1..K} p^t of an example's K loops are frozen: 0.94 of 4 at p = 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from loopdropout_trainer.looped import LoopState
from loopdropout_trainer.models.looped_modeling import LoopInputs
from loopdropout_trainer.models.speed.packing import Packing


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
class Thresholds:
    """Numbers of tokens from which on it saves time to treat examples separately.

    Attributes:
        frozen: tokens of frozen examples, to run these in a part of their own.
        inactive: tokens of inactive examples, to leave their update out.
    """

    frozen: float = 0
    inactive: float = 0


def schedule(active: Sequence[Sequence[bool]], lengths: Sequence[int], thresholds: Thresholds) -> list[list[Part]]:
    """Return the parts of each loop.

    Args:
        active: [K][N], whether an example has an active gate in a loop.
        lengths: [N], in tokens.
        thresholds: numbers of tokens from which on examples are treated separately.
    """
    everyone, started, parts = set(range(len(lengths))), set(), []  # started: active or inactive, not frozen any more
    tokens = lambda examples: sum(lengths[index] for index in examples)
    for gates in active:
        running = [index for index in sorted(everyone) if gates[index]]
        started.update(running)
        if started and tokens(everyone - started) < thresholds.frozen:
            started = set(everyone)  # for good: their state then has a graph, which later loops must not cut
        frozen, inactive = sorted(everyone - started), sorted(started.difference(running))
        parts.append([])
        if frozen:
            parts[-1].append(Part(tuple(frozen), 0, frozen=True))
        if started and running and tokens(inactive) < thresholds.inactive:
            parts[-1].append(Part(tuple(sorted(started)), len(started)))
        elif started:
            parts[-1].append(Part((*running, *inactive), len(running)))
    return parts


@dataclass
class _Layout:
    """Examples in one order: what a loop reads of them besides their state, and the index of each token's gates [n]."""

    inputs: LoopInputs
    tokens: torch.Tensor


class PackedLoops:
    """A packed micro-batch on its way through the loops. Inputs other than the state are computed once for all loops.

    Args:
        inputs: of the first loop, with all examples: state [1, T, H].
        packing: of the examples.
        loop_state: of the model.
        mask_of: returns the attention's mask for examples of these lengths, packed in this order.
        lora_parameters: see `TrainingPolicy`; None: no loop runs as the frozen model.
        thresholds: see `schedule`.
    """

    def __init__(
        self,
        inputs: LoopInputs,
        packing: Packing,
        loop_state: LoopState,
        mask_of: Callable[[Sequence[int]], object],
        lora_parameters: Sequence[torch.nn.Parameter] | None,
        thresholds: Thresholds,
    ) -> None:
        self.loop_state = loop_state
        self.plan = loop_state.plan
        self.prepared = {}
        self.mask_of = mask_of
        self.lora_parameters = lora_parameters
        self.packing, self.lengths = packing, packing.lengths
        self.all = tuple(range(len(self.lengths)))
        self.layouts = {self.all: _Layout(inputs, packing.tokens())}
        # The state [1, n, H] of each part after the last loop, by the part's order; all of them together hold every example.
        self.states: dict[tuple[int, ...], torch.Tensor] = {self.all: inputs.state}
        self.schedule = None
        if lora_parameters is not None and self.plan.active is not None:
            # Gates belong to rows or segments of the batch, lengths to the examples that were found in it.
            examples = packing.examples
            active = [
                [gates[e] for e in examples] if len(gates) > 1 else gates * len(examples) for gates in self.plan.active
            ]
            self.schedule = schedule(active, self.lengths, thresholds)
        self.has_gradient = self.schedule is None

    def loop(self, recurrent_step: Callable[[LoopInputs], torch.Tensor], loop: int) -> None:
        """Run one loop, a function from inputs to the state after it, on all examples."""
        parts = [Part(self.all, len(self.all))] if self.schedule is None else self.schedule[loop]
        states = {}
        for part in parts:
            layout, state = self._layout(part.order), self._state(part.order)  # [1, n, H]
            num_active = sum(self.lengths[index] for index in part.order[: part.num_active])  # tokens, from the first
            step = self.plan.step(loop, state.device, layout.tokens, num_active, part.frozen, self.prepared)
            self.loop_state.announce(step)  # for what runs outside of a layer; layers announce it themselves
            # Nothing trained has touched the state of frozen examples. The gradient of inactive ones passes through the
            # frozen weights to an earlier loop.
            with torch.set_grad_enabled(torch.is_grad_enabled() and not part.frozen):
                states[part.order] = recurrent_step(replace(layout.inputs, state=state, step=step))
            self.has_gradient |= not part.frozen
        self.states = states

    def result(self) -> LoopInputs:
        """Return the inputs with the state [1, T, H] after the loops so far, in their first order."""
        state = self._state(self.all)
        if not self.has_gradient:
            # Nothing has a gradient, but the loss must have one, and in DDP so must every adapter.
            state = state + 0 * sum(parameter.flatten()[0] for parameter in self.lora_parameters)
        return replace(self.layouts[self.all].inputs, state=state)

    def _state(self, order: tuple[int, ...]) -> torch.Tensor:
        """Return the state [1, n, H] that examples have come to, in this order."""
        if order in self.states:
            return self.states[order]  # as it lies, without a copy
        # Of the parts before, those with some of the wanted examples, one after the other: (0, 2) and (1) for (2, 1).
        sources = [part for part in self.states if not set(order).isdisjoint(part)]
        lie = [index for part in sources for index in part]
        states = [self.states[part] for part in sources]
        # Autocast to bfloat16 knows no float16 here: states may be float32 beside a float16 base's embeddings.
        with torch.autocast(states[0].device.type, enabled=False):
            state = states[0] if len(states) == 1 else torch.cat(states, dim=1)
            return state if tuple(lie) == order else state.index_select(1, self._rows(lie, order))

    def _layout(self, order: tuple[int, ...]) -> _Layout:
        if order not in self.layouts:
            rows = self._rows(self.all, order)
            inputs = self.layouts[self.all].inputs.take(rows)
            mask = self.mask_of([self.lengths[index] for index in order])
            self.layouts[order] = _Layout(replace(inputs, attention_mask=mask), self.packing.tokens(order))
        return self.layouts[order]

    def _rows(self, lie: Sequence[int], order: Sequence[int]) -> torch.Tensor:
        """Return the indices [n] of the tokens of the examples `order` in a row that holds the examples `lie`.

        If examples (0, 1, 2) of lengths (2, 3, 1) lie in a row, those of (2, 1) are 5, 2, 3, 4.
        """
        starts, start = {}, 0
        for index in lie:
            starts[index] = start
            start += self.lengths[index]
        lengths = torch.tensor([self.lengths[index] for index in order])  # (1, 3)
        firsts = torch.tensor([starts[index] for index in order])  # (5, 2), and shall be (0, 1)
        shifts = firsts - (lengths.cumsum(0) - lengths)  # (5, 1), of all tokens of an example
        rows = torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)  # 0 + 5, 1 + 1, 2 + 1, 3 + 1
        return rows.to(self.packing.device, non_blocking=True)
