"""How well the shared update works in one loop alone (Appendix "Single-Loop Activation").

The adapter is enabled, at unit strength, in loop t only; the backbone runs all K loops, and the final loop's
teacher-forced loss is compared with the frozen model's:

    rho_t = 100 (CE(0) - CE(e_t)) / CE(0)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from peft import PeftModel

from loopdropout_trainer.adapters import use_gates
from loopdropout_trainer.looped import find_looped_model


@dataclass(frozen=True)
class SingleLoopActivation:
    """Token-weighted cross entropies of the final loop, in nats, under different activations of one adapter.

    Attributes:
        frozen: CE(0), no loop adapted.
        only: CE(e_t) for t = 1..K, only loop t adapted.
        all_on: every loop adapted, as at inference.
    """

    frozen: float
    only: tuple[float, ...]
    all_on: float

    @property
    def reductions(self) -> tuple[float, ...]:
        """rho_t for t = 1..K, in percent of the frozen model's loss."""
        return tuple(100 * (self.frozen - loss) / self.frozen for loss in self.only)


def single_loop_activation(model: PeftModel, batches: Iterable[dict[str, torch.Tensor]]) -> SingleLoopActivation:
    """Measure an adapter one loop at a time.

    Args:
        model: PEFT model over a looped model.
        batches: model inputs with `labels` [B, S], -100 where no target is; they are run K + 2 times.
    """
    batches = list(batches)
    num_loops = find_looped_model(model).config.num_loops
    one_hot = torch.eye(num_loops)
    return SingleLoopActivation(
        frozen=final_loop_loss(model, batches, torch.zeros(num_loops)),
        only=tuple(final_loop_loss(model, batches, one_hot[loop]) for loop in range(num_loops)),
        all_on=final_loop_loss(model, batches, torch.ones(num_loops)),
    )


@torch.no_grad()
def final_loop_loss(model: PeftModel, batches: Iterable[dict[str, torch.Tensor]], gates: torch.Tensor) -> float:
    """Return the cross entropy of the final loop per target token, in nats, under gates [K] or [K, 1].

    Raises:
        ValueError: if the batches hold no target token.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    try:
        with use_gates(model, gates):
            for batch in batches:
                batch = {name: tensor.to(device) for name, tensor in batch.items()}
                targets = int((batch["labels"][:, 1:] != -100).sum())
                if targets:
                    total += float(model(**batch, use_cache=False).loss) * targets
                    tokens += targets
    finally:
        model.train(was_training)
    if tokens == 0:
        raise ValueError("The batches hold no target token: every label is -100.")
    return total / tokens
