"""Put a saved adapter of any kind on a looped model."""

from __future__ import annotations

from pathlib import Path

from peft import PeftConfig, PeftModel
from peft.utils import load_peft_weights
from transformers import PreTrainedModel

from loopdropout_trainer.adapters.gated import GatedLora, add_gates
from loopdropout_trainer.adapters.learned import LearnedGatesLora
from loopdropout_trainer.adapters.per_loop import PerLoopLora
from loopdropout_trainer.looped import find_looped_model


def attach_adapter(
    model: PreTrainedModel, folder: str | Path, is_trainable: bool = False, config: PeftConfig | None = None
) -> PeftModel:
    """Put a saved adapter on a looped model: shared, independent for each loop, or with learned gates.

    PEFT itself does that for shared adapters. It refuses independent ones, whose factors have another shape, and ignores
    learned gates.

    Args:
        model: looped model without adapter.
        folder: local path or hub name of the adapter.
        is_trainable: False freezes it.
        config: its configuration; default: as PEFT reads it from the folder.

    Raises:
        ValueError: if each loop has factors or a gate of its own, for another number of loops than the model runs.
    """
    config = PeftConfig.from_pretrained(str(folder)) if config is None else config
    weights = load_peft_weights(str(folder), device="cpu")
    kinds: dict[type[GatedLora], int] = {}  # number of loops that each was trained for
    for name, weight in weights.items():
        if weight.dim() == 3:
            kinds[PerLoopLora] = len(weight)
        elif name.endswith("lora_loop_gates"):
            kinds[LearnedGatesLora] = len(weight)
    if not kinds:
        return PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable, config=config)

    num_loops = find_looped_model(model).config.num_loops
    config.inference_mode = not is_trainable
    peft_model = PeftModel(model, config)
    for kind, trained_for in kinds.items():
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
