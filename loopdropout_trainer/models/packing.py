"""The same forward pass in less time and memory, over examples that are packed in one row without padding.

Before its first active gate an example is frozen: h_t = recurrent_step(h_{t-1}) without adapter and without gradient. Frozen
examples run apart from the others. That costs kernel launches, and pays only for enough tokens. Fewer tokens run with the
other examples before their first active gate. For gates [K, N] of 3 long examples:

    loop 1   0 2 0    examples 0 and 2 frozen,   example 1
    loop 2   0 0 2    example 0 frozen,          examples 1 and 2
    loop 3   0 2 2    example 0 frozen,          examples 1 and 2

Nothing is approximated: a gate of zero removes the update, and states that no trained weight has touched have no gradient.
With independent gates of drop probability p, sum_{t=1..K} p^t of an example's K loops are frozen: 0.94 of 4 at p = 0.5.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import logging

from loopdropout_trainer.looped import RunningLoop, example_starts, launch_flops, launches_pay
from loopdropout_trainer.models.backbone import BatchPass, LoopInputs


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # builds of torch without it
    varlen_attn = None

logger = logging.get_logger(__name__)

FORWARD_LAUNCHES, SPLIT_LAUNCHES = 40, 30
"""Operations of a layer's forward pass, and of splitting and joining a row."""


@dataclass(frozen=True)
class Packing:
    """Places of the tokens of a batch [B, S] when its examples are packed in one row [1, T].

    Attributes:
        shape: (B, S).
        kept: [T] indices of the packed tokens among the B * S tokens. None: all tokens, in order.
        lengths: Number of tokens of each example.
        examples: Index of each example's gates, which is its row or its segment.
        tokens: [T] index of each token's gates.
    """

    shape: tuple[int, int]
    kept: Tensor | None
    lengths: list[int]
    examples: list[int]
    tokens: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """Return [1, T, ...] for [B, S, ...], or for [1, S, ...] that all rows share."""
        x = x.expand(self.shape[0], *x.shape[1:]).flatten(0, 1)
        return (x if self.kept is None else x[self.kept]).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """Return [B, S, ...] for [1, T, ...], with zeros on padding."""
        x = x[0]
        if self.kept is not None:
            x = x.new_zeros(math.prod(self.shape), *x.shape[1:]).index_copy(0, self.kept, x)
        return x.unflatten(0, self.shape)


def find_packing(
    shape: tuple[int, int], attention_mask: Tensor | None, position_ids: Tensor, segments: Tensor | None = None
) -> Packing:
    """Find the examples of a batch.

    Args:
        shape: (B, S).
        attention_mask: [B, S], 0 on padding. Then each row is one example.
        position_ids: [B or 1, S]. Without a mask, they mark the beginnings of examples (`example_starts`).
        segments: [B, S] index of each token's gates. Default: its row.
    """
    device = position_ids.device
    mask = torch.ones(shape, dtype=torch.bool)
    starts = example_starts(position_ids).cpu().expand(shape)  # [B, S]
    if attention_mask is not None:
        mask = attention_mask.bool().cpu()
        starts = (torch.arange(shape[1]) == 0).expand(shape)
    owners = torch.arange(shape[0]).unsqueeze(1).expand(shape) if segments is None else segments.cpu()
    examples = owners[starts]
    lengths = (starts.flatten().cumsum(0) - 1)[mask.flatten()].bincount(minlength=len(examples))
    examples, lengths = examples[lengths > 0], lengths[lengths > 0]  # without rows of padding only
    kept = None if mask.all() else mask.flatten().nonzero().squeeze(1).to(device, non_blocking=True)
    tokens = examples.repeat_interleave(lengths).to(device, non_blocking=True)
    return Packing(shape, kept, lengths.tolist(), examples.tolist(), tokens)


