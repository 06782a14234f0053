"""One forward pass of a backbone: over the rows of a batch, or over its examples packed in one row.

The packed pass gives the same result in less time and memory. Before its first active gate an example is frozen:
h_t = recurrent_step(h_{t-1}) without adapter and without gradient. Frozen examples run apart from the others. That costs
kernel launches, and pays only for enough tokens. Fewer tokens run with the other examples before their first active gate.
For gates [K, N] of 3 long examples:

    loop 1   0 2 0    examples 0 and 2 frozen,   example 1
    loop 2   0 0 2    example 0 frozen,          examples 1 and 2
    loop 3   0 2 2    example 0 frozen,          examples 1 and 2

Nothing is approximated: a gate of zero removes the update, and states that no trained weight has touched have no gradient.
With independent gates of drop probability p, sum_{t=1..K} p^t of an example's K loops are frozen: 0.94 of 4 at p = 0.5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from loopdropout_trainer.gate_state import RunningLoop
from loopdropout_trainer.models.looped_modeling import CACHE, LoopedPreTrainedModel
from loopdropout_trainer.models.packing import PackedAttention, chunk_mask, find_packing, launch_flops


@dataclass
class LoopInputs:
    """Inputs of a loop, for the rows of a batch [B, S] or for examples packed in one row [1, T].

    Attributes:
        state: [B, S, H] hidden states.
        attention_mask: Mask in the form of the attention kernel, or a `PackedAttention`.
        position_ids: [B or 1, S].
        position_embeddings: Cosines and sines, each [B or 1, S, ...].
        cache: Cache of keys and values. It has the layers of the running loop.
        injected: [B, S, H] input that every loop adds again, or None.
        attention_kwargs: Further arguments of the attention kernel.
        token_examples: [T] index of each packed token's example. None: row b is example b.
        set_loop: Function that sets the running loop. None outside of the loops.
    """

    state: Tensor
    attention_mask: Any
    position_ids: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    cache: Cache | LoopCache | None = None
    injected: Tensor | None = None
    attention_kwargs: dict[str, Any] = field(default_factory=dict)
    token_examples: Tensor | None = None
    set_loop: Callable[[], None] | None = None

    def run(self, layers: Iterable[nn.Module]) -> Tensor:
        """Return the state [B, S, H] after some layers."""
        state = self.state
        for layer in layers:
            state = layer(
                state,
                attention_mask=self.attention_mask,
                position_ids=self.position_ids,
                position_embeddings=self.position_embeddings,
                cache=self.cache,
                set_loop=self.set_loop,
                **self.attention_kwargs,
            )
        return state


class LoopCache:
    """The layers of a cache that belong to one loop: layer `layer_idx` here is layer `layer_idx + offset` of the cache.

    In loop t, a token attends to the keys that the tokens before it had in loop t. So the cache has one layer for each (loop,
    layer), although the K loops share their weights. Layers that run once come first. For 3 layers, of which the last 2 are
    looped, and K = 2:

        layer of the model    0   1 2   1 2
        layer of the cache    0   1 2   3 4        offset 0 in the first loop, 2 in the second
    """

    def __init__(self, cache: Cache, offset: int) -> None:
        self.cache = cache
        self.offset = offset

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, S, d] to a layer, and return all of its keys and values."""
        return self.cache.update(keys, values, layer_idx + self.offset, *args, **kwargs)


class BatchPass:
    """One forward pass of a backbone over the rows of a batch. `PackedPass` gives the same results in less time and memory."""

    def __init__(self, backbone: LoopedPreTrainedModel) -> None:
        self.backbone = backbone

    def prepare(self, inputs: LoopInputs, attention_mask: Any) -> LoopInputs:
        """Return inputs [B, S, ...] in the form that the layers of this pass take, with their mask."""
        self.backbone.gate_state.set_loop(RunningLoop(self.backbone.gate_state.batch))
        if isinstance(attention_mask, dict):  # generation with a static cache creates the masks, by layer type
            mask = attention_mask["full_attention"]
        else:
            options = {CACHE: inputs.cache, "position_ids": inputs.position_ids}
            mask = create_causal_mask(self.backbone.config, inputs.state, attention_mask, **options)
        return replace(inputs, attention_mask=mask)

    def pack(self, x: Tensor) -> Tensor:
        """Return a tensor [B, S, ...] in the form of this pass. `unpack` reverses it."""
        return x

    unpack = pack

    def run_loops(self, inputs: LoopInputs) -> list[LoopInputs]:
        """Run all loops, and return the inputs with the state after each loop."""
        config = self.backbone.config
        results = []
        for loop in range(config.num_loops):
            loop_inputs = inputs
            if inputs.cache is not None:
                loop_cache = LoopCache(inputs.cache, offset=loop * config.num_recurrent_layers)
                loop_inputs = replace(inputs, cache=loop_cache)
            inputs = replace(inputs, state=self.run_loop(loop, loop_inputs))
            results.append(inputs)
        return results

    def run_loop(self, index: int, inputs: LoopInputs, **attributes: Any) -> Tensor:
        """Return the state [B, S, H] after a loop, [1, n, H] if packed. `attributes` are further ones of its `RunningLoop`."""
        gate_state = self.backbone.gate_state
        tokens = inputs.token_examples
        device = inputs.state.device if tokens is None else tokens.device  # where tokens select their gates
        # The loop is bound here, with the gates of this pass. Gradient checkpointing keeps `set_loop` with the arguments
        # of a layer. It calls it again in the backward pass, when loops run in reverse and `batch` may hold other gates.
        running = gate_state.batch.loop(index, device, tokens, **attributes)
        set_loop = functools.partial(gate_state.set_loop, running)
        set_loop()  # for modules outside of the layers
        return self.backbone.recurrent_step(replace(inputs, set_loop=set_loop))


