"""Reinforcement learning with Loop Dropout: TRL's `GRPOTrainer` with gates on the policy that is trained."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from trl import GRPOTrainer

from loopdropout_trainer.errors import UserError, count_rows, join_words
from loopdropout_trainer.rewards import REWARDS, find_rewards
from loopdropout_trainer.training.config import LoopDropoutGRPOConfig
from loopdropout_trainer.training.examples import name_datasets
from loopdropout_trainer.training.reference import ReferenceMixin, check_reference, find_reference_fix
from loopdropout_trainer.training.reward_checks import check_answers, with_checked_result
from loopdropout_trainer.training.setup import with_gates
from loopdropout_trainer.training.sft import GateSamplingMixin


class LoopDropoutGRPOTrainer(ReferenceMixin, GateSamplingMixin, GRPOTrainer):
    """Trainer for reinforcement learning of a looped language model with Loop Dropout.

    Completions are sampled at unit gates, and each completion is trained on under its own gates. The reference keeps unit
    gates. It takes the arguments of [`~trl.GRPOTrainer`] in the same order, and `peft_config` defaults to the paper's
    adapter. A [`~trl.GRPOConfig`] as `args` keeps its values and gets the fields of the method, with p = 0.5. `reward_funcs`
    may also have the names of this package's rewards, such as "last_number". Each batch of
    completions trains once (`num_iterations=1`), because TRL computes old log-probabilities at unit gates and the importance
    ratio would clip many tokens.
    """

    _samples_start_states = False  # as for the completions and the reference

    _reads_answers: Sequence[bool] = ()  # whether each reward is one of this package, which reads the column `answer`
    _has_references = False
    _has_rewards = False

    config_class = LoopDropoutGRPOConfig
    objective = "GRPO"
    if not TYPE_CHECKING:  # type checkers see the same signature in GRPOTrainer
        __init__ = with_gates(GRPOTrainer.__init__)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompts and completions. TRL's other trainers count in another place."""
        return self.state.num_input_tokens_seen

    @num_tokens.setter
    def num_tokens(self, num_tokens: int) -> None:
        self.state.num_input_tokens_seen = num_tokens

    def formats(self, args: LoopDropoutGRPOConfig) -> Collection[Sequence[str]]:
        return (("prompt",),)

    def _before_init(self, arguments: dict[str, Any]) -> None:
        rewards = arguments["reward_funcs"]
        rewards = find_rewards(rewards if isinstance(rewards, list) else [rewards])
        arguments["reward_funcs"] = rewards
        self._reads_answers = [reward in REWARDS.values() for reward in rewards]
        super()._before_init(arguments)
        fix = find_reference_fix(arguments["args"])
        if fix is not None:
            check_reference(arguments["model"], fix)

    def _check_rows_of(self, arguments, writer):
        """Also check the references that rewards of this package read."""
        super()._check_rows_of(arguments, writer)
        if not any(self._reads_answers):
            return
        for title, dataset in name_datasets(arguments):
            has_reference = check_answers(title, dataset, is_needed=all(self._reads_answers))
            self._has_references = self._has_references or has_reference

    def _calculate_rewards(self, inputs, prompts, *others):
        """Calculate rewards with checks of what the reward functions return.

        Raises:
            UserError: If a result is not one number or None for each completion, or if no completion of the first batch of a
                training has a reward. Batches of examples without a reference may have none.
        """
        functions = self.reward_funcs
        named = zip(functions, self.reward_func_names, strict=True)
        self.reward_funcs = [with_checked_result(function, name) for function, name in named]
        try:
            rewards = super()._calculate_rewards(inputs, prompts, *others)  # [N, number of functions], NaN for None
        finally:
            self.reward_funcs = functions
        if self.model.training and not (self._has_rewards or self._has_references):
            if rewards.isnan().all():
                names = join_words([f"`{name}`" for name in self.reward_func_names])
                raise UserError(
                    f"`reward_funcs` must give rewards, but {names} returned None for all {len(rewards):,} completions of the "
                    "first batch, so nothing can be learned. Return numbers, or remove examples that have no reward."
                )
            self._has_rewards = True
        return rewards

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        """Compute log-probabilities with the further inputs that the model needs, as in generation."""
        self._restore_head()  # TRL also calls it outside of `compute_loss`
        completion_mask = attention_mask.clone()
        completion_mask[:, :-logits_to_keep] = 0
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "completion_mask": completion_mask}
        kwargs |= {name: x for name, x in self.looped.complete_batch(batch).items() if name not in batch}
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _mean_metrics(self) -> dict[str, float | None]:
        """Return the means of an evaluation without the batches in which a reward function has given no reward (NaN)."""
        recorded = self._metrics["eval"]
        for name, values in recorded.items():
            recorded[name] = [value for value in values if not math.isnan(value)]
        return super()._mean_metrics()

    def example_ids(self, inputs: dict[str, Any]) -> tuple[list[tuple[int, int]], None]:
        """Return the ids of the completions of a micro-batch."""
        return [(row, 0) for row in range(count_rows(inputs, "completion_ids"))], None
