"""A forward pass whose examples run packed: which of them run together in a loop, in which order, and which with gradient.

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

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from loopdropout_trainer.looped import RunningLoop, launch_flops
from loopdropout_trainer.models.backbone import LoopInputs, PlainPass
from loopdropout_trainer.models.speed.packed_attention import Lengths, lengths_in_chunks
from loopdropout_trainer.models.speed.packing import find_packing


FORWARD_LAUNCHES, SLICE_LAUNCHES, ORDER_LAUNCHES = 40, 20, 30
"""Operations of a layer's forward pass, of a layer that leaves some tokens alone, and of putting a row in another order."""


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


def loop_parts(
    active: Sequence[Sequence[bool]], lengths: Sequence[int], least_frozen: float, least_inactive: float
) -> list[list[Part]]:
    """Return the parts of each loop.

    Args:
        active: [K][N], whether an example has an active gate in a loop.
        lengths: [N], in tokens.
        least_frozen: tokens of frozen examples from which on these run in a part of their own.
        least_inactive: tokens of inactive examples from which on their update is left out.
    """
    everyone = set(range(len(lengths)))
    started = set()  # active or inactive, not frozen any more
    parts = []
    tokens = lambda examples: sum(lengths[index] for index in examples)
    for gates in active:
        running = [index for index in sorted(everyone) if gates[index]]
        started.update(running)
        if started and tokens(everyone - started) < least_frozen:
            started = set(everyone)  # for good: their state then has a graph, which later loops must not cut
        frozen = sorted(everyone - started)
        inactive = sorted(started.difference(running))
        parts.append([])
        if frozen:
            parts[-1].append(Part(tuple(frozen), 0, frozen=True))
        if started and running and tokens(inactive) < least_inactive:
            parts[-1].append(Part(tuple(sorted(started)), len(started)))
        elif started:
            parts[-1].append(Part((*running, *inactive), len(running)))
    return parts


