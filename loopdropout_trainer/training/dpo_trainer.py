"""`LoopDropoutDPOTrainer`: TRL's `DPOTrainer` with a gate on every application of the adapter."""

from __future__ import annotations

import functools
from typing import Any

import torch
from trl import DPOTrainer

from loopdropout_trainer.adapters import add_unit_gates
from loopdropout_trainer.gates.streams import ExampleId
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.training.config import LoopDropoutDPOConfig
from loopdropout_trainer.training.fault_tolerance import FaultToleranceMixin
from loopdropout_trainer.training.gate_sampling import GateSamplingMixin
from loopdropout_trainer.training.sft_trainer import collate_completely


class LoopDropoutDPOTrainer(FaultToleranceMixin, GateSamplingMixin, DPOTrainer):
    """Preference tuning of a looped language model with a gate on every application of its LoRA adapter.

    Takes what `DPOTrainer` takes. The chosen and the rejected answer of a pair share their gates, so that their rewards are
    those of one and the same thinned model. The reference is never gated: the base model (adapter off), the frozen copy of
    a pretrained adapter at unit gates, or a reference model of its own.

    Args:
        model: looped model, PEFT model over one, or the name or path of one.
        args: `LoopDropoutDPOConfig`; a plain `DPOConfig` gets the paper's default rule.
        peft_config: LoRA adapter; default: the paper's (`default_peft_config`).
        others: all other arguments of `DPOTrainer`, under its names or in its order.

    Raises:
        NotLoopedError: for a model without loops.
        ValueError: for an adapter or a rule that cannot be trained so; before weights are loaded if `model` is a name.
    """

    _tag_names = ["trl", "dpo", "loop-dropout"]
    args_class = LoopDropoutDPOConfig

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self.data_collator = functools.partial(collate_completely, self.data_collator, find_looped_model(self.model))
        if "ref" in self.model.peft_config:
            add_unit_gates(self.model, "ref")

    @staticmethod
    def dataset_formats(args: LoopDropoutDPOConfig) -> list[set[str]]:
        return [{"chosen", "rejected"}, {"prompt_ids", "chosen_ids", "rejected_ids"}]

    def example_ids_of(self, inputs: dict[str, torch.Tensor]) -> list[ExampleId]:
        """Return the ids of N chosen and then N rejected answers: those of their pairs."""
        pairs = len(inputs["input_ids"]) // 2
        return [(pair, 0) for pair in range(pairs)] * 2
