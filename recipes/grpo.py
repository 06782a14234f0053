"""Train a looped language model by reward (GRPO), with Loop Dropout or with any other rule.

    accelerate launch recipes/grpo.py recipes/grpo/arithmetic.yaml
    python recipes/grpo.py recipes/grpo/gsm8k.yaml --learning_rate 1e-5 --seed 102

Completions of each prompt are sampled from the model as it will be used, at unit gates, and rewarded if their answer equals
the reference. A recipe sets the fields below; `--field value` overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from loopdropout_trainer import LoopDropoutGRPOConfig
from loopdropout_trainer.checks import check_list, shown
from loopdropout_trainer.errors import UserError, run_command
from loopdropout_trainer.experimental.rewards import REWARDS, math_verify
from loopdropout_trainer.runs.run import Run, run_all
from loopdropout_trainer.settings.arguments import setting
from loopdropout_trainer.settings.recipe import RecipeError


@dataclass
class RewardArguments:
    """What completions are rewarded for."""

    rewards: list[str] = setting(
        help="`gsm8k_strict`, `gsm8k_format`, `last_number` or `math_verify`: each 1 or 0, added by `reward_weights`.",
        default_factory=lambda: ["gsm8k_strict"],
    )

    def __post_init__(self):
        check_list("rewards", self.rewards)
        if not self.rewards:
            raise UserError("`rewards` must name one or more rewards; got [].")


class GRPORun(Run):
    """A run of GRPO: the model completes the prompts of the prepared rows, whose completions are the references."""

    config_class = LoopDropoutGRPOConfig
    more_arguments = (RewardArguments,)

    @property
    def trainer_class(self) -> type:
        from loopdropout_trainer import LoopDropoutGRPOTrainer

        return LoopDropoutGRPOTrainer

    def check(self) -> None:
        (self.rewards,) = self.more
        for name in self.rewards.rewards:
            if name not in REWARDS:
                raise RecipeError(f"`rewards` must be among {', '.join(REWARDS)}; got {name!r}.")
        if self.configs[0].remove_unused_columns:
            raise RecipeError("`remove_unused_columns` would take the references from the rewards: leave it at false.")
        if self.script.single_loop_batches:
            raise RecipeError(
                "`single_loop_batches` measures losses of examples, which GRPO has none of: leave it out."
            )

    def examples(self, rows: Dataset | None) -> Dataset | None:
        if rows is None:
            return None
        if "completion" not in rows.column_names:
            raise RecipeError(
                "GRPO needs rows with `prompt` and `completion`, the reference that answers are compared with."
            )
        examples = Dataset.from_dict({"prompt": rows["prompt"], "answer": [_reference(row) for row in rows]})
        rewards = [REWARDS[name] for name in self.rewards.rewards]
        for row in examples:
            if not row["prompt"]:
                raise RecipeError("GRPO completes prompts, and a row has an empty one.")
            right = [row["answer"]]  # math-verify reads them in seconds, not milliseconds
            if math_verify not in rewards and not any(reward(right, right)[0] for reward in rewards):
                raise RecipeError(
                    f"No completion could be rewarded for equalling the reference {shown(row['answer'])}."
                )
        return examples

    def longest_row(self, config: LoopDropoutGRPOConfig) -> int | None:
        return self.data.report.longest + config.max_completion_length  # more than that no prompt has

    def trainer_arguments(self) -> dict[str, Any]:
        return {"reward_funcs": [REWARDS[name] for name in self.rewards.rewards]}


def _reference(row: dict[str, Any]) -> str:
    completion = row["completion"]
    return completion if isinstance(completion, str) else completion[-1]["content"]


RUN = GRPORun  # what recipes/sweep.py checks recipes with


def main(argv: list[str] | None = None) -> None:
    run_all(GRPORun(argv, __doc__))


if __name__ == "__main__":
    run_command(main)