class PackedAttention:
    """Causal self-attention within each example of a packed row. Attention layers get it as their mask.

    All examples attend at once if torch has a kernel for variable lengths. Otherwise they attend one after another, and short
    neighbors together behind a mask.

    Args:
        lengths: Number of tokens of each example, in order.
        state: [1, T, H] hidden states.
        num_heads: Number of attention heads.
        head_dim: Number of channels of a head.
    """

    def __init__(self, lengths: Sequence[int], state: Tensor, num_heads: int, head_dim: int) -> None:
        device = state.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else state.dtype
        self.lengths = list(lengths)
        self.device = state.device
        self.at_once = _has_varlen_kernel(state.device, dtype, head_dim)
        self.chunks = [[lengths[0]]]
        for length in lengths[1:]:
            # One more example in a chunk of n tokens saves 12 launches, forward and backward, and adds 2 n `length` pairs of
            # tokens behind the mask. A pair takes 4 FLOP for each channel forward (q k, and the sum of v), and 10 backward.
            pairs = 2 * sum(self.chunks[-1]) * length
            if launches_pay(12, 14 * pairs * num_heads * head_dim, state):
                self.chunks[-1].append(length)
            else:
                self.chunks.append([length])
        self._masks: dict[torch.dtype, list[Tensor | None]] = {}

    @functools.cached_property
    def ends(self) -> Tensor:
        """The [N + 1] number of tokens before each example and in all of them, int32."""
        return torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32).to(self.device, non_blocking=True)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float) -> Tensor:
        """Return the output [1, T, heads, d] for queries, keys and values [1, heads, T, d]."""
        if (groups := query.shape[1] // key.shape[1]) > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        if self.at_once and not dropout:
            return _attend_at_once(query, key, value, self.ends.to(query.device), max(self.lengths), scaling)
        if query.dtype not in self._masks:
            self._masks[query.dtype] = [_chunk_mask(chunk, query) for chunk in self.chunks]
        sizes = [sum(chunk) for chunk in self.chunks]
        pieces = zip(*(x.split(sizes, dim=2) for x in (query, key, value)), self._masks[query.dtype], strict=True)
        options = {"scale": scaling, "dropout_p": dropout}
        outputs = [
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, **options).transpose(1, 2)
            for q, k, v, mask in pieces
        ]
        return torch.cat(outputs, dim=1)


def _chunk_mask(lengths: Sequence[int], query: Tensor) -> Tensor | None:
    """Return the mask [1, 1, n, n] of neighbors that attend in one launch, -inf except for their own example's past."""
    if len(lengths) == 1:
        return None  # the kernel is causal itself
    seen = torch.block_diag(*(torch.ones(length, length) for length in lengths)).tril()
    mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill(seen == 0, -math.inf)
    return mask[None, None].to(query.device)


def _attend_at_once(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float) -> Tensor:
    inputs = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, heads, d]
    return varlen_attn(*inputs, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0)).unsqueeze(0)


@functools.cache
def _has_varlen_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch's attention for variable lengths runs on a device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    x = torch.zeros(1, 1, 8, head_dim, device=device, dtype=dtype)
    ends = torch.tensor([0, 8], device=device, dtype=torch.int32)
    try:
        _attend_at_once(x, x, x, ends, 8, 1.0)
    except (RuntimeError, TypeError, ValueError) as error:  # not available on this GPU or in this torch
        logger.warning(f"torch's attention for variable lengths is not used on {device}: {error}")
        return False
    return True


def loop_parts(
    active: Sequence[Sequence[bool]], lengths: Sequence[int], least_frozen: float
) -> list[dict[tuple[int, ...], bool]]:
    """Return for each loop the examples that run together, and whether they are frozen.

    Args:
        active: [K][N], whether an example has an active gate in a loop.
        lengths: [N] numbers of tokens.
        least_frozen: Number of tokens of frozen examples from which they run apart.
    """
    everyone = range(len(lengths))
    started = set()
    parts = []
    for gates in active:
        started.update(index for index in everyone if gates[index])
        frozen = tuple(index for index in everyone if index not in started)
        if started and sum(lengths[index] for index in frozen) < least_frozen:
            started, frozen = set(everyone), ()  # in later loops too, because their states then have a graph
        parts.append({frozen: True} if frozen else {})
        if started:
            parts[-1][tuple(sorted(started))] = False
    return parts


def _join(pieces: Iterable[Tensor], dim: int = 1) -> Tensor:
    pieces = list(pieces)
    with torch.autocast(pieces[0].device.type, enabled=False):  # which cannot join tensors of float16
        return torch.cat(pieces, dim=dim)


