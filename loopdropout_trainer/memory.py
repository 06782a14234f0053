"""Estimate the memory and the operations of a training from the fields of a model's config.json, without heavy imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """Where the sizes of a family's models are in config.json.

    Attributes:
        kept: C. A run of a layer keeps C H + 6 I bytes of a token for the backward pass.
        hidden: Field of the hidden size H.
        num_loops: Field of the recurrence depth K.
        looped: Field of the layers that are looped, their number or a list of their indices.
        outside: Fields of the layers that run once before and after them.
        heads: Field of the number of attention heads.
    """

    kept: int
    hidden: str
    num_loops: str
    looped: str
    outside: tuple[str, ...] = ()
    heads: str = "num_attention_heads"


FAMILIES = {
    "ouro": Family(41, hidden="hidden_size", num_loops="total_ut_steps", looped="num_hidden_layers"),
    "nanbeige": Family(37, hidden="hidden_size", num_loops="num_loops", looped="num_hidden_layers"),
    "huginn_raven": Family(
        39,
        hidden="n_embd",
        num_loops="mean_recurrence",
        looped="n_layers_in_recurrent_block",
        outside=("n_layers_in_prelude", "n_layers_in_coda"),
        heads="n_heads",
    ),
    "lds": Family(
        44,
        hidden="hidden_size",
        num_loops="N",
        looped="reasoning_layer_indices",
        outside=("encoder_layer_indices", "decoder_layer_indices"),
    ),
    "dory": Family(
        79,
        hidden="hidden_size",
        num_loops="n_recurrent_loops",
        looped="n_recurrent_layers",
        outside=("n_input_layers", "n_output_layers"),
    ),
}
"""Families whose memory is known, by `model_type`."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        hidden: Hidden size H.
        mlp: Width I of an MLP.
        num_loops: Recurrence depth K of the model.
        looped, before, after: Numbers of layers that are looped, and that run once before and after them.
        projections: (in, out) of the linear projections of a layer.
        vocabulary: Number of tokens.
        has_tied_head: Whether the head is the embedding.
    """

    hidden: int
    mlp: int
    num_loops: int
    looped: int
    before: int
    after: int
    projections: list[tuple[int, int]]
    vocabulary: int
    has_tied_head: bool


def read_shape(config: Mapping[str, Any]) -> Shape | None:
    """Return the sizes of a model, or None for a family that is not in `FAMILIES`, or a configuration with other fields."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        return None
    try:
        return _read_fields(config, kind)
    except KeyError:
        return None


