"""What gates, adapters and models hand one another: the gates of a micro-batch, and the loop that runs. Both are frozen.

The gates of a micro-batch are a `GatePlan`: g[t, b] for K loops and N examples (Eq. 3). While the model runs, each loop is a
`LoopStep`: which tokens run, and by how much their update is multiplied.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from loopdropout_trainer.errors import UserError


class DrawKey(Protocol):
    """What a training step's random draws are keyed by; `example_ids` are (row, segment) of its examples."""

    seed: int
    step: int
    example_ids: Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class LoopStep:
    """One loop of one forward pass, for some of its tokens or for all of them.

    Attributes:
        loop: its index, 0-based.
        tokens: [n] index of the example that each token belongs to, if examples are packed in one row [1, n]. None: the
            batch, row by row.
        gate: of each packed token [n, 1] or, for M adapted modules, [n, M]; without packing of each example, [N, 1] or
            [N, M]. None: unit gates.
        num_active: number of packed tokens, counted from the first, beyond which every gate is zero; None: not known.
        frozen: whether the tokens have no active gate up to this loop and need no gradient: adapters are left out.
        prepared: what is computed once for all loops of one forward pass, such as cast weights. It lives as long as the pass,
            so that what changes between two passes (weights, merging, the active adapter) is never missed. None outside of
            a pass.
        skips_updates: whether no token has an active gate. (A flag of its own, since code that reads `num_active` is compiled
            again for each of its values.)
        scales: what adapters that run together multiply their updates by, made once for all layers.
    """

    loop: int = 0
    tokens: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    num_active: int | None = None
    frozen: bool = False
    prepared: dict[Hashable, Any] | None = None
    skips_updates: bool = field(init=False)
    scales: dict[Hashable, torch.Tensor] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "skips_updates", self.frozen or self.num_active == 0)


@dataclass(frozen=True, eq=False)
class GatePlan:
    """The gates of one micro-batch, and all that follows from them.

    Attributes:
        gates: [K, N] multipliers of the adapter's update for N examples (N = 1: the same for every example), or [K, N, M]
            with one for each of the M adapted modules. None: unit gates, which is ordinary LoRA and what inference uses;
            gates that are all exactly one are stored so, and cost nothing.
        segments: [B, S] index of the example that each token belongs to, when several examples share one row (packing,
            padding-free). None: row b is example b.
        seeds: int64 seeds of random factors that an adapter expands itself, in the shape that it asks for, or None.
        draw: in a training step, what its random draws are keyed by, for models that start from a random state; None
            outside of one.
        active: [K][N], whether an example has an active gate in a loop. None for unit gates, and where an update can have an
            effect or a gradient although its gate is zero.
        unused_modules: [M], True for modules that no loop and no example uses while others are in use: they need not be
            computed. Empty unless gates are [K, N, M].
    """

    gates: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    draw: DrawKey | None = None
    active: list[list[bool]] | None = field(init=False, default=None)
    unused_modules: list[bool] = field(init=False, default_factory=list)
    _on_device: dict[torch.device, torch.Tensor] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.gates is None or self.gates.requires_grad:
            return
        gates = self.gates.cpu()
        if bool((gates == 1).all()):
            object.__setattr__(self, "gates", None)
            return
        used = gates != 0
        if self.seeds is None:
            active = used.flatten(2).any(dim=2) if gates.dim() == 3 else used
            object.__setattr__(self, "active", active.tolist())
        if gates.dim() == 3 and bool(used.any()):
            object.__setattr__(self, "unused_modules", (~used.flatten(0, 1).any(dim=0)).tolist())

    @property
    def per_module(self) -> bool:
        """Whether adapted modules have gates of their own."""
        return self.gates is not None and self.gates.dim() == 3

    def step(
        self,
        loop: int,
        device: torch.device | None = None,
        tokens: torch.Tensor | None = None,
        num_active: int | None = None,
        frozen: bool = False,
        prepared: dict[Hashable, Any] | None = None,
    ) -> LoopStep:
        """Return the step of one loop, with its gates on `device`; the other arguments are attributes of `LoopStep`.

        Raises:
            ValueError: if the plan has no gates for this loop.
        """
        gate = self._gate(loop, device)
        if gate is not None and tokens is not None:
            gate = gate[tokens if len(gate) > 1 else torch.zeros_like(tokens)]  # [n, 1 or M]
        return LoopStep(loop, tokens, gate, num_active, frozen, prepared)

    def _gate(self, loop: int, device: torch.device | None) -> torch.Tensor | None:
        """Return the gates of a loop, [N, 1] or [N, M]; None for unit gates."""
        gates = self.gates
        if gates is None:
            return None
        if loop >= len(gates):
            raise UserError(
                f"Gates were set for {len(gates)} loops, but the model is running loop {loop + 1}: "
                "set the gates after the model's depth (`config.num_loops`)."
            )
        if device is not None and gates.device != device:
            if device not in self._on_device:
                self._on_device[device] = gates.to(device, non_blocking=True)
            gates = self._on_device[device]
        return gates[loop] if gates.dim() == 3 else gates[loop].unsqueeze(1)


UNIT_GATES = GatePlan()
"""Ordinary LoRA: what holds outside of training steps and of `use_gates`."""


def example_starts(position_ids: torch.Tensor) -> torch.Tensor:
    """Return whether an example begins at each token, [B, S]: where its position is not the previous token's plus 1.

    This is decided here alone, by the criterion of transformers' attention masks.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    return starts


def as_gate_matrix(gates: torch.Tensor | Sequence, num_loops: int) -> torch.Tensor:
    """Return gates [K], [K, N] or [K, N, M] as a floating-point tensor, [K] as [K, 1], the others as they are.

    Raises:
        ValueError: for another shape, K other than `num_loops`, or a gate that is not finite.
    """
    gates = torch.as_tensor(gates)
    if not gates.is_floating_point():
        gates = gates.to(torch.float32)
    if gates.dim() == 1:
        gates = gates.unsqueeze(1)
    if gates.dim() not in (2, 3) or len(gates) != num_loops or 0 in gates.shape:
        raise UserError(
            f"Gates must have shape [K], [K, 1], [K, B] or [K, B, M] with K = {num_loops} loops and M adapted modules; "
            f"got {list(gates.shape)}."
        )
    if not bool(torch.isfinite(gates.detach()).all()):
        raise UserError("Gates must be finite numbers.")
    return gates


def first_active_loops(gates: torch.Tensor) -> list[int]:
    """Return each example's first loop, 0-based, with a nonzero gate in [K, N] or [K, N, M]; K if all its gates are zero."""
    active = (gates != 0).flatten(2).any(dim=2) if gates.dim() == 3 else gates != 0  # [K, N]
    return (active.cumsum(dim=0) == 0).sum(dim=0).tolist()
