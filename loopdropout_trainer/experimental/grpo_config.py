"""TRL's `GRPOConfig` with the gate rule and its fields, and which loops get credit."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

from transformers import TrainingArguments
from trl import GRPOConfig

from loopdropout_trainer.settings.ranges import check_integer, check_number
from loopdropout_trainer.training.config import LoopDropoutArguments, LoopLossArguments


# What TRL finds out in the first step, or not at all.
_CHOICES = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}
_INTEGERS = {
    "num_generations": 2,
    "num_generations_eval": 1,
    "num_iterations": 1,
    "steps_per_generation": 1,
    "generation_batch_size": 1,
    "max_completion_length": 1,
    "completion_slots": 1,
    "top_k": 0,
}
_NUMBERS = {
    "temperature": {"least": 0, "above": True},
    "top_p": {"least": 0, "above": True, "most": 1},
    "min_p": {"least": 0, "most": 1},
    "repetition_penalty": {"least": 0, "above": True},
    "beta": {"least": 0},
    "epsilon": {"least": 0},
    "epsilon_high": {"least": 0},
    "delta": {"least": 0},
}


@dataclass
class LoopDropoutGRPOConfig(LoopLossArguments, LoopDropoutArguments, GRPOConfig):
    """Training arguments of `LoopDropoutGRPOTrainer`: what `GRPOConfig` has, how gates are drawn, which loops get credit.

    docs/reinforcement.md says what each choice does to the importance ratio.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "rule_args", "loop_loss_args"]

    gates_per: str = field(
        default="prompt",
        metadata={
            "help": "Who shares gates: all completions of a `prompt`, so that they are compared under one thinned model, or "
            "none, each `completion` having its own.",
            "choices": ["prompt", "completion"],
        },
    )
    old_gates: str = field(
        default="same",
        metadata={
            "help": "Gates of the old log-probabilities: the `same` as the current policy's (the importance ratio begins at "
            "1), or `unit`, with which the completions were sampled (the ratio corrects for the gates).",
            "choices": ["same", "unit"],
        },
    )
    reference_gates: str = field(
        default="unit",
        metadata={
            "help": "Gates of the reference's log-probabilities (with `beta`) if it is the copy of a pretrained adapter: "
            "`unit`, or the `same` as the current policy's. A new adapter's reference is the base model, which has none.",
            "choices": ["unit", "same"],
        },
    )
    completion_decoding: str = field(
        default="eager",
        metadata={
            "help": "How completions are decoded without vLLM: `eager` (continuous batching), `compiled` (the same with "
            "compiled steps), or `generate` (transformers' own, as TRL does).",
            "choices": ["eager", "compiled", "generate"],
        },
    )
    completion_slots: int | None = field(
        default=None,
        metadata={
            "help": "Completions that a process decodes at a time. Default: all that it generates at once. No completion "
            "depends on it."
        },
    )

    def __post_init__(self):
        self._check_fields()
        super().__post_init__()
        if self.loop_loss != "final" and self.use_vllm and self.vllm_importance_sampling_correction:
            raise ValueError(
                "`vllm_importance_sampling_correction` compares the final loop's probabilities with vLLM's: set it to "
                "false, or `loop_loss` to 'final'."
            )

    def _check_fields(self) -> None:
        for name in ("gates_per", "old_gates", "reference_gates", "completion_decoding"):
            valid = type(self).__dataclass_fields__[name].metadata["choices"]
            if getattr(self, name) not in valid:
                raise ValueError(f"`{name}` must be {' or '.join(valid)}; got {getattr(self, name)!r}.")
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"`{name}` must be among {', '.join(map(str, valid))}; got {getattr(self, name)!r}.")
        for name, least in _INTEGERS.items():
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least)
        for name, limits in _NUMBERS.items():
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), **limits)
        for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
            if getattr(self, name):
                raise ValueError(
                    f"`{name}` has no cache for a model that runs its layers several times: leave it out. Completions are "
                    "batched continuously by default (`completion_decoding`)."
                )
        for weight in self.reward_weights or ():
            check_number("reward_weights", weight, -math.inf)
        if self.make_loop_loss().name == "random":
            raise ValueError(
                "`loop_loss: random` runs fewer loops than the completions were sampled with: choose 'final', 'uniform', "
                "'progressive', 'weighted' or 'exit'."
            )

    @property
    def generates_every(self) -> int:
        """Micro-batches between two generations: those for which one set of completions is used."""
        return self.steps_per_generation * self.num_iterations

    @property
    def scores_old(self) -> bool:
        """Whether TRL asks for the old log-probabilities; else they are the current ones at the same weights."""
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        return self.gradient_accumulation_steps % self.generates_every != 0 or corrects

    def depth_limits(self, num_loops: int) -> tuple[int, int]:
        self.make_loop_loss().check((num_loops, num_loops))
        return num_loops, num_loops

    @classmethod
    def from_arguments(cls, args: TrainingArguments | None, output_dir: str) -> LoopDropoutGRPOConfig:
        if isinstance(args, GRPOConfig) and not isinstance(args, cls):
            args = copy.copy(args)
            args.generation_batch_size = None  # TRL worked out one of the two, and refuses both
        return super().from_arguments(args, output_dir)
