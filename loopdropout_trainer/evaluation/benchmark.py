"""What every benchmark is, whatever it asks for: problems on which a model is evaluated, and a verdict on each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from loopdropout_trainer.evaluation.answer_log import AnswerLog
from loopdropout_trainer.evaluation.results import BenchmarkResult
from loopdropout_trainer.evaluation.subject import Subject


Files = str | Path | Sequence[str | Path]


class Benchmark(ABC):
    """Problems, and the rules to evaluate a model on them.

    Attributes:
        name: for reports and files.
        kind: how it is run; for the results file.
    """

    name: str
    kind: ClassVar[str]

    @abstractmethod
    def settings(self, subject: Subject) -> dict[str, Any]:
        """Return what the answers depend on beside the model's weights, as JSON values, problems as a hash."""

    @abstractmethod
    def run(self, subject: Subject, log: AnswerLog, progress: bool = True) -> BenchmarkResult:
        """Compute the answers that the log does not hold yet, keep them there, and score all.

        It is called in all processes together: each takes a share of the problems, and returns the result of all.
        """


class Task(ABC):
    """A benchmark without its problems: what `BENCHMARKS` holds by name.

    Attributes:
        part_of: name of a benchmark that gives this one's metrics, too, so that both are not run.
    """

    part_of: str | None = None

    @abstractmethod
    def load(self, name: str, files: Files | None, limit: int | None, confirmed: bool) -> Benchmark:
        """Return the benchmark with its problems, from local files or as published; for the arguments see `load_benchmark`.

        Raises:
            ValueError, OSError: for a file that cannot be read or a bad row (the message names file and row), or if
                something that scoring needs is missing.
        """

    def metric_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the metrics of the benchmark `name`, as far as they are known before it runs."""
        return (name,)


def list_of(files: Files) -> list[Any]:
    """Return one or several files as a list."""
    return list(files) if isinstance(files, Sequence) and not isinstance(files, str) else [files]
