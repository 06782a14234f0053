"""Choose each method's learning rate on the development split, and train the other seeds with it.

    python recipes/sweep.py recipes/sweeps/metamath_gsm.yaml
    python recipes/sweep.py recipes/gsm8k.yaml --learning_rates 1e-4 3e-4 --methods lora loop_dropout --seeds 101 102
    python recipes/sweep.py recipes/sweeps/metamath_gsm.yaml --print_commands > commands.txt

The first seed is trained at every rate; held-out rows are answered by greedy generation; the rate with most correct
answers (the smaller of equals) trains the other seeds, and all of them answer the recipe's benchmarks. What follows `--`
goes to sft.py. The same command continues a sweep that was interrupted, or prints what a scheduler can start next.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

from rich.console import Console

from loopdropout_trainer.runs.sweep import Sweep, SweepArguments, sweep_command_line
from loopdropout_trainer.settings.command import run_command
from loopdropout_trainer.settings.recipe import parse_recipe


def main(argv: list[str] | None = None) -> None:
    argv, passed_on = sweep_command_line(sys.argv[1:] if argv is None else argv)
    (arguments,), _ = parse_recipe([SweepArguments], argv, description=__doc__)
    sweep = Sweep(arguments, Path(__file__).parent, passed_on)
    if arguments.print_commands:
        sweep.claim()
        for job in sweep.ready_jobs():
            print(shlex.join(job.command))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("sweep.py: asked to stop; the same command continues."))
    sweep.run()
    console = Console()
    for table in sweep.tables():
        console.print(table)
    print(f"Everything is in {sweep.output_dir / 'summary.json'} and summary.md")


if __name__ == "__main__":
    run_command(main, interrupted="interrupted; the same command continues.")
