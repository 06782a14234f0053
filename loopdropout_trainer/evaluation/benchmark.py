"""What every benchmark is, whatever it asks for, and the evaluation of a model on one; killed, it goes on where it was."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from loopdropout_trainer.errors import UserError, user_supplied, writing
from loopdropout_trainer.evaluation.results import BenchmarkResult, write_predictions
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.processes import all_processes, from_main_process
from loopdropout_trainer.record.identity import (
    ONE_RUN,
    Identity,
    differences,
    identity_key,
    model_identity,
    read_identity,
)
from loopdropout_trainer.saving.files import read_json, sha256_of_json, write_json


logger = logging.getLogger(__name__)

IDENTITY_FILE = "identity.json"
ANSWER_FILES = "[0-9]*.jsonl"


class SettingsChangedError(ValueError):
    """What is on disk was measured of another model, or under other settings."""


class AnswerLog:
    """What a model has answered, by key: completions by the problem's index, other requests by their hash.

    On disk it is a folder with `identity.json` and one JSON Lines file for each process, `{"key": ..., "answer": ...,
    "hash": ...}`. The hash is of these two and the identity: a line that was edited, or is another model's, is noticed.

    Args:
        folder: of one benchmark's answers; None: nothing is written.

    Attributes:
        answers: those that are known.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.answers: dict[Any, Any] = {}
        self._identity: str | None = None  # key of what is on disk

    def check(self, identity: Identity) -> bool:
        """Return whether there is anything on disk, after comparing what it depends on.

        Raises:
            SettingsChangedError: if the answers depend on something else; it names every difference.
        """
        path = self.folder / IDENTITY_FILE
        if path.is_file():
            with user_supplied(f"{path} cannot be read"):
                check_same(read_identity(read_json(path)), identity, self.folder)
        elif any(self.folder.glob(ANSWER_FILES)):
            raise SettingsChangedError(f"{self.folder} holds answers without {IDENTITY_FILE}: remove that folder.")
        return path.is_file()

    def read(self, identity: Identity) -> None:
        """Read the answers of all processes on disk; write what they depend on if there are none yet.

        It is called in all processes, and the first one reads: a line that a killed process left unfinished is removed.

        Raises:
            SettingsChangedError: as `check`.
            ValueError: if a file is damaged; it names the file and the line.
        """
        self._identity, self.answers = from_main_process(self._read, identity)

    def _read(self, identity: Identity) -> tuple[str, dict[Any, Any]]:
        path = self.folder / IDENTITY_FILE
        if not self.check(identity):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, identity)
        of_log = identity_key(read_json(path))
        answers = {}
        for path in self.folder.glob(ANSWER_FILES):
            with path.open("r+b") as file:
                lines = file.read().split(b"\n")
                if unfinished := lines.pop():
                    file.truncate(file.tell() - len(unfinished))
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                    is_own = row["hash"] == _hash(of_log, row["key"], row["answer"])
                    answers[row["key"]] = row["answer"]
                except (ValueError, KeyError, TypeError):
                    is_own = False
                if not is_own:
                    raise UserError(
                        f"{path}, line {number}, holds no answer of this evaluation as it was written: remove that line, or "
                        "the file."
                    )
        return of_log, answers

    def keep(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Add (key, answer) pairs, and write them to this process's file; ValueError for NaN or infinity."""
        pairs = list(pairs)
        lines = []
        for key, answer in pairs:
            row = {"key": key, "answer": answer, "hash": _hash(self._identity, key, answer)}
            lines.append(json.dumps(row, allow_nan=False) + "\n")
        self.answers.update(pairs)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{all_processes().process_index:05d}.jsonl"
            with writing(path), path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))

    def exchange(self, keys: Iterable[Any]) -> None:
        """Give all processes what each has answered under keys of its own, which they have shared out."""
        for part in gather_object([{key: self.answers[key] for key in keys}]):
            self.answers.update(part)


def _hash(identity: str | None, key: Any, answer: Any) -> str:
    return sha256_of_json([identity, key, answer])[:16]


def check_same(before: Identity, now: Identity, where: Any, parts: Iterable[str] = ONE_RUN) -> None:
    """Refuse to go on with what was measured of something else: SettingsChangedError names every difference."""
    if changed := differences(before, now, parts):
        raise SettingsChangedError(
            f"{where} holds answers of another evaluation ({', '.join(dict.fromkeys(map(str, changed)))}): give another "
            "`output_dir`, give the row a name of its own (`--adapter NAME=PATH`, or `NAME=none` for the model alone), or "
            "remove that folder."
        )
    if changed := differences(before, now, ("versions",)):
        logger.warning("Going on in %s with other libraries: %s.", where, ", ".join(map(str, changed)))


class Benchmark(ABC):
    """Problems, and the rules to evaluate a model on them.

    Attributes:
        name: for reports and files.
    """

    name: str

    @abstractmethod
    def problems(self) -> Any:
        """Return the problems as JSON values, whose hash tells them from others."""

    @abstractmethod
    def settings(self, subject: Subject) -> dict[str, Any]:
        """Return how problems are asked and scored, as JSON values."""

    @property
    def data(self) -> dict[str, str]:
        """What tells the problems from others: a part of the identity of what is measured."""
        return {"benchmark": self.name, "problems": sha256_of_json(self.problems())}

    def identity(self, subject: Subject, model: Identity) -> Identity:
        """Return what the answers depend on; `model`: that part of it which is the model's (`model_identity`)."""
        return {**model, "data": self.data, "settings": self.settings(subject), "loops": subject.loops}

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
    log = AnswerLog(log_dir)
    if log_dir is not None:
        if model is None:
            model = from_main_process(model_identity, subject.model, subject.tokenizer)
        log.read(benchmark.identity(subject, model))
    result = benchmark.run(subject, log, progress)
    if log_dir is not None and all_processes().is_main_process:
        write_predictions(log_dir, result.predictions)
    return result
