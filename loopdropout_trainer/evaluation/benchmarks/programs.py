"""HumanEval, HumanEval+, MBPP and MBPP+: one greedy completion of each problem, and EvalPlus's verdict on its program.

One completion gives two verdicts: with the problem's own tests (HumanEval, MBPP) and also with those that EvalPlus adds.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm

from loopdropout_trainer.evaluation.answer_log import AnswerLog
from loopdropout_trainer.evaluation.benchmark import Benchmark, Files, Task, list_of
from loopdropout_trainer.evaluation.benchmarks.generated import complete
from loopdropout_trainer.evaluation.code.sandbox import check_allowed, check_program, run_scorer
from loopdropout_trainer.evaluation.processes import all_processes
from loopdropout_trainer.evaluation.results import BenchmarkResult, Metric, Prediction
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.saving.files import sha256_of_json, write_atomically


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
    """A data set of EvalPlus's.

    Attributes:
        dataset: `humaneval` or `mbpp`.
        metrics: names here -> `base` or `plus`.
        part_of: benchmark that gives these metrics, too.
    """

    dataset: str
    metrics: tuple[tuple[str, str], ...]
    part_of: str | None = None

    def metric_names(self, name: str) -> tuple[str, ...]:
        return tuple(metric for metric, _ in self.metrics)

    def load(
        self, name: str, files: Files | None = None, limit: int | None = None, confirm_run_unsafe_code: bool = False
    ) -> CodeBenchmark:
        if find_spec("evalplus") is None:
            raise ValueError(
                f'`{name}` needs EvalPlus, which is not installed: pip install "loopdropout-trainer[eval]".'
            )
        sandboxed = check_allowed(name, confirm_run_unsafe_code)
        problems = list(evalplus_problems(self.dataset, None if files is None else list_of(files)[0]).values())
        return CodeBenchmark(name, self, problems[:limit], sandboxed)


def evalplus_problems(dataset: str, file: str | Path | None = None) -> dict[str, dict[str, Any]]:
    """Return EvalPlus's problems by id: its release, downloaded once, or a local file in its format (.jsonl, .jsonl.gz).

    Raises:
        ValueError: if there is no such file, or it is not in EvalPlus's format.
    """
    from evalplus.data import humaneval, mbpp

    module, variable, read = {
        "humaneval": (humaneval, "HUMANEVAL_OVERRIDE_PATH", humaneval.get_human_eval_plus),
        "mbpp": (mbpp, "MBPP_OVERRIDE_PATH", mbpp.get_mbpp_plus),
    }[dataset]
    if file is None:
        return read()
    if not Path(file).is_file():
        raise ValueError(f"`benchmark_files` names {file} for {dataset}, which does not exist.")
    # EvalPlus reads the environment variables that name a file only once, when it is imported.
    before = getattr(module, variable)
    setattr(module, variable, str(file))
    try:
        return read()
    except (AssertionError, EOFError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not EvalPlus's data of {dataset}: {type(error).__name__}: {error}") from error
    finally:
        setattr(module, variable, before)


@dataclass(frozen=True)
class CodeBenchmark(Benchmark):
    """Problems that are solved by programs.

    Attributes:
        name: for reports and files.
        task: the data set, and its metrics.
        problems: rows of EvalPlus's.
        sandboxed: whether bubblewrap contains the programs; if not, the user has confirmed to run them.
    """

    name: str
    task: CodeTask
    problems: Sequence[dict[str, Any]]
    sandboxed: bool = True

    kind: ClassVar[str] = "code"

    @property
    def prompts(self) -> list[str]:
        """The user turn of each problem."""
        return [f"{INSTRUCTION}\n```\n{problem['prompt'].strip()}\n```\n" for problem in self.problems]

    def settings(self, subject: Subject) -> dict[str, Any]:
        problems = [[problem["task_id"], prompt] for problem, prompt in zip(self.problems, self.prompts, strict=True)]
        return {
            "benchmark": self.name,
            "problems_sha256": sha256_of_json(problems),
            "max_new_tokens": MAX_NEW_TOKENS,
            "stop_strings": list(STOP_STRINGS),
            "evalplus": metadata.version("evalplus"),
            **subject.settings(subject.in_turns(True)),
        }

    def run(self, subject: Subject, log: AnswerLog, progress: bool = True) -> BenchmarkResult:
        in_turns = subject.in_turns(True)
        texts = [subject.prompt_text(prompt, in_turns) + COMPLETION_BEGINNING for prompt in self.prompts]
        completions = complete(subject, texts, log, MAX_NEW_TOKENS, STOP_STRINGS, in_turns, progress)
        verdicts: list[Any] = [None]
        if all_processes().is_main_process:
            verdicts = [self.score(completions, log, progress)]
        (verdicts,) = broadcast_object_list(verdicts)
        passed = {"plus": [v == "pass" for v in verdicts], "base": [v == "pass" or v[:4] == "plus" for v in verdicts]}
        metrics = {name: Metric.of(passed[part]) for name, part in self.task.metrics}
        first = self.task.metrics[0][1]
        predictions = [
            Prediction(
                prompt=texts[place],
                completion=completion,
                reference="",
                extracted=completion if completion.strip() else None,
                correct=passed[first][place],
                id=self.problems[place]["task_id"],
                values={name: float(passed[part][place]) for name, part in self.task.metrics}
                if len(metrics) > 1
                else None,
                note=None if verdicts[place] == "pass" else verdicts[place],
            )
            for place, completion in enumerate(completions)
        ]
        return BenchmarkResult(self.name, predictions, metrics)

    def score(self, completions: Sequence[str], log: AnswerLog, progress: bool = True) -> list[str]:
        """Return EvalPlus's verdict on each completion: `pass`, `base: fail`, `plus: timeout`, ...

        Verdicts are kept in the log beside the completions. The programs are also written to `samples.jsonl` in the log's
        folder, in EvalPlus's format: `evalplus.evaluate --dataset humaneval --samples samples.jsonl` scores them, too.
        """
        keys = [f"verdict {place}" for place in range(len(self.problems))]
        places = [place for place, key in enumerate(keys) if key not in log.found]
        if not places:
            return [log.found[key] for key in keys]
        with tempfile.TemporaryDirectory(prefix="programs_") as name:
            folder = Path(name)
            jobs = [
                (self.task.dataset, problem, cut_as_evalplus_does(completion))
                for problem, completion in zip(self.problems, completions, strict=True)
            ]
            (folder / "problems.pickle").write_bytes(pickle.dumps(jobs))
            if run_scorer("prepare", folder, seconds=None, sandboxed=self.sandboxed) != 0:
                raise RuntimeError(f"EvalPlus could not compute the expected outputs of `{self.name}`.")
            (folder / "problems.pickle").unlink()  # the reference solutions
            self._write_samples(folder, log)

            def check(place: int) -> tuple[str, str]:
                if not (folder / f"{place}.pickle").is_file():
                    return keys[place], "base: no program can be read"
                return keys[place], check_program(folder, place, self.sandboxed)

            pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2))  # as many as EvalPlus runs at a time
            try:
                verdicts = pool.map(check, places)
                for verdict in tqdm(verdicts, total=len(places), unit=" programs", disable=not progress):
                    log.keep([verdict])
            finally:
                pool.shutdown(cancel_futures=True)  # after an interrupt no further program starts
        return [log.found[key] for key in keys]

    def _write_samples(self, folder: Path, log: AnswerLog) -> None:
        if log.folder is None:
            return
        samples = []
        for number, problem in enumerate(self.problems):
            file = folder / f"{number}.py"
            solution = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
            samples.append(json.dumps({"task_id": problem["task_id"], "solution": solution}) + "\n")
        (log.folder / "evalplus").mkdir(parents=True, exist_ok=True)
        write_atomically(log.folder / "evalplus" / "samples.jsonl", "".join(samples))


def cut_as_evalplus_does(completion: str) -> str:
    """Return a completion up to the earliest stop string, with spaces for tabs."""
    return min((completion.split(stop)[0] for stop in STOP_STRINGS), key=len).replace("\t", "    ")


BENCHMARKS = {
    "humaneval_plus": CodeTask("humaneval", (("humaneval_plus", "plus"), ("humaneval", "base"))),
    "mbpp_plus": CodeTask("mbpp", (("mbpp_plus", "plus"), ("mbpp", "base"))),
    "humaneval": CodeTask("humaneval", (("humaneval", "base"),), part_of="humaneval_plus"),
    "mbpp": CodeTask("mbpp", (("mbpp", "base"),), part_of="mbpp_plus"),
}
