"""The paper's figures and their like, as data: panels of lines, bars or a heat map, drawn by `drawing` and by the page.

A figure is a function that takes the runs and returns a `Figure`, or None where they have nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loopdropout_trainer.evaluation.statistics import summarize
from loopdropout_trainer.gates import Draw, make_rule
from loopdropout_trainer.reports.records import Record
from loopdropout_trainer.reports.tables import FinishedTable


@dataclass(frozen=True)
class Series:
    """One method in a panel: `y` at each `x`, and sample SD over seeds (None for one seed)."""

    name: str
    x: list[Any]
    y: list[float]
    sd: list[float | None]


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        kind: "lines" or "bars" of `series`; "heat": `values` [rows][columns], None for empty cells.
        rows, columns: labels of a heat map. signed: whether its colours are around zero.
    """

    title: str
    x_label: str
    y_label: str
    kind: str = "lines"
    series: list[Series] = field(default_factory=list)
    values: list[list[float | None]] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    signed: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure with its caption; `name` is its file's."""

    name: str
    caption: str
    panels: list[Panel]


FigureMaker = Callable[..., Figure | None]
FIGURES: dict[str, FigureMaker] = {}


def figure(function: FigureMaker) -> FigureMaker:
    """Register a figure under its function's name."""
    FIGURES[function.__name__] = function
    return function


def make_figures(records: Sequence[Record], tables: Sequence[FinishedTable] = ()) -> list[Figure]:
    """Return every figure that the runs have numbers for.

    Args:
        records: runs.
        tables: of the same report; what they compare is drawn as they compare it.
    """
    return [made for maker in FIGURES.values() if (made := maker(records, tables)) is not None]


@figure
def overview(records: Sequence[Record], tables: Sequence[FinishedTable]) -> Figure | None:
    """Draw the gates of eight examples in training, as a run draws them, and those of inference."""
    run = next((record for record in records if record.fields.get("rule") == "loop_dropout"), None)
    if run is None:
        return None
    loops, p = run.fields.get("num_loops") or 4, run.fields.get("p") or 0.5
    seed = run.fields.get("seed") or 0
    draw = Draw(seed=seed, step=0, example_ids=[(row, 0) for row in range(8)], num_loops=loops)
    gates = make_rule("loop_dropout", p=p).sample(draw)  # [K, 8]
    names = [f"loop {loop}" for loop in range(1, loops + 1)]
    panel = lambda title, values: Panel(
        title, "", "example", "heat", values=values, rows=[str(row) for row in range(1, 9)], columns=names
    )
    return Figure(
        "overview",
        f"Gates on the shared update: drawn in training (p = {p}, the first step of seed {seed}), and at inference.",
        [panel("training", gates.T.tolist()), panel("inference", [[1.0] * loops] * 8)],
    )


@figure
def single_loop_activation(records: Sequence[Record], tables: Sequence[FinishedTable]) -> Figure | None:
    """Draw the loss reduction with the adapter in one loop at a time."""
    series = _loop_series(records, "single_loop", "reductions_percent")
    if not series:
        return None
    panel = Panel("", "active loop", "loss reduction, % of frozen", "bars", series)
    return Figure(
        "single_loop_activation",
        "Loss reduction with the adapter in one loop only (rho_t), all backbone loops running.",
        [panel],
    )


@figure
def early_adaptation(records: Sequence[Record], tables: Sequence[FinishedTable]) -> Figure | None:
    """Draw answers from one application, and each loop's readout."""
    panels = []
    for benchmark in _benchmarks_of(records, "single_loop_generation"):
        series = _series(
            records,
            lambda record, benchmark=benchmark: [
                entry["score"]
                for entry in record.diagnostics.get("single_loop_generation", {}).get(benchmark, {}).get("only", [])
            ],
        )
        panels.append(Panel(f"{benchmark}, one application", "active loop", "correct, %", "bars", series))
    readouts = _loop_series(records, "readouts", "losses")
    if readouts:
        panels.append(Panel("readouts", "loop", "cross entropy, nats", "lines", readouts))
    if not panels:
        return None
    return Figure(
        "early_adaptation", "Generation from single applications, and the loss of each loop's readout.", panels
    )


@figure
def rank_overview(records: Sequence[Record], tables: Sequence[FinishedTable]) -> Figure | None:
    """Draw accuracy against the adapter's rank: of the table of ranks if the report has it, else within each sweep."""
    caption = "Accuracy at different ranks of the shared adapter, mean and SD over seeds."
    table = next((table for table in tables if table.spec.label == "tab:rank_tuned" and table.filled), None)
    if table is None:
        return _against("rank_overview", caption, records, "rank", "rank")
    panels = []
    for place, column in enumerate(table.spec.columns):
        points: dict[str, dict[int, list[float]]] = {}
        for (rank, method), row in zip(table.names, table.cells, strict=True):
            if row[place].by_seed:
                points.setdefault(method, {})[int(rank)] = list(row[place].by_seed)
        series = [_points(method, values) for method, values in points.items()]
        panels.append(Panel(column["name"], "rank", "correct, %", "lines", series))
    return Figure("rank_overview", caption, panels)


@figure
def learning_rates(records: Sequence[Record], tables: Sequence[FinishedTable]) -> Figure | None:
    """Draw accuracy against the learning rate."""
    caption = "Accuracy at different learning rates, mean and SD over seeds."
    return _against("learning_rates", caption, records, "learning_rate", "learning rate")


@figure
def drop_probability(records: Sequence[Record], tables: Sequence[FinishedTable]) -> Figure | None:
    """Draw accuracy against p."""
    return _against(
        "drop_probability",
        "Accuracy at different drop probabilities.",
        [record for record in records if isinstance(record.fields.get("p"), (int, float))],
        "p",
        "p",
    )


