"""What a training run prints when it ends: small tables, each with a sentence made from its numbers, and one figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from loopdropout_trainer.diagnostics.scores import reduction
from loopdropout_trainer.evaluation import BenchmarkResult
from loopdropout_trainer.evaluation.metrics import last_integer
from loopdropout_trainer.evaluation.statistics import sign_test
from loopdropout_trainer.runs.result import RunResult


def print_results(outcomes: Sequence[RunResult], console: Console | None = None) -> None:
    """Print what was trained, what was measured of it, and where things were saved.

    Tables have at most 80 columns for two methods, two benchmarks and eight depths.
    """
    console = console or Console()
    for title, columns, rows, sentence in _tables(outcomes):
        console.print(title, style="bold", highlight=False)  # a table's own title is broken at the table's width
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        if sentence:
            console.print(sentence, highlight=False)
        console.print()
    for outcome in outcomes:
        for what, where in outcome.saved.items():
            console.print(f"{outcome.title}: {what} in {where}", highlight=False, soft_wrap=True)


def _tables(outcomes: Sequence[RunResult]) -> Iterator[tuple[str, list[str], list[list[str]], str]]:
    """Yield title, columns, rows and sentence of each table."""
    first, titles = outcomes[0], [outcome.title for outcome in outcomes]
    depth = f"K = {first.num_loops}"
    rows = []
    for o in outcomes:  # by reward: its mean over the first and the last tenth of the log
        counts = [f"{count:,}" for count in (o.trainable_parameters, o.examples, o.steps)]
        losses = [f"{number:.4f}" for number in o.rewards or [o.train_loss]]
        rows.append([o.title, "-" if o.p is None else str(o.p), *counts, *losses, f"{o.train_seconds:.0f}"])
    losses = ["loss"] if first.rewards is None else ["reward, first", "last"]
    yield f"Training at {depth}", ["p", "trainable", "examples", "steps", *losses, "seconds"], rows, ""
    if first.benchmarks:
        measured = [("before training", first.base_benchmarks), *((o.title, o.benchmarks) for o in outcomes)]
        rows = [
            [name, *(cell for result in each for cell in _cells(result).values())] for name, each in measured if each
        ]
        columns = [column for result in first.benchmarks for column in _cells(result)]
        yield f"Accuracy at the training depth {depth}, in %", columns, rows, about_accuracy(outcomes)
    if all(outcome.by_depth for outcome in outcomes):
        name, columns = next(iter(first.by_depth.values())).name, [f"K={depth}" for depth in first.by_depth]
        rows = [_scores(outcome.title, outcome.by_depth.values()) for outcome in outcomes]
        yield f"Accuracy on {name} with K loops at inference, in %", columns, rows, about_depths(outcomes)
    loops = [f"loop {loop}" for loop in range(1, first.num_loops + 1)]
    if all(outcome.single_loop_benchmarks for outcome in outcomes):
        title = f"Accuracy on {first.single_loop_benchmarks[0].name} with the adapter in one loop only, in %"
        yield title, loops, [_scores(outcome.title, outcome.single_loop_benchmarks) for outcome in outcomes], ""
    if all(outcome.single_loop is not None for outcome in outcomes):
        losses = [outcome.single_loop for outcome in outcomes]
        rho = [(*each.reductions, reduction(each.frozen, each.all_on)) for each in losses]  # in percent (Section 5)
        rows = [[title, *(f"{each:.1f}" for each in row)] for title, row in zip(titles, rho, strict=True)]
        rows = [[*row, f"{each.frozen:.4f}"] for row, each in zip(rows, losses, strict=True)]
        changes = [f"{title} {row[-2] - row[0]:+.1f}" for title, row in zip(titles, rho, strict=True)]
        sentence = f"From the first to the last loop rho_t changes by, in points: {', '.join(changes)}."
        title = "Loss reduction with the adapter in one loop only, rho_t in %"
        yield title, [*loops, "all loops", "frozen loss"], rows, sentence


def _cells(result: BenchmarkResult) -> dict[str, str]:
    """Return the accuracy, by the column's name; of `#### N` answers also that of the last number, wherever it stands."""
    count = "" if result.correct is None else f"{result.correct}/{result.total}  "  # None: parts of points
    cells = {result.name: f"{count}{result.score:.1f}"}
    if all("####" in prediction.reference for prediction in result.predictions):
        cells["last number"] = f"{100 * correct_by_last_number(result) / result.total:.1f}"
    return cells


def _scores(title: str, results: Iterator[BenchmarkResult]) -> list[str]:
    return [title, *(f"{result.score:.1f}" for result in results)]


def about_accuracy(outcomes: Sequence[RunResult]) -> str:
    """Say which of two methods is more accurate, and how likely chance alone makes such a difference."""
    sentences = []
    for results in zip(*(outcome.benchmarks for outcome in outcomes), strict=True):
        if len(results) != 2 or any(result.correct is None for result in results):
            continue
        ranked = sorted(zip(results, outcomes, strict=True), key=lambda each: -each[0].correct)
        (one, first), (other, second) = ranked
        if one.correct == other.correct:
            sentences.append(f"{one.name}: {first.title} and {second.title} have the same accuracy.")
        else:
            sentences.append(
                f"{one.name}: {first.title} is {one.score - other.score:.1f} points more accurate than {second.title} "
                f"(paired sign test, p = {paired_sign_test(one, other):.2g}; one seed)."
            )
    return "\n".join(sentences)


def about_depths(outcomes: Sequence[RunResult]) -> str:
    """Say at which depths which of two methods is more accurate."""
    if len(outcomes) != 2:
        return ""
    first, second = outcomes
    groups = {
        f"{first.title} is more accurate at": [],
        f"{second.title} is more accurate at": [],
        "they are level at": [],
    }
    for depth, result in first.by_depth.items():
        gap = result.score - second.by_depth[depth].score
        list(groups.values())[0 if gap > 0 else 1 if gap < 0 else 2].append(str(depth))
    sentence = "; ".join(f"{words} K = {', '.join(depths)}" for words, depths in groups.items() if depths)
    return f"{sentence[0].upper()}{sentence[1:]} (trained at K = {first.num_loops}; one seed)."


def paired_sign_test(one: BenchmarkResult, other: BenchmarkResult) -> float:
    """Return the p-value of the sign test over the problems that only one of two methods solves."""
    pairs = [(a.correct, b.correct) for a, b in zip(one.predictions, other.predictions, strict=True)]
    return sign_test(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))


def correct_by_last_number(result: BenchmarkResult) -> int:
    """Count the completions whose last number is the reference's, whatever stands before it."""
    return sum(last_integer(p.completion) == last_integer(p.reference) is not None for p in result.predictions)


def plot_results(outcomes: Sequence[RunResult], path: str | Path) -> Path:
    """Save one figure of finished runs, as PNG, PDF and SVG: accuracy by depth, and what the adapter does in one loop only."""
    from loopdropout_trainer.reports.plots import overview_figure, save_figure
    from loopdropout_trainer.reports.reading import load_table

    table = load_table([outcome.saved["adapter"] for outcome in outcomes])
    return save_figure(overview_figure(table), Path(path).with_suffix(""))[0]
