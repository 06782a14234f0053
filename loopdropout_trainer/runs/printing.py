"""What a run prints: one bar for each phase and one line for each logging interval; at its end small tables of results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import ProgressCallback

from loopdropout_trainer.evaluation.results import LAST_NUMBER, Metric
from loopdropout_trainer.record.measurement import BASE
from loopdropout_trainer.runs.result import Result


Cells = list[tuple[str, str]]
"""A row of a table: titles of its columns, each with the text below it."""


def print_results(results: Sequence[Result], depths: Sequence[int] = (), console: Console | None = None) -> None:
    """Print what was trained, what was measured of it, and where things were saved.

    Tables have at most 80 columns for two methods, two benchmarks and eight depths.

    Args:
        results: one for each rule.
        depths: other depths that the first benchmark was evaluated at.
        console: default: standard output.
    """
    console = console or Console()
    for title, rows in _tables(results, depths):
        console.print(title, style="bold", highlight=False)  # a table's own title is broken at the table's width
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", no_wrap=True)
        for column, _ in rows[-1][1]:
            table.add_column(column, justify="right")
        for method, cells in rows:
            table.add_row(method, *(text for _, text in cells))
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
    ahead = {}
    for depth in sorted({first.depth, *depths}):
        gain = round(_first_score(one, depth=depth) - _first_score(other, depth=depth), 1)
        words = f"as accurate as {second.method}"
        if gain:
            words = f"{'more' if gain > 0 else 'less'} accurate than {second.method}"
        ahead.setdefault(words, []).append(f"K = {depth}" + (f" ({gain:+.1f})" if gain else ""))
    parts = [f"{words} at {', '.join(places)}" for words, places in ahead.items()]
    return f"{first.method} is {'; '.join(parts)} (points, one seed)."


def _first_score(result: Result, **place: int) -> float:
    """Return the accuracy on the first benchmark, the one that is evaluated at other depths and in single loops, too."""
    return next(iter(result.scores(**place).values())).value


def _tables(results: Sequence[Result], depths: Sequence[int]) -> Iterator[tuple[str, list[tuple[str, Cells]]]]:
    """Yield the title of each table, and its rows: methods with their cells."""

    def of_methods(cells: Callable[[Result], Cells]) -> list[tuple[str, Cells]]:
        return [(result.training.method, cells(result)) for result in results]

    first = results[0]
    num_loops = first.training.depth
    loops = range(1, num_loops + 1)
    yield f"Training at K = {num_loops}", of_methods(_costs)
    if benchmarks := list(first.scores()):
        before = [("before training", _accuracies(first, BASE))] if first.scores(method=BASE) else []
        yield f"Accuracy at the training depth K = {num_loops}, in %", before + of_methods(_accuracies)
        title = f"Accuracy on {benchmarks[0]} with"
        if depths:
            at_depths = lambda result: [(f"K={depth}", f"{_first_score(result, depth=depth):.1f}") for depth in depths]
            yield f"{title} K loops at inference, in %", of_methods(at_depths)
        if first.scores(loop=1):
            alone = lambda result: [(f"loop {loop}", f"{_first_score(result, loop=loop):.1f}") for loop in loops]
            yield f"{title} the adapter in one loop only, in %", of_methods(alone)
    if any(row.family == "single_loop" for row in first.rows):
        yield "Loss reduction with the adapter in one loop only, rho_t in %", of_methods(_loss_reductions)


def _costs(result: Result) -> Cells:
    training = result.training
    p = result.identities[training.run]["settings"]["p"]
    losses = {"loss": "train_loss"}
    if any(row.metric == "reward_first" for row in result.rows):
        losses = {"reward, first": "reward_first", "last": "reward_last"}
    return [
        ("p", "-" if p is None else str(p)),
        ("trainable", f"{result.value('trainable_parameters'):,}"),
        ("examples", f"{result.value('examples'):,}"),
        ("steps", f"{training.steps:,}"),
        *((column, f"{result.value(metric):.4f}") for column, metric in losses.items()),
        ("seconds", f"{result.value('train_seconds'):.0f}"),
    ]


def _accuracies(result: Result, method: str | None = None) -> Cells:
    """Return each benchmark's accuracy; of `#### N` answers also that of the last number, wherever it stands."""
    last_numbers = result.scores(method=method, families=[LAST_NUMBER])
    cells = []
    for name, row in result.scores(method=method).items():
        correct = Metric(row.value, row.verdicts).correct  # None: a problem may be solved in part
        count = "" if correct is None else f"{correct}/{row.total}  "
        cells.append((name, f"{count}{row.value:.1f}"))
        if name in last_numbers:
            cells.append(("last number", f"{last_numbers[name].value:.1f}"))
    return cells


def _loss_reductions(result: Result) -> Cells:
    """Return those of Section 5, and the loss that they are relative to."""
    loops = range(1, result.training.depth + 1)
    columns = {f"loop {loop}": loop for loop in loops} | {"all loops": None}
    reductions = [(column, f"{result.value('loss_reduction', loop):.1f}") for column, loop in columns.items()]
    return [*reductions, ("frozen loss", f"{result.value('frozen_loss'):.4f}")]


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
