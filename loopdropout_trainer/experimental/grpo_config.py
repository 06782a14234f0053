"""TRL's `GRPOConfig` with the gate rule and its fields, and which loops get credit."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from transformers import GenerationConfig, TrainingArguments
from trl import GRPOConfig

from loopdropout_trainer.checks import check_choice
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.settings.arguments import setting
from loopdropout_trainer.training.config import LoopDropoutArguments, LoopLossArguments, check_choices
from loopdropout_trainer.training.depth import LOOP_LOSSES


# What TRL finds out in the first step, or not at all.
_CHOICES = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "gates_per": ("prompt", "completion"),
    "old_gates": ("same", "unit"),
    "reference_gates": ("unit", "same"),
    "completion_decoding": ("eager", "compiled", "generate"),
}


@dataclass
class LoopDropoutGRPOConfig(LoopLossArguments, LoopDropoutArguments, GRPOConfig):
    """Training arguments of `LoopDropoutGRPOTrainer`: what `GRPOConfig` has, how gates are drawn, which loops get credit.

    docs/reinforcement.md says what each choice does to the importance ratio.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "rule_args", "loop_loss_args"]

    gates_per: str = setting(
        "prompt",
        "Who shares gates: all completions of a `prompt`, so that they are compared under one thinned model, or none, "
        "each `completion` having its own.",
        choices=_CHOICES["gates_per"],
    )
    old_gates: str = setting(
        "same",
        "Gates of the old log-probabilities: the `same` as the current policy's (the importance ratio begins at 1), or "
        "`unit`, with which the completions were sampled (the ratio corrects for the gates).",
        choices=_CHOICES["old_gates"],
    )
    reference_gates: str = setting(
        "unit",
        "Gates of the reference's log-probabilities (with `beta`) if it is the copy of a pretrained adapter: `unit`, or "
        "the `same` as the current policy's. A new adapter's reference is the base model, which has none.",
        choices=_CHOICES["reference_gates"],
    )
    completion_decoding: str = setting(
        "eager",
        "How completions are decoded without vLLM: `eager` (continuous batching), `compiled` (the same with compiled "
        "steps), or `generate` (transformers' own, as TRL does).",
        choices=_CHOICES["completion_decoding"],
    )
    completion_slots: int | None = setting(
        None,
        "Completions that a process decodes at a time. Default: all that it generates at once. No completion depends on "
        "it.",
    )

    def __post_init__(self):
        check_choices(self, _CHOICES)
        for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
            if getattr(self, name):
                raise UserError(
                    f"`{name}` has no cache for a model that runs its layers several times: leave it out. Completions are "
                    "batched continuously by default (`completion_decoding`)."
                )
        if self.make_loop_loss().name == "random":
            raise UserError(
                "`loop_loss: random` runs fewer loops than the completions were sampled with: choose another of "
                f"{', '.join(LOOP_LOSSES)}."
            )
        super().__post_init__()
        if not self.use_vllm:  # which has names of its own
            for name in self.generation_kwargs or ():
                check_choice("generation_kwargs", name, sorted(vars(GenerationConfig())))
        if self.loop_loss != "final" and self.use_vllm and self.vllm_importance_sampling_correction:
            raise UserError(
                "`vllm_importance_sampling_correction` compares the final loop's probabilities with vLLM's: set it to "
                "false, or `loop_loss` to 'final'."
            )

    @property
    def generates_every(self) -> int:
        """Micro-batches between two generations: those for which one set of completions is used."""
        return self.steps_per_generation * self.num_iterations

    def micro_batches(self, num_rows: int) -> int:
        prompts = self.generation_batch_size // self.num_generations
        if num_rows < prompts:
            why = "`generation_batch_size` by `num_generations`"
            raise UserError(f"A generation takes {prompts:,} prompts ({why}), and there are {num_rows:,} of them.")
        return num_rows // prompts * self.generates_every  # whole generations, each trained on so often

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
