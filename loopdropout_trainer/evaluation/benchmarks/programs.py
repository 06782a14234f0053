"""HumanEval, HumanEval+, MBPP and MBPP+: one greedy answer to each problem, and EvalPlus's verdict on the program in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

from accelerate.utils import broadcast_object_list

from loopdropout_trainer.evaluation.answer_log import Answers
from loopdropout_trainer.evaluation.benchmark import Benchmark, Files, Task
from loopdropout_trainer.evaluation.benchmarks.generated import generate_answers, list_of
from loopdropout_trainer.evaluation.code import (
    ANSWER_BEGINNING,
    MAX_NEW_TOKENS,
    STOP_STRINGS,
    CodeExecutionError,
    containment_report,
    prompts,
    score,
)
from loopdropout_trainer.evaluation.processes import all_processes
from loopdropout_trainer.evaluation.results import BenchmarkResult, Metric, Prediction
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.saving.files import sha256_of_json


@dataclass(frozen=True)
class CodeTask(Task):
    """A data set of EvalPlus's.

    Attributes:
        dataset: its name.
        metrics: names here -> EvalPlus's two verdicts, of which one answer gives both.
        part_of: benchmark that gives these metrics, too.
    """

    dataset: str
    metrics: tuple[tuple[str, str], ...]
    part_of: str | None = None

    def load(self, name: str, files: Files | None = None, limit: int | None = None) -> CodeBenchmark:
        file = None if files is None else list_of(files)[0]
        return CodeBenchmark(name, self, tuple(prompts(self.dataset, file)[:limit]), file)


@dataclass(frozen=True)
class CodeBenchmark(Benchmark):
    """Problems that are answered by programs.

    Attributes:
        name: for reports and files.
        task: the data set, and its metrics.
        problems: (id, user turn) of each.
        file: EvalPlus's data as a local file; None: what EvalPlus downloads.
    """

    name: str
    task: CodeTask
    problems: Sequence[tuple[str, str]]
    file: Any = None

    kind: ClassVar[str] = "code"

    def settings(self, subject: Subject) -> dict[str, Any]:
        self._check_allowed(subject)
        return {
            "benchmark": self.name,
            "problems_sha256": sha256_of_json(self.problems),
            "max_new_tokens": MAX_NEW_TOKENS,
            "stop_strings": list(STOP_STRINGS),
            "evalplus": metadata.version("evalplus"),
            **subject.settings(subject.in_turns(True)),
        }

    def _check_allowed(self, subject: Subject) -> None:
        if not subject.allow_code_execution:
            raise CodeExecutionError(
                f"`{self.name}` runs programs that the model has written: set `allow_code_execution` to true to run "
                f"them. {containment_report()}"
            )

    def run(self, subject: Subject, answers: Answers, progress: bool = True) -> BenchmarkResult:
        self._check_allowed(subject)
        in_turns = subject.in_turns(True)
        texts = [subject.ask(prompt, in_turns) + ANSWER_BEGINNING for _, prompt in self.problems]
        completions = generate_answers(
            subject, texts, answers, MAX_NEW_TOKENS, subject.stops(STOP_STRINGS, in_turns), in_turns, progress
        )
        ids = [task_id for task_id, _ in self.problems]
        verdicts: list[Any] = [None]
        state = all_processes()
        if state.is_main_process:
            log = None
            if answers.log is not None:
                log = answers.log.folder / "verdicts" / "verdicts.jsonl"
                log.parent.mkdir(parents=True, exist_ok=True)
            found = score(
                self.task.dataset,
                dict(zip(ids, completions, strict=True)),
                self.file,
                allow_code_execution=subject.allow_code_execution,
                log=log,
                progress=progress,
            )
            verdicts = [[found[task_id] for task_id in ids]]
        (verdicts,) = broadcast_object_list(verdicts)
        names = dict(self.task.metrics)
        first = next(iter(names.values()))
        predictions = [
            Prediction(
                prompt=text,
                completion=completion,
                reference="",
                extracted=completion if completion.strip() else None,
                correct=bool(verdict[first]),
                id=task_id,
                values={name: float(verdict[part]) for name, part in names.items()} if len(names) > 1 else None,
                note=verdict["why"] or None,
            )
            for task_id, text, completion, verdict in zip(ids, texts, completions, verdicts, strict=True)
        ]
        metrics = {name: Metric.of([bool(verdict[part]) for verdict in verdicts]) for name, part in names.items()}
        return BenchmarkResult(self.name, predictions, metrics)


BENCHMARKS = {
    "humaneval_plus": CodeTask("humaneval", (("humaneval_plus", "plus"), ("humaneval", "base"))),
    "mbpp_plus": CodeTask("mbpp", (("mbpp_plus", "plus"), ("mbpp", "base"))),
    "humaneval": CodeTask("humaneval", (("humaneval", "base"),), part_of="humaneval_plus"),
    "mbpp": CodeTask("mbpp", (("mbpp", "base"),), part_of="mbpp_plus"),
}
