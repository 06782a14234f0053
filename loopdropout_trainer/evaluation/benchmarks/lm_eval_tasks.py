"""Tasks of lm-eval as benchmarks: its prompts and scorers, this package's model backend, and a log of every answer.

Every process builds all requests, computes its share of those that the log does not answer, and gets the others' answers
from them. So the results do not depend on the number of processes, and a killed evaluation continues inside a task.
"""

from __future__ import annotations

import functools
import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset

from loopdropout_trainer.data.rows import DataError, read_files
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.evaluation.answer_log import AnswerLog
from loopdropout_trainer.evaluation.benchmark import Benchmark, Task
from loopdropout_trainer.evaluation.benchmarks.generated import Row, read_problems
from loopdropout_trainer.evaluation.results import BenchmarkResult, Metric, Prediction
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.processes import random_states_kept
from loopdropout_trainer.record.identity import library_versions


# lm-eval gives this advice for each task of local rows.
logging.getLogger("lm_eval.api.task").addFilter(lambda record: "Custom kwargs" not in str(record.msg))


@dataclass(frozen=True)
class LmEvalTask(Task):
    """One or several tasks of lm-eval that make one benchmark.

    Attributes:
        tasks: name of a task; or what the names of those tasks in `folder` begin with that make the benchmark.
        folder: below lm-eval's folder of tasks; None: all of them, which takes seconds to look through.
        metrics: this package's names of the metrics -> lm-eval's `metric,filter`; None: all, under lm-eval's names.
        num_fewshot: examples in the prompt; None: the task's own number.
        generation: fields of `generation_kwargs` that differ from the task's own.
        in_turns: whether the protocol's prompts are turns of a chat.
        task_of: the task that a row of a local file belongs to, where one file holds several tasks.
        overrides: other fields of the task's configuration.
        check_scorer: raises ValueError if something is missing that scoring needs.
    """

    tasks: str
    folder: str | None = None
    metrics: Mapping[str, str] | None = None
    num_fewshot: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    in_turns: bool = False
    task_of: Callable[[Row], str] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    check_scorer: Callable[[], None] = lambda: None

    def metric_names(self, name: str) -> tuple[str, ...]:
        return tuple(self.metrics or ())

    def load(self, name: str, files: list[Path] | None, limit: int | None, confirmed: bool) -> LmEvalBenchmark:
        manager = _task_manager(self.folder)
        splits = None if files is None else self._local_splits(name, files)
        with user_supplied(f"`{name}` cannot be loaded"):
            names = [self.tasks]
            if self.folder is not None and self.tasks not in manager.all_subtasks:
                names = [task for task in manager.all_subtasks if task.startswith(f"{self.tasks}_")]
            elif self.tasks not in manager.all_tasks:  # the path of a YAML file, which can run code, is no name
                raise UserError(
                    f"lm-eval has no task `{self.tasks}`; `python -m loopdropout_trainer.lm_eval ls tasks` lists them"
                )
            specs = {task: {"task": task, **self.overrides} for task in splits or names}
            for task, of_task in (splits or {}).items():
                if task not in manager.all_subtasks:
                    raise DataError(f"`{name}` has no task `{task}`: `benchmark_files` takes a folder of TASK.jsonl.")
                specs[task] |= {"custom_dataset": lambda of_task=of_task, **kwargs: of_task, "dataset_kwargs": None}
            if splits or self.overrides:  # built-in tasks take other fields inside a group only
                names = [{"group": f"{name} with local settings", "task": list(specs.values())}]
            tasks = list(manager.load(names)["tasks"].values())
        self.check_scorer()
        for task in tasks:
            if getattr(task, "UNSAFE_CODE", False) and not confirmed:
                raise UserError(
                    f"`{name}` runs programs that the model has written, and lm-eval does not contain them: give "
                    "`--confirm_run_unsafe_code true` on the command line to run them with your own rights."
                )
            own = task.get_config("num_fewshot") or 0
            task.set_config(key="num_fewshot", value=own if self.num_fewshot is None else self.num_fewshot)
            if self.generation:
                task.set_config(key="generation_kwargs", value=dict(self.generation), update=True)
            if splits is not None:
                task.dataset.check_examples(name, task.config)
            if splits is not None and self.metrics:
                for number, doc in enumerate(task.eval_docs, start=1):
                    _check_problem(task, doc, f"Problem {number} of `{task.task_name}`")
        return LmEvalBenchmark(name, self, tasks, manager, limit, confirmed)

    def _local_splits(self, name: str, files: list[Path]) -> dict[str, LocalSplits]:
        """Read files of one task's rows or, told apart by `task_of`, of several's; or folders of `TASK[.SPLIT].jsonl`."""
        found: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
        task_of = self.task_of or (lambda row: self.tasks)
        for path in files:
            if path.is_dir():
                for file in sorted(filter(Path.is_file, path.iterdir())):
                    task, _, split = file.name.removesuffix(".gz").rpartition(".")[0].partition(".")
                    found[task][split] += read_problems(name, read_files([file]), lambda row: row)
            else:
                for task, row in read_problems(name, read_files([path]), lambda row: (task_of(row), row)):
                    found[task][""].append(row)
        if not found:
            raise DataError(f"`{name}` has no problems.")
        return {task: LocalSplits(task, found[task]) for task in sorted(found)}


