"""The KV cache of a looped model: one slot for every (loop, layer), because each loop attends to its own keys."""

from __future__ import annotations

import copy

import torch
from transformers.cache_utils import Cache


def fit_cache(cache: Cache, num_slots: int) -> None:
    """Give `cache` one slot per (loop, layer).

    transformers sizes a cache by `config.num_hidden_layers`, which counts a looped layer once. The missing slots are
    copies of the first, still empty ones, so that every kind of cache (dynamic, static, offloaded) keeps its kind.

    Raises:
        ValueError: if the cache already holds tokens of a run with fewer loops.
    """
    if cache.layer_class_to_replicate is not None or len(cache.layers) >= num_slots:
        return
    if cache.get_seq_length() > 0:
        raise ValueError(
            f"This cache holds tokens of a run with {len(cache.layers)} (loop, layer) slots; the model now needs "
            f"{num_slots}. Its number of loops was raised in between: start from an empty cache."
        )
    period = len(cache.layers)
    cache.layers.extend(copy.deepcopy(cache.layers[slot % period]) for slot in range(period, num_slots))


class LoopCacheView:
    """The part of a cache that belongs to one loop: slot `layer_idx` here is `layer_idx + offset` there.

    It offers what an attention layer uses, so that the attention of any non-looped model runs in a loop unchanged.
    """

    def __init__(self, cache: Cache, offset: int) -> None:
        self.cache = cache
        self.offset = offset

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [B, heads, S, d] to the slot; return everything the slot holds."""
        return self.cache.update(keys, values, layer_idx + self.offset, *args, **kwargs)
