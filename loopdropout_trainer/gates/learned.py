"""Learned per-loop gates: the strength of the shared update in each loop is trained with it."""

from __future__ import annotations

from dataclasses import dataclass

from loopdropout_trainer.gates.loop_dropout import MaskedRule
from loopdropout_trainer.gates.rule import register_rule


@register_rule
@dataclass(frozen=True)
class Learned(MaskedRule):
    """One trainable scalar gamma_t for each loop, from 1; alone (p = 0) or together with Loop Dropout.

    The gammas are saved with the adapter and stay at inference. They cannot be merged unless all are equal.

    Gate: gamma_t b_t / q_t, b_t ~ Bernoulli(q_t)
    Mean: gamma
    Covariance: (p/q) diag(gamma^2)
    Paper: Table "Structured, scheduled and adaptive masks"
    """

    name = "learned"
    adapter = "learned"
    mergeable = False
    p: float | tuple[float, ...] = 0.0
