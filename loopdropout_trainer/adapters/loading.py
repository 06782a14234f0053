"""Load a saved adapter of any kind, and say whether a model's adapter can be merged."""

from __future__ import annotations

from pathlib import Path

from peft import PeftConfig, PeftModel
from peft.utils import load_peft_weights
from transformers import PreTrainedModel

from loopdropout_trainer.adapters.gated import add_gates
from loopdropout_trainer.adapters.learned import LearnedGatesLora
from loopdropout_trainer.adapters.per_loop import PerLoopLora
from loopdropout_trainer.looped import find_looped_model


def load_adapter(model: PreTrainedModel, folder: str | Path, is_trainable: bool = False) -> PeftModel:
    """Put a saved adapter on a looped model: shared, independent for each loop, or with learned gates.

    `PeftModel.from_pretrained` does for shared adapters. It refuses independent ones, whose factors have another shape, and
    ignores learned gates.

    Args:
        model: looped model without adapter.
        folder: local path or hub name of the adapter.
        is_trainable: False freezes it.

    Returns:
        The model, ready for `use_gates`; at unit gates until then.

    Raises:
        ValueError: if the adapter was trained for another number of loops than the model runs, or cannot be gated.
    """
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = not is_trainable
    num_loops = find_looped_model(model).config.num_loops
    weights = load_peft_weights(str(folder), device="cpu")
    peft_model = PeftModel(model, config)
    kinds = {
        PerLoopLora: next((len(weight) for weight in weights.values() if weight.dim() == 3), None),
        LearnedGatesLora: next((len(weight) for key, weight in weights.items() if "lora_loop_gates" in key), None),
    }
    for kind, trained_for in kinds.items():
        if trained_for is None:
            continue
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
    return peft_model.train(is_trainable)
