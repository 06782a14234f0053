"""How many loops a training step runs, and which of them its loss scores.

The depth is the model's own K, or one that is drawn for each optimizer step. A draw is a pure function of (seed, optimizer
step), as gates are, so that all processes and all micro-batches of a step run equally deep, and neither the split into
micro-batches nor a resume changes it.

The loss is read from the final loop's readout, as in the paper, or from those of all loops:

    loss = sum_t w_t CE(head(r_t)),   sum_t w_t = 1

All readouts come from one forward pass. They go through TRL's fused head as one batch, which scores tiles of a few thousand
tokens, so that no loop's logits are ever in memory all at once. Evaluation always scores the final loop.

A recipe chooses both by a name and its fields: `depth_sampling: uniform`, `depth_sampling_args: {low: 2}`.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from loopdropout_trainer.lora.gated import ADAPTER_KINDS
from loopdropout_trainer.checks import MOST_LOOPS, Range, check_choice, check_numbers
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gates import GateRule
from loopdropout_trainer.gates.rule import build
from loopdropout_trainer.gates.streams import Streams
from loopdropout_trainer.looped import LoopedModelMixin


def make_choice(field: str, choices: Mapping[str, type], name: str, fields: Mapping[str, Any] | None) -> Any:
    """Build the choice `name` from its fields, the value of `<field>_args`.

    Args:
        field: what the recipe calls it.
        choices: dataclasses by name.

    Raises:
        ValueError: for an unknown name, a field that the choice does not take, or a value that it refuses.
    """
    check_choice(field, name, sorted(choices))
    return build(choices[name], fields or {}, f"`{field}: {name}`", f" in `{field}_args`")


def relative_weights(weights: Sequence[float] | None, name: str) -> list[float]:
    """Return weights divided by their sum.

    Raises:
        ValueError: unless they are a list of finite numbers from 0, not all of them 0.
    """
    values = weights if isinstance(weights, (list, tuple)) else ()
    are_numbers = all(type(value) in (int, float) and 0 <= value < math.inf for value in values)
    if not are_numbers or not any(values):
        raise UserError(f"`{name}` must be a list of numbers of at least 0, one of them above 0; got {weights!r}.")
    return [value / sum(values) for value in values]


def step_uniforms(seed: int, purpose: str, step: int) -> list[float]:
    """Return two uniforms that are the same on every process and in every micro-batch of an optimizer step."""
    return Streams(seed, step, ()).step_uniforms(purpose, 2).tolist()


DepthLimits = tuple[int, int]
"""The least and the greatest depth of a training step."""


# How many loops run.


@dataclass
class DepthSampler:
    """The model's own depth K in every step; the base of all samplers, whose fields are those of `depth_sampling_args`."""

    name: ClassVar[str] = "fixed"

    def limits(self, num_loops: int) -> DepthLimits:
        """Return the least and the greatest depth of a model whose own depth is K = `num_loops`.

        Raises:
            ValueError: if the sampler's fields do not fit the model.
        """
        return num_loops, num_loops

    def sample(self, u: Sequence[float], num_loops: int) -> int:
        """Return a depth, from two uniforms in [0, 1) and the model's own depth K."""
        return num_loops


@dataclass
class UniformDepth(DepthSampler):
    """Every depth from `low` to `high` (default: K) alike."""

    name = "uniform"
    low: int = 1
    high: int | None = None

    def __post_init__(self):
        depths = Range(1, MOST_LOOPS)
        check_numbers(self, low=depths, high=depths)

    def limits(self, num_loops: int) -> DepthLimits:
        high = self.high or num_loops
        if self.low > high:
            raise UserError(f"`low` of `depth_sampling: uniform` is {self.low}, above the greatest depth {high}.")
        return self.low, high

    def sample(self, u: Sequence[float], num_loops: int) -> int:
        low, high = self.limits(num_loops)
        return low + int(u[0] * (high - low + 1))


@dataclass
class LogNormalPoisson(DepthSampler):
    """What Huginn was pretrained with: mostly shallow steps, and a long tail of deep ones (Geiping et al. 2025, Section 3.3).

        r ~ Poisson(exp(tau)) + 1,   tau ~ N(log(rate) - sigma^2 / 2, sigma^2)

    Its mean is `rate` + 1 (default of `rate`: K), its variance rate + rate^2 (exp(sigma^2) - 1). Depths above `most` become
    `most`, which bounds the memory of a step.
    """

    name = "lognormal_poisson"
    rate: float | None = None
    sigma: float = 0.5
    most: int = MOST_LOOPS

    def __post_init__(self):
        check_numbers(self, rate=Range(0.01, MOST_LOOPS), sigma=Range(most=3), most=Range(1, MOST_LOOPS))

    def limits(self, num_loops: int) -> DepthLimits:
        return 1, self.most

    def sample(self, u: Sequence[float], num_loops: int) -> int:
        import scipy.stats  # half a second that most trainings can spare

        if u[1] == 0:
            return 1
        normal = scipy.stats.norm.ppf(u[0] + 2.0**-54)
        tau = math.log(self.rate or num_loops) - self.sigma**2 / 2 + self.sigma * normal
        return min(int(scipy.stats.poisson.ppf(u[1], math.exp(tau))) + 1, self.most)


