"""Estimate the memory of a training from the fields of a model's config.json, before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


_LLAMA = {"kept": 37, "hidden": "hidden_size", "layers": "num_hidden_layers", "outside": ()}
FIELDS = {
    "ouro": {**_LLAMA, "kept": 41, "loops": "total_ut_steps"},
    "nanbeige": {**_LLAMA, "loops": "num_loops"},
    "huginn_raven": {
        "kept": 39,
        "hidden": "n_embd",
        "layers": "n_layers_in_recurrent_block",
        "outside": ("n_layers_in_prelude", "n_layers_in_coda"),
        "loops": "mean_recurrence",
    },
    "lds": {
        "kept": 44,
        "hidden": "hidden_size",
        "layers": "reasoning_layer_indices",
        "outside": ("encoder_layer_indices", "decoder_layer_indices"),
        "loops": "N",
    },
    "dory": {
        "kept": 79,
        "hidden": "hidden_size",
        "layers": "n_recurrent_layers",
        "outside": ("n_input_layers", "n_output_layers"),
        "loops": "n_recurrent_loops",
    },
}
"""Names of the fields of a family's config.json by `model_type`, and the `kept` numbers of `kept_per_layer`."""

OVERHEAD_GB = 1.2
"""GB of the CUDA context, the kernels' workspaces, and the loss, which is computed in chunks of tokens."""


def kept_per_layer(config: Mapping[str, Any]) -> int:
    """Return the bytes that one run of a recurrent layer keeps for a token, C H + 6 I for hidden size H and MLP width I.

    C was counted at the models' real widths (`python benchmarks/memory.py`).
    """
    names = FIELDS[config["model_type"]]
    base = {**config, **config.get("base_config_dict", {})}
    return names["kept"] * base[names["hidden"]] + 6 * base["intermediate_size"]


def estimate_memory(
    config: Mapping[str, Any],
    num_tokens: int,
    *,
    num_loops: int | None = None,
    rank: int = 16,
    checkpointing: bool = True,
    four_bit: bool = False,
) -> dict[str, float]:
    """Return the GB (10^9 bytes) of a LoRA training in bfloat16 by part, and in all (`total`).

    The weights of the frozen model take 2 bytes each, or 0.56 in the linear layers of a 4-bit model. A number of the adapter
    takes 16 bytes with its gradient and AdamW in float32. Each run of a layer keeps `kept_per_layer` bytes for a token,
    or its input of 2 H bytes with gradient checkpointing.

    Args:
        config: Content of a config.json.
        num_tokens: Tokens of a micro-batch without padding.
        num_loops: Recurrence depth K. Default: the model's own.
        rank: Rank of the adapter on all linear projections of the recurrent block.
        checkpointing: Whether the backward pass computes the layers again.
        four_bit: Whether the linear layers of the frozen model have 4-bit weights.

    Returns:
        An empty dict for a model that is not in `FIELDS`.
    """
    names = FIELDS.get(config.get("model_type", ""))
    if names is None:
        return {}
    config = {**config, **config.get("base_config_dict", {}), "model_type": config["model_type"]}
    count = lambda name: len(config[name]) if isinstance(config[name], list) else config[name]
    layers, outside = count(names["layers"]), sum(map(count, names["outside"]))
    if config["model_type"] == "dory":  # its file counts the attention and the MLP of a layer apart
        layers, outside = layers // 2, outside // 2
    hidden, mlp, loops = config[names["hidden"]], config["intermediate_size"], num_loops or config[names["loops"]]
    heads = config.get("num_attention_heads") or config["n_heads"]
    width = heads * (config.get("head_dim") or hidden // heads)
    kv_width = width * (config.get("num_key_value_heads") or heads) // heads
    sizes = [(hidden, width), (hidden, kv_width), (hidden, kv_width), (width, hidden)]  # (in, out) of the projections
    sizes += [(hidden, mlp), (hidden, mlp), (mlp, hidden), *[(hidden, width)] * (config["model_type"] == "dory")]
    linear = (layers + outside) * sum(rows * columns for rows, columns in sizes)
    is_tied = config.get("tie_word_embeddings", config.get("tie_embeddings", False)) and config["model_type"] != "lds"
    embeddings = config["vocab_size"] * hidden * (1 if is_tied else 2)
    adapter = layers * rank * sum(map(sum, sizes))
    kept = kept_per_layer(config)
    runs = loops * layers + outside
    activations = num_tokens * (runs * 2 * hidden + kept if checkpointing else runs * kept)
    parts = {
        "frozen weights": (0.56 if four_bit else 2) * linear + 2 * embeddings,
        "adapter and optimizer": 16 * adapter,
        "activations": activations,
        "overhead": OVERHEAD_GB * 1e9,
    }
    return {name: value / 1e9 for name, value in {**parts, "total": sum(parts.values())}.items()}