FORWARD_LAUNCHES, SPLIT_LAUNCHES = 40, 30
"""Operations of a layer's forward pass, and of splitting and joining a row."""


@dataclass(frozen=True)
class Group:
    """Examples of a packed row that run one loop together.

    Attributes:
        examples: Indices of the examples, in order.
        frozen: Whether none of them had an active gate up to this loop. They run without adapter and gradient.
        skips_updates: Whether none of them has an active gate in this loop.
    """

    examples: tuple[int, ...]
    frozen: bool = False
    skips_updates: bool = False


def plan_loops(
    active: Sequence[Sequence[bool]], lengths: Sequence[int], min_frozen_tokens: float
) -> list[list[Group]]:
    """Return the groups of each loop.

    Args:
        active: [K][N], whether an example has an active gate in a loop.
        lengths: [N] numbers of tokens.
        min_frozen_tokens: Number of tokens of frozen examples from which they run apart.
    """
    everyone = range(len(lengths))
    started: set[int] = set()  # examples that run with gradient: after their first active gate, or joined below
    plan = []
    for is_active in active:  # [N]
        started.update(index for index in everyone if is_active[index])
        waiting = tuple(index for index in everyone if index not in started)
        num_waiting = sum(lengths[index] for index in waiting)
        if started and num_waiting < min_frozen_tokens:
            # They run with the others from here on, under a gate of zero. A state that has run in a group with gradient has a
            # graph, so it cannot be frozen in a later loop.
            started, waiting = set(everyone), ()
        groups = []
        if waiting:
            groups.append(Group(waiting, frozen=True, skips_updates=True))
        if started:
            has_updates = any(is_active[index] for index in started)
            groups.append(Group(tuple(sorted(started)), skips_updates=not has_updates))
        plan.append(groups)
    return plan


def _join(pieces: Iterable[Tensor], dim: int = 1) -> Tensor:
    pieces = list(pieces)
    with torch.autocast(pieces[0].device.type, enabled=False):  # which cannot join tensors of float16
        return torch.cat(pieces, dim=dim)