@figure
def depth_accuracy(records: Sequence[Record], tables: Sequence[FinishedTable]) -> Figure | None:
    """Draw accuracy against the depth of evaluation, a panel for each depth of training."""
    table = _depth_table(records)
    panels = []
    for benchmark, trained in sorted({(benchmark, trained) for benchmark, trained, _, _ in table}):
        series = []
        for method in dict.fromkeys(key[2] for key in table):
            points = {key[3]: values for key, values in table.items() if key[:3] == (benchmark, trained, method)}
            if len(points) > 1:
                series.append(_points(method, dict(sorted(points.items()))))
        if series:
            panels.append(
                Panel(f"{benchmark}, trained at K = {trained}", "evaluated at K", "correct, %", "lines", series)
            )
    if not panels:
        return None
    return Figure(
        "depth_accuracy", "Accuracy at other depths than the training's; work grows in proportion to K.", panels
    )


@figure
def depth_gains(records: Sequence[Record], tables: Sequence[FinishedTable]) -> Figure | None:
    """Draw Loop Dropout's gain over LoRA for each pair of depths."""
    table = _depth_table(records)
    panels = []
    for benchmark in dict.fromkeys(key[0] for key in table):
        keys = [key for key in table if key[0] == benchmark]
        trained = sorted({key[1] for key in keys})
        evaluated = sorted({key[3] for key in keys})
        values: list[list[float | None]] = []
        for train in trained:
            row: list[float | None] = []
            for depth in evaluated:
                pair = [table.get((benchmark, train, method, depth)) for method in ("LoRA", "Loop Dropout")]
                row.append(summarize(pair[1]).mean - summarize(pair[0]).mean if all(pair) else None)
            values.append(row)
        if len(evaluated) > 1 and any(value is not None for row in values for value in row):
            panels.append(
                Panel(
                    benchmark,
                    "evaluated at K",
                    "trained at K",
                    "heat",
                    values=values,
                    rows=list(map(str, trained)),
                    columns=list(map(str, evaluated)),
                    signed=True,
                )
            )
    if not panels:
        return None
    return Figure("depth_gains", "Loop Dropout minus LoRA, in percentage points, for each pair of depths.", panels)


def _depth_table(records: Sequence[Record]) -> dict[tuple[str, int, str, int], list[float]]:
    """Return the scores in percent by benchmark, depth of training, method and depth of evaluation."""
    table: dict[tuple[str, int, str, int], list[float]] = {}
    for record in _plain(records):
        if len({score.depth for score in record.scores}) < 2:  # runs that nobody evaluated at another depth
            continue
        for score in record.scores:
            trained, percent = record.fields.get("num_loops"), score.percent()
            named = score.benchmark != "development" and score.gates is None
            if named and score.depth and trained and percent is not None:
                table.setdefault((score.benchmark, trained, record.method, score.depth), []).append(percent)
    return table


def _plain(records: Sequence[Record]) -> list[Record]:
    """Leave out runs that differ from others of their method in more than seed and depth: a line is one setting."""
    ranks = {record.fields.get("rank") for record in records}
    return [record for record in records if len(ranks) == 1 or record.fields.get("rank") in (16, None)]


def _against(name: str, caption: str, records: Sequence[Record], setting: str, label: str) -> Figure | None:
    """Return accuracy against a setting, if several values of it were tested on one benchmark with one method."""
    several_sweeps = len({record.fields.get("sweep") for record in records}) > 1
    points: dict[str, dict[str, dict[Any, list[float]]]] = {}
    for record in records:
        value, sweep = record.fields.get(setting), record.fields.get("sweep")
        for score in record.scores:
            own = score.depth in (None, record.fields.get("num_loops"))
            if value is not None and score.gates is None and own and score.benchmark != "development":
                title = f"{score.benchmark} ({sweep})" if several_sweeps and sweep else score.benchmark
                method = points.setdefault(title, {}).setdefault(record.method, {})
                method.setdefault(value, []).append(score.percent() or 0.0)
    panels = []
    for benchmark, methods in points.items():
        series = [
            _points(method, dict(sorted(values.items()))) for method, values in methods.items() if len(values) > 1
        ]
        if series:
            panels.append(Panel(benchmark, label, "correct, %", "lines", series))
    return Figure(name, caption, panels) if panels else None


def _points(name: str, values: dict[Any, list[float]]) -> Series:
    summaries = [summarize(each) for each in values.values()]
    return Series(name, list(values), [each.mean for each in summaries], [each.sd for each in summaries])


def _benchmarks_of(records: Sequence[Record], diagnostic: str) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.diagnostics.get(diagnostic, {})))


def _loop_series(records: Sequence[Record], diagnostic: str, key: str) -> list[Series]:
    return _series(records, lambda record: record.diagnostics.get(diagnostic, {}).get(key) or [])


def _series(records: Sequence[Record], values_of: Callable[[Record], list[float]]) -> list[Series]:
    """Return one line for each method over the loops, mean and SD over its runs."""
    by_method: dict[str, list[list[float]]] = {}
    for record in records:
        values = values_of(record)
        if values:
            by_method.setdefault(record.method, []).append(values)
    series = []
    for method, runs in by_method.items():
        loops = min(map(len, runs))
        summaries = [summarize([run[loop] for run in runs]) for loop in range(loops)]
        series.append(
            Series(
                method, list(range(1, loops + 1)), [each.mean for each in summaries], [each.sd for each in summaries]
            )
        )
    return series
