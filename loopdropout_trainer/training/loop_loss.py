"""What the training loss is read from: the final loop's readout, as in the paper, or those of all loops.

    loss = sum_t w_t CE(head(r_t)),   sum_t w_t = 1

All readouts come from one forward pass. They go through TRL's fused head as one batch, which scores tiles of a few thousand
tokens, so that no loop's logits are ever in memory all at once. Evaluation always scores the final loop.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from loopdropout_trainer.checks import check_number
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import LoopedModelMixin
from loopdropout_trainer.training.depth import relative_weights


Readouts = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class LoopLoss:
    """The final loop's loss (Algorithm 1); also the base of all losses, whose fields are those of `loop_loss_args`.

    Class attributes:
        scores_all: whether all loops that run are scored, or the last of them only.
    """

    name: ClassVar[str] = "final"
    scores_all: ClassVar[bool] = False

    def check(self, limits: tuple[int, int]) -> None:
        """Raise ValueError if the loss does not fit steps of the least to the greatest depth in `limits`."""

    def check_model(self, model: LoopedModelMixin) -> None:
        """Raise ValueError if the loss needs what the model does not have."""

    def loops_to_run(self, u: Sequence[float], num_loops: int) -> int:
        """Return how many of `num_loops` loops the loss depends on, from uniforms in [0, 1)."""
        return num_loops

    def weights(self, model: LoopedModelMixin, readouts: Readouts) -> torch.Tensor:
        """Return the loops' weights, [L], or [L, B, S] for what follows each token, for L readouts [B, S, H]; sum 1."""
        return torch.ones(1)  # the final readout is the only one


@dataclass(frozen=True)
class RandomLoop(LoopLoss):
    """The loss of one loop, drawn uniformly for each optimizer step; the loops behind it do not run."""

    name = "random"

    def loops_to_run(self, u: Sequence[float], num_loops: int) -> int:
        return 1 + int(u[0] * num_loops)


@dataclass(frozen=True)
class Progressive(LoopLoss):
    """Later loops count more: w_t is proportional to t^power."""

    name = "progressive"
    scores_all = True
    power: float = 1.0

    def __post_init__(self):
        check_number("power", self.power, 0, 16)

    def weights(self, model: LoopedModelMixin, readouts: Readouts) -> torch.Tensor:
        weights = torch.arange(1, len(readouts) + 1, dtype=torch.float64) ** self.power
        return (weights / weights.sum()).float()


@dataclass(frozen=True)
class UniformLoss(Progressive):
    """The mean of all loops' losses: w_t = 1 / K."""

    name = "uniform"
    power: float = field(default=0.0, init=False)


@dataclass(frozen=True)
class WeightedLoss(LoopLoss):
    """Weights of one's own, in proportion to the K numbers of `weights`."""

    name = "weighted"
    scores_all = True
    loop_weights: tuple[float, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "loop_weights", relative_weights(self.loop_weights, "loop_weights"))

    def check(self, limits: tuple[int, int]) -> None:
        if limits != (len(self.loop_weights),) * 2:
            depths = limits[0] if limits[0] == limits[1] else f"{limits[0]} to {limits[1]}"
            raise UserError(
                f"`loop_weights` has {len(self.loop_weights)} values, but a step runs {depths} loops: give one for each loop "
                "of a fixed depth, or choose `loop_loss: uniform` or `progressive`."
            )

    def weights(self, model: LoopedModelMixin, readouts: Readouts) -> torch.Tensor:
        return torch.tensor(self.loop_weights)


@dataclass(frozen=True)
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
                f"`loop_loss: exit` needs a model with an exit gate, and {type(model).__name__} has none: choose `uniform`, "
                "`progressive`, `weighted` or `random`."
            )

    @torch.no_grad()
    def weights(self, model: LoopedModelMixin, readouts: Readouts) -> torch.Tensor:
        weights = model.base_model.exit_distribution(readouts).float().movedim(-1, 0)  # [L, B, S]
        return weights / weights.sum(dim=0)  # the gate may run in bfloat16


LOOP_LOSSES = {cls.name: cls for cls in (LoopLoss, RandomLoop, UniformLoss, Progressive, WeightedLoss, ExitWeighted)}


def score_loops(model: LoopedModelMixin, loss: LoopLoss) -> None:
    """Let a model with TRL's fused head (`add_fused_lm_head`) score all its loops in training: weighted sums of `log_probs`.

    The other outputs (entropy, whether a token was the most likely one) stay those of the last loop. Only tokens with a label
    are scored, as TRL's own kernel for GPUs does by itself. Evaluation scores the final loop.
    """
    fused = model.forward

    @functools.wraps(fused.__func__)
    def forward(model, *args, fused_lm_head: bool = False, labels: torch.Tensor | None = None, **kwargs):
        scores_all = model.training and loss.scores_all
        if not fused_lm_head or labels is None or (labels.is_cuda and not scores_all):
            return fused(*args, fused_lm_head=fused_lm_head, labels=labels, **kwargs)
        kwargs.pop("use_cache", None)
        if scores_all:
            readouts = model.loop_readouts(*args, **kwargs)  # L of [B, S, H]
        else:
            readouts = (model.base_model(*args, use_cache=False, **kwargs).last_hidden_state,)
        weights = loss.weights(model, readouts) if scores_all else torch.ones(1)
        return _score(fused.__func__, model, readouts, weights, labels)

    model.forward = types.MethodType(forward, model)


def _score(fused, model: LoopedModelMixin, readouts: Readouts, weights: torch.Tensor, labels: torch.Tensor):
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