@dataclass
class WeightedDepth(DepthSampler):
    """The depths of a list, with probabilities in proportion to `weights` (default: all alike)."""

    name = "weighted"
    depths: Sequence[int] | None = None
    weights: Sequence[float] | None = None

    def __post_init__(self):
        depths = self.depths
        if not isinstance(depths, (list, tuple)) or not depths or len({*depths}) != len(depths):
            raise UserError(f"`depths` must be a list of different numbers of loops; got {depths!r}.")
        check_numbers(self)
        weights = relative_weights([1] * len(depths) if self.weights is None else self.weights, "weights")
        if len(weights) != len(depths):
            raise UserError(f"`weights` has {len(weights)} values for {len(depths)} `depths`: give one for each.")
        self.depths = [depth for depth, weight in zip(depths, weights, strict=True) if weight]
        self.weights = [weight for weight in weights if weight]

    def limits(self, num_loops: int) -> DepthLimits:
        return min(self.depths), max(self.depths)

    def sample(self, u: Sequence[float], num_loops: int) -> int:
        *ends, _ = itertools.accumulate(self.weights)  # the last one may be rounded below 1
        return self.depths[bisect.bisect(ends, u[0])]


DEPTH_SAMPLERS = {cls.name: cls for cls in (DepthSampler, UniformDepth, LogNormalPoisson, WeightedDepth)}


def check_rule_at_depths(rule: GateRule, limits: DepthLimits, num_loops: int) -> None:
    """Raise ValueError for depths (`limits`: the least and the greatest) at which a rule or its adapter has no meaning."""
    for depth in limits:
        rule.check(depth)
    if limits == (num_loops, num_loops):
        return
    kind = ADAPTER_KINDS[rule.adapter]
    what = kind.description if kind.one_depth else "an estimate for each loop" if rule.wants_sensitivity else None
    if what is not None:
        raise UserError(
            f"The rule {rule.name!r} has {what}, which belongs to the model's {num_loops} loops: leave `depth_sampling` at "
            "'fixed', or use a rule with a shared adapter and no memory."
        )


# Which loops are scored.


Readouts = tuple[Tensor, ...]


@dataclass
class LoopLoss:
    """The final loop's loss (Algorithm 1); also the base of all losses, whose fields are those of `loop_loss_args`.

    Class attributes:
        scores_all: whether all loops that run are scored, or the last of them only.
    """

    name: ClassVar[str] = "final"
    scores_all: ClassVar[bool] = False

    def check(self, limits: DepthLimits) -> None:
        """Raise ValueError if the loss does not fit steps of the least to the greatest depth in `limits`."""

    def check_model(self, model: LoopedModelMixin) -> None:
        """Raise ValueError if the loss needs what the model does not have."""

    def loops_to_run(self, u: Sequence[float], num_loops: int) -> int:
        """Return how many of `num_loops` loops the loss depends on, from uniforms in [0, 1)."""
        return num_loops

    def weights(self, model: LoopedModelMixin, readouts: Readouts) -> Tensor:
        """Return the loops' weights, [L], or [L, B, S] for what follows each token, for L readouts [B, S, H]; sum 1."""
        return torch.ones(1)  # the final readout is the only one


@dataclass
class RandomLoop(LoopLoss):
    """The loss of one loop, drawn uniformly for each optimizer step; the loops behind it do not run."""

    name = "random"

    def loops_to_run(self, u: Sequence[float], num_loops: int) -> int:
        return 1 + int(u[0] * num_loops)


@dataclass
class Progressive(LoopLoss):
    """Later loops count more: w_t is proportional to t^power."""

    name = "progressive"
    scores_all = True
    power: float = 1.0

    def __post_init__(self):
        check_numbers(self, power=Range(most=16))

    def weights(self, model: LoopedModelMixin, readouts: Readouts) -> Tensor:
        weights = torch.arange(1, len(readouts) + 1, dtype=torch.float64) ** self.power
        return (weights / weights.sum()).float()


@dataclass
class UniformLoss(Progressive):
    """The mean of all loops' losses: w_t = 1 / K."""

    name = "uniform"
    power: float = field(default=0.0, init=False)


