"""The two matched noise controls (Appendix "Matched noise controls").

Both rules add noise where Loop Dropout with the same seed removes the update: the events a_t ~ Bernoulli(p) are the same.
The normal variates use separate random streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loopdropout_trainer.gates.loop_dropout import MaskedRule, survival
from loopdropout_trainer.gates.rule import Draw, check_number, register_rule


@register_rule
@dataclass(frozen=True)
class ParallelNoise(MaskedRule):
    """Continuous noise along the learned update, with the first two moments of Loop Dropout at c = 1.

    Unlike masks it has negative gates, and no mass at zero.

    Gate: 1 + a_t c xi_t / sqrt(q_t), a_t ~ Bernoulli(p_t), xi_t ~ N(0, 1)
    Mean: 1
    Covariance: c^2 (p/q) I
    Paper: Section "Training controls", Appendix "Matched noise controls"
    """

    name = "parallel_noise"
    c: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_number("c", self.c, 0, 1e3)

    def sample(self, draw: Draw) -> Tensor:
        noise = draw.normals("parallel noise", draw.num_loops).T
        gates = 1 + draw.removals(self.p) * self.c * noise / survival(self.p).sqrt()
        return gates.to(torch.float32)


@register_rule
@dataclass(frozen=True)
class WeightNoise(MaskedRule):
    """Low-rank weight noise, along random directions of rank r_n instead of the update.

    Delta_i + a_t c |Delta_i|_F / sqrt(q_t d_out d_in r_n) G_out G_in, with standard normal G_out [d_out, r_n] and
    G_in [r_n, d_in], drawn for each example, loop and matrix. |Delta_i|_F has no gradient. Gates are one. The expected
    energy of the noise is c^2 (p/q) |Delta_i|_F^2, which equals the energy of Loop Dropout at c = 1.

    Gate: 1, plus weight noise where a_t = 1, a_t ~ Bernoulli(p_t)
    Mean: 1
    Covariance: 0, noise energy c^2 (p/q) |Delta|_F^2
    Paper: Section "Training controls", Appendix "Matched noise controls"
    """

    name = "weight_noise"
    title = "Low-rank weight noise"
    lora_kind = "weight_noise"
    c: float = 1.0
    noise_rank: int = 16

    def __post_init__(self):
        super().__post_init__()
        check_number("c", self.c, 0, 1e3)
        check_number("noise_rank", self.noise_rank, 1, 1024, int)

    def noise_scales(self, num_loops: int) -> Tensor:
        """Return c / sqrt(q_t), [K] float64."""
        return (self.c / survival(self.p).sqrt()).view(-1).expand(num_loops)

    def sample(self, draw: Draw) -> Tensor:
        return torch.ones(draw.num_loops, len(draw.example_ids))

    def seeds(self, draw: Draw) -> Tensor:
        """Return [K, N, M] seeds of the noise of each loop, example and module, 0 where there is no event."""
        u = draw.uniforms("weight noise", draw.num_loops * draw.num_modules)
        seeds = (u * 2.0**53).to(torch.int64) + 1
        seeds = seeds.view(-1, draw.num_loops, draw.num_modules).transpose(0, 1)
        return seeds * draw.removals(self.p).unsqueeze(-1)
