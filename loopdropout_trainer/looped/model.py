"""What is known of a looped model: which modules recur, how deep it runs, how each loop is read out; and how to find it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers.utils import logging

from loopdropout_trainer.checks import MOST_LOOPS
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped.state import LoopState


logger = logging.get_logger(__name__)


class NotLoopedError(ValueError):
    """The model has no recurrent block that announces its loops."""


class LoopedModelMixin:
    """What is known of a looped model: which modules recur, which loop runs, how deep it runs, how it is read out.

    A model class of one's own subclasses this; one that belongs to others gets a `LoopDescription`. The model reads its
    depth from `config.num_loops` at every forward call, and announces every loop on `loop_state`, inside the recurrent
    layers' checkpointed `forward`.
    """

    loop_state: LoopState
    config: PreTrainedConfig
    can_pack = False  # whether the model does what `Optimisations` allow
    trains_at_one_depth = False  # whether it is built for the depth that it trains at, and for the final loop's loss
    trained_with: Mapping[str, Any] = MappingProxyType({})  # `rule`, `p`, ... of the adapter on it, for its card

    def recurrent_layers(self) -> Iterable[nn.Module]:
        """Return the modules that run in every loop. Their linear projections are where adapters go by default."""
        raise NotImplementedError

    def recurrent_linears(self) -> list[str]:
        """Return the full names of the linear projections inside the recurrent block: where adapters go by default."""
        layers = set(map(id, self.recurrent_layers()))
        inside = tuple(f"{name}." for name, module in self.named_modules() if id(module) in layers)
        names = [
            name.removesuffix(".base_layer")  # PEFT keeps the model's own layer under this name
            for name, module in self.named_modules()
            if f"{name}.".startswith(inside) and hasattr(module, "in_features") and ".lora_" not in name
        ]
        return list(dict.fromkeys(names))

    def register_projections(self) -> None:
        """Tell PEFT where an adapter without `target_modules` goes in models of this type: on `recurrent_linears`."""
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING  # late: it takes long

        names = [name.removeprefix(f"{self.base_model_prefix}.") for name in self.recurrent_linears()]
        patterns = dict.fromkeys(re.sub(r"\b\d+\b", r"\\d+", re.escape(name)) for name in names)  # of any layer
        pattern = rf"(.*\.)?({'|'.join(patterns)})"
        TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(self.config.model_type, pattern)

    def loop_readouts(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
        """Return the K head-ready hidden states [B, S, H], one after each loop, for a causal model's inputs."""
        raise NotImplementedError

    def complete_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a collated batch of examples with what else the model reads of it; by default nothing."""
        return batch

    def enable_input_require_grads(self) -> None:
        """Let the embeddings require a gradient; by a hook that `torch.save` can keep, which transformers' own is not."""
        self._require_grads_hooks = [self.get_input_embeddings().register_forward_hook(_require_gradient)]

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None, **kwargs):
        # Reentrant checkpointing runs a backward pass inside the backward pass. A layer that ran K times then reports
        # its gradients K times: DDP raises or lets the ranks diverge, ZeRO-3, for which TRL asks for it, reduces wrong sums.
        func = gradient_checkpointing_func or checkpoint
        if enable and getattr(func, "keywords", {}).get("use_reentrant"):
            logger.warning("Reentrant gradient checkpointing is wrong for layers that run several times: not used.")
        super()._set_gradient_checkpointing(enable, functools.partial(func, use_reentrant=False), **kwargs)

    def compile_layers(self) -> bool:
        """Compile the repeated layer, for training: one program for all its runs. Return whether the model can do that."""
        return False


def _require_gradient(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
    output.requires_grad_(True)


def find_looped_model(model: nn.Module) -> LoopedModelMixin:
    """Return the looped model inside PEFT, DDP or other wrappers; raise NotLoopedError if there is none."""
    looped = next((module for module in model.modules() if isinstance(module, LoopedModelMixin)), None)
    if looped is None:
        raise NotLoopedError(
            f"{type(model).__name__} is not a looped model, such as `model_type: ouro`, or one that was built after "
            "`register_looped` described its class."
        )
    return looped


def check_num_loops(num_loops: int, name: str = "num_loops") -> int:
    """Return `num_loops` if it is a usable recurrence depth K, an integer from 1 to `MOST_LOOPS`; else raise ValueError."""
    if isinstance(num_loops, bool) or not isinstance(num_loops, int) or not 1 <= num_loops <= MOST_LOOPS:
        raise UserError(
            f"`{name}` is the number of loops K and must be an integer from 1 to {MOST_LOOPS:,}; got {num_loops!r}."
        )
    return num_loops
