"""The KV cache of a looped model: a layer of its own for every (loop, layer), because each loop attends to its own keys."""

from __future__ import annotations

import copy

import torch
from transformers.cache_utils import Cache, DynamicLayer

from loopdropout_trainer.errors import UserError


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

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [B, heads, S, d] to the layer's; return all that it holds."""
        return self.cache.update(keys, values, layer_idx + self.offset, *args, **kwargs)
