"""A rule of your own: at most one loop of each example is off.

    loopdropout sft quickstart.yaml --import recipes/examples/drop_one_loop.py --rule drop_one_loop \\
        --output_dir outputs/own_rule

docs/extending.md explains it. In a file of the package's `gates/`, import from `loopdropout_trainer.gates.rule` instead.
"""

from dataclasses import dataclass

import torch

from loopdropout_trainer.gates import Draw, GateRule, register_rule


@register_rule
@dataclass(frozen=True)
class DropOneLoop(GateRule):
    """With probability p, one random loop of an example is off. The mean gate is 1."""

    name = "drop_one_loop"
    p: float = 0.5

    def sample(self, draw: Draw) -> torch.Tensor:
        uniforms = draw.uniforms("drop_one_loop", 2)  # [N, 2]
        is_dropped = uniforms[:, 0] < self.p  # [N]
        loop = (uniforms[:, 1] * draw.num_loops).long()  # [N]
        gates = torch.ones(draw.num_loops, len(draw.example_ids))  # [K, N]
        gates[loop[is_dropped], is_dropped] = 0
        return gates / (1 - self.p / draw.num_loops)
