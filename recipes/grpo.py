"""Train a looped language model by reward (GRPO), with Loop Dropout or with any other rule.

    accelerate launch recipes/grpo.py recipes/grpo/arithmetic.yaml
    python recipes/grpo.py recipes/grpo/gsm8k.yaml --learning_rate 1e-5 --seed 102

Completions of each prompt are sampled from the model as it will be used, at unit gates, and rewarded if their answer equals
the reference. A recipe sets the fields below; `--field value` overrides it.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from loopdropout_trainer import LoopDropoutGRPOConfig, LoopDropoutGRPOTrainer
from loopdropout_trainer.experimental.rewards import REWARDS
from loopdropout_trainer.runs.run import Run, run_all
from loopdropout_trainer.settings.arguments import RewardArguments
from loopdropout_trainer.settings.command import run_command
from loopdropout_trainer.settings.recipe import RecipeError


class GRPORun(Run):
    """A run of GRPO: the model completes the prompts of the prepared rows, whose completions are the references."""

    config_class = LoopDropoutGRPOConfig
    trainer_class = LoopDropoutGRPOTrainer
    more_arguments = (RewardArguments,)

    def check(self) -> None:
        (self.rewards,) = self.more
        for name in self.rewards.rewards:
            if name not in REWARDS:
                raise RecipeError(f"`rewards` must be among {', '.join(REWARDS)}; got {name!r}.")
        for name in ("single_loop_batches", "live_diagnostics_steps"):
            if getattr(self.script, name):
                raise RecipeError(f"`{name}` measures losses of examples, which GRPO has none of: leave it out.")

    def examples(self, rows: Dataset | None) -> Dataset | None:
        if rows is None:
            return None
        if "completion" not in rows.column_names:
            raise RecipeError(
                "GRPO needs rows with `prompt` and `completion`, the reference that answers are compared with."
            )
        return Dataset.from_dict({"prompt": rows["prompt"], "answer": [_reference(row) for row in rows]})

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
