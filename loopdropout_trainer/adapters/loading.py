"""Put a saved adapter of any kind on a looped model."""

from __future__ import annotations

from pathlib import Path

from peft import PeftConfig, PeftModel
from peft.utils import load_peft_weights
from transformers import PreTrainedModel

from loopdropout_trainer.adapters.gated import ADAPTER_KINDS, add_gates
from loopdropout_trainer.looped import find_looped_model


def attach_adapter(model: PreTrainedModel, folder: str | Path, is_trainable: bool = False) -> PeftModel:
    """Put a saved adapter of any kind on a looped model.

    PEFT itself does that for adapters that have A and B only. It refuses those whose A and B have another shape, and ignores
    parameters that it does not know.

    Args:
        model: looped model without adapter.
        folder: local path or hub name of the adapter.
        is_trainable: False freezes it.

    Raises:
        ValueError: if each loop has factors or a gate of its own, for another number of loops than the model runs.
    """
    config = PeftConfig.from_pretrained(str(folder))
    shapes = {name: tuple(w.shape) for name, w in load_peft_weights(str(folder), device="cpu").items()}
    depths = {kind: kind.saved_num_loops(shapes) for kind in ADAPTER_KINDS.values()}
    depths = {kind: depth for kind, depth in depths.items() if depth is not None}
    if not depths:
        return PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable)

    num_loops = find_looped_model(model).config.num_loops
    config.inference_mode = not is_trainable
    peft_model = PeftModel(model, config)
    for kind, trained_for in depths.items():
        if trained_for != num_loops:
            raise ValueError(
                f"The adapter in {folder} belongs to {trained_for} loops, but the model runs {num_loops}: set "
                f"`config.num_loops` to {trained_for}, or train a shared adapter, which runs at any depth."
            )
        kind.prepare(peft_model, "default", num_loops, seed=0)
    peft_model.load_adapter(str(folder), "default", is_trainable=is_trainable)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(is_trainable)
    add_gates(peft_model)
    return peft_model.eval()
