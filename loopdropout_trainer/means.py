"""Faults of a user's rule: gates whose mean is not 1, as all gates are at inference, and gates that nobody can draw again."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loopdropout_trainer.gate_values import as_gate_matrix
from loopdropout_trainer.gates.rule import Draw, GateRule, is_packaged


_NUM_EXAMPLES = 4096
_FEWEST_STEPS = 4  # because the spread of the means over steps is measured, too
_MOST_STEPS = 512
_TOLERANCE = 0.02


class RuleFault(NamedTuple):
    """The faults of a user's rule.

    Attributes:
        warning: Sentences about them.
        means: Mean gate of each loop, [K], if they are not 1, else empty.
        num_examples: Number of examples that the means were measured on.
    """

    warning: str
    means: Sequence[float] = ()
    num_examples: int = 0


def find_fault(
    rule: GateRule, num_loops: int, layers: Sequence[int], batch_size: int = 16, seed: int = 0
) -> RuleFault | None:
    """Return the faults of a user's rule with its measured mean gates, or None if they are 1 and can be drawn again.

    The rules of this package are tested, and a rule with `has_unit_mean = False` has another mean on purpose. The measurement
    draws from a copy of the rule, and leaves its state and torch's random state on the CPU unchanged.

    Args:
        rule: Rule of the training.
        num_loops: Recurrence depth K.
        layers: Index of the physical layer of each adapted module, [M].
        batch_size: Number of examples of a draw.
        seed: Seed of the draws.
    """
    if is_packaged(type(rule)) or not rule.has_unit_mean:
        return None
    warnings = []
    if not _draws_again(rule, num_loops, layers, batch_size, seed):
        warnings.append(
            f"The rule {rule.name!r} must draw the same gates for the same `draw`, but two calls of `sample` differ, so a "
            "resumed training would have other gates. Draw random numbers by `draw.uniforms` or `draw.normals`, and not from "
            "the random state of torch, numpy or Python."
        )
    means, num_examples = measure_mean(rule, num_loops, layers, batch_size, seed)  # [steps, K]
    mean, error = means.mean(dim=0), means.std(dim=0) / math.sqrt(len(means))  # [K]
    wrong_means = []
    if bool(((mean - 1).abs() > _TOLERANCE + 5 * error).any()):
        wrong_means = mean.tolist()
        warnings.append(
            f"The gates of the rule {rule.name!r} must have the mean 1, because all gates are 1 at inference, but over "
            f"{num_examples:,} examples it is {name_means(mean.tolist())}. Divide the gates by their mean, or write "
            f"`has_unit_mean = False` in the class {type(rule).__name__} if another scale is meant."
        )
    if not warnings:
        return None
    return RuleFault(" ".join(warnings), wrong_means, num_examples)


def name_means(means: Iterable[float]) -> str:
    """Return the mean gates of loops 1 to K as a text, such as "0.50 in loop 1, 0.75 in loop 2"."""
    return ", ".join(f"{mean:.2f} in loop {loop}" for loop, mean in enumerate(means, start=1))


def _draws_again(rule: GateRule, num_loops: int, layers: Sequence[int], batch_size: int, seed: int) -> bool:
    """Return whether two copies of a rule draw the same gates for the same examples."""
    draw = _make_draw(0, num_loops, layers, batch_size, seed)
    with torch.random.fork_rng(devices=[]):
        first, second = (_sample(copy.deepcopy(rule), draw) for _ in range(2))
    return torch.equal(first, second)


def measure_mean(
    rule: GateRule, num_loops: int, layers: Sequence[int], batch_size: int, seed: int = 0
) -> tuple[Tensor, int]:
    """Return the mean gates of each of many steps, [steps, K], and the number of examples in all of them."""
    rule = copy.deepcopy(rule)
    num_steps = min(_MOST_STEPS, max(_FEWEST_STEPS, math.ceil(_NUM_EXAMPLES / batch_size)))
    means = []
    with torch.random.fork_rng(devices=[]):
        for step in range(num_steps):
            draw = _make_draw(step, num_loops, layers, batch_size, seed, num_steps)
            gates = _sample(rule, draw)  # [K, N] or [K, N, M]
            means.append(gates.detach().double().cpu().flatten(1).mean(dim=1))
    return torch.stack(means), num_steps * batch_size


def _make_draw(
    step: int, num_loops: int, layers: Sequence[int], batch_size: int, seed: int, num_steps: int = 1
) -> Draw:
    """Return the draw of a step with `batch_size` rows."""
    return Draw(
        seed=seed,
        step=step,
        example_ids=[(row, 0) for row in range(batch_size)],
        num_loops=num_loops,
        num_steps=num_steps,
        num_modules=len(layers),
        layers=layers,
    )


def _sample(rule: GateRule, draw: Draw) -> Tensor:
    """Return the gates of a draw, [K, N] or [K, N, M], or raise UserError if they are not numbers of this shape."""
    name = f"Gates of the rule {rule.name!r}"
    return as_gate_matrix(rule.sample(draw), draw.num_loops, draw.num_modules, len(draw.example_ids), name)
