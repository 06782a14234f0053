"""Time of greedy decoding in slots that answers enter and leave, relative to transformers' `generate` in batches.

    python benchmarks/decoding.py    # five minutes on a CPU core, writes benchmarks/results/decoding.md

A random Ouro answers random prompts. Each answer ends at a length that is drawn before, once equal for all answers, and once
log-normal, as those of real problems. Both ways compute the same tokens, and take turns. A ratio compares two runs of a round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import workload
from torch import nn

from loopdropout_trainer.generation import _decode_in_slots, generate_in_batches


Tokens = list[list[int]]


def _end_in_batches(lengths: Sequence[int]) -> Callable[[Tokens], list[bool]]:
    """Return a function that ends the answers of each batch at the next lengths."""
    waiting, batch = iter(lengths), []

    def find_ended(answers: Tokens) -> list[bool]:
        if len(answers[0]) == 1:
            batch[:] = [next(waiting) for _ in answers]
        return [len(answer) >= length for answer, length in zip(answers, batch, strict=True)]

    return find_ended


def _end_in_slots(lengths: Sequence[int]) -> Callable[[Tokens], list[bool]]:
    """Return a function that ends answers at the lengths, in the order in which they begin. Each answer stays one list."""
    waiting, own = iter(lengths), {}

    def find_ended(answers: Tokens) -> list[bool]:
        own.update({id(answer): next(waiting) for answer in answers if id(answer) not in own})
        return [len(answer) >= own[id(answer)] for answer in answers]

    return find_ended


ROWS = {
    "`generate` in batches sorted by length": (generate_in_batches, _end_in_batches),
    "decoding in slots": (_decode_in_slots, _end_in_slots),
}


def draw_prompts(vocab_size: int, num_prompts: int, median: float) -> Tokens:
    """Return prompts of random tokens, the longest first, in which order they are answered."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(median), 0.3, num_prompts)).clip(2)
    return [random.integers(2, vocab_size, round(length)).tolist() for length in sorted(lengths, reverse=True)]


def draw_lengths(num_prompts: int, median: float, spread: float) -> list[int]:
    """Return the lengths of the answers, log-normal with a deviation of `spread` in the logarithm."""
    lengths = np.exp(np.random.default_rng(1).normal(np.log(median), spread, num_prompts))
    return lengths.clip(1, 4 * median).round().astype(int).tolist()


@torch.no_grad()
def decode(name: str, model: nn.Module, prompts: Tokens, lengths: Sequence[int], batch: int) -> tuple[float, Tokens]:
    """Return the seconds of a row, and its answers."""
    run, ends = ROWS[name]
    workload.synchronize()
    began = workload.clock()
    answers: dict[int, list[int]] = {}
    for completions in run(model, prompts, max(lengths), batch, ends(lengths)):
        answers.update(completions)
    workload.synchronize()
    return workload.clock() - began, [answers[index][:length] for index, length in enumerate(lengths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    preset = workload.PRESETS["cpu"]
    model = workload.random_ouro(preset).eval()
    number, batch, median = 48, 16, 48
    prompts = draw_prompts(preset.vocab_size, number, median)
    lines = [
        "# Decoding",
        "",
        f"`python benchmarks/decoding.py --rounds {options.rounds}` on one core of a CPU ({workload.cpu_name()}); "
        f"{workload.versions()}.",
        "",
        f"Random Ouro of {preset.num_layers} layers, hidden size {preset.hidden_size}, {preset.num_loops} loops, "
        f"{preset.dtype}; {number} prompts of about {median} tokens, {batch} answers at a time. "
        f"Medians of {options.rounds} rounds, also of the ratios, which therefore differ from the ratios of the seconds.",
        "",
        "| lengths of the answers | `generate`, s | in slots, s | relative | equal answers |",
        "|---|---:|---:|---:|---:|",
    ]
    for spread in (0.0, 0.5):
        lengths = draw_lengths(number, median, spread)
        rounds = [[decode(name, model, prompts, lengths, batch) for name in ROWS] for _ in range(options.rounds)]
        ratio = statistics.median(slots[0] / plain[0] for plain, slots in rounds)
        seconds = (statistics.median(row[index][0] for row in rounds) for index in range(2))
        equal = sum(one == other for one, other in zip(rounds[0][0][1], rounds[0][1][1], strict=True))
        cells = (
            f"{min(lengths)} to {max(lengths)}",
            *map("{:.0f}".format, seconds),
            f"{ratio:.2f}",
            f"{equal} of {number}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    (options.out / "decoding.md").write_text("\n".join([*lines, ""]))
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
