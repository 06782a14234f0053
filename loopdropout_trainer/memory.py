"""Estimate the memory of a training from the fields of a model's config.json, before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


HUGINN_LAYERS = ("n_layers_in_recurrent_block", "n_layers_in_prelude", "n_layers_in_coda")
FAMILIES = {
    "ouro": (41, "hidden_size", "total_ut_steps", "num_hidden_layers"),
    "nanbeige": (37, "hidden_size", "num_loops", "num_hidden_layers"),
    "huginn_raven": (39, "n_embd", "mean_recurrence", *HUGINN_LAYERS),
    "lds": (44, "hidden_size", "N", "reasoning_layer_indices", "encoder_layer_indices", "decoder_layer_indices"),
    "dory": (79, "hidden_size", "n_recurrent_loops", "n_recurrent_layers", "n_input_layers", "n_output_layers"),
}
"""C, and the names of the fields of H, K, the looped layers and the other layers, by `model_type`."""


def estimate_memory(
    config: Mapping[str, Any],
    num_tokens: int,
    num_loops: int | None = None,
    rank: int = 16,
    checkpointing: bool = True,
    four_bit: bool = False,
) -> dict[str, float]:
    """Return the GB (10^9 bytes) of a LoRA training in bfloat16 by part, and in all (`total`).

    For a token, a run of a layer keeps its input of 2 H bytes with gradient checkpointing, else C H + 6 I bytes, with hidden
    size H and MLP width I. `python benchmarks/memory.py` counts C. The result is empty for a model that is not in `FAMILIES`.

    Args:
        config: Content of a config.json.
        num_tokens: Tokens of a micro-batch without padding.
        num_loops: Recurrence depth K. Default: the model's own.
        rank: Rank of the adapter on all linear projections of the recurrent block.
        checkpointing: Whether the backward pass computes the layers again.
        four_bit: Whether the linear layers of the frozen model have 4-bit weights.
    """
    if (kind := config.get("model_type")) not in FAMILIES:
        return {}
    config = {**config, **config.get("base_config_dict", {})}
    factor, *names = FAMILIES[kind]
    hidden, own_loops, layers, *outside = [config[name] for name in names]
    counts = [len(part) if isinstance(part, list) else part for part in (layers, *outside)]
    # Dory counts attention and MLP apart.
    layers, *outside = [count // 2 if kind == "dory" else count for count in counts]
    mlp, heads = config["intermediate_size"], config.get("num_attention_heads") or config["n_heads"]
    width = heads * (config.get("head_dim") or hidden // heads)
    kv_width = width * (config.get("num_key_value_heads") or heads) // heads
    sizes = [(hidden, width), (hidden, kv_width), (hidden, kv_width), (width, hidden)]  # (in, out) of the projections
    sizes += [(hidden, mlp), (hidden, mlp), (mlp, hidden), *[(hidden, width)] * (kind == "dory")]
    linear = (layers + sum(outside)) * sum(rows * columns for rows, columns in sizes)
    is_tied = config.get("tie_word_embeddings", config.get("tie_embeddings", False)) and kind != "lds"
    runs, kept = (num_loops or own_loops) * layers + sum(outside), factor * hidden + 6 * mlp
    parts = {
        "frozen weights": (0.56 if four_bit else 2) * linear + 2 * config["vocab_size"] * hidden * (2 - bool(is_tied)),
        "adapter and optimizer": 16 * layers * rank * sum(map(sum, sizes)),  # with gradient and AdamW in float32
        "activations": num_tokens * (runs * 2 * hidden + kept if checkpointing else runs * kept),
        "overhead": 1.2e9,  # CUDA, the kernels' workspaces, and the loss, which is computed in chunks of tokens
    }
    return {name: value / 1e9 for name, value in {**parts, "total": sum(parts.values())}.items()}
