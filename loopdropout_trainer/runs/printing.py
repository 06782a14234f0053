"""What a run prints: one bar for each phase and one line for each logging interval; at its end small tables of results."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import ProgressCallback

from loopdropout_trainer.evaluation.results import LAST_NUMBER, Metric
from loopdropout_trainer.record.measurement import BASE
from loopdropout_trainer.runs.result import Result


class _Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[str]]  # the method, and a cell for each column


def print_results(results: Sequence[Result], depths: Sequence[int] = (), console: Console | None = None) -> None:
    """Print what was trained, what was measured of it, and where things were saved.

    Tables have at most 80 columns for two methods, two benchmarks and eight depths.

    Args:
        results: one for each rule.
        depths: other depths that the first benchmark was evaluated at.
        console: default: standard output.
    """
    console = console or Console()
    for title, columns, rows in _tables(results, depths):
        console.print(title, style="bold", highlight=False)  # a table's own title is broken at the table's width
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if len(results) == 2 and results[0].scores():
        console.print(compared(*results, depths), highlight=False)
    for result in results:
        for what, where in result.saved.items():
            console.print(f"{result.training.method}: {what} in {where}", highlight=False, soft_wrap=True)


def compared(one: Result, other: Result, depths: Sequence[int] = ()) -> str:
    """Return a sentence on which of two methods is more accurate with how many loops, and by how much."""
    first = one.training
    second = other.training
    benchmark = next(iter(one.scores()))
    ahead = {}
    for depth in sorted({first.depth, *depths}):
        gain = round(one.scores(depth)[benchmark].value - other.scores(depth)[benchmark].value, 1)
        words = f"as accurate as {second.method}"
        if gain:
            words = f"{'more' if gain > 0 else 'less'} accurate than {second.method}"
        ahead.setdefault(words, []).append(f"K = {depth}" + (f" ({gain:+.1f})" if gain else ""))
    parts = [f"{words} at {', '.join(places)}" for words, places in ahead.items()]
    return f"{first.method} is {'; '.join(parts)} (points, one seed)."


def _tables(results: Sequence[Result], depths: Sequence[int]) -> Iterator[_Table]:
    yield _training_table(results)
    first = results[0]
    loops = range(1, first.training.depth + 1)
    if benchmarks := list(first.scores()):
        yield _accuracy_table(results)
        places = {}
        if depths:
            places["K loops at inference"] = {f"K={depth}": {"depth": depth} for depth in depths}
        if first.scores(loop=1):
            places["the adapter in one loop only"] = {f"loop {loop}": {"loop": loop} for loop in loops}
        name = benchmarks[0]
        for where, columns in places.items():
            rows = []
            for result in results:
                rows.append(_row(result, [result.scores(**place)[name].value for place in columns.values()]))
            yield _Table(f"Accuracy on {name} with {where}, in %", list(columns), rows)
    if any(row.family == "single_loop" for row in first.rows):
        rows = []
        for result in results:
            reductions = [result.value("loss_reduction", loop) for loop in (*loops, None)]  # Section 5
            rows.append([*_row(result, reductions), f"{result.value('frozen_loss'):.4f}"])
        columns = [*(f"loop {loop}" for loop in loops), "all loops", "frozen loss"]
        yield _Table("Loss reduction with the adapter in one loop only, rho_t in %", columns, rows)


def _row(result: Result, values: Sequence[float]) -> list[str]:
    return [result.training.method, *(f"{value:.1f}" for value in values)]


def _training_table(results: Sequence[Result]) -> _Table:
    is_rewarded = any(row.metric == "reward_first" for row in results[0].rows)
    losses = {"reward_first": "reward, first", "reward_last": "last"} if is_rewarded else {"train_loss": "loss"}
    rows = []
    for result in results:
        training = result.training
        p = result.identities[training.run]["settings"]["p"]
        counts = (result.value("trainable_parameters"), result.value("examples"), training.steps)
        cells = [f"{count:,}" for count in counts] + [f"{result.value(name):.4f}" for name in losses]
        seconds = f"{result.value('train_seconds'):.0f}"
        rows.append([training.method, "-" if p is None else str(p), *cells, seconds])
    columns = ["p", "trainable", "examples", "steps", *losses.values(), "seconds"]
    return _Table(f"Training at K = {results[0].training.depth}", columns, rows)


def _accuracy_table(results: Sequence[Result]) -> _Table:
    first = results[0]
    rows = [["before training", *_cells(first, BASE).values()]] if first.scores(method=BASE) else []
    rows += [[result.training.method, *_cells(result, result.training.method).values()] for result in results]
    columns = [name for name, _ in _cells(first, first.training.method)]
    return _Table(f"Accuracy at the training depth K = {first.training.depth}, in %", columns, rows)


def _cells(result: Result, method: str) -> dict[tuple[str, str], str]:
    """Return each benchmark's accuracy; of `#### N` answers also that of the last number, wherever it stands."""
    last_numbers = result.scores(method=method, families=[LAST_NUMBER])
    cells = {}
    for name, row in result.scores(method=method).items():
        correct = Metric(row.value, row.verdicts).correct  # None: a problem may be solved in part
        count = "" if correct is None else f"{correct}/{row.total}  "
        cells[name, name] = f"{count}{row.value:.1f}"
        if name in last_numbers:
            cells["last number", name] = f"{last_numbers[name].value:.1f}"
    return cells


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
    prefix, title = ("", "loss") if "loss" in logs else ("eval_", "held-out loss")
    if f"{prefix}loss" not in logs:
        return None
    words = [f"{title} {float(logs[f'{prefix}loss']):.4f}"]
    if any(name.startswith(f"{prefix}reward") for name in logs):
        for name in _OF_REWARDS:
            value = logs.get(prefix + name)
            if value is not None:
                words.append(f"{name.split('/')[-1]} {float(value):.3g}")
    if logs.get("learning_rate") is not None:
        words.append(f"learning rate {float(logs['learning_rate']):.3g}")
    return f"step {step} of {max_steps}: {', '.join(words)}"
