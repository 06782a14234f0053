"""`LoopDropoutSFTTrainer`: TRL's `SFTTrainer` with a gate on every application of the adapter."""

from __future__ import annotations

import functools
from typing import Any

import torch
from trl import SFTTrainer

from loopdropout_trainer.training.config import LoopDropoutConfig
from loopdropout_trainer.training.distributed import EveryExampleOnceMixin
from loopdropout_trainer.training.fault_tolerance import FaultToleranceMixin
from loopdropout_trainer.training.gate_sampling import GateSamplingMixin


class LoopDropoutSFTTrainer(FaultToleranceMixin, EveryExampleOnceMixin, GateSamplingMixin, SFTTrainer):
    """Supervised fine-tuning of a looped language model with a gate on every application of its LoRA adapter.

    Takes what `SFTTrainer` takes. In each training micro-batch it draws gates [K, B] by the rule of its config, applies
    them to the adapter, and trains on the final loop's loss (Algorithm 1); evaluation, generation and saved models use
    unit gates: ordinary LoRA.

    Args:
        model: looped model, PEFT model over one, or the name or path of one.
        args: `LoopDropoutConfig`; a plain `SFTConfig` gets the paper's default rule.
        peft_config: LoRA adapter; default: the paper's (`default_peft_config`).
        others: all other arguments of `SFTTrainer`, under its names or in its order.

    Raises:
        NotLoopedError: for a model without loops.
        ValueError: for an adapter or a rule that cannot be trained so; before weights are loaded if `model` is a name.
    """

    _tag_names = ["trl", "sft", "loop-dropout"]
    args_class = LoopDropoutConfig

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        if self.padding_free:
            self.data_collator = functools.partial(_collate_with_places, self.data_collator)

    @staticmethod
    def dataset_formats(args: LoopDropoutConfig) -> list[set[str]]:
        return [{args.dataset_text_field}, {"prompt", "completion"}, {"messages"}, {"conversations"}, {"input_ids"}]


def _collate_with_places(collate, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate, and note which row (and which of the examples packed in it) each part of the flattened row comes from."""
    batch = collate(examples)
    batch["gate_places"] = torch.tensor(
        [(row, part) for row, example in enumerate(examples) for part in range(len(example.get("seq_lengths") or [0]))]
    )
    return batch
