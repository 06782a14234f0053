"""Loop Dropout: g_t = b_t / q_t with b_t ~ Bernoulli(q_t) independent for each example and loop, q_t = 1 - p_t (Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopdropout_trainer.gates.probabilities import check_p, check_p_length
from loopdropout_trainer.gates.rule import Draw, GateRule, register_rule


@register_rule
@dataclass(frozen=True)
class LoopDropout(GateRule):
    """g = b / q: the whole adapter is removed from a loop, or applied at 1/q of its strength.

    Mean 1, covariance (p/q) I (Eq. 4). p is one number or one per loop (Table "Structured masks" has profiles).
    """

    name = "loop_dropout"
    p: float | tuple[float, ...] = 0.5

    def __post_init__(self):
        object.__setattr__(self, "p", check_p(self.p))

    def check(self, num_loops: int) -> None:
        check_p_length(self.p, num_loops)

    def sample(self, draw: Draw) -> torch.Tensor:
        q = 1 - torch.as_tensor(self.p, dtype=torch.float64).view(-1, 1)
        kept = ~draw.removals(self.p)
        return (kept / q).to(torch.float32)