def _read_fields(config: Mapping[str, Any], kind: str) -> Shape:
    family = FAMILIES[kind]
    config = {**config, **config.get("base_config_dict", {})}  # LoopUS nests the fields of Qwen3
    hidden, mlp = config[family.hidden], config["intermediate_size"]
    heads = config[family.heads]
    width = heads * (config.get("head_dim") or hidden // heads)
    kv_width = width * (config.get("num_key_value_heads") or heads) // heads
    projections = [(hidden, width), (hidden, kv_width), (hidden, kv_width), (width, hidden)]
    projections += [(hidden, mlp), (hidden, mlp), (mlp, hidden)]
    if kind == "dory":
        projections.append((hidden, width))  # the gate of its attention
    before, after = [_count_layers(config[name], kind) for name in family.outside] or (0, 0)
    is_tied = config.get("tie_word_embeddings", config.get("tie_embeddings", False))
    return Shape(
        hidden=hidden,
        mlp=mlp,
        num_loops=config[family.num_loops],
        looped=_count_layers(config[family.looped], kind),
        before=before,
        after=after,
        projections=projections,
        vocabulary=config["vocab_size"],
        has_tied_head=bool(is_tied) and kind != "lds",  # LoopUS has a head of its own
    )


def _count_layers(layers: int | list[int], kind: str) -> int:
    """Return a number of layers from a field, which is a number or a list of indices."""
    count = len(layers) if isinstance(layers, list) else layers
    if kind == "dory":  # counts attention and MLP apart
        return count // 2
    return count


def read_depth(config: Mapping[str, Any]) -> int | None:
    """Return the recurrence depth K of a model of a known family, or None for another model."""
    family = FAMILIES.get(config.get("model_type"))
    if family is None:
        return None
    return config.get(family.num_loops)


def count_parameters(config: Mapping[str, Any], rank: int) -> int | None:
    """Return the number of parameters of an adapter on all linear projections of the recurrent block.

    Args:
        config: Content of a config.json.
        rank: Rank of the adapter.

    Returns:
        The number, or None for a model whose sizes are not known.
    """
    shape = read_shape(config)
    return None if shape is None else _count_adapter(shape, rank)


def find_smallest_projection(config: Mapping[str, Any]) -> int | None:
    """Return the smallest width of a linear projection of the recurrent block, or None for a model of unknown sizes."""
    shape = read_shape(config)
    if shape is None:
        return None
    return min(min(sizes) for sizes in shape.projections)


def list_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the index of the layer of each linear projection of the recurrent block, or () for a model of unknown sizes."""
    shape = read_shape(config)
    if shape is None:
        return ()
    return tuple(layer for layer in range(shape.looped) for _ in shape.projections)


def _count_adapter(shape: Shape, rank: int) -> int:
    return shape.looped * rank * sum(rows + columns for rows, columns in shape.projections)


def estimate_memory(
    config: Mapping[str, Any],
    num_tokens: int,
    num_loops: int | None = None,
    rank: int = 16,
    checkpointing: bool = True,
    four_bit: bool = False,
    num_parameters: int | None = None,
) -> dict[str, float]:
    """Return the GB (10^9 bytes) of a LoRA training in bfloat16 by part, and in all (`total`).

    For a token, a run of a layer keeps its input of 2 H bytes with gradient checkpointing, else C H + 6 I bytes, with hidden
    size H and MLP width I. `python benchmarks/memory.py` counts C. The result is empty for a model whose sizes are not known.

    Args:
        config: Content of a config.json.
        num_tokens: Tokens of a micro-batch without padding.
        num_loops: Recurrence depth K. Default: the model's own.
        rank: Rank of the adapter on all linear projections of the recurrent block.
        checkpointing: Whether the backward pass computes the layers again.
        four_bit: Whether the linear layers of the frozen model have 4-bit weights.
        num_parameters: Number of parameters of the adapter. Default: those of all linear projections of the recurrent block.
    """
    shape = read_shape(config)
    if shape is None:
        return {}
    outside = shape.before + shape.after
    layers = shape.looped + outside
    linear = layers * sum(rows * columns for rows, columns in shape.projections)
    num_embeddings = 1 if shape.has_tied_head else 2
    if num_parameters is None:
        num_parameters = _count_adapter(shape, rank)

    runs = (num_loops or shape.num_loops) * shape.looped + outside  # of layers, in a forward pass
    kept = FAMILIES[config["model_type"]].kept * shape.hidden + 6 * shape.mlp  # bytes of a token in a run
    if checkpointing:  # the inputs of all runs, and one run that is computed again
        activations = num_tokens * (runs * 2 * shape.hidden + kept)
    else:
        activations = num_tokens * runs * kept
    bytes_of_weight = 0.56 if four_bit else 2  # four bits, and the constants of their blocks
    embeddings = num_embeddings * shape.vocabulary * shape.hidden
    parts = {
        "frozen weights": bytes_of_weight * linear + 2 * embeddings,
        "adapter and optimizer": 16 * num_parameters,  # with gradient and AdamW in float32
        "activations": activations,
        "overhead": 1.2e9,  # CUDA, the kernels' workspaces, and the loss, which is computed in chunks of tokens
    }
    parts["total"] = sum(parts.values())
    return {name: size / 1e9 for name, size in parts.items()}


def count_operations(
    config: Mapping[str, Any], num_loops: int | None = None, checkpointing: bool = True
) -> float | None:
    """Return the floating point operations of a token in a training: two for each weight that multiplies it.

    The loops and the layers behind them run forward and backward, and with gradient checkpointing forward once more. The
    layers before the loops run forward only. Attention scores and the adapter are left out.

    Args:
        config: Content of a config.json.
        num_loops: Recurrence depth K. Default: the model's own.
        checkpointing: Whether the backward pass computes the layers again.

    Returns:
        The number, or None for a model whose sizes are not known.
    """
    shape = read_shape(config)
    if shape is None:
        return None
    passes = 3 if checkpointing else 2
    runs = shape.before + passes * ((num_loops or shape.num_loops) * shape.looped + shape.after)
    layer = sum(rows * columns for rows, columns in shape.projections)
    head = shape.vocabulary * shape.hidden
    return 2.0 * (runs * layer + 2 * head)