class PackedPass(BatchPass):
    """One forward pass of a backbone over examples that are packed in one row.

    `_plan` decides which examples run a loop together, `_run_group` runs them, and `_merge` joins their states:

        state [1, T, H]  ->  frozen [1, n, H], others [1, T - n, H]  ->  one loop each  ->  state [1, T, H]
    """

    def __init__(self, backbone: LoopedPreTrainedModel) -> None:
        super().__init__(backbone)
        self._selected: dict[tuple[int, ...], dict] = {}  # inputs of some examples, the same in all loops

    def prepare(self, inputs: LoopInputs, attention_mask: Any) -> LoopInputs:
        shape = inputs.state.shape[:2]
        batch = self.backbone.gate_state.batch
        token_examples = batch.find_token_examples(shape)
        self.packing = packing = find_packing(shape, attention_mask, inputs.position_ids, token_examples)
        # Random initial states are drawn in the prelude, which runs before the first loop and reads the example of each token.
        self.backbone.gate_state.set_loop(RunningLoop(batch, token_examples=packing.token_examples))
        return replace(
            inputs,
            state=packing.pack(inputs.state),
            attention_mask=self._attention(inputs.state, packing.lengths),
            position_ids=packing.pack(inputs.position_ids),
            position_embeddings=tuple(map(packing.pack, inputs.position_embeddings)),
            token_examples=packing.token_examples,
        )

    def pack(self, x: Tensor) -> Tensor:
        return self.packing.pack(x)

    def unpack(self, x: Tensor) -> Tensor:
        return self.packing.unpack(x)

    def run_loops(self, inputs: LoopInputs) -> list[LoopInputs]:
        # A loop may run without gradient only if nothing before it is trained. With trained embeddings or a trained prelude,
        # the gradient of the loss by the first state passes through every loop.
        needs_gradient = any(x is not None and x.requires_grad for x in (inputs.state, inputs.injected))
        parameters = self.backbone.gate_state.batch.options.lora_parameters
        trains_adapter_only = parameters is not None
        may_freeze = trains_adapter_only and torch.is_grad_enabled() and not needs_gradient
        results = []
        for loop, groups in enumerate(self._plan(inputs.state, may_freeze)):
            states = [self._run_group(loop, group, inputs) for group in groups]
            inputs = replace(inputs, state=self._merge(groups, states))
            results.append(inputs)
        if may_freeze and not inputs.state.requires_grad:
            # Every loop of every example was frozen, so the state has no graph. `backward` raises an error for such a loss,
            # and DDP waits for a gradient of every parameter. Zero times one number of each factor gives the state a graph and
            # each factor a gradient of zero.
            zero = 0 * sum(parameter.flatten()[0] for parameter in parameters)
            results[-1] = replace(inputs, state=inputs.state + zero)
        return results

    def _plan(self, state: Tensor, may_freeze: bool) -> list[list[Group]]:
        """Return the groups of each of the model's loops."""
        batch, lengths = self.backbone.gate_state.batch, self.packing.lengths
        num_loops = self.backbone.config.num_loops
        if not may_freeze or batch.active is None:
            everyone = Group(tuple(range(len(lengths))))
            return [[everyone] for _ in range(num_loops)]
        batch.check_loop(num_loops - 1)
        # The columns of the gates [K, N] are rows or segments of the batch. Examples without tokens have no length here, so an
        # example's place in the packed row is not its column.
        columns = self.packing.examples
        if len(batch.active[0]) == 1:  # one gate for all examples
            columns = [0] * len(lengths)
        active = []  # [K][N] in the order of the packed row
        for gates in batch.active[:num_loops]:
            active.append([gates[column] for column in columns])
        return plan_loops(active, lengths, self._min_frozen_tokens(state))

    def _run_group(self, loop: int, group: Group, inputs: LoopInputs) -> Tensor:
        """Return the state [1, n, H] of a group after a loop. `inputs` are those of all examples."""
        if len(group.examples) < len(self.packing.lengths):
            inputs = self._select(inputs, group.examples)
        # Without gradient, a frozen loop keeps no activations, and checkpointing does not run it again.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not group.frozen):
            return self.run_loop(loop, inputs, frozen=group.frozen, skips_updates=group.skips_updates)

    def _merge(self, groups: Sequence[Group], states: Sequence[Tensor]) -> Tensor:
        """Return the state [1, T, H] of all examples, in their order."""
        if len(groups) == 1:
            return states[0]
        lengths = self.packing.lengths
        pieces = {}
        for group, state in zip(groups, states, strict=True):
            sizes = [lengths[index] for index in group.examples]
            pieces.update(zip(group.examples, state.split(sizes, dim=1), strict=True))
        return _join(pieces[index] for index in range(len(lengths)))

    def _pick(self, x: Tensor, examples: tuple[int, ...], dim: int = 1) -> Tensor:
        """Return the tokens of some examples."""
        pieces = x.split(self.packing.lengths, dim=dim)
        return _join((pieces[index] for index in examples), dim)

    def _min_frozen_tokens(self, state: Tensor) -> float:
        """Return the number of frozen tokens from which it takes less time to run them apart.

        For n tokens a pass over the block's W frozen weights takes 2 n W FLOP, forward or backward. With a launch worth L
        FLOP, and I layers, running them apart saves the backward pass, 2 n W, and costs the launches of another forward pass,
        (40 I + 30) L.
        """
        num_weights = self.backbone.num_block_weights
        launches = FORWARD_LAUNCHES * self.backbone.config.num_recurrent_layers + SPLIT_LAUNCHES
        cost = launches * launch_flops(state.device, state.dtype)
        if state.is_cuda and num_weights * state.shape[1] > cost:
            # A GPU computes while Python launches the next operations. Here even half of a forward pass over the T tokens, W T
            # FLOP, takes longer than the launches. So they cost no time, and any number of frozen tokens runs apart.
            return 0
        num_saved = 1  # the backward pass
        if self.backbone.gradient_checkpointing:
            num_saved = 2  # also the recomputation before it
        return cost / (2 * num_saved * num_weights)

    def _attention(self, state: Tensor, lengths: Sequence[int]) -> PackedAttention | Tensor | None:
        """Return the mask for the attention layers: a `PackedAttention`, unless all examples attend behind one tensor."""
        config = self.backbone.config
        attention = PackedAttention(lengths, state, config.num_attention_heads, config.head_dim)
        if attention.has_varlen_kernel or len(attention.chunks) > 1:
            return attention
        return chunk_mask(lengths, state)  # one launch of transformers' attention

    def _select(self, inputs: LoopInputs, examples: tuple[int, ...]) -> LoopInputs:
        """Return the inputs of some examples."""
        pick = functools.partial(self._pick, examples=examples)
        if examples not in self._selected:
            lengths = [self.packing.lengths[index] for index in examples]
            injected = inputs.injected
            if injected is not None:
                injected = pick(injected)
            self._selected[examples] = {
                "attention_mask": self._attention(inputs.state, lengths),
                "position_ids": pick(inputs.position_ids),
                "position_embeddings": tuple(map(pick, inputs.position_embeddings)),
                "injected": injected,
                "token_examples": pick(inputs.token_examples, dim=0),
            }
        return replace(inputs, state=pick(inputs.state), **self._selected[examples])
