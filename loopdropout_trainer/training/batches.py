"""Ids of the examples in a training batch, and the tokens of it that a loss reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DataCollator

from loopdropout_trainer.training.distributed import IGNORED


def collate_with_example_ids(collate: DataCollator, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate examples into one row, and add `example_ids`: [N, 2] row and segment of each example.

    Args:
        collate: TRL's padding-free collator.
        examples: Rows of the dataset. A packed row has the lengths of its examples in `seq_lengths`.
    """
    batch = collate(examples)
    ids = []
    for row, example in enumerate(examples):
        num_segments = len(example.get("seq_lengths") or [0])
        ids += [(row, segment) for segment in range(num_segments)]
    batch["example_ids"] = torch.tensor(ids)
    return batch


def has_target(labels: Sequence[int]) -> bool:
    """Return whether an example has a token to train on.

    The label of the first token never counts, because no token before it predicts it.
    """
    return any(label != IGNORED for label in labels[1:])


def has_targets(inputs: dict[str, Any]) -> bool:
    """Return whether a batch trains a token. Batches without `labels` do."""
    labels = inputs.get("labels")
    return labels is None or bool((labels[:, 1:] != IGNORED).any())


def reads_padding(inputs: dict[str, Any]) -> bool:
    """Return whether a loss over the `labels` of a batch, if it has some, reads outputs of padding."""
    labels, mask = inputs.get("labels"), inputs.get("attention_mask")
    if labels is None or mask is None:
        return False
    if labels.shape != mask.shape:
        return True
    is_target = labels[:, 1:] != IGNORED  # of the output at the token before
    is_padding = mask[:, :-1] == 0
    return bool((is_target & is_padding).any())


@contextmanager
def score_targets_only(backbone: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
    """Let TRL's fused head score the tokens with a label only, as it does on GPUs.

    Args:
        backbone: Model without its head.
        inputs: Inputs with `labels` [B, S]. They get `shift_labels` [1, n] of the n targets.
    """
    # The head computes V logits for each row of its input, and most rows of a batch are prompt or padding. So the hidden
    # states [B, S, H] of the backbone become [1, n, H] before the head sees them.
    targets = F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED).flatten()  # [B * S] next tokens
    scored = (targets != IGNORED).nonzero().squeeze(1)  # [n] among the B * S tokens
    if len(scored) == 0:
        yield
        return

    def select(module: nn.Module, args: tuple, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1).index_select(0, scored).unsqueeze(0)
        return output

    inputs["shift_labels"] = targets[scored].unsqueeze(0)
    hook = backbone.register_forward_hook(select)
    try:
        yield
    finally:
        hook.remove()
