"""What answering prompts keeps in memory, by arithmetic.

    weights + copies of projections + libraries + keys and values of every (loop, layer) + work

The work is that of reading prompts: a few tensors as wide as the widest projection, and the logits of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from loopdropout_trainer.generation.decoding import ALLOCATED_COLUMNS, PREFILL_TOKENS
from loopdropout_trainer.processes import LIBRARY_BYTES


WIDEST_TENSORS = 4
"""Tensors as wide as the widest projection that one layer holds at a time."""

LOGITS_BYTES = 12
"""Of a logit: as the head gives it, in float32, and while the most probable one is looked for."""


def decoding_memory(
    model: PreTrainedModel, lengths: Sequence[int], max_new_tokens: int, num_slots: int, copied_bytes: int = 0
) -> dict[str, int]:
    """Return the bytes that continuing prompts takes at most: of `libraries`, `weights`, `copies`, `keys and
    values` and `work`.

    Args:
        model: looped model, with its adapter if it has one.
        lengths: tokens of each prompt.
        max_new_tokens: most tokens of a completion.
        num_slots: rows that are decoded together.
        copied_bytes: of projections that are made ready for many calls (`PreparedProjections.copied_bytes`).
    """
    config, itemsize = model.config, model.dtype.itemsize
    slots, longest = min(num_slots, len(lengths)), max(lengths, default=0)
    columns = -(-(longest + max_new_tokens) // ALLOCATED_COLUMNS) * ALLOCATED_COLUMNS
    layers = getattr(config, "num_layer_runs", config.num_loops * config.num_hidden_layers)  # of each loop its own
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    linears = [model.get_submodule(name) for name in model.recurrent_linears()]
    widest = max(max(linear.in_features, linear.out_features) for linear in linears)
    read_together = max(longest, min(slots * longest, PREFILL_TOKENS))
    return {
        "libraries": int(LIBRARY_BYTES) if model.device.type == "cpu" else 0,
        "weights": sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        "copies": copied_bytes,
        "keys and values": 2 * layers * slots * columns * heads * width * itemsize,
        "work": read_together * widest * WIDEST_TENSORS * itemsize + slots * config.vocab_size * LOGITS_BYTES,
    }