@dataclass
class LocalSplits:
    """A task's dataset of local rows by split. A split without rows has those of the file that names none (`""`)."""

    task: str
    rows: Mapping[str, list[Row]]

    def __getitem__(self, split: str) -> Dataset:
        if not {split, ""} & self.rows.keys():
            raise DataError(f"There is no file {self.task}.{split}.jsonl with the rows of the split `{split}`.")
        return Dataset.from_list(self.rows.get(split) or self.rows[""])

    def check_examples(self, name: str, config: Any) -> None:
        """Refuse examples in the prompt that would be test problems, because their own split has no rows."""
        tested = config.test_split or config.validation_split
        source = config.fewshot_split or config.training_split or tested
        given = isinstance(config.fewshot_config, dict) and config.fewshot_config.get("samples")
        if config.num_fewshot and not given and source != tested and source not in self.rows:
            raise DataError(
                f"`{name}` shows {config.num_fewshot} examples of the split `{source}`: let `benchmark_files` name a folder "
                f"with {self.task}.jsonl and {self.task}.{source}.jsonl."
            )


@functools.cache
def _task_manager(folder: str | None) -> Any:
    """Return lm-eval's index of its tasks, or of those in one of its folders. All of them take seconds to read: once."""
    import lm_eval.tasks

    if folder is None:
        return lm_eval.tasks.TaskManager()
    path = Path(lm_eval.tasks.__file__).parent / folder
    return lm_eval.tasks.TaskManager(include_path=str(path), include_defaults=False)


