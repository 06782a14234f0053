"""Put a saved adapter of any kind on a looped model."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict, load_peft_weights
from transformers import PreTrainedModel

from loopdropout_trainer.adapters.gated import ADAPTER_KINDS, add_gates
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import find_looped_model


def attach_adapter(
    model: PreTrainedModel, folder: str | Path, is_trainable: bool, config: PeftConfig, files: str | Path
) -> PeftModel:
    """Put a saved adapter of any kind on a looped model; PEFT itself does that for adapters that have A and B only.

    Args:
        model: looped model without adapter.
        folder: of the adapter, as errors name it.
        is_trainable: False freezes it.
        config: its configuration.
        files: folder that holds its tensors in PEFT's format.

    Raises:
        ValueError: if tensors are missing, or not finite; or if each loop has factors or a gate of its own, for another
            number of loops than the model runs.
    """
    weights = load_peft_weights(str(files), device="cpu")
    if not weights:
        raise UserError(f"The adapter in {folder} has no tensors: it was not saved to its end.")
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise UserError(f"The adapter in {folder} is damaged: `{name}` holds {weight.dtype} numbers.")
        if not torch.isfinite(weight).all():
            raise UserError(f"The adapter in {folder} is damaged: `{name}` holds numbers that are NaN or infinite.")
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    depths = {kind: kind.saved_num_loops(shapes) for kind in ADAPTER_KINDS.values()}
    if set(depths.values()) == {None}:
        peft_model = PeftModel.from_pretrained(model, str(files), is_trainable=is_trainable, config=config)
        _check_complete(peft_model, weights, folder)
        return peft_model

    num_loops = find_looped_model(model).config.num_loops
    config.inference_mode = not is_trainable
    peft_model = PeftModel(model, config)
    for kind, trained_for in depths.items():
        if trained_for is None:
            continue
        if trained_for != num_loops:
            raise UserError(
                f"The adapter in {folder} belongs to {trained_for} loops, but the model runs {num_loops}: set "
                f"`config.num_loops` to {trained_for}, or train a shared adapter, which runs at any depth."
            )
        kind.prepare(peft_model, "default", num_loops, seed=0)
    peft_model.load_adapter(str(files), "default", is_trainable=is_trainable)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(is_trainable)
    _check_complete(peft_model, weights, folder)
    add_gates(peft_model)
    return peft_model.eval()


def _check_complete(peft_model: PeftModel, weights: dict[str, torch.Tensor], folder: str | Path) -> None:
    """Raise ValueError for an adapter whose tensors are not exactly those that its configuration describes."""
    expected = get_peft_model_state_dict(peft_model, save_embedding_layers=False).keys()
    for wrong, what in ((expected - weights.keys(), "lacks"), (weights.keys() - expected, "has an unknown tensor,")):
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise UserError(
                f"The adapter in {folder} does not fit this model by its adapter_config.json: it {what} `{min(wrong)}`{more}."
            )
