"""Fine-tune a looped language model with Loop Dropout, or with any other rule.

    accelerate launch recipes/sft.py recipes/quickstart.yaml
    python recipes/sft.py recipes/gsm8k.yaml --learning_rate 2e-4 --seed 102

A recipe sets the fields below; `--field value` overrides it. At the end the run's results are printed, and saved in
`output_dir` with the settings that repeat it.
"""

from __future__ import annotations

from loopdropout_trainer.errors import run_command
from loopdropout_trainer.runs.run import Run, run_all


RUN = Run  # what recipes/sweep.py checks recipes with


def main(argv: list[str] | None = None) -> None:
    run_all(Run(argv, __doc__))


if __name__ == "__main__":
    run_command(main)
