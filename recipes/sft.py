"""Fine-tune a looped language model with Loop Dropout, or with any other rule.

    accelerate launch recipes/sft.py recipes/quickstart.yaml
    python recipes/sft.py recipes/gsm8k.yaml --learning_rate 2e-4 --seed 302

A recipe sets the fields below; `--field value` overrides it. What was trained, its results and the settings that repeat
the run are printed at the end and saved in `output_dir`.
"""

from __future__ import annotations

from loopdropout_trainer.settings.command import run_command
from loopdropout_trainer.settings.help import answer_help


HELP = (
    ("Model", "settings/arguments.py", "ModelArguments"),
    ("Adapter", "settings/arguments.py", "AdapterArguments"),
    ("Rule and speed", "training/config.py", "LoopDropoutArguments"),
    ("Depth", "training/config.py", "LoopDropoutConfig"),
    ("Loops", "training/config.py", "LoopLossArguments"),
    ("Data", "data/arguments.py", "DataArguments"),
    ("Benchmarks", "settings/arguments.py", "BenchmarkArguments"),
    ("Around the training", "settings/arguments.py", "RunArguments"),
)
if __name__ == "__main__":
    answer_help(__doc__, HELP, trains=True)  # before the imports that take seconds

from loopdropout_trainer.runs.run import Run, carry_out


RUN = Run  # what recipes/sweep.py checks recipes with


def main(argv: list[str] | None = None) -> None:
    carry_out(Run(argv, __doc__))


if __name__ == "__main__":
    run_command(main, "sft.py")
