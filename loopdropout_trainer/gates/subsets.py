"""Dependent random sets of active loops, with each gate divided by its retention probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopdropout_trainer.gates.rule import Draw, GateRule, check_number, register_rule


@register_rule
@dataclass(frozen=True)
class ExactlyM(GateRule):
    """Exactly m of the K loops are active, with the update times K/m. All sets of m loops are equally likely.

    The active loops have the largest event uniforms, so that the sets correlate with Loop Dropout's sets.

    Gate: (K/m) 1[t in S], S a random set of m loops
    Mean: 1
    Covariance: (p/q) K/(K-1) P_perp, q = m/K, P_perp = I - 11'/K
    Paper: Table "Structured, scheduled and adaptive masks", Appendix "What the Controls Match"
    """

    name = "exactly_m"
    title = "Exactly m loops"
    m: int = 2

    def __post_init__(self):
        check_number("m", self.m, 1, 1024, int)

    def check(self, num_loops: int) -> None:
        check_number("m", self.m, 1, num_loops, int)

    def sample(self, draw: Draw) -> torch.Tensor:
        chosen = draw.event_uniforms().topk(self.m, dim=0).indices  # [m, N]
        gates = torch.zeros(draw.num_loops, len(draw.example_ids))
        return gates.scatter_(0, chosen, draw.num_loops / self.m)


@register_rule
@dataclass(frozen=True)
class RandomPrefix(GateRule):
    """Loops 1..T are active, T uniform on 1..K: loop t is retained with probability (K - t + 1)/K.

    T increases with the event uniform of the last loop, which is retained least often.

    Gate: 1[t <= T] K/(K - t + 1)
    Mean: 1
    Covariance: (m - 1)/(K - m + 1) at (s, t), m = min(s, t)
    Paper: Table "Structured, scheduled and adaptive masks"
    """

    name = "random_prefix"

    def sample(self, draw: Draw) -> torch.Tensor:
        return _prefix_gates(draw.event_uniforms()[-1], draw.num_loops)


@register_rule
@dataclass(frozen=True)
class RandomSuffix(GateRule):
    """Loops T..K are active, T uniform on 1..K: loop t is retained with probability t/K.

    T decreases with the event uniform of the first loop, which is retained least often.

    Gate: 1[t >= T] K/t
    Mean: 1
    Covariance: (K - m)/m at (s, t), m = max(s, t)
    Paper: Table "Structured, scheduled and adaptive masks"
    """

    name = "random_suffix"

    def sample(self, draw: Draw) -> torch.Tensor:
        return _prefix_gates(draw.event_uniforms()[0], draw.num_loops).flip(0)


def _prefix_gates(u: torch.Tensor, num_loops: int) -> torch.Tensor:
    """Return the gates [K, N] of random prefixes for uniforms [N]."""
    loop = torch.arange(num_loops).unsqueeze(1)  # t - 1
    last = (u * num_loops).to(torch.int64)  # T - 1, [N]
    return (loop <= last) * (num_loops / (num_loops - loop))