class PackedPass(PlainPass):
    """A forward pass whose examples run packed in one row; `PlainPass` says what each method is for."""

    def arrange(self, inputs: LoopInputs, attention_mask: Any, cache: Cache | None) -> LoopInputs:
        loop_state = self.backbone.loop_state
        shape = inputs.state.shape[:2]  # (B, S)
        self.packing = packing = find_packing(shape, attention_mask, inputs.position_ids, loop_state.batch.segments)
        self.pack = packing.pack
        self.unpack = packing.unpack
        loop_state.set_loop(RunningLoop(tokens=packing.tokens))  # for random initial states
        return replace(
            inputs,
            state=packing.pack(inputs.state),  # [1, T, H], T tokens that are no padding
            attention_mask=self._mask(inputs.state, packing.lengths),
            position_ids=packing.pack(inputs.position_ids),
            position_embeddings=tuple(map(packing.pack, inputs.position_embeddings)),
            tokens=packing.tokens,
        )

    def start(self, inputs: LoopInputs) -> None:
        batch = self.backbone.loop_state.batch
        packing = self.packing
        self.state = inputs.state  # [1, T, H], of the examples in their first order
        self.all = tuple(range(len(packing.lengths)))
        # What a loop reads of examples besides their state is computed once for all loops, by their order.
        self.inputs = {self.all: inputs}
        self.parts = [[Part(self.all, len(self.all))]] * self.backbone.config.num_loops
        # If what comes before the loops is trained, no loop of any example is free of gradient.
        needs_gradient = any(x is not None and x.requires_grad for x in (inputs.state, inputs.injected))
        may_freeze = torch.is_grad_enabled() and not needs_gradient
        self.lora_parameters = batch.options.lora_parameters if may_freeze else None
        if self.lora_parameters is not None and batch.active is not None:
            # Gates belong to rows or segments of the batch, lengths to the examples that were found in it.
            examples = packing.examples if len(batch.active[0]) > 1 else [0] * len(self.all)
            active = [[gates[example] for example in examples] for gates in batch.active]
            self.parts = loop_parts(active, packing.lengths, *self.least_tokens(inputs.state))

    def loop(self, recurrent_step: Callable[[LoopInputs], Tensor], loop: int) -> None:
        loop_state = self.backbone.loop_state
        states = []
        order = ()
        for part in self.parts[loop]:
            inputs = self._inputs(part.order)
            active = part.order[: part.num_active]
            running = loop_state.batch.loop(
                loop,
                inputs.tokens.device,
                inputs.tokens,
                num_active=sum(self.packing.lengths[index] for index in active),  # tokens
                frozen=part.frozen,
                prepared=self.prepared,
            )
            announce = functools.partial(loop_state.set_loop, running)
            announce()  # for what runs outside of a layer; layers announce it themselves
            inputs = replace(inputs, state=self._reordered(self.state, self.all, part.order), announce=announce)
            # Nothing trained has touched the state of frozen examples. The gradient of inactive ones passes through the
            # frozen weights to an earlier loop.
            with torch.set_grad_enabled(torch.is_grad_enabled() and not part.frozen):
                states.append(recurrent_step(inputs))
            order += part.order
        # Autocast to bfloat16 knows no float16 here, as the states of a float16 base are.
        with torch.autocast(states[0].device.type, enabled=False):
            state = torch.cat(states, dim=1) if len(states) > 1 else states[0]
        self.state = self._reordered(state, order, self.all)

    def result(self) -> LoopInputs:
        state = self.state
        if self.lora_parameters is not None and not state.requires_grad:
            # Nothing has a gradient, but the loss must have one, and in DDP so must every adapter.
            numbers = [parameter.flatten()[0] for parameter in self.lora_parameters]
            state = state + 0 * sum(numbers)
        return replace(self.inputs[self.all], state=state)

    def least_tokens(self, like: Tensor) -> tuple[float, float]:
        """Return from how many frozen, and inactive, tokens on it takes less time to treat them apart.

        For n tokens a pass over the block's W frozen weights takes 2 n W FLOP, forward or backward, and one over the A
        adapter weights 2 n A forward and 4 n A backward. So with a launch worth L FLOP, and I layers:

            frozen apart     saves the backward pass, 2 n W,      costs another forward pass, (40 I + 30) L
            inactive apart   saves their update, 6 n A,           costs slices, (20 I + 30) L
        """
        backbone = self.backbone
        if backbone.block_sizes is None:
            linears = [backbone.get_submodule(name) for name in backbone.recurrent_linears()]
            weights = sum(linear.in_features * linear.out_features for linear in linears)
            factors = sum(parameter.numel() for parameter in self.lora_parameters)
            backbone.block_sizes = (weights, factors)
        weights, factors = backbone.block_sizes
        num_layers = backbone.config.num_recurrent_layers
        launch = launch_flops(like.device, like.dtype)
        apart = (FORWARD_LAUNCHES * num_layers + ORDER_LAUNCHES) * launch
        if like.is_cuda and weights * like.shape[1] > apart:
            return 0, 0  # the device is busy for longer than both launches take, which it does not wait for
        passes = 2 if backbone.gradient_checkpointing else 1  # the backward pass, with what it recomputes
        inactive = (SLICE_LAUNCHES * num_layers + ORDER_LAUNCHES) * launch / (6 * factors)
        return apart / (2 * passes * weights), inactive

    def _mask(self, like: Tensor, lengths: Sequence[int]) -> Lengths | Tensor | None:
        """Return the mask with which the configuration's attention keeps packed examples of these lengths apart."""
        config = self.backbone.config
        packed = Lengths(lengths, like.device, [lengths])
        if config._attn_implementation == "sdpa":
            packed = lengths_in_chunks(lengths, like, config.num_attention_heads, config.head_dim)
            if len(packed.chunks) > 1:
                return packed
            if len(lengths) == 1:
                return None  # the kernel's own causal mask
        return packed.mask(0, like.dtype)[
            None, None
        ]  # [1, 1, T, T], for one launch, which can be compiled with its layer

    def _inputs(self, order: tuple[int, ...]) -> LoopInputs:
        """Return what examples in this order read; their state is still to be set."""
        if order not in self.inputs:
            inputs = self.inputs[self.all]
            rows = self._rows(self.all, order)
            lengths = [self.packing.lengths[index] for index in order]
            with torch.no_grad():  # examples are put in another order only where none of this needs a gradient
                self.inputs[order] = replace(
                    inputs,
                    attention_mask=self._mask(inputs.state, lengths),
                    position_ids=inputs.position_ids[:, rows],
                    position_embeddings=tuple(x[:, rows] for x in inputs.position_embeddings),
                    injected=None if inputs.injected is None else inputs.injected[:, rows],
                    tokens=inputs.tokens[rows],
                )
        return self.inputs[order]

    def _reordered(self, state: Tensor, lie: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
        """Return the states [1, n, H] of the examples `order` out of a row that holds the examples `lie`."""
        return state if lie == order else state.index_select(1, self._rows(lie, order))

    def _rows(self, lie: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
        """Return the indices [n] of the tokens of the examples `order` in a row that holds the examples `lie`.

        If examples (0, 1, 2) of lengths (2, 3, 1) lie in a row, those of (2, 1) are 5, 2, 3, 4.
        """
        lengths = [self.packing.lengths[index] for index in lie]
        pieces = torch.arange(sum(lengths)).split(lengths)
        rows = dict(zip(lie, pieces, strict=True))
        ordered = torch.cat([rows[index] for index in order])
        return ordered.to(self.packing.tokens.device, non_blocking=True)
