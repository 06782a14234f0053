"""What a diagnostic is: something measured on one model, and a table of all of them.

A subclass of `Diagnostic` with a name is found by that name: one file is one diagnostic, and nothing else has to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn

from loopdropout_trainer.adapters import use_gates
from loopdropout_trainer.diagnostics.rows import Rows
from loopdropout_trainer.diagnostics.scores import Batch, Scores, evaluating, score_final, total
from loopdropout_trainer.evaluation.benchmark import Benchmark
from loopdropout_trainer.evaluation.results import BenchmarkResult
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.looped import find_looped_model


Found = TypeVar("Found")

DIAGNOSTICS: dict[str, type[Diagnostic]] = {}


class Diagnostic:
    """One thing that is measured, alike on the base model, on adapters and on merged models.

    Class attributes:
        name: of its files, and on the command line.
        title: of what it measures, for its file.
        needs: `rows` (teacher-forced targets) or `benchmarks` (evaluated by generation).
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

    def skip_reason(self, context: Context) -> str | None:
        """Return why this model cannot be measured, or None if it can."""
        if self.needs_adapter and context.kind != "adapter":
            return "it has no update that could be gated apart from the weights"
        return None

    def settings(self, context: Context) -> dict[str, Any]:
        """Return what the measurement depends on beside the model and the rows or benchmarks."""
        return {}

    def measure(self, context: Context) -> dict[str, Any]:
        """Measure one model, in all processes at once; return what JSON can hold, the same in each of them."""
        raise NotImplementedError

    def compare(self, runs: Sequence[dict[str, Any]]) -> Any:
        """Return what can only be told from several models' measurements together, as the file holds them, or None."""
        return None


@dataclass
class GroupedBenchmark:
    """A benchmark to be evaluated, and the columns of its rows by which problems fall into groups.

    Attributes:
        benchmark: prompts, references, scorer.
        groups: column -> the group of each problem.
    """

    benchmark: Benchmark
    groups: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Context:
    """One model, and what it is measured on.

    Attributes:
        subject: the model as evaluation sees it, at its own depth and unit gates.
        kind: `base`, `adapter` or `merged`.
        rows: teacher-forced rows; None if no diagnostic needs any.
        benchmarks: to be evaluated by generation.
        depths: that the depth diagnostics run at.
        processes: that share the work.
        evaluate: evaluates the model on a benchmark by greedy generation (benchmark, gates or None, depth or None).
    """

    subject: Subject
    kind: str
    rows: Rows | None
    benchmarks: Sequence[GroupedBenchmark]
    depths: Sequence[int]
    processes: PartialState
    evaluate: Callable[[GroupedBenchmark, Sequence[float] | None, int | None], BenchmarkResult] | None = None

    @property
    def model(self) -> nn.Module:
        """The looped model, with its adapter if it has one."""
        return self.subject.model

    @property
    def num_loops(self) -> int:
        """Depth K that the model runs at."""
        return self.subject.num_loops

    def over_batches(self, measure: Callable[[Batch], Found]) -> list[Found]:
        """Return what `measure` finds in every batch of rows, in their order; the processes share the batches.

        It runs without gradients and in evaluation mode. Which rows make up a batch does not depend on the number of
        processes, so that the results do not either.
        """
        first, step = self.processes.process_index, self.processes.num_processes
        with evaluating(self.model):
            found = [(place, measure(batch)) for place, batch in list(enumerate(self.rows.batches))[first::step]]
        return [value for _, value in sorted(gather_object(found), key=lambda pair: pair[0])]

    def scores(self, gates: Sequence[float] | torch.Tensor | None = None) -> Scores:
        """Return the final loop's scores on all rows, under gates [K] or at unit gates."""
        with self.gated(gates):
            return Scores.of(total(self.over_batches(lambda batch: score_final(self.model, batch))))

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
