"""Compare methods: choose each one's learning rate on held-out rows, then train and measure all seeds with it.

    python recipes/sweep.py recipes/sweeps/metamath_gsm.yaml
    python recipes/sweep.py --recipe recipes/gsm8k.yaml --learning_rates 1e-4 3e-4 --methods lora loop_dropout \\
        --seeds 101 102 --measure '{"benchmarks": ["gsm8k"]}'
    python recipes/sweep.py recipes/studies/small.yaml --dry_run true
    python recipes/sweep.py recipes/studies/ouro_1.4b.yaml --workers 8
    python recipes/sweep.py recipes/sweeps/metamath_gsm.yaml --print_commands true > commands.txt

A run is a folder with its log.txt, measurements.jsonl and run.json. The same command continues a sweep that was stopped, and
shares the runs of a sweep that other processes work on.
"""

from __future__ import annotations

from pathlib import Path

from loopdropout_trainer.errors import run_command
from loopdropout_trainer.runs.sweep import Sweep, SweepArguments
from loopdropout_trainer.settings.recipe import parse_recipe


def main(argv: list[str] | None = None) -> None:
    (arguments,), _ = parse_recipe([SweepArguments], argv, __doc__)
    sweep = Sweep(arguments)
    if arguments.dry_run:
        print(sweep.plan())
        return
    from loopdropout_trainer.runs.queue import Queue
    from loopdropout_trainer.runs.workers import sigterm_as_interrupt

    queue = Queue(sweep, Path(__file__).parent)
    if arguments.print_commands:
        print("\n".join(queue.commands()))
        return
    with sigterm_as_interrupt():
        queue.run()
    print(f"{queue.table()}\n\nEverything is in {sweep.output_dir / 'summary.json'} and summary.txt")


if __name__ == "__main__":
    run_command(main, interrupted="stopped; the same command continues.")
