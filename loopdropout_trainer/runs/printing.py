"""What a training run prints when it ends: small tables, each with a sentence made from its numbers, and one figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from loopdropout_trainer.evaluation import BenchmarkResult
from loopdropout_trainer.evaluation.scorers import last_integer
from loopdropout_trainer.evaluation.statistics import sign_test
from loopdropout_trainer.runs.result import RunResult


def print_results(outcomes: Sequence[RunResult], console: Console | None = None) -> None:
    """Print what was trained, what was measured of it, and where things were saved."""
    console = console or Console()
    parts: list[tuple[Table, str]] = [(training_table(outcomes), "")]
    if outcomes[0].benchmarks:
        parts.append((accuracy_table(outcomes), about_accuracy(outcomes)))
    if all(outcome.by_depth for outcome in outcomes):
        parts.append((depth_table(outcomes), about_depths(outcomes)))
    if all(outcome.single_loop_benchmarks for outcome in outcomes):
        parts.append((single_loop_accuracy_table(outcomes), ""))
    if all(outcome.single_loop is not None for outcome in outcomes):
        parts.append((loss_reduction_table(outcomes), about_loss_reductions(outcomes)))
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
    """Return the accuracy at the training depth; of `#### N` answers also that of the last number, wherever it stands."""
    benchmarks = outcomes[0].benchmarks
    columns = []
    for result in benchmarks:
        columns += [result.name, "last number"] if _has_marks(result) else [result.name]
    table = _table(f"Accuracy at the training depth K = {outcomes[0].num_loops}, in %", columns)
    rows = [("before training", outcomes[0].base_benchmarks), *((o.title, o.benchmarks) for o in outcomes)]
    for name, results in rows:
        cells = []
        for result in results:
            count = "" if result.correct is None else f"{result.correct}/{result.total}  "  # None: parts of points
            cells.append(f"{count}{result.score:.1f}")
            if _has_marks(result):
                cells.append(f"{100 * correct_by_last_number(result) / result.total:.1f}")
        if cells:
            table.add_row(name, *cells)
    return table


def depth_table(outcomes: Sequence[RunResult]) -> Table:
    """Return the accuracy by the number of loops at inference, in percent."""
    depths = list(outcomes[0].by_depth)
    name = outcomes[0].by_depth[depths[0]].name
    table = _table(f"Accuracy on {name} with K loops at inference, in %", [f"K={depth}" for depth in depths])
    for outcome in outcomes:
        table.add_row(outcome.title, *(f"{result.score:.1f}" for result in outcome.by_depth.values()))
    return table


def single_loop_accuracy_table(outcomes: Sequence[RunResult]) -> Table:
    """Return the accuracy with the adapter in one loop only, in percent."""
    name = outcomes[0].single_loop_benchmarks[0].name
    loops = range(1, len(outcomes[0].single_loop_benchmarks) + 1)
    table = _table(f"Accuracy on {name} with the adapter in one loop only, in %", [f"loop {loop}" for loop in loops])
    for outcome in outcomes:
        table.add_row(outcome.title, *(f"{result.score:.1f}" for result in outcome.single_loop_benchmarks))
    return table


def loss_reduction_table(outcomes: Sequence[RunResult]) -> Table:
    """Return rho_t, by how much the adapter in loop t only reduces the frozen model's loss, in percent (Section 5)."""
    columns = [*(f"loop {loop}" for loop in range(1, outcomes[0].num_loops + 1)), "all loops", "frozen loss"]
    table = _table("Loss reduction with the adapter in one loop only, rho_t in %", columns)
    for outcome in outcomes:
        measured = outcome.single_loop
        numbers = (*measured.reductions, measured.reduction(measured.all_on))
        table.add_row(outcome.title, *(f"{rho:.1f}" for rho in numbers), f"{measured.frozen:.4f}")
    return table


# Sentences, each of them true of the table above it by the way it is made.


def about_accuracy(outcomes: Sequence[RunResult]) -> str:
    """Say which of two methods is more accurate, and how likely chance alone makes such a difference."""
    sentences = []
    for results in zip(*(outcome.benchmarks for outcome in outcomes), strict=True):
        if len(results) != 2 or any(result.correct is None for result in results):
            continue
        (first, one), (second, other) = zip((o.title for o in outcomes), results, strict=True)
        if one.correct < other.correct:
            first, one, second, other = second, other, first, one
        if one.correct == other.correct:
            sentences.append(f"{one.name}: {first} and {second} have the same accuracy.")
            continue
        sentences.append(
            f"{one.name}: {first} is {one.score - other.score:.1f} points more accurate than {second} "
            f"(paired sign test, p = {paired_sign_test(one, other):.2g}; one seed)."
        )
    return "\n".join(sentences)


def about_depths(outcomes: Sequence[RunResult]) -> str:
    """Say at which depths which of two methods is more accurate."""
    if len(outcomes) != 2:
        return ""
    first, second = outcomes
    gaps = {depth: result.score - second.by_depth[depth].score for depth, result in first.by_depth.items()}
    groups = {
        f"{first.title} is more accurate at": [depth for depth, gap in gaps.items() if gap > 0],
        f"{second.title} is more accurate at": [depth for depth, gap in gaps.items() if gap < 0],
        "they are level at": [depth for depth, gap in gaps.items() if gap == 0],
    }
    parts = [f"{words} K = {', '.join(map(str, depths))}" for words, depths in groups.items() if depths]
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]} (trained at K = {first.num_loops}; one seed)."


def about_loss_reductions(outcomes: Sequence[RunResult]) -> str:
    """Say whether each method's update is biased towards late loops: rho_K - rho_1."""
    parts = []
    for outcome in outcomes:
        rho = outcome.single_loop.reductions
        parts.append(f"{outcome.title} {rho[-1] - rho[0]:+.1f}")
    return f"From the first to the last loop rho_t changes by, in points: {', '.join(parts)}."


def paired_sign_test(one: BenchmarkResult, other: BenchmarkResult) -> float:
    """Return the p-value of the sign test over the problems that only one of two methods solves."""
    pairs = list(zip(one.predictions, other.predictions, strict=True))
    wins, losses = (sum(a.correct > b.correct for a, b in way) for way in (pairs, [pair[::-1] for pair in pairs]))
    return sign_test(wins, losses)


def correct_by_last_number(result: BenchmarkResult) -> int:
    """Count the completions whose last number is the reference's, whatever stands before it."""
    return sum(last_integer(p.completion) == last_integer(p.reference) is not None for p in result.predictions)


def _has_marks(result: BenchmarkResult) -> bool:
    return all("####" in prediction.reference for prediction in result.predictions)


# The figure.


def plot_results(outcomes: Sequence[RunResult], path: str | Path) -> Path:
    """Save one figure of finished runs, as PNG, PDF and SVG: accuracy by depth, and what the adapter does in one loop only."""
    from loopdropout_trainer.reports.plots import overview_figure, save_figure
    from loopdropout_trainer.reports.reading import load_table

    table = load_table([outcome.saved["adapter"] for outcome in outcomes])
    return save_figure(overview_figure(table), Path(path).with_suffix(""))[0]
