"""What a run prints: one bar for each phase and one line for each logging interval; at its end small tables of results."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import ProgressCallback

from loopdropout_trainer.evaluation.results import same_last_number
from loopdropout_trainer.settings.recipe import method_title
from loopdropout_trainer.training.scores import reduction


Results = dict[str, Any]  # of a run, or of a benchmark in it, as in results.json


def title_of(results: Results) -> str:
    """Return what people call the method."""
    return method_title({"rule": results["train_info"]["rule"]})


def print_results(runs: Sequence[Results], console: Console | None = None) -> None:
    """Print what was trained, what was measured of it, and where things were saved.

    Tables have at most 80 columns for two methods, two benchmarks and eight depths.
    """
    console = console or Console()
    for title, columns, rows in _tables(runs):
        console.print(title, style="bold", highlight=False)  # a table's own title is broken at the table's width
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if len(runs) == 2 and runs[0]["benchmarks"]:
        console.print(compared(*runs), highlight=False)
    for run in runs:
        for what, where in run["saved"].items():
            console.print(f"{title_of(run)}: {what} in {where}", highlight=False, soft_wrap=True)


def compared(one: Results, other: Results) -> str:
    """Return a sentence on which of two methods is more accurate with how many loops, and by how much."""
    scores = [{run["meta_info"]["num_loops"]: next(iter(run["benchmarks"].values()))["score"]} for run in (one, other)]
    for of, run in zip(scores, (one, other), strict=True):
        of |= {int(depth): result["score"] for depth, result in run["by_depth"].items()}
    ahead: dict[str, list[str]] = {}
    for depth in sorted(scores[0].keys() & scores[1].keys()):
        gain = round(scores[0][depth] - scores[1][depth], 1)
        word = "more accurate" if gain > 0 else "less accurate" if gain < 0 else "as accurate"
        ahead.setdefault(word, []).append(f"K = {depth}" + (f" ({gain:+.1f})" if gain else ""))
    parts = [
        f"{word} {'as' if word[0] == 'a' else 'than'} {title_of(other)} at {', '.join(ahead[word])}" for word in ahead
    ]
    return f"{title_of(one)} is {'; '.join(parts)} (points, one seed)."


def _tables(runs: Sequence[Results]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, columns and rows of each table."""
    first, depth = runs[0], f"K = {runs[0]['meta_info']['num_loops']}"
    rows = []
    for run in runs:
        of = run["train_info"]
        counts = [f"{of[name]:,}" for name in ("trainable_parameters", "examples", "steps")]
        losses = [f"{number:.4f}" for number in of.get("rewards") or [of["train_loss"] or float("nan")]]
        p = "-" if of["p"] is None else str(of["p"])
        rows.append([title_of(run), p, *counts, *losses, f"{of['train_seconds']:.0f}"])
    losses = ["reward, first", "last"] if "rewards" in first["train_info"] else ["loss"]  # tenths of the log
    yield f"Training at {depth}", ["p", "trainable", "examples", "steps", *losses, "seconds"], rows
    if first["benchmarks"]:
        measured = [("before training", first["base_benchmarks"])]
        measured += [(title_of(run), run["benchmarks"]) for run in runs]
        cells = {name: [cell for each in of.items() for cell in _cells(*each)] for name, of in measured if of}
        columns = [column for column, _ in cells[title_of(first)]]
        rows = [[name, *(text for _, text in row)] for name, row in cells.items()]
        yield f"Accuracy at the training depth {depth}, in %", columns, rows
    scores = lambda run, results: [title_of(run), *(f"{each['score']:.1f}" for each in results)]
    benchmark = next(iter(first["benchmarks"]), "")
    if all(run["by_depth"] for run in runs):
        rows = [scores(run, run["by_depth"].values()) for run in runs]
        yield f"Accuracy on {benchmark} with K loops at inference, in %", [f"K={k}" for k in first["by_depth"]], rows
    loops = [f"loop {loop}" for loop in range(1, first["meta_info"]["num_loops"] + 1)]
    if all(run["single_loop_benchmarks"] for run in runs):
        rows = [scores(run, run["single_loop_benchmarks"]) for run in runs]
        yield f"Accuracy on {benchmark} with the adapter in one loop only, in %", loops, rows
    if all("single_loop" in run for run in runs):
        rows = []
        for run in runs:
            of = run["single_loop"]
            rho = [*of["reductions_percent"], reduction(of["frozen"], of["all_on"])]  # Section 5
            rows.append([title_of(run), *(f"{each:.1f}" for each in rho), f"{of['frozen']:.4f}"])
        title = "Loss reduction with the adapter in one loop only, rho_t in %"
        yield title, [*loops, "all loops", "frozen loss"], rows


def _cells(name: str, result: Results) -> list[tuple[str, str]]:
    """Return the accuracy, after its column; of `#### N` answers also that of the last number, wherever it stands."""
    count = "" if result["correct"] is None else f"{result['correct']}/{result['total']}  "  # None: partial credit
    cells = [(name, f"{count}{result['score']:.1f}")]
    if all("####" in prediction["reference"] for prediction in result["predictions"]):
        cells.append(("last number", f"{100 * correct_by_last_number(result) / result['total']:.1f}"))
    return cells


def correct_by_last_number(result: Results) -> int:
    """Count the completions whose last number is the reference's, whatever stands before it."""
    return sum(same_last_number(each["completion"], each["reference"]) for each in result["predictions"])


# While it runs.

_OF_REWARDS = [
    "reward",
    "rewards/margins",
    "rewards/accuracies",
    "completions/mean_length",
    "kl",
    "entropy",
    "gate_mean",
]
"""What a line says of the log of DPO and GRPO beside the loss."""


class _LogAboveBars(logging.StreamHandler):
    """Writes log records above the bars; a message that every evaluation of a run repeats is written once."""

    _said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if line not in self._said or record.levelno > logging.WARNING:
            tqdm.write(line, file=sys.stderr)
        self._said.add(line)


def show_log() -> None:
    """Write this package's log to standard error: from INFO on in the first process, from WARNING on in the others."""
    log = logging.getLogger("loopdropout_trainer")
    if not log.handlers:
        log.addHandler(_LogAboveBars())
        log.handlers[0].setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


class TrainingProgress(ProgressCallback):
    """transformers' bar, with a title, that writes the log as words; in a file there are the words alone."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def on_train_begin(self, args, state, control, **kwargs):
        self.current_step = 0
        if state.is_world_process_zero:
            # `disable=None`: no bar where standard error is no terminal.
            self.training_bar = tqdm(total=state.max_steps, desc=self.title, dynamic_ncols=True, disable=None)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if sys.stderr.isatty():
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = log_line(state.global_step, state.max_steps, logs or {})
        if line and state.is_world_process_zero and self.training_bar is not None:
            tqdm.write(line, file=sys.stdout)


def log_line(step: int, max_steps: int, logs: dict[str, float]) -> str | None:
    """Return the line of one logging interval or evaluation; None for the summary of the whole run, which has a table."""
    before = "" if "loss" in logs else "eval_"
    if f"{before}loss" not in logs:
        return None
    said = [f"{'held-out ' if before else ''}loss {float(logs[f'{before}loss']):.4f}"]
    if any(name.startswith(f"{before}reward") for name in logs):
        found = {name: logs.get(before + name) for name in _OF_REWARDS}
        said += [f"{name.split('/')[-1]} {float(value):.3g}" for name, value in found.items() if value is not None]
    if logs.get("learning_rate") is not None:
        said.append(f"learning rate {float(logs['learning_rate']):.3g}")
    return f"step {step} of {max_steps}: {', '.join(said)}"
