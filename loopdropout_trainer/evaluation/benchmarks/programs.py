"""HumanEval, HumanEval+, MBPP and MBPP+: one greedy completion of each problem, and EvalPlus's verdict on its program.

One completion gives two verdicts: with the problem's own tests (HumanEval, MBPP) and also with those that EvalPlus adds.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, ClassVar

from tqdm.auto import tqdm

from loopdropout_trainer.errors import user_supplied
from loopdropout_trainer.evaluation.benchmark import AnswerLog, Task
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedBenchmark
from loopdropout_trainer.evaluation.results import BenchmarkResult, Metric, Prediction
from loopdropout_trainer.evaluation.sandbox import check_allowed, check_program, run_scorer
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.processes import from_main_process


MAX_NEW_TOKENS = 1024
# EvalPlus's own words for models that chat, which its scores are compared by; they stand inside one of its functions.
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)
COMPLETION_BEGINNING = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:\n"
    "```python\n"
)
STOP_STRINGS = ("<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint(", "\n```\n")


@dataclass(frozen=True)
class CodeTask(Task):
    """A data set of EvalPlus's, `humaneval` or `mbpp`; `name_plus` is also scored with the tests that EvalPlus adds."""

    dataset: str
    part_of: str | None = None

    def metric_names(self, name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((name, self.dataset)))

    def load(self, name: str, files: list[Path] | None, limit: int | None, confirmed: bool) -> CodeBenchmark:
        sandboxed = check_allowed(name, confirmed)
        problems = list(evalplus_problems(self.dataset, files and files[0]).values())[:limit]
        prompts = [f"{INSTRUCTION}\n```\n{problem['prompt'].strip()}\n```\n" for problem in problems]
        names = [problem["task_id"] for problem in problems]
        protocol = {"metric": self.dataset, "max_new_tokens": MAX_NEW_TOKENS, "stop_strings": STOP_STRINGS}
        return CodeBenchmark(name, prompts, names, **protocol, rows=problems, sandboxed=sandboxed)


def evalplus_problems(dataset: str, file: str | Path | None = None) -> dict[str, dict[str, Any]]:
    """Return EvalPlus's problems by id: its release, downloaded once, or a local file in its format (.jsonl, .jsonl.gz)."""
    module, variable = import_module(f"evalplus.data.{dataset}"), f"{dataset.upper()}_OVERRIDE_PATH"
    before = getattr(module, variable)  # the environment variable of this name, which it reads when it is imported
    setattr(module, variable, before if file is None else str(file))
    try:
        with user_supplied(f"{file or dataset} is not EvalPlus's data of {dataset}"):
            return module.get_human_eval_plus() if dataset == "humaneval" else module.get_mbpp_plus()
    finally:
        setattr(module, variable, before)


@dataclass(frozen=True)
class CodeBenchmark(GeneratedBenchmark):
    """Problems that are solved by programs; `metric` is the data set, `rows` are EvalPlus's, `references` their names.

    Attributes:
        sandboxed: whether bubblewrap contains the programs; if not, the user has confirmed to run them.
    """

    sandboxed: bool = True

    in_turns: ClassVar[bool] = True
    beginning: ClassVar[str] = COMPLETION_BEGINNING

    def problems(self) -> list[list[str]]:
        return [*super().problems(), list(map(repr, self.rows))]  # their tests

    def settings(self, subject: Subject) -> dict[str, Any]:
        return {**super().settings(subject), "evalplus": metadata.version("evalplus")}

    def score(self, completions: list[str], texts: list[str], log: AnswerLog, progress: bool) -> BenchmarkResult:
        verdicts = from_main_process(self.verdicts, completions, log, progress)
        passed = {
            self.name: [verdict == "pass" for verdict in verdicts],
            self.metric: [verdict.startswith(("pass", "plus")) for verdict in verdicts],  # the problem's own tests
        }
        predictions = []
        for index, verdict in enumerate(verdicts):
            values = {metric: float(of_metric[index]) for metric, of_metric in passed.items()}
            predictions.append(
                Prediction(
                    prompt=texts[index],
                    completion=completions[index],
                    reference="",
                    extracted=completions[index] if completions[index].strip() else None,
                    correct=passed[self.name][index],
                    id=self.references[index],
                    values=values if len(values) > 1 else None,
                    note=None if verdict == "pass" else verdict,
                )
            )
        metrics = {metric: Metric.of(of_metric) for metric, of_metric in passed.items()}
        return BenchmarkResult(self.name, predictions, metrics)

    def verdicts(self, completions: Sequence[str], log: AnswerLog, progress: bool = True) -> list[str]:
        """Return EvalPlus's verdict on each completion: `pass`, `base: fail`, `plus: timeout`, ...

        Verdicts are kept in the log beside the completions.
        """
        keys = [f"verdict {place}" for place in range(len(self.rows))]
        if all(key in log.answers for key in keys):
            return [log.answers[key] for key in keys]
        with tempfile.TemporaryDirectory(prefix="programs_") as name:
            folder = Path(name)
            jobs = [
                (self.metric, problem, cut_as_evalplus_does(completion))
                for problem, completion in zip(self.rows, completions, strict=True)
            ]
            (folder / "problems.pickle").write_bytes(pickle.dumps(jobs))
            if run_scorer("prepare", folder, seconds=None, sandboxed=self.sandboxed) != 0:
                raise RuntimeError(f"EvalPlus could not compute the expected outputs of `{self.name}`.")
            (folder / "problems.pickle").unlink()  # the reference solutions
            check = lambda key: (key, check_program(folder, int(key.split()[1]), self.sandboxed))
            pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2))  # as many as EvalPlus runs at a time
            try:
                missing = [key for key in keys if key not in log.answers]
                for verdict in tqdm(pool.map(check, missing), total=len(missing), disable=not progress):
                    log.keep([verdict])
            finally:
                pool.shutdown(cancel_futures=True)  # after an interrupt no further program starts
        return [log.answers[key] for key in keys]


def cut_as_evalplus_does(completion: str) -> str:
    """Return a completion up to the earliest stop string, with spaces for tabs."""
    return min((completion.split(stop)[0] for stop in STOP_STRINGS), key=len).replace("\t", "    ")


BENCHMARKS = {
    "humaneval_plus": CodeTask("humaneval"),
    "mbpp_plus": CodeTask("mbpp"),
    "humaneval": CodeTask("humaneval", part_of="humaneval_plus"),
    "mbpp": CodeTask("mbpp", part_of="mbpp_plus"),
}
