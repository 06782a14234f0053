"""One forward pass over the loops: what a loop reads, the pass itself, and its KV cache.

The cache has a layer of its own for every (loop, layer), because each loop attends to its own keys.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import create_causal_mask

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import LoopedModelMixin, RunningLoop


@dataclass
class LoopInputs:
    """All that a loop reads besides weights and cache: of a batch, row by row, or of examples packed in one row.

    Nothing about the rows of a batch is passed in any other way.

    Attributes:
        state: [B, S, H], carried from loop to loop; [1, T, H] if the examples are packed.
        attention_mask: in the attention kernel's own form: None, [B, 1, S, cached + S], a block mask, or packed lengths.
        position_ids: [B or 1, S].
        position_embeddings: cosines and sines, each [B or 1, S, ...].
        injected: [B, S, H] that every loop mixes in again, or None.
        attention_kwargs: further arguments of the attention kernel.
        tokens: [n] index of the example whose gates each packed token has; None: the batch, row by row.
        announce: says that the running loop runs, as each of its layers does; None before and after the loops.
    """

    state: Tensor
    attention_mask: Any
    position_ids: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    injected: Tensor | None = None
    attention_kwargs: dict[str, Any] = field(default_factory=dict)
    tokens: Tensor | None = None
    announce: Callable[[], None] | None = None

    def run(self, layers: Iterable[nn.Module], **layer_kwargs) -> Tensor:
        """Return the state [B, S, H] after some layers, which are told the loop."""
        state = self.state
        for layer in layers:
            state = layer(
                state,
                attention_mask=self.attention_mask,
                position_ids=self.position_ids,
                position_embeddings=self.position_embeddings,
                announce=self.announce,
                **self.attention_kwargs,
                **layer_kwargs,
            )
        return state


class PlainPass:
    """One forward pass of a backbone, row by row of its batch. `PackedPass` gives the same results in less time and memory."""

    def __init__(self, backbone: LoopedModelMixin) -> None:
        self.backbone = backbone
        self.prepared: dict[Any, Any] = {}  # see `RunningLoop`

    def arrange(self, inputs: LoopInputs, attention_mask: Any, cache: Cache | None) -> LoopInputs:
        """Return inputs [B, S, ...] as the layers of this pass read them, from the prelude on, with their mask."""
        self.backbone.loop_state.announce(RunningLoop())
        if isinstance(attention_mask, dict):  # compiled generation builds the mask beforehand, by layer type
            mask = attention_mask["full_attention"]
        else:
            options = {"past_key_values": cache, "position_ids": inputs.position_ids}
            mask = create_causal_mask(self.backbone.config, inputs.state, attention_mask, **options)
        return replace(inputs, attention_mask=mask)

    def pack(self, x: Tensor) -> Tensor:
        """Return [B, S, ...] as `arrange` returns its inputs; `unpack` is the way back."""
        return x

    unpack = pack

    def start(self, inputs: LoopInputs) -> None:
        """Take the first loop's inputs."""
        self.inputs = inputs

    def loop(self, recurrent_step: Callable[[LoopInputs], Tensor], loop: int) -> None:
        """Run one loop: a function from inputs to the state after it."""
        state = self.backbone.loop_state
        running = state.batch.loop(loop, self.inputs.state.device, prepared=self.prepared)
        announce = functools.partial(state.announce, running)
        announce()  # for what runs outside of a layer
        self.inputs = replace(self.inputs, state=recurrent_step(replace(self.inputs, announce=announce)))

    def result(self) -> LoopInputs:
        """Return the inputs with the state after the loops so far."""
        return self.inputs


def fit_cache(cache: Cache, num_layers: int) -> None:
    """Give `cache` one layer of keys and values per (loop, layer) of the model.

    transformers sizes a cache by `config.num_hidden_layers`, which counts a looped layer once. The missing ones are
    copies of the first, still empty ones, so that every kind of cache (dynamic, static, offloaded) keeps its kind.

    Raises:
        ValueError: if the cache already holds tokens of a run with fewer loops.
    """
    held = len(cache.layers)
    first = cache.layers[0] if held else None
    if held < num_layers:
        stale = held > 0 and cache.get_seq_length() > 0
    else:  # a later run may have used fewer of the layers
        stale = type(first) is DynamicLayer and cache.layers[num_layers - 1].get_seq_length() != first.get_seq_length()
    if stale:
        raise UserError(
            f"This cache has {held} layers for (loop, layer) pairs, not all with every token; the model needs {num_layers}: "
            "its number of loops was raised, or it was made for layers that run once, as by prefix tuning."
        )
    if cache.layer_class_to_replicate is None:  # else the cache adds layers by itself
        cache.layers.extend(copy.deepcopy(cache.layers[index % held]) for index in range(held, num_layers))


class LoopCacheView:
    """The part of a cache that belongs to one loop: layer `layer_idx` here is `layer_idx + offset` there.

    It offers what an attention layer uses, so that the attention of any non-looped model runs in a loop unchanged.
    """

    def __init__(self, cache: Cache, offset: int) -> None:
        self.cache = cache
        self.offset = offset

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, S, d] to the layer's; return all that it holds."""
        return self.cache.update(keys, values, layer_idx + self.offset, *args, **kwargs)
