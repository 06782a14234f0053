"""What a diagnostic is: something measured on one adapter, and a table and figures of all of them.

A subclass of `Diagnostic` with a name is found by that name: one file is one diagnostic, and nothing else has to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.table import Table
from torch import nn

from loopdropout_trainer.adapters import use_gates
from loopdropout_trainer.diagnostics.rows import Rows
from loopdropout_trainer.diagnostics.scores import Batch, Scores, measuring, score_final
from loopdropout_trainer.diagnostics.style import BASE
from loopdropout_trainer.diagnostics.subjects import Subject
from loopdropout_trainer.evaluation.benchmark import Benchmark
from loopdropout_trainer.evaluation.results import BenchmarkResult
from loopdropout_trainer.evaluation.statistics import mean_and_sd, plus_minus
from loopdropout_trainer.looped import find_looped_model


Found = TypeVar("Found")
DIAGNOSTICS: dict[str, type[Diagnostic]] = {}


class Diagnostic:
    """One thing that is measured, alike on the base model, on adapters and on merged models.

    Class attributes:
        name: of its files, and on the command line.
        title: above its table.
        needs: `rows` (teacher-forced targets) or `problems` (answered by generation).
        needs_adapter: whether it gates an update, which the base and a merged model do not have apart from the weights.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    needs: ClassVar[str] = "rows"
    needs_adapter: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.name:
            return
        taken = DIAGNOSTICS.get(cls.name)
        if taken is not None and taken.__module__ != cls.__module__:
            raise ValueError(
                f"There is a diagnostic `{cls.name}` already, in {taken.__module__}: choose another name."
            )
        DIAGNOSTICS[cls.name] = cls

    def why_not(self, context: Context) -> str | None:
        """Return why this subject cannot be measured, or None if it can."""
        if self.needs_adapter and context.subject.kind != "adapter":
            return "it has no update that could be gated apart from the weights"
        return None

    def settings(self, context: Context) -> dict[str, Any]:
        """Return what the measurement depends on beside the model and the rows or problems."""
        return {}

    def passes(self, context: Context) -> int:
        """Return how many times the rows are run, for the estimate of the time that is left."""
        return 1

    def measure(self, context: Context) -> dict[str, Any]:
        """Measure one subject, in all processes at once; return what JSON can hold, the same in each of them."""
        raise NotImplementedError

    def compare(self, report: Report) -> Any:
        """Return what can only be told from several subjects together, or None."""
        return None

    def table(self, report: Report) -> Table | None:
        """Return the printed table, of at most 80 columns for a few methods; `report.table` makes one."""
        return None

    def draw(self, report: Report, path: Path) -> list[Path]:
        """Draw figures to `path` (without its ending, which may be lengthened); return the files."""
        return []


@dataclass
class Problems:
    """A benchmark to be answered, and the columns of its rows by which problems fall into groups.

    Attributes:
        benchmark: prompts, references, scorer.
        groups: column -> the group of each problem.
    """

    benchmark: Benchmark
    groups: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Context:
    """One subject, and what it is measured on.

    Attributes:
        subject: whose measurement this is.
        num_loops: depth K that the model runs at.
        rows: teacher-forced rows; None if no diagnostic needs any.
        problems: to be answered by generation.
        depths: that the depth diagnostics run at.
        processes: that share the work.
        model: the looped model, with its adapter if it has one; set when it is loaded.
        answer: answers problems by greedy generation (problems, gates [K] or None, depth or None).
        advance: called after each batch.
    """

    subject: Subject
    num_loops: int
    rows: Rows | None
    problems: Sequence[Problems]
    depths: Sequence[int]
    processes: PartialState
    model: nn.Module | None = None
    answer: Callable[[Problems, Sequence[float] | None, int | None], BenchmarkResult] | None = None
    advance: Callable[[], None] = lambda: None

    def over_batches(self, measure: Callable[[Batch], Found]) -> list[Found]:
        """Return what `measure` finds in every batch of rows, in their order; the processes share the batches.

        It runs without gradients and in evaluation mode. Which rows make up a batch does not depend on the number of
        processes, so that the results do not either.
        """
        found = []
        with measuring(self.model):
            for index in range(self.processes.process_index, len(self.rows.batches), self.processes.num_processes):
                found.append((index, measure(self.rows.batches[index])))
                self.advance()
        return [value for _, value in sorted(gather_object(found), key=lambda pair: pair[0])]

    def scores(self, gates: Sequence[float] | torch.Tensor | None = None) -> Scores:
        """Return the final loop's scores of all rows, under gates [K] or at unit gates."""
        with self.gated(gates):
            return Scores.join(self.over_batches(lambda batch: score_final(self.model, batch)))

    @contextmanager
    def gated(self, gates: Sequence[float] | torch.Tensor | None) -> Iterator[None]:
        """Apply gates [K] inside the block; None: unit gates."""
        with nullcontext() if gates is None else use_gates(self.model, torch.as_tensor(gates)):
            yield

    @contextmanager
    def at_depth(self, num_loops: int) -> Iterator[None]:
        """Run the model at another depth inside the block."""
        config = find_looped_model(self.model).config
        before, config.num_loops = config.num_loops, num_loops
        try:
            yield
        finally:
            config.num_loops = before


class Report:
    """All subjects' measurements of one diagnostic: what its JSON file holds.

    A method is all subjects of one name, such as one adapter for each seed.

    Args:
        content: of the file.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.runs: list[dict[str, Any]] = content["runs"]
        self.methods = list(dict.fromkeys(run["method"] for run in self.runs))

    @property
    def num_loops(self) -> int:
        """Depth K that the model runs at."""
        return self.content["settings"]["num_loops"]

    @property
    def loops(self) -> range:
        """1..K."""
        return range(1, self.num_loops + 1)

    def of(self, method: str) -> list[dict[str, Any]]:
        """Return the runs of a method, one for each seed."""
        return [run for run in self.runs if run["method"] == method]

    def values(self, method: str, *path: str | int) -> np.ndarray:
        """Return a number or list of numbers in `measured`, found by keys and indices, of all seeds: [seeds, ...]."""
        found = []
        for run in self.of(method):
            value = run["measured"]
            for key in path:
                value = value[key]
            found.append(value)
        return np.asarray(found, dtype=float)

    def series(self, *path: str | int) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """Return for each method the mean over seeds and the sample standard deviation (None for one seed)."""
        return {method: mean_and_sd(self.values(method, *path)) for method in self.methods}

    def table(self, rows: Mapping[str, tuple[str | int, ...]], form: str | None = None) -> Table:
        """Return a table with a column for each method: mean ± sample standard deviation over seeds.

        Args:
            rows: name of each row, and where its number is found in `measured`.
            form: of the numbers; default: four digits.
        """
        table = Table()
        table.add_column("")
        for method in self.methods:
            table.add_column(method, justify="right")
        for name, path in rows.items():
            series = self.series(*path)
            table.add_row(name, *(shown(*series[method], form) for method in self.methods))
        return table


def shown(mean: float, sd: float | None, form: str | None = None) -> str:
    """Return `mean ± sd`, or the mean alone."""
    if form is None:
        form = ".4f" if abs(mean) < 10 else ".2f"
    return plus_minus(mean, sd, form)


__all__ = ["BASE", "DIAGNOSTICS", "Context", "Diagnostic", "Problems", "Report", "shown"]
