"""Where gates, adapters and models meet: the gates in force, and the running loop.

A looped model runs h_t = F(h_{t-1}; W) for t = 1..K with the same weights W (Eq. 1). While it runs, it *announces* each loop
on its `LoopState`; a gated adapter reads from the same object by how much to multiply its update in that loop. Models,
adapters and gate rules never import one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped.plan import UNIT_GATES, GatePlan, LoopStep


class LoopState:
    """The gates in force in one looped model, and its running loop: two references to objects that never change.

    They are plain attributes and not thread-locals, because CUDA's backward pass recomputes in autograd's own thread.

    Attributes:
        plan: of the micro-batch. Written by who sets gates: the trainer for a training step, `use_gates` for its block.
        step: the running loop. The model's recurrent layers write it *inside* their checkpointed `forward`: recomputation in
            the backward pass then announces the right loop again, although loops run backwards there.
    """

    def __init__(self) -> None:
        self.plan: GatePlan = UNIT_GATES
        self.step: LoopStep = LoopStep()

    @property
    def loop(self) -> int:
        """Index of the running loop, 0-based."""
        return self.step.loop

    @property
    def gates(self) -> torch.Tensor | None:
        """The gates in force, [K, N] or [K, N, M]; None for unit gates."""
        return self.plan.gates

    def apply(self, plan: GatePlan) -> None:
        """Apply the gates of `plan` from now on."""
        self.plan = plan
        self.step = plan.step(0)

    def unit_gates(self) -> None:
        """Return to ordinary LoRA, outside of any training step: every gate is one."""
        self.apply(UNIT_GATES)

    def announce(self, step: LoopStep) -> None:
        """Say which loop runs, and on which tokens."""
        self.step = step

    def gate_for(self, hidden_states: torch.Tensor, module: int = 0) -> torch.Tensor | None:
        """Return the running loop's gate, shaped to multiply [B, S, r] activations, or None for unit gates.

        Args:
            hidden_states: the [B, S, H] input of an adapted linear map; gives batch size and device.
            module: index of that map among the adapted ones.
        """
        gate = self.step.gate
        if gate is None:
            return None
        if gate.shape[1] > 1:
            gate = gate[:, module : module + 1]
        if gate.device != hidden_states.device:  # a model spread over several devices
            gate = gate.to(hidden_states.device)
        return gate.unsqueeze(0) if self.step.tokens is not None else self.per_token(gate, hidden_states)

    def per_token(self, values: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return values of each example, [N] or [N, E], shaped to multiply [B, S, r] or [B, S, E] activations."""
        values = values.reshape(len(values), -1)  # [N, E]
        between = [1] * (hidden_states.dim() - 2)
        if len(values) == 1:
            return values.view(1, *between, -1)
        tokens, segments = self.step.tokens, self.plan.segments
        if tokens is not None:
            return values[tokens.to(values.device)].unsqueeze(0)  # [1, n, E]
        if segments is not None:
            return values[segments.to(values.device)]  # [B, S, E]
        if len(values) != len(hidden_states):
            raise UserError(
                f"Gates were set for {len(values)} examples, but the batch has {len(hidden_states)}; "
                "give one column for each example, or a single column for all of them."
            )
        return values.view(len(values), *between, -1)

    def is_unused(self, module: int) -> bool:
        """Return whether the update of an adapted module is zero for all running tokens, so that it need not be computed."""
        unused = self.plan.unused_modules
        return self.step.skips_updates or (bool(unused) and unused[module])


@contextmanager
def applied_gates(
    state: LoopState, gates: torch.Tensor | None, segments: torch.Tensor | None = None
) -> Iterator[None]:
    """Apply gates inside the block, and put back everything that was there before, also after an exception."""
    before = state.plan, state.step
    state.apply(GatePlan(gates, segments))
    try:
        yield
    finally:
        state.plan, state.step = before
