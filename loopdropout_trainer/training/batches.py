"""Training batches without padding, and the ids of the examples in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DataCollator


def collate_with_example_ids(collate: DataCollator, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate examples into one row, and add `example_ids`: [N, 2] row and segment of each example.

    Args:
        collate: TRL's padding-free collator.
        examples: Rows of the dataset. A packed row has the lengths of its examples in `seq_lengths`.
    """
    batch = collate(examples)
    batch["example_ids"] = torch.tensor(
        [
            (row, segment)
            for row, example in enumerate(examples)
            for segment in range(len(example.get("seq_lengths") or [0]))
        ]
    )
    return batch


def remove_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a padded batch [B, S] as one row [1, T] of its T tokens, as TRL's `padding_free` does.

    Batches with other inputs stay unchanged.
    """
    if inputs.keys() != {"input_ids", "attention_mask", "labels"}:
        return inputs
    kept = inputs["attention_mask"].bool()
    positions = kept.cumsum(dim=1) - 1
    labels = inputs["labels"].masked_fill(positions == 0, -100)  # the token before it belongs to another example
    rows = torch.arange(len(kept))
    return {
        "input_ids": inputs["input_ids"][kept].unsqueeze(0),
        "labels": labels[kept].unsqueeze(0),
        "position_ids": positions[kept].unsqueeze(0),
        "example_ids": torch.stack([rows, torch.zeros_like(rows)], dim=1),
    }


@contextmanager
def score_targets_only(backbone: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
    """Let TRL's fused head score the tokens with a label only, as it does on GPUs.

    Args:
        backbone: Model without its head.
        inputs: One row of inputs with `labels` [1, T]. They get `shift_labels` [1, n].
    """
    targets = inputs["labels"][:, 1:]
    scored = (targets[0] != -100).nonzero().squeeze(1)  # [n] positions that predict a target
    if len(scored) == 0:
        yield
        return

    def select(module: nn.Module, args: tuple, output: Any) -> Any:
        hidden_states: Tensor = output.last_hidden_state
        output.last_hidden_state = hidden_states.index_select(1, scored)
        return output

    inputs["shift_labels"] = targets[:, scored]
    hook = backbone.register_forward_hook(select)
    try:
        yield
    finally:
        hook.remove()
