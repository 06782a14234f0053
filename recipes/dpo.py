"""Train a looped language model on preferences (DPO), with Loop Dropout or with any other rule.

    accelerate launch recipes/dpo.py recipes/dpo/arithmetic.yaml
    python recipes/dpo.py recipes/dpo/ultrafeedback.yaml --beta 0.05 --seed 102

Each row has a `chosen` and a `rejected` completion, and mostly their `prompt`. A recipe sets the fields below; `--field value`
overrides it.
"""

from __future__ import annotations

from datasets import Dataset

from loopdropout_trainer import LoopDropoutDPOConfig
from loopdropout_trainer.errors import run_command
from loopdropout_trainer.runs.run import Run, run_all
from loopdropout_trainer.settings.recipe import RecipeError


class DPORun(Run):
    """A run of DPO, on rows with a chosen and a rejected answer."""

    config_class = LoopDropoutDPOConfig

    @property
    def trainer_class(self) -> type:
        from loopdropout_trainer import LoopDropoutDPOTrainer

        return LoopDropoutDPOTrainer

    def check(self) -> None:
        if self.script.single_loop_batches:
            raise RecipeError(
                "`single_loop_batches` measures losses of single answers, and DPO has pairs: leave it out."
            )

    def longest_row(self, config: LoopDropoutDPOConfig) -> None:
        return None  # each example is two rows

    def examples(self, rows: Dataset | None) -> Dataset | None:
        if rows is None:
            return None
        if not {"chosen", "rejected"} <= {*rows.column_names}:
            raise RecipeError(
                "DPO needs rows with a `chosen` and a `rejected` answer; `column_mapping` names other columns."
            )
        return rows.select_columns([name for name in ("prompt", "chosen", "rejected") if name in rows.column_names])


RUN = DPORun  # what recipes/sweep.py checks recipes with


def main(argv: list[str] | None = None) -> None:
    run_all(DPORun(argv, __doc__))


if __name__ == "__main__":
    run_command(main)
