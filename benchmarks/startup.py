"""CPU seconds of commands that print or check, relative to `from trl import SFTTrainer`, which imports what a training needs.

    python benchmarks/startup.py    # some minutes, writes benchmarks/results/startup.md

Each round runs all commands in turn. CPU seconds of a process depend less on other processes than its time does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path


COMMANDS = {
    "`from trl import SFTTrainer`": "-c 'from trl import SFTTrainer'",
    "`loopdropout sft --help`": "-m loopdropout_trainer sft --help",
    "`loopdropout sft quickstart.yaml --dry_run true`": "-m loopdropout_trainer sft quickstart.yaml --dry_run true",
    "a wrong field in a recipe": "-m loopdropout_trainer sft quickstart.yaml --learning_rat 1",
    "a wrong value in a recipe": "-m loopdropout_trainer sft quickstart.yaml --rule none",
}


def cpu_seconds(arguments: str) -> float:
    """Run Python with arguments, and return the CPU seconds of the process and its children."""
    command = f"exec {sys.executable} {arguments}"
    process = subprocess.Popen(command, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    usage = os.wait4(process.pid, 0)[2]
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    options = parser.parse_args()
    for arguments in COMMANDS.values():  # so that files are compiled and in the cache
        cpu_seconds(arguments)
    rounds = [[cpu_seconds(arguments) for arguments in COMMANDS.values()] for _ in range(options.rounds)]
    lines = [
        "# Start-up",
        "",
        f"`python benchmarks/startup.py --rounds {options.rounds}`: medians of {options.rounds} rounds, also of the "
        "ratios, which therefore differ from the ratios of the seconds. The last minute "
        f"had {os.getloadavg()[0]:.0f} busy processes on {os.cpu_count()} CPU cores.",
        "",
        "| | CPU seconds | relative to TRL |",
        "|---|---:|---:|",
    ]
    for index, name in enumerate(COMMANDS):
        seconds = statistics.median(row[index] for row in rounds)
        ratio = statistics.median(row[index] / row[0] for row in rounds)
        lines.append(f"| {name} | {seconds:.1f} | {ratio:.2f} |")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "startup.md").write_text("\n".join([*lines, ""]))
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
