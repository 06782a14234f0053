"""What every looped model does the same way, whatever its layers look like."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging

from loopdropout_trainer.looped import LoopedModelMixin, check_num_loops


logger = logging.get_logger(__name__)


@dataclass
class LoopedModelOutput(BaseModelOutputWithPast):
    """`last_hidden_state` is the final loop's readout; `readouts` holds all K of them, each [B, S, H], if asked for."""

    readouts: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class LoopedCausalLMOutput(CausalLMOutputWithPast):
    """`loss` and `logits` belong to the final loop; `readouts` are K head-ready states [B, S, H], if asked for."""

    readouts: tuple[torch.FloatTensor, ...] | None = None


class LoopedConfigMixin:
    """Makes `num_loops` a checked name for the family's own depth field (named in `attribute_map`)."""

    auto_map = {}  # TRL reads it of every architecture that it does not find in transformers

    def __setattr__(self, name, value):
        if name in ("num_loops", self.attribute_map.get("num_loops")):
            check_num_loops(value, name)
        super().__setattr__(name, value)


class LoopedPreTrainedModel(LoopedModelMixin, PreTrainedModel):
    """A `PreTrainedModel` whose layers run more than once in a forward pass."""

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None, **kwargs):
        # Reentrant checkpointing runs a backward pass inside the backward pass. A layer that ran K times then reports
        # its gradients K times: DDP raises or lets the ranks diverge, ZeRO-3 reduces wrong sums, silently.
        if gradient_checkpointing_func is None:
            gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
        use_reentrant = getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant")
        if enable and use_reentrant is not False:
            if use_reentrant:
                logger.warning(
                    "Reentrant gradient checkpointing gives wrong gradients for layers that run several times in "
                    "distributed training; using the non-reentrant kind (`use_reentrant: false`) instead."
                )
            gradient_checkpointing_func = functools.partial(gradient_checkpointing_func, use_reentrant=False)
        super()._set_gradient_checkpointing(
            enable=enable, gradient_checkpointing_func=gradient_checkpointing_func, **kwargs
        )
