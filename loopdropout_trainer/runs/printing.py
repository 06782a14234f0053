"""What a training run prints when it ends: small tables, each with a sentence made from its numbers, and one figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from loopdropout_trainer.evaluation import BenchmarkResult
from loopdropout_trainer.evaluation.scorers import last_integer
from loopdropout_trainer.evaluation.statistics import sign_test
from loopdropout_trainer.reports import load_table, save_figure
from loopdropout_trainer.reports.figures import overview_figure
from loopdropout_trainer.runs.result import RunResult


MATTERS = 0.05  # below this p-value of the sign test, a difference is said to be more than chance


def print_results(outcomes: Sequence[RunResult], console: Console | None = None) -> None:
    """Print what was trained, what was measured of it, and where things were saved."""
    console = console or Console()
    parts: list[tuple[Table, str]] = [(training_table(outcomes), "")]
    if outcomes[0].benchmarks:
        parts.append((accuracy_table(outcomes), about_accuracy(outcomes)))
    if all(outcome.single_loop is not None for outcome in outcomes):
        parts.append((single_loop_table(outcomes), about_single_loops(outcomes)))
    if all(outcome.by_depth for outcome in outcomes):
        parts.append((depth_table(outcomes), about_depths(outcomes)))
    for table, sentence in parts:
        console.print(table.title, style="bold", highlight=False)  # a table's own title is broken at the table's width
        table.title = None
        console.print(table)
        if sentence:
            console.print(sentence, highlight=False)
        console.print()
    for outcome in outcomes:
        for what, where in outcome.saved.items():
            console.print(f"{outcome.title}: {what} in {where}", highlight=False, soft_wrap=True)


# Tables: at most 80 columns for two methods, two benchmarks and eight depths.


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def training_table(outcomes: Sequence[RunResult]) -> Table:
    """Return how each adapter was trained; by reward: its mean over the first and the last tenth of the log."""
    by_reward = outcomes[0].rewards is not None
    figures = ("reward, first", "last") if by_reward else ("loss",)
    table = _table(
        f"Training at K = {outcomes[0].num_loops}", ("p", "trainable", "examples", "steps", *figures, "seconds")
    )
    for outcome in outcomes:
        table.add_row(
            outcome.title,
            "-" if outcome.p is None else str(outcome.p),
            f"{outcome.trainable_parameters:,}",
            f"{outcome.examples:,}",
            f"{outcome.steps:,}",
            *(f"{number:.4f}" for number in outcome.rewards or [outcome.train_loss]),
            f"{outcome.train_seconds:.0f}",
        )
    return table


def accuracy_table(outcomes: Sequence[RunResult]) -> Table:
    """Return the accuracies at the training depth; for answers that end in `#### N` also by the last number in them."""
    benchmarks = outcomes[0].benchmarks
    columns = []
    for result in benchmarks:
        columns += [result.name, "last number"] if _has_marks(result) else [result.name]
    table = _table(f"Accuracy, greedy decoding, at the training depth K = {outcomes[0].num_loops}", columns)
    for name, results in [
        ("before training", outcomes[0].base_benchmarks),
        *((o.title, o.benchmarks) for o in outcomes),
    ]:
        cells = []
        for result in results:
            count = "" if result.correct is None else f"{result.correct}/{result.total} "  # None: parts of points
            cells.append(f"{count}{result.score:.1f}%")
            if _has_marks(result):
                cells.append(f"{100 * correct_by_last_number(result) / result.total:.1f}%")
        if cells:
            table.add_row(name, *cells)
    return table


def single_loop_table(outcomes: Sequence[RunResult]) -> Table:
    """Return rho_t, the part of the frozen model's loss that goes away with the adapter in loop t only, in percent."""
    columns = [*(f"loop {loop}" for loop in range(1, outcomes[0].num_loops + 1)), "all loops", "frozen loss"]
    table = _table("Loss reduction with the adapter in one loop only, rho_t in %", columns)
    for outcome in outcomes:
        measured = outcome.single_loop
        all_on = 100 * (measured.frozen - measured.all_on) / measured.frozen
        table.add_row(
            outcome.title, *(f"{rho:.1f}" for rho in measured.reductions), f"{all_on:.1f}", f"{measured.frozen:.4f}"
        )
    return table