@dataclass
class WeightedLoss(LoopLoss):
    """Weights of one's own, in proportion to the K numbers of `loop_weights`."""

    name = "weighted"
    scores_all = True
    loop_weights: Sequence[float] = ()

    def __post_init__(self):
        self.loop_weights = relative_weights(self.loop_weights, "loop_weights")

    def check(self, limits: DepthLimits) -> None:
        if {*limits} != {len(self.loop_weights)}:
            depths = " to ".join(map(str, sorted({*limits})))
            raise UserError(
                f"`loop_weights` has {len(self.loop_weights)} values, but a step runs {depths} loops: give one for each loop "
                "of a fixed depth, or choose another `loop_loss`."
            )

    def weights(self, model: LoopedModelMixin, readouts: Readouts) -> Tensor:
        return torch.tensor(self.loop_weights)


@dataclass
class ExitWeighted(LoopLoss):
    """The expected loss when a token leaves after loop t with the probability that the model's exit gate gives it.

    The gate is frozen and its probabilities are taken as they are: no gradient flows through them, else the adapter could
    lower the loss by moving the exit instead of the answers. (Ouro's pretraining trains both, against an entropy term.)
    """

    name = "exit"
    scores_all = True

    def check_model(self, model: LoopedModelMixin) -> None:
        if not hasattr(model.base_model, "exit_distribution"):
            raise UserError(
                f"`loop_loss: exit` needs a model with an exit gate, and {type(model).__name__} has none: choose another of "
                f"{', '.join(LOOP_LOSSES)}."
            )

    @torch.no_grad()
    def weights(self, model: LoopedModelMixin, readouts: Readouts) -> Tensor:
        weights = model.base_model.exit_distribution(readouts).float().movedim(-1, 0)  # [L, B, S]
        return weights / weights.sum(dim=0)  # the gate may run in bfloat16


LOOP_LOSSES = {cls.name: cls for cls in (LoopLoss, UniformLoss, Progressive, WeightedLoss, ExitWeighted, RandomLoop)}
"""By the names that recipes, helps and messages use; docs/depth.md describes them in this order."""


def score_loops(model: LoopedModelMixin, loss: LoopLoss) -> None:
    """Let a model with TRL's fused head (`add_fused_lm_head`) score all its loops in training: weighted sums of `log_probs`.

    The other outputs (entropy, whether a token was the most likely one) stay those of the last loop. Only tokens with a label
    are scored, as TRL's own kernel for GPUs does by itself.
    """
    fused = model.forward

    @functools.wraps(fused.__func__)
    def forward(model, *args, fused_lm_head: bool = False, labels: Tensor | None = None, **kwargs):
        in_force = loss if model.training else LoopLoss()
        if not fused_lm_head or labels is None or (labels.is_cuda and not in_force.scores_all):
            return fused(*args, fused_lm_head=fused_lm_head, labels=labels, **kwargs)
        kwargs.pop("use_cache", None)
        if in_force.scores_all:
            readouts = model.loop_readouts(*args, **kwargs)  # L of [B, S, H]
        else:
            readouts = (model.base_model(*args, use_cache=False, **kwargs).last_hidden_state,)
        return _score(fused.__func__, model, readouts, in_force.weights(model, readouts), labels)

    model.forward = types.MethodType(forward, model)


def _score(fused, model: LoopedModelMixin, readouts: Readouts, weights: Tensor, labels: Tensor):
    """Return TRL's scores of the tokens [B, S - 1] that follow, from L readouts and their weights, [L] or [L, B, S]."""
    labels = labels[:, 1:]
    mask = labels != -100
    rows = mask.flatten().nonzero().squeeze(1)  # [n], of the tokens with a label
    scored = torch.cat([readout[:, :-1].flatten(0, 1).index_select(0, rows) for readout in readouts])  # [L n, H]
    targets = labels.flatten()[rows].repeat(len(readouts)).unsqueeze(0)
    # One batch for TRL's head, which reads two things of a model: its readouts, and the output embeddings.
    outputs = types.SimpleNamespace(last_hidden_state=scored.unsqueeze(0))
    has_run = types.SimpleNamespace(
        base_model=lambda **inputs: outputs, get_output_embeddings=model.get_output_embeddings
    )
    scores = fused(has_run, fused_lm_head=True, shift_labels=targets)
    by_loop = scores.log_probs.view(len(readouts), len(rows))
    weights = weights[..., :-1].flatten(1)[:, rows] if weights.dim() == 3 else weights.unsqueeze(1)
    unpacked = lambda x: x.new_zeros(mask.shape).masked_scatter(mask, x)
    last = slice(scores.entropy.numel() - len(rows), None)
    return type(scores)(
        log_probs=unpacked((weights.to(by_loop) * by_loop).sum(dim=0)),
        entropy=unpacked(scores.entropy[0, last]),
        is_top1=None if scores.is_top1 is None else unpacked(scores.is_top1[0, last]),
        label_mask=mask,
    )
