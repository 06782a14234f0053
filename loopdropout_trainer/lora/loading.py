"""Put a saved adapter of any kind on a looped model."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, PeftModelForCausalLM
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.lora.gated import ADAPTER_KINDS, add_gates


def attach_adapter(
    model: PreTrainedModel, folder: Path, is_trainable: bool, config: PeftConfig, weights: dict[str, Tensor]
) -> PeftModel:
    """Put a saved adapter of any kind on a looped model.

    Args:
        model: Looped model without adapter.
        folder: Folder of the adapter, for messages.
        is_trainable: Whether to train the adapter.
        config: Configuration of the adapter.
        weights: Tensors by PEFT's names.

    Raises:
        UserError: If tensors are missing or not finite, or belong to another number of loops.
    """
    _check_numbers(weights, folder)
    num_loops = find_looped_model(model).num_loops
    kinds = []  # those with parameters of their own
    for kind in ADAPTER_KINDS.values():
        trained_for = kind.saved_num_loops(weights)
        if trained_for is None:
            continue
        check_saved_depth(folder, trained_for, num_loops)
        kinds.append(kind)
    config.inference_mode = not is_trainable
    peft_model = PeftModelForCausalLM(model, config)
    for kind in kinds:
        kind.prepare(peft_model, "default", num_loops, seed=0)
    set_peft_model_state_dict(peft_model, weights)
    _check_complete(peft_model, weights, folder)
    if kinds:
        add_gates(peft_model)
    if not is_trainable:
        peft_model.requires_grad_(False).eval()
    return peft_model


def check_saved_depth(folder: Path, trained_for: int, num_loops: int) -> None:
    """Raise UserError if a model runs another number of loops than a saved adapter has parameters for."""
    if trained_for != num_loops:
        raise UserError(
            f"The adapter in {folder} belongs to {trained_for} loops, but the model runs {num_loops}. Set "
            f"`config.num_loops` to {trained_for}."
        )


def _check_numbers(weights: dict[str, Tensor], folder: Path) -> None:
    """Raise UserError if there are no tensors, or a tensor has numbers that are not finite or not real."""
    if not weights:
        raise UserError(f"The adapter in {folder} has no tensors. Save it again.")
    for name, weight in weights.items():
        if not (weight.is_floating_point() and torch.isfinite(weight).all()):
            raise UserError(
                f"The adapter in {folder} is damaged: `{name}` holds numbers that are not finite or not real."
            )


def _check_complete(peft_model: PeftModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Raise UserError if the tensors differ from the adapter's configuration."""
    expected = get_peft_model_state_dict(peft_model, save_embedding_layers=False).keys()
    known = get_peft_model_state_dict(peft_model, save_embedding_layers=True).keys()  # PEFT saves resized embeddings
    problems = {"lacks": expected - weights.keys(), "has an unknown tensor,": weights.keys() - known}
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"The adapter in {folder} does not fit this model: it {problem} `{min(names)}`{more}.")