class PackedPass(BatchPass):
    """One forward pass of a backbone over examples that are packed in one row."""

    def prepare(self, inputs: LoopInputs, attention_mask: Any) -> LoopInputs:
        shape = inputs.state.shape[:2]
        batch = self.backbone.loop_state.batch
        self.packing = packing = find_packing(shape, attention_mask, inputs.position_ids, batch.segments)
        self.pack, self.unpack = packing.pack, packing.unpack
        self.backbone.loop_state.set_loop(RunningLoop(tokens=packing.tokens, batch=batch))  # for random initial states
        return replace(
            inputs,
            state=packing.pack(inputs.state),
            attention_mask=self._attention(inputs.state, packing.lengths),
            position_ids=packing.pack(inputs.position_ids),
            position_embeddings=tuple(map(packing.pack, inputs.position_embeddings)),
            tokens=packing.tokens,
        )

    def run_loops(self, inputs: LoopInputs) -> list[LoopInputs]:
        loop_state = self.backbone.loop_state
        batch, lengths = loop_state.batch, self.packing.lengths
        everyone = tuple(range(len(lengths)))
        active = [[True] * len(lengths)] * self.backbone.config.num_loops
        parts = [{everyone: False}] * len(active)
        # If the embeddings or the prelude are trained, every loop has a gradient.
        needs_gradient = any(x is not None and x.requires_grad for x in (inputs.state, inputs.injected))
        parameters = batch.options.lora_parameters if torch.is_grad_enabled() and not needs_gradient else None
        if parameters is not None and batch.active is not None:
            # Gates belong to rows or segments, lengths to examples.
            owners = self.packing.examples if len(batch.active[0]) > 1 else [0] * len(lengths)
            active = [[gates[owner] for owner in owners] for gates in batch.active]
            parts = loop_parts(active, lengths, self._least_frozen(inputs.state))

        selected = {everyone: inputs}  # inputs of some examples, the same in all loops
        results = []
        for loop, groups in enumerate(parts):
            before = inputs.state.split(lengths, dim=1)
            after = {}
            for examples, frozen in groups.items():
                if examples not in selected:
                    selected[examples] = self._select(inputs, examples)
                tokens = selected[examples].tokens
                skips = frozen or not any(active[loop][index] for index in examples)
                running = batch.loop(loop, tokens.device, tokens, frozen=frozen, skips_updates=skips)
                set_loop = functools.partial(loop_state.set_loop, running)
                set_loop()  # for modules outside of the layers
                state = inputs.state if examples == everyone else _join(before[index] for index in examples)
                with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                    part_inputs = replace(selected[examples], state=state, set_loop=set_loop)
                    state = self.backbone.recurrent_step(part_inputs)
                after.update(zip(examples, state.split([lengths[index] for index in examples], dim=1), strict=True))
            inputs = replace(inputs, state=state if len(groups) == 1 else _join(after[index] for index in everyone))
            results.append(inputs)
        if parameters is not None and not inputs.state.requires_grad:
            # Every loop was frozen. The loss must have a gradient, and in DDP every parameter too.
            zero = 0 * sum(parameter.flatten()[0] for parameter in parameters)
            results[-1] = replace(inputs, state=inputs.state + zero)
        return results

    def _least_frozen(self, state: Tensor) -> float:
        """Return the number of frozen tokens from which it takes less time to run them apart.

        For n tokens a pass over the block's W frozen weights takes 2 n W FLOP, forward or backward. With a launch worth L
        FLOP, and I layers, running them apart saves the backward pass, 2 n W, and costs another forward pass, (40 I + 30) L.
        """
        backbone = self.backbone
        if backbone.block_size is None:
            linears = [backbone.get_submodule(name) for name in backbone.recurrent_linears()]
            backbone.block_size = sum(linear.in_features * linear.out_features for linear in linears)
        launches = FORWARD_LAUNCHES * backbone.config.num_recurrent_layers + SPLIT_LAUNCHES
        cost = launches * launch_flops(state.device, state.dtype)
        if state.is_cuda and backbone.block_size * state.shape[1] > cost:
            return 0  # the device is busy for longer than the launches take
        passes = 2 if backbone.gradient_checkpointing else 1
        return cost / (2 * passes * backbone.block_size)

    def _attention(self, state: Tensor, lengths: Sequence[int]) -> PackedAttention | Tensor | None:
        config = self.backbone.config
        attention = PackedAttention(lengths, state, config.num_attention_heads, config.head_dim)
        if attention.at_once or len(attention.chunks) > 1:
            return attention
        return _chunk_mask(lengths, state)  # one launch of transformers' attention

    def _select(self, inputs: LoopInputs, examples: tuple[int, ...]) -> LoopInputs:
        """Return the inputs of some examples, except for their state."""
        lengths = self.packing.lengths

        def select(x: Tensor, dim: int = 1) -> Tensor:
            pieces = x.split(lengths, dim=dim)
            return _join((pieces[index] for index in examples), dim)

        return replace(
            inputs,
            attention_mask=self._attention(inputs.state, [lengths[index] for index in examples]),
            position_ids=select(inputs.position_ids),
            position_embeddings=tuple(map(select, inputs.position_embeddings)),
            injected=None if inputs.injected is None else select(inputs.injected),
            tokens=select(inputs.tokens, dim=0),
        )
