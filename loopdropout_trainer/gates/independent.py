"""Independent adapters: a pair (A_t, B_t) of its own for each loop, with or without Loop Dropout's masks."""

from __future__ import annotations

from dataclasses import dataclass

from loopdropout_trainer.gates.loop_dropout import MaskedRule
from loopdropout_trainer.gates.rule import register_rule


@register_rule
@dataclass(frozen=True)
class Independent(MaskedRule):
    """h_t = F(h_{t-1}; W + g_t Delta_t): `lora_r` is the rank of each loop's pair.

    Rank 4 matches the parameters of a shared rank-16 adapter at four loops (equal budget), rank 16 its rank (equal rank).

    Gate: b_t / q_t on loop t's own update, b_t ~ Bernoulli(q_t)
    Mean: 1
    Covariance: (p/q) I
    Paper: Table "Sharing x masking on Ouro-1.4B"; Appendix "Sharing and masking"
    """

    name = "independent"
    adapter = "per_loop"
    mergeable = False
    p: float | tuple[float, ...] = 0.0
