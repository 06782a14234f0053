"""The states that a looped model carries from loop to loop, where target tokens are predicted."""

from __future__ import annotations

import torch
from torch import nn

from loopdropout_trainer.diagnostics.scores import Batch, split_labels
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.models.looped_modeling import LoopedBackbone


def carries_states(model: nn.Module) -> bool:
    """Return whether the model tells the states that it carries; of a described model only the readouts are known."""
    return isinstance(find_looped_model(model).base_model, LoopedBackbone)


def target_states(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states and the readouts after each loop where a target token is predicted, [K, targets, H] each.

    Args:
        model: looped model in evaluation mode, under the gates in force. One that does not tell its states has its
            readouts taken for them.
        batch: model inputs with `labels`.
    """
    looped = find_looped_model(model)
    inputs, labels = split_labels(model, batch)
    if carries_states(model):
        output = looped.base_model(**inputs, use_cache=False, output_readouts=True)
        states, readouts = output.loop_states, output.readouts
    else:
        states = readouts = looped.loop_readouts(**inputs)
    kept = labels != -100
    return tuple(torch.stack([each[:, :-1][kept] for each in group]) for group in (states, readouts))
