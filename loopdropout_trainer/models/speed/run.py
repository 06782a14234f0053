"""One forward pass of a backbone with the optimisations that are switched on; `PlainRun` says what each method is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from loopdropout_trainer.looped import LoopStep, launch_flops
from loopdropout_trainer.models.looped_modeling import LoopInputs, PlainRun
from loopdropout_trainer.models.speed.packed_attention import Lengths, lengths_in_chunks
from loopdropout_trainer.models.speed.packed_loops import PackedLoops, Thresholds
from loopdropout_trainer.models.speed.packing import find_packing


FORWARD_LAUNCHES, SLICE_LAUNCHES, ORDER_LAUNCHES = 40, 20, 30
"""Operations of a layer's forward pass, of a layer that leaves some tokens alone, and of putting a row in another order."""


class FastRun(PlainRun):
    """A forward pass whose examples run packed in one row."""

    def arrange(self, inputs: LoopInputs, attention_mask: Any, cache: Cache | None) -> LoopInputs:
        plan, rows = self.backbone.loop_state.plan, inputs.state.shape[:2]  # [B, S]
        self.packing = packing = find_packing(rows, attention_mask, inputs.position_ids, plan.segments)
        self.backbone.loop_state.announce(LoopStep(tokens=packing.tokens()))  # for random initial states
        return replace(
            inputs,
            state=packing.pack(inputs.state),  # [1, T, H], T tokens that are no padding
            attention_mask=self._mask(inputs.state, packing.lengths),
            position_ids=packing.pack(inputs.position_ids),
            position_embeddings=tuple(map(packing.pack, inputs.position_embeddings)),
        )

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        return self.packing.pack(x)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        return self.packing.unpack(x)

    def start(self, inputs: LoopInputs) -> None:
        # If what comes before the loops is trained, no loop of any example is free of gradient.
        needs_gradient = any(x is not None and x.requires_grad for x in (inputs.state, inputs.injected))
        may_freeze = torch.is_grad_enabled() and not needs_gradient
        lora_parameters = self.backbone.training_policy.lora_parameters if may_freeze else None
        limits = Thresholds() if lora_parameters is None else self.thresholds(inputs.state, lora_parameters)
        mask_of, state = lambda lengths: self._mask(inputs.state, lengths), self.backbone.loop_state
        self.packed = PackedLoops(inputs, self.packing, state, mask_of, lora_parameters, limits)
        self.loop, self.result = self.packed.loop, self.packed.result

    def thresholds(self, like: torch.Tensor, lora_parameters: Sequence[nn.Parameter]) -> Thresholds:
        """Return from how many tokens on it takes less time to treat examples apart, by the sizes of the recurrent block.

        For n tokens a pass over the block's W frozen weights takes 2 n W FLOP, forward or backward, and one over the A
        adapter weights 2 n A forward and 4 n A backward. So with a launch worth L FLOP, and I layers:

            frozen apart     saves the backward pass, 2 n W,      costs another forward pass, (40 I + 30) L
            inactive apart   saves their update, 6 n A,           costs slices, (20 I + 30) L
        """
        backbone = self.backbone
        if backbone.block_sizes is None:
            linears = [backbone.get_submodule(name) for name in backbone.recurrent_names()]
            weights = sum(linear.in_features * linear.out_features for linear in linears)
            backbone.block_sizes = weights, sum(parameter.numel() for parameter in lora_parameters)
        weights, factors = backbone.block_sizes
        num_layers = backbone.config.num_recurrent_layers
        launch = launch_flops(like.device, like.dtype)
        apart = (FORWARD_LAUNCHES * num_layers + ORDER_LAUNCHES) * launch
        if like.is_cuda and weights * like.shape[1] > apart:
            return Thresholds()  # the device is busy for longer than both launches take, which it does not wait for
        passes = 2 if backbone.gradient_checkpointing else 1  # the backward pass, with what it recomputes
        inactive = (SLICE_LAUNCHES * num_layers + ORDER_LAUNCHES) * launch / (6 * factors)
        return Thresholds(frozen=apart / (2 * passes * weights), inactive=inactive)

    def _mask(self, like: torch.Tensor, lengths: Sequence[int]) -> Lengths | torch.Tensor | None:
        """Return the mask with which the configuration's attention keeps packed examples of these lengths apart."""
        config = self.backbone.config
        if config._attn_implementation == "sdpa":
            packed = lengths_in_chunks(lengths, like, config.num_attention_heads, config.head_dim)
            if len(packed.chunks) > 1:
                return packed
            mask = packed.mask(0, like.dtype)  # one launch of the usual kernel, which can be compiled with its layer
            return None if mask is None else mask[None, None]  # [1, 1, T, T]
        positions = torch.cat([torch.arange(length, device=like.device) for length in lengths])
        row = like.new_empty(1, len(positions), 1)
        return create_causal_mask(config, row, None, past_key_values=None, position_ids=positions.unsqueeze(0))