@dataclass
class LmEvalBenchmark(Benchmark):
    """Loaded tasks of lm-eval.

    Attributes:
        name: for reports and files.
        spec: which tasks these are, and what differs from lm-eval's own settings.
        tasks, manager: lm-eval's objects.
        limit: only the first problems of each task.
        confirm_run_unsafe_code: whether the user lets lm-eval run programs that the model has written.
    """

    name: str
    spec: LmEvalTask
    tasks: list[Any]
    manager: Any
    limit: int | None = None
    confirm_run_unsafe_code: bool = False

    kind: ClassVar[str] = "lm_eval"

    def problems(self) -> list[list[Any]]:
        return [
            [task.task_name, task.VERSION, *(repr(doc) for doc in islice(task.eval_docs, self.limit))]
            for task in self.tasks
        ]

    def settings(self, subject: Subject) -> dict[str, Any]:
        return {
            "num_fewshot": sorted({task.get_config("num_fewshot") for task in self.tasks}),
            "generation": dict(self.spec.generation),
            "lm_eval": library_versions()["lm-eval"],
            **subject.settings(subject.in_turns(self.spec.in_turns)),
        }

    def run(self, subject: Subject, log: AnswerLog, progress: bool = True) -> BenchmarkResult:
        from lm_eval.evaluator import evaluate

        from loopdropout_trainer.evaluation.looped_lm import LoggedLM

        in_turns = subject.in_turns(self.spec.in_turns)
        with random_states_kept():
            random.seed(0)  # these three and the next: lm-eval's defaults
            np.random.seed(1234)
            torch.manual_seed(1234)
            for task in self.tasks:
                task.set_fewshot_seed(seed=1234)
            results = evaluate(
                LoggedLM(subject, log, in_turns, progress),
                self.manager.load(self.tasks),
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=True,
                system_instruction=subject.system_instruction if in_turns else None,
                apply_chat_template=in_turns,
                fewshot_as_multiturn=in_turns,
                confirm_run_unsafe_code=self.confirm_run_unsafe_code,
            )
        return self._result(results)

    def _result(self, results: Mapping[str, Any]) -> BenchmarkResult:
        """Return lm-eval's results as this package's."""
        table = {
            task: {key: float(row[key]) for key in row if "," in key and "_stderr" not in key and _is_finite(row[key])}
            for task, row in results["results"].items()
        }
        wanted = self.spec.metrics or {key: key for row in table.values() for key in row}
        keys = {name: key.rpartition(",")[::2] for name, key in wanted.items()}  # metric and filter
        predictions, values = [], {name: [] for name in wanted}
        for task in self.tasks:
            problems: dict[int, dict[str, dict]] = defaultdict(dict)
            for sample in results["samples"][task.task_name]:
                problems[sample["doc_id"]][sample["filter"]] = sample
            for _, by_filter in sorted(problems.items()):
                found = {name: by_filter.get(of, {}).get(metric) for name, (metric, of) in keys.items()}
                found = {name: float(value) for name, value in found.items() if _is_finite(value)}
                for name, value in found.items():
                    values[name].append(value)
                sample = by_filter.get(next(iter(keys.values()))[1]) or next(iter(by_filter.values()))
                group = task.task_name if len(self.tasks) > 1 else None
                predictions.append(_prediction(sample, found, found.get(next(iter(wanted))), group))
        of_all = table.get(self.spec.tasks, next(iter(table.values())))
        metrics = {}
        for name, key in wanted.items():
            if len(values[name]) == len(predictions) and all(0 <= value <= 1 for value in values[name]):
                metrics[name] = Metric.of(values[name])
            elif key in of_all:  # no share of the problems, such as a perplexity: as lm-eval gives it
                metrics[name] = Metric(of_all[key])
        if not metrics:
            raise UserError(f"lm-eval gives `{self.name}` no finite number for {', '.join(wanted) or 'any metric'}.")
        return BenchmarkResult(self.name, predictions, metrics)


def _prediction(sample: dict, scored: dict[str, float], value: float | None, task: str | None) -> Prediction:
    """Return a sample of lm-eval's as a prediction with these metrics, of which the first has this value."""
    responses, log_likelihoods = [response[0] for response in sample["resps"]], None
    if isinstance(responses[0], str):
        completion, extracted = responses[0], sample["filtered_resps"][0]
        extracted = None if extracted in ("[invalid]", "", None) else str(extracted)
    else:  # log-likelihoods of choices, or of the text itself
        log_likelihoods = [float(each[0] if isinstance(each, tuple | list) else each) for each in responses]
        best = max(range(len(responses)), key=log_likelihoods.__getitem__)
        completion = sample["arguments"][best][1] if len(sample["arguments"][best]) > 1 else ""
        extracted = completion.strip()
    place, is_verdict = str(sample["doc_id"]), value in (0, 1)
    return Prediction(
        prompt=sample["arguments"][0][0],
        completion=completion,
        reference=str(sample["target"]),
        extracted=extracted,
        correct=bool(value) if is_verdict else None,
        id=place if task is None else f"{task}/{place}",
        values=None if is_verdict and len(scored) == 1 else scored,
        groups=None if task is None else {"task": task},
        log_likelihoods=log_likelihoods,
    )


def _check_problem(task: Any, doc: Row, place: str) -> None:
    """Raise ValueError for a problem whose answers could not be scored, by scoring one that nobody gave."""
    chooses = task.OUTPUT_TYPE == "multiple_choice"
    with user_supplied(f"{place} cannot be scored"):
        answers = [(-1.0, False)] * len(task.doc_to_choice(doc)) if chooses else ["text"]
        task.process_results(doc, answers)
    right = task.doc_to_target(doc) if chooses else None
    if isinstance(right, int) and not 0 <= right < len(answers):
        raise DataError(f"{place} has {len(answers)} choices, from 0, and the right one is said to be {right}.")


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real | np.bool_) and math.isfinite(value)
