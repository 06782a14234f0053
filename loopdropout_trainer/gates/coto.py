"""CoTo-on-Ouro: physical layers switched on at random, more and more of them as training goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopdropout_trainer.checks import check_number
from loopdropout_trainer.gates.rule import Draw, GateRule, register_rule


@register_rule
@dataclass(frozen=True)
class CoTo(GateRule):
    """One switch for each of L physical layers, fixed over its projections, all loops, all examples of the step.

    The keep probability q goes linearly from `keep_start` in the first optimizer step to 1 after the fraction `ramp` of
    the steps. If the draw switches all layers off, the layer with the largest draw is on. No rescaling. An adapter that is
    switched off for a step is not computed on a single process; in distributed runs it takes part with zero.

    Gate: b_l for the modules of layer l, b_l ~ Bernoulli(q(step)), not all zero
    Mean: q + (1-q)^L / L
    Covariance: m (1-m) 11' for the mean m: one switch for all loops
    Paper: Appendix "Baseline Configurations and Per-Seed Results" (CoTo-on-Ouro)
    """

    name = "coto"
    keep_start: float = 0.1
    ramp: float = 0.75

    def __post_init__(self):
        check_number("keep_start", self.keep_start, 0, 1)
        check_number("ramp", self.ramp, 0, 1)

    def keep_at(self, step: int, num_steps: int) -> float:
        """Return q in optimizer step `step` (from 0) of `num_steps`."""
        ramp_steps = self.ramp * num_steps
        progress = min(step / ramp_steps, 1.0) if ramp_steps > 0 else 1.0
        return self.keep_start + (1 - self.keep_start) * progress

    def sample(self, draw: Draw) -> torch.Tensor:
        layers = torch.tensor(draw.layers)  # [M]
        u = draw.step_uniforms("coto", int(layers.max()) + 1)  # [L]
        on = u >= 1 - self.keep_at(draw.step, draw.num_steps)
        on[u.argmax()] = True  # the last to go, so that the set is never empty
        return on[layers].to(torch.float32).expand(draw.num_loops, 1, -1).contiguous()  # [K, 1, M]
