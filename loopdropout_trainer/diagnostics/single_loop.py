"""How well the shared update works in one loop alone (Appendix "Single-Loop Activation").

The adapter is enabled, at unit strength, in loop t only; the backbone runs all K loops, and the final loop's
teacher-forced loss is compared with the frozen model's:

    rho_t = 100 (CE(0) - CE(e_t)) / CE(0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft import PeftModel

from loopdropout_trainer.adapters import use_gates
from loopdropout_trainer.diagnostics.depth import counts
from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic
from loopdropout_trainer.diagnostics.scores import Batch, Scores, evaluating, score_final, total
from loopdropout_trainer.looped import find_looped_model


@dataclass(frozen=True)
class SingleLoopActivation:
    """Cross entropies of the final loop, in nats per target token, under different activations of one adapter.

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
        return tuple(map(self.reduction, self.only))

    def reduction(self, loss: float) -> float:
        """Return by how much a loss is below the frozen model's, in percent."""
        return 100 * (self.frozen - loss) / self.frozen


def activation(loss: Callable[[torch.Tensor], float], num_loops: int) -> SingleLoopActivation:
    """Measure an adapter one loop at a time.

    Args:
        loss: gives the final loop's loss under gates [K]; called K + 2 times.
        num_loops: K.
    """
    return SingleLoopActivation(
        frozen=loss(torch.zeros(num_loops)),
        only=tuple(loss(one_hot) for one_hot in torch.eye(num_loops)),
        all_on=loss(torch.ones(num_loops)),
    )


def single_loop_activation(
    model: PeftModel, batches: Iterable[Batch], over_processes: bool = False
) -> SingleLoopActivation:
    """Measure an adapter one loop at a time.

    Args:
        model: PEFT model over a looped model; of several adapters, the active one is measured.
        batches: model inputs with `labels` [B, S], -100 where no target is; they are run K + 2 times.
        over_processes: whether every process calls this with batches of its own; the means are over all of them.

    Raises:
        ValueError: if the batches hold no target token.
    """
    batches = list(batches)
    num_loops = find_looped_model(model).config.num_loops
    return activation(lambda gates: final_loop_loss(model, batches, gates, over_processes), num_loops)


def final_loop_loss(
    model: PeftModel, batches: Iterable[Batch], gates: torch.Tensor, over_processes: bool = False
) -> float:
    """Return the cross entropy of the final loop per target token, in nats, under gates [K] or [K, 1].

    Raises:
        ValueError: if the batches hold no target token.
    """
    with use_gates(model, gates), evaluating(model):
        return Scores.of(total((score_final(model, batch) for batch in batches), over_processes)).loss


class SingleLoop(Diagnostic):
    """K + 2 passes: frozen, each loop alone, all loops."""

    name = "single_loop"
    title = "Loss reduction with the adapter in one loop only, %"
    needs_adapter = True

    def measure(self, context: Context) -> dict[str, Any]:
        found = activation(lambda gates: context.scores(gates).loss, context.num_loops)
        return {
            **asdict(found),
            "reductions_percent": found.reductions,
            "all_on_reduction_percent": found.reduction(found.all_on),
        }


class SingleLoopGeneration(Diagnostic):
    """Accuracy by greedy generation with one adapter application (Table "GSM8K generation with one adapter application")."""

    name = "single_loop_generation"
    title = "Accuracy with the adapter in one loop only, %"
    needs = "benchmarks"
    needs_adapter = True

    def measure(self, context: Context) -> dict[str, Any]:
        found = {}
        for grouped in context.benchmarks:
            only = [context.evaluate(grouped, one_hot, None) for one_hot in torch.eye(context.num_loops).tolist()]
            all_on = context.evaluate(grouped, None, None)
            of_loops = {"only": [counts(result) for result in only], "all_on": counts(all_on)}
            found[grouped.benchmark.name] = {"total": all_on.total, **of_loops}
        return found
