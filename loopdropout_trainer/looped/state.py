"""What the gates, the adapters and the models share: the running loop, and the gates that apply in it.

A looped model runs h_t = F(h_{t-1}; W) for t = 1..K with the same weights W (Eq. 1). While it runs, it *announces*
each loop on its `LoopState`; a gated adapter reads from the same object by how much to multiply its update in that loop.
Models, adapters and gate rules never import one another: they meet here, in one small tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn


class Draw(Protocol):
    """What a training step's random draws are keyed by; `places` are (row, segment) of its examples."""

    seed: int
    step: int
    places: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Part:
    """Tokens of a micro-batch, packed in one row [1, n], and their gates in the loop that they run.

    Attributes:
        examples: [n] index of the example that each token belongs to.
        gate: [n, 1] or, for M adapted modules, [n, M]; None for unit gates.
        active: number of tokens, counted from the first, beyond which every gate is zero.
        silent: whether there are no active ones. (A flag, since compiled code would be made anew for each `active`.)
    """

    examples: torch.Tensor
    gate: torch.Tensor | None
    active: int
    silent: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "silent", self.active == 0)


class LoopState:
    """The running loop of one looped model, and the gates of its adapters.

    Attributes:
        version: a number that changes whenever gates are set, before and after every micro-batch.
        loop: index of the running loop, 0-based. The model's recurrent layers write it *inside* their checkpointed
            `forward`: recomputation in the backward pass then announces the right loop again, although loops run
            backwards there. It is a plain attribute and not a thread-local, because CUDA's backward recomputes in
            autograd's own thread.
        gates: [K, N] multipliers of the adapter's update for N examples (N = 1: the same for every example), or
            [K, N, M] with one for each of the M adapted modules, or None for unit gates, which is ordinary LoRA and what
            inference uses.
        segments: [B, S] index of the example that each token belongs to, when several examples share one row
            (packing, padding-free). None: row b is example b.
        seeds: int64 seeds of random factors that an adapter expands itself, in the shape that it asks for, or None.
        active: [K][N], whether an example has an active gate in a loop; None if that is not known on the CPU, or if an
            update can have a gradient where its gate is zero.
        pack: whether the model may run a batch's examples packed in one row, without their padding.
        factors: the adapter's trained parameters, if nothing else is trained; a packed micro-batch's loops before an
            example's first active gate may then run as the frozen model, without gradient. None: all loops run alike.
        part: the tokens that run, if they are packed; None: the whole batch, row by row. Announced together with `loop`.
        frozen: whether the running tokens have no active gate up to this loop and need no gradient: adapters are left out.
        off: [M], True for modules that no loop and no example uses (gates all zero) while others are in use; they need
            not be computed. Empty unless gates are [K, N, M].
        learned: where the [K] trained gates are that multiply the drawn ones, as a dictionary and a key, or None. Not
            the tensor itself, since sharding puts another one in its place.
        draw: in a training step, what its random draws are keyed by (`seed`, `step`, and the examples' `places` in the
            global batch), for models that start from a random state; None outside of one.
    """

    def __init__(self) -> None:
        self.version = 0
        self.loop = 0
        self.gates: torch.Tensor | None = None
        self.segments: torch.Tensor | None = None
        self.seeds: torch.Tensor | None = None
        self.active: list[list[bool]] | None = None
        self.pack = False
        self.factors: Sequence[nn.Parameter] | None = None
        self.part: Part | None = None
        self.frozen = False
        self.off: list[bool] = []
        self.learned: tuple[nn.ParameterDict, str] | None = None
        self.draw: Draw | None = None

    def set_gates(
        self, gates: torch.Tensor | None, segments: torch.Tensor | None = None, seeds: torch.Tensor | None = None
    ) -> None:
        """Apply `gates` from now on; exact unit gates are stored as None, so that they cost nothing."""
        self.version += 1
        plain = gates is not None and not gates.requires_grad and gates.device.type == "cpu"
        if plain and bool((gates == 1).all()):
            gates = None
        self.active = None
        if plain and gates is not None and seeds is None:
            self.active = (gates != 0).flatten(2).any(dim=2).tolist() if gates.dim() == 3 else (gates != 0).tolist()
        self.off = []
        if plain and gates is not None and gates.dim() == 3:
            off = (gates == 0).all(dim=0).all(dim=0)  # [M]
            self.off = [] if bool(off.all()) else off.tolist()
        self.gates, self.seeds = gates, seeds
        self.segments = segments

    def unit_gates(self) -> None:
        """Return to ordinary LoRA, outside of any training step: every gate is one."""
        self.set_gates(None)
        self.draw = self.factors = self.part = None
        self.pack = False

    def announce(self, loop: int, part: Part | None = None) -> None:
        """Say which loop runs, and on which tokens if the micro-batch is packed."""
        self.loop, self.part = loop, part

    def part_of(self, loop: int, examples: torch.Tensor, active: int) -> Part:
        """Return the packed tokens of `examples` [n] with their gates in `loop`; only the first `active` may be gated."""
        gate = self._gates_of(loop, examples)
        if gate is not None:
            gate = gate[examples if len(gate) > 1 else torch.zeros_like(examples)]  # [n] or [n, M]
        return Part(examples, None if gate is None else gate.reshape(len(examples), -1), active)

    def gate_for(self, hidden_states: torch.Tensor, module: int = 0) -> torch.Tensor | None:
        """Return the running loop's gate, shaped to multiply [B, S, r] activations, or None for unit gates.

        Args:
            hidden_states: the [B, S, H] input of an adapted linear map; gives batch size and device.
            module: index of that map among the adapted ones.
        """
        if self.part is not None:
            gate = self.part.gate
            if gate is not None:
                gate = (gate if gate.shape[1] == 1 else gate[:, module : module + 1]).unsqueeze(0)  # [1, n, 1]
        else:
            gate = self._gates_of(self.loop, hidden_states)  # [N] or [N, M]
            if gate is not None:
                gate = self.per_token(gate[:, module] if gate.dim() == 2 else gate, hidden_states)
        if self.learned is not None:
            learned = self._learned_gate().to(hidden_states.device)
            gate = learned if gate is None else gate * learned
        return gate

    def per_token(self, values: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return values of each example, [N] or [N, E], shaped to multiply [B, S, r] or [B, S, E] activations."""
        values = values.reshape(len(values), -1)  # [N, E]
        between = [1] * (hidden_states.dim() - 2)
        if len(values) == 1:
            return values.view(1, *between, -1)
        if self.part is not None:
            return values[self.part.examples.to(values.device)].unsqueeze(0)  # [1, n, E]
        if self.segments is not None:
            return values[self.segments.to(values.device)]  # [B, S, E]
        if len(values) != len(hidden_states):
            raise ValueError(
                f"Gates were set for {len(values)} examples, but the batch has {len(hidden_states)}; "
                "give one column for each example, or a single column for all of them."
            )
        return values.view(len(values), *between, -1)

    def is_off(self, module: int) -> bool:
        """Return whether no loop and no example of the batch, or none of the running tokens, uses the module's update."""
        silent = self.part is not None and self.part.silent
        return self.frozen or silent or (bool(self.off) and self.off[module])

    def _gates_of(self, loop: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return the gates [N] or [N, M] of a loop on the device of `like`, None for unit gates."""
        if self.gates is None:
            return None
        if loop >= len(self.gates):
            raise ValueError(
                f"Gates were set for {len(self.gates)} loops, but the model is running loop {loop + 1}: "
                "set the gates after the model's depth (`config.num_loops`)."
            )
        if self.gates.device != like.device:
            self.gates = self.gates.to(like.device, non_blocking=True)
        return self.gates[loop]

    def _learned_gate(self) -> torch.Tensor:
        parameters, key = self.learned
        if self.loop >= len(parameters[key]):
            raise ValueError(
                f"The adapter learned gates for {len(parameters[key])} loops, but the model is running loop "
                f"{self.loop + 1}: set its depth (`config.num_loops`) back."
            )
        return parameters[key][self.loop]


def as_gate_matrix(gates: torch.Tensor | Sequence, num_loops: int) -> torch.Tensor:
    """Return `gates` given as [K], [K, 1], [K, N] or [K, N, M] in one of the latter two forms, checked against the depth.

    Raises:
        ValueError: if the first dimension is not K, or a gate is not finite.
    """
    gates = torch.as_tensor(gates)
    if not gates.is_floating_point():
        gates = gates.to(torch.float32)
    if gates.dim() == 1:
        gates = gates.unsqueeze(1)
    if gates.dim() not in (2, 3) or len(gates) != num_loops or 0 in gates.shape:
        raise ValueError(
            f"Gates must have shape [K], [K, 1], [K, B] or [K, B, M] with K = {num_loops} loops and M adapted modules; "
            f"got {list(gates.shape)}."
        )
    if not bool(torch.isfinite(gates.detach()).all()):
        raise ValueError("Gates must be finite numbers.")
    return gates


def first_active_loops(gates: torch.Tensor) -> list[int]:
    """Return for each of N examples the first loop, from 0, in which a gate of [K, N] or [K, N, M] is not zero; K: none."""
    active = (gates != 0).flatten(2).any(dim=2) if gates.dim() == 3 else gates != 0  # [K, N]
    return (active.cumsum(dim=0) == 0).sum(dim=0).tolist()


@contextmanager
def applied_gates(state: LoopState, gates: torch.Tensor, segments: torch.Tensor | None = None) -> Iterator[None]:
    """Apply gates inside the block, and put back what was there before, also after an exception."""
    before = (state.gates, state.segments, state.seeds)
    state.set_gates(gates, segments)
    try:
        yield
    finally:
        state.set_gates(*before)
