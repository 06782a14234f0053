"""How long commands take to start, in CPU seconds and as multiples of `import torch` and of importing TRL's trainer.

    python benchmarks/startup.py --rounds 5

Each round starts every command once, one after the other, so that what slows the machine down slows all of them. The table in
results/startup.md has the medians.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median


COMMAND = ("-m", "loopdropout_trainer")
TORCH, TRL = "import torch", "from trl import SFTTrainer"
RESULTS = Path(__file__).parent / "results" / "startup.md"


def cpu_seconds(arguments: tuple[str, ...], folder: str) -> float:
    """Start Python with these arguments, and return the user and system time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    programs = {code: ("-c", code) for code in (TORCH, TRL, "import loopdropout_trainer")}
    lines = ["--help", "recipes", "report --help", "sft --help", "evaluate --help", "sweep --help", "sft mistake.yaml"]
    for line in [*lines, "sft quickstart.yaml --dry_run true"]:
        programs[f"loopdropout {line}"] = (*COMMAND, *line.split())
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mistake.yaml").write_text("learning_rat: 1\n", encoding="utf-8")
        for _ in range(rounds):
            for name, arguments in programs.items():
                seconds[name].append(cpu_seconds(arguments, folder))
    medians = {name: median(values) for name, values in seconds.items()}
    table = [f"Medians of {rounds} alternating rounds of `python benchmarks/startup.py`: user and system time.\n"]
    table += ["| program | CPU seconds | of `import torch` | of importing TRL's trainer |", "|---|---:|---:|---:|"]
    for name, value in medians.items():
        table.append(f"| `{name}` | {value:.2f} | {value / medians[TORCH]:.2f} | {value / medians[TRL]:.2f} |")
    RESULTS.write_text("\n".join(["# Starting\n", *table]) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
