"""What every benchmark is, whatever it asks for, and the evaluation of a model on one; killed, it goes on where it was."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.tensor import DTensor

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation.answer_log import AnswerLog
from loopdropout_trainer.evaluation.results import BenchmarkResult, write_predictions
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.processes import all_processes, from_main_process
from loopdropout_trainer.record.identity import Identity, model_identity
from loopdropout_trainer.saving.files import sha256_of_json


class Benchmark(ABC):
    """Problems, and the rules to evaluate a model on them.

    Attributes:
        name: for reports and files.
        kind: how it is run; for the results file.
    """

    name: str
    kind: ClassVar[str]

    @abstractmethod
    def problems(self) -> Any:
        """Return the problems as JSON values, whose hash tells them from others."""

    @abstractmethod
    def settings(self, subject: Subject) -> dict[str, Any]:
        """Return how problems are asked and scored, as JSON values."""

    def identity(self, subject: Subject, model: Identity) -> Identity:
        """Return what the answers depend on; `model`: that part of it which is the model's (`model_identity`)."""
        data = {"benchmark": self.name, "problems": sha256_of_json(self.problems())}
        return {**model, "data": data, "settings": self.settings(subject), "loops": subject.loops}

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

    def at_revision(self, name: str, revision: str) -> Task:
        """Return the benchmark `name` with its problems from a revision of their dataset on the Hub, a branch, tag or commit.

        Raises:
            ValueError: if its problems do not come from one dataset of the Hub that this package reads.
        """
        raise UserError(
            f"`benchmark_revisions` cannot name {name}, whose problems another library loads: leave it out."
        )

    @abstractmethod
    def load(self, name: str, files: list[Path] | None, limit: int | None, confirmed: bool) -> Benchmark:
        """Return the benchmark with its problems, from local files or as published; see `load_benchmark`."""

    def metric_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the metrics of the benchmark `name`, as far as they are known before it runs."""
        return (name,)


def evaluate_subject(
    subject: Subject,
    benchmark: Benchmark,
    log_dir: str | Path | None = None,
    model: Identity | None = None,
    progress: bool = True,
) -> BenchmarkResult:
    """Evaluate a model with gates, a readout or a chat template of its own on a benchmark.

    Call it in all processes: each holds the complete model, takes a share of the problems, and returns the result of all.

    Args:
        subject: the model, and how it is run.
        benchmark: problems.
        log_dir: folder that keeps each answer as soon as it is there, and in the end the predictions. Answers found in it
            are not computed again.
        model: identity of the model, with which that of the answers in `log_dir` is compared. Default: it is worked out.
        progress: show a bar in the first process.

    Raises:
        SettingsChangedError: if `log_dir` holds answers of another model, or of other problems or settings.
        ValueError: if a file in it is damaged, or the model's weights are sharded over processes (FSDP2, ZeRO-3):
            processes that generate texts of different lengths would wait for one another.
    """
    if any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in subject.model.parameters()):
        raise UserError(
            "The model's weights are sharded over processes, but each process evaluates problems of its own: leave "
            "`benchmarks` out of the training, and evaluate the saved adapter with recipes/evaluate.py."
        )
    log = AnswerLog(log_dir, all_processes().process_index)
    if log_dir is not None:
        of_model = lambda: model or model_identity(subject.model, subject.tokenizer)
        log.found = from_main_process(lambda: log.read(benchmark.identity(subject, of_model())))
    result = benchmark.run(subject, log, progress)
    if log_dir is not None and all_processes().is_main_process:
        write_predictions(log_dir, result.predictions)
    return result
