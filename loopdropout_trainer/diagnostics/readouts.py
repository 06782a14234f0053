"""The loss at every loop's readout along the fully adapted recurrence (Table "MATH-500 readouts")."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from loopdropout_trainer.looped import find_looped_model


@torch.no_grad()
def readout_losses(model: nn.Module, batches: Iterable[dict[str, torch.Tensor]]) -> list[float]:
    """Return the cross entropy per target token, in nats, of the readout after each loop t = 1..K.

    Args:
        model: looped causal language model, with or without an adapter (applied in every loop).
        batches: model inputs with `labels` [B, S], -100 where no target is.

    Raises:
        ValueError: if the batches hold no target token.
    """
    looped = find_looped_model(model)
    num_loops = looped.config.num_loops
    device = next(model.parameters()).device
    head = model.get_output_embeddings()
    was_training = model.training
    model.eval()
    totals, tokens = torch.zeros(num_loops, dtype=torch.float64), 0
    try:
        for batch in batches:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            labels = batch.pop("labels")[:, 1:]
            kept = labels != -100
            for loop, readout in enumerate(looped.loop_readouts(**batch)):
                logits = head(readout[:, :-1][kept]).float()  # [targets, V]
                totals[loop] += float(F.cross_entropy(logits, labels[kept], reduction="sum"))
            tokens += int(kept.sum())
    finally:
        model.train(was_training)
    if tokens == 0:
        raise ValueError("The batches hold no target token: every label is -100.")
    return (totals / tokens).tolist()