def depth_table(outcomes: Sequence[RunResult]) -> Table:
    """Return the accuracies by the number of loops at inference, in percent."""
    depths = list(outcomes[0].by_depth)
    name = outcomes[0].by_depth[depths[0]].name
    table = _table(f"Accuracy on {name} by the loops K at inference, in %", [f"K={depth}" for depth in depths])
    for outcome in outcomes:
        table.add_row(outcome.title, *(f"{result.score:.1f}" for result in outcome.by_depth.values()))
    return table


# Sentences, each of them true of the table above it by the way it is made.


def about_accuracy(outcomes: Sequence[RunResult]) -> str:
    """Say which of two methods has the higher accuracy, and whether chance alone could make such a difference."""
    sentences = []
    for results in zip(*(outcome.benchmarks for outcome in outcomes), strict=True):
        if len(results) != 2 or any(result.correct is None for result in results):
            continue
        (first, one), (second, other) = zip((o.title for o in outcomes), results, strict=True)
        if one.correct < other.correct:
            first, one, second, other = second, other, first, one
        difference, p_value = one.correct - other.correct, paired_sign_test(one, other)
        if difference == 0:
            sentences.append(f"On {one.name}, {first} and {second} solve equally many of {one.total} problems.")
            continue
        verdict = "more than chance would explain" if p_value < MATTERS else "which chance alone could explain"
        sentences.append(
            f"On {one.name}, {first} solves {difference} more of {one.total} problems than {second}, {verdict} "
            f"(paired sign test, p = {p_value:.2g}, one seed)."
        )
    return "\n".join(sentences)


def about_single_loops(outcomes: Sequence[RunResult]) -> str:
    """Say in which single loop each method's update reduces the loss least and most."""
    parts = []
    for outcome in outcomes:
        rho = outcome.single_loop.reductions
        low, high = (rho.index(pick(rho)) for pick in (min, max))
        parts.append(f"{outcome.title} {rho[low]:.1f}% (loop {low + 1}) to {rho[high]:.1f}% (loop {high + 1})")
    return f"Active in one loop only, the update reduces the frozen model's loss by: {'; '.join(parts)}."


def about_depths(outcomes: Sequence[RunResult]) -> str:
    """Say at which depths which method has the higher accuracy."""
    scores = {outcome.title: {k: r.score for k, r in outcome.by_depth.items()} for outcome in outcomes}
    first = next(iter(scores))
    if len(scores) != 2:
        return " ".join(f"{name} is most accurate at K = {_best(row)}." for name, row in scores.items())
    second = next(name for name in scores if name != first)
    tests: dict[str, Callable[[float], bool]] = {
        f"{first} is more accurate at": lambda gap: gap > 0,
        f"{second} is more accurate at": lambda gap: gap < 0,
        "they are level at": lambda gap: gap == 0,
    }
    parts = []
    for words, holds in tests.items():
        depths = [k for k in scores[first] if holds(scores[first][k] - scores[second][k])]
        if depths:
            parts.append(f"{words} K = {', '.join(map(str, depths))}")
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]} (trained at K = {outcomes[0].num_loops}; one seed)."


def _best(row: dict[int, float]) -> int:
    return max(row, key=row.get)


def paired_sign_test(one: BenchmarkResult, other: BenchmarkResult) -> float:
    """Return the p-value of the sign test over the problems that only one of two methods solves."""
    pairs = list(zip(one.predictions, other.predictions, strict=True))
    wins, losses = (sum(a.correct > b.correct for a, b in way) for way in (pairs, [pair[::-1] for pair in pairs]))
    return sign_test(wins, losses)


def correct_by_last_number(result: BenchmarkResult) -> int:
    """Count the completions whose last number is the reference's last, whatever stands before it."""
    return sum(last_integer(p.completion) == last_integer(p.reference) is not None for p in result.predictions)


def _has_marks(result: BenchmarkResult) -> bool:
    return all("####" in prediction.reference for prediction in result.predictions)


# The figure.


def plot_results(outcomes: Sequence[RunResult], path: str | Path) -> Path:
    """Save one figure of finished runs, as PNG, PDF and SVG: accuracy by depth, and what the adapter does in one loop only."""
    table = load_table([outcome.saved["adapter"] for outcome in outcomes])
    return save_figure(overview_figure(table), Path(path).with_suffix(""))[0]
