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
from functools import partial
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from loopdropout_trainer.data.rows import DataError, read_files
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.evaluation.benchmark import AnswerLog, Benchmark, Task
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
            tasks = self._load_tasks(name, manager, splits)
        self.check_scorer()
        for task in tasks:
            if getattr(task, "UNSAFE_CODE", False) and not confirmed:
                raise UserError(
                    f"`{name}` runs programs that the model has written, and lm-eval does not contain them: give "
                    "`--confirm_run_unsafe_code true` on the command line to run them with your own rights."
                )
            num_fewshot = self.num_fewshot
            if num_fewshot is None:
                num_fewshot = task.get_config("num_fewshot") or 0
            task.set_config(key="num_fewshot", value=num_fewshot)
            if self.generation:
                task.set_config(key="generation_kwargs", value=dict(self.generation), update=True)
            if splits is not None:
                task.dataset.check_examples(name, task.config)
                if self.metrics:
                    _check_problems(task)
        return LmEvalBenchmark(name, self, tasks, manager, limit, confirmed)

    def _load_tasks(self, name: str, manager: Any, splits: Mapping[str, LocalSplits] | None) -> list[Any]:
        """Return lm-eval's objects of the tasks, with local rows in place of the published ones where there are any."""
        names = [self.tasks]
        if self.folder is not None and self.tasks not in manager.all_subtasks:
            names = [task for task in manager.all_subtasks if task.startswith(f"{self.tasks}_")]
        elif self.tasks not in manager.all_tasks:  # the path of a YAML file, which can run code, is no name
            raise UserError(
                f"lm-eval has no task `{self.tasks}`; `python -m loopdropout_trainer.lm_eval ls tasks` lists them"
            )
        if splits or self.overrides:  # built-in tasks take other fields inside a group only
            specs = [{"task": task, **self.overrides} for task in splits or names]
            for spec in specs if splits else ():
                task = spec["task"]
                if task not in manager.all_subtasks:
                    raise DataError(f"`{name}` has no task `{task}`: `benchmark_files` takes a folder of TASK.jsonl.")
                spec |= {"custom_dataset": partial(_local_rows, splits[task]), "dataset_kwargs": None}
            names = [{"group": f"{name} with local settings", "task": specs}]
        return list(manager.load(names)["tasks"].values())

    def _local_splits(self, name: str, files: list[Path]) -> dict[str, LocalSplits]:
        """Read files of one task's rows or, told apart by `task_of`, of several's; or folders of `TASK[.SPLIT].jsonl`."""
        rows: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
        task_of = self.task_of or (lambda row: self.tasks)
        for path in files:
            if path.is_dir():
                for file in sorted(filter(Path.is_file, path.iterdir())):
                    task, _, split = file.name.removesuffix(".gz").rpartition(".")[0].partition(".")
                    rows[task][split] += read_problems(name, read_files([file]), lambda row: row)
            else:
                for task, row in read_problems(name, read_files([path]), lambda row: (task_of(row), row)):
                    rows[task][""].append(row)
        if not rows:
            raise DataError(f"`{name}` has no problems.")
        return {task: LocalSplits(task, rows[task]) for task in sorted(rows)}


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


def _local_rows(splits: LocalSplits, **dataset: Any) -> LocalSplits:
    return splits  # whatever dataset the task's own configuration names


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
        numbers = {task: _finite_numbers(row) for task, row in results["results"].items()}
        wanted = self.spec.metrics or {key: key for row in numbers.values() for key in row}
        predictions = []
        for task in self.tasks:
            group = task.task_name if len(self.tasks) > 1 else None
            problems: dict[int, dict[str, dict]] = defaultdict(dict)
            for sample in results["samples"][task.task_name]:
                problems[sample["doc_id"]][sample["filter"]] = sample
            for _, by_filter in sorted(problems.items()):
                predictions.append(_prediction(by_filter, wanted, group))
        of_all = numbers.get(self.spec.tasks, next(iter(numbers.values())))
        metrics = {}
        for name, key in wanted.items():
            values = [prediction.values[name] for prediction in predictions if name in prediction.values]
            if len(values) == len(predictions) and all(0 <= value <= 1 for value in values):
                metrics[name] = Metric.of(values)
            elif key in of_all:  # no share of the problems, such as a perplexity: as lm-eval gives it
                metrics[name] = Metric(of_all[key])
        if not metrics:
            raise UserError(f"lm-eval gives `{self.name}` no finite number for {', '.join(wanted) or 'any metric'}.")
        return BenchmarkResult(self.name, predictions, metrics)


def _finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite ones of lm-eval's numbers of a task by `metric,filter`, without their standard errors."""
    keys = [key for key in row if "," in key and "_stderr" not in key]
    return {key: float(row[key]) for key in keys if _is_finite(row[key])}


def _prediction(by_filter: Mapping[str, dict], wanted: Mapping[str, str], task: str | None) -> Prediction:
    """Return what lm-eval says of one problem as a prediction.

    Args:
        by_filter: its samples by the filter of the answer, of which each metric names its own.
        wanted: the metrics' names -> lm-eval's `metric,filter`.
        task: name of the task, if there are several.
    """
    values = {}
    for name, key in wanted.items():
        metric, _, answer_filter = key.rpartition(",")
        value = by_filter.get(answer_filter, {}).get(metric)
        if _is_finite(value):
            values[name] = float(value)
    first = next(iter(wanted), "")
    sample = by_filter.get(wanted.get(first, "").rpartition(",")[2]) or next(iter(by_filter.values()))
    responses = [response[0] for response in sample["resps"]]
    log_likelihoods = None
    if isinstance(responses[0], str):
        completion = responses[0]
        extracted = sample["filtered_resps"][0]
        extracted = None if extracted in ("[invalid]", "", None) else str(extracted)
    else:  # log-likelihoods of choices, or of the text itself
        numbers = [response[0] if isinstance(response, tuple | list) else response for response in responses]
        log_likelihoods = [float(number) for number in numbers]
        best = sample["arguments"][int(np.argmax(log_likelihoods))]
        completion = best[1] if len(best) > 1 else ""
        extracted = completion.strip()
    place = str(sample["doc_id"])
    value = values.get(first)
    return Prediction(
        prompt=sample["arguments"][0][0],
        completion=completion,
        reference=str(sample["target"]),
        extracted=extracted,
        correct=bool(value) if value in (0, 1) else None,
        id=place if task is None else f"{task}/{place}",
        values=values,
        groups=None if task is None else {"task": task},
        log_likelihoods=log_likelihoods,
    )


def _check_problems(task: Any) -> None:
    """Raise ValueError for a problem whose answers could not be scored, by scoring one that nobody gave."""
    chooses = task.OUTPUT_TYPE == "multiple_choice"
    for number, doc in enumerate(task.eval_docs, start=1):
        place = f"Problem {number} of `{task.task_name}`"
        with user_supplied(f"{place} cannot be scored"):
            answers = [(-1.0, False)] * len(task.doc_to_choice(doc)) if chooses else ["text"]
            task.process_results(doc, answers)
        right = task.doc_to_target(doc) if chooses else None
        if isinstance(right, int) and not 0 <= right < len(answers):
            raise DataError(f"{place} has {len(answers)} choices, from 0, and the right one is said to be {right}.")


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real | np.bool_) and math.isfinite(value)
