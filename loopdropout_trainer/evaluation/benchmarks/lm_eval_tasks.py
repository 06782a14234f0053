"""Tasks of lm-eval as benchmarks: its prompts and scorers, this package's model backend, and a log of every answer.

Every process builds all requests, computes its share of those that the log does not answer, and gets the others' answers
from them. So the results do not depend on the number of processes, and a killed evaluation continues inside a task.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset

from loopdropout_trainer.data.rows import BadRow, DataError, read_files
from loopdropout_trainer.evaluation.answer_log import AnswerLog
from loopdropout_trainer.evaluation.benchmark import Benchmark, Files, Task, list_of
from loopdropout_trainer.evaluation.benchmarks.generated import Row
from loopdropout_trainer.evaluation.loading import quiet
from loopdropout_trainer.evaluation.processes import random_states_kept
from loopdropout_trainer.evaluation.results import BenchmarkResult, Metric, Prediction
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.saving.files import sha256_of_json
from loopdropout_trainer.settings.command import one_line
from loopdropout_trainer.settings.versions import library_versions


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
    check_scorer: Callable[[], None] | None = None

    def metric_names(self, name: str) -> tuple[str, ...]:
        return tuple(self.metrics or ())

    def load(
        self, name: str, files: Files | None = None, limit: int | None = None, confirm_run_unsafe_code: bool = False
    ) -> LmEvalBenchmark:
        if find_spec("lm_eval") is None:
            raise ValueError(
                f'`{name}` needs lm-eval, which is not installed: pip install "loopdropout-trainer[eval]".'
            )
        import lm_eval.tasks

        root = Path(lm_eval.tasks.__file__).parent
        try:
            manager = (
                lm_eval.tasks.TaskManager()
                if self.folder is None
                else lm_eval.tasks.TaskManager(include_path=str(root / self.folder), include_defaults=False)
            )
            rows = None if files is None else read_local_rows(name, list_of(files), self.task_of)
            specs = self._specs(name, manager, rows)
            with quiet("lm_eval.api.task"):  # it tells how to use local datasets, for each of them
                tasks = list(manager.load(specs)["tasks"].values())
        except DataError:
            raise
        except Exception as error:  # a task's own code runs here, and the Hub's client raises many kinds
            raise ValueError(f"`{name}` cannot be loaded: {one_line(error)}") from error
        if self.check_scorer is not None:
            self.check_scorer()
        benchmark = LmEvalBenchmark(name, self, tasks, manager, limit, confirm_run_unsafe_code)
        for task in tasks:
            if getattr(task, "UNSAFE_CODE", False) and not confirm_run_unsafe_code:
                raise ValueError(
                    f"`{name}` runs programs that the model has written, and lm-eval does not contain them: give "
                    "`--confirm_run_unsafe_code true` on the command line to run them with your own rights."
                )
            if self.num_fewshot is not None:
                task.set_config(key="num_fewshot", value=self.num_fewshot)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            if self.generation:
                task.set_config(key="generation_kwargs", value=dict(self.generation), update=True)
            if isinstance(task.dataset, Splits):
                task.dataset.check_examples(name, task)
        return benchmark

    def _specs(self, name: str, manager: Any, rows: LocalRows | None) -> list[Any]:
        """Return what lm-eval's task manager loads: names, and dictionaries of what differs from the built-in tasks."""
        known = manager.all_subtasks
        if self.folder is not None:
            names = [task for task in known if task == self.tasks]
            names = names or [task for task in known if task.startswith(f"{self.tasks}_")]
        elif self.tasks in manager.all_tasks:
            names = [self.tasks]
        else:
            raise ValueError(
                f"lm-eval has no task `{self.tasks}`; `python -m loopdropout_trainer.lm_eval ls tasks` lists them"
            )
        if rows is None and not self.overrides:
            return names
        differing = {task: {"task": task, **self.overrides} for task in names}
        if rows is not None:
            if set(rows) == {None} and (len(names) != 1 or names[0] not in known):
                raise DataError(
                    f"`{name}` has several tasks: let `benchmark_files` name a folder with a file for each, TASK.jsonl."
                )
            chosen = names if set(rows) == {None} else sorted(rows)
            valid = known if names and names[0] not in known else names  # the members of a group are not listed
            for task in chosen:
                if task not in valid:
                    raise DataError(f"`{name}` has no task `{task}`, which the local files have rows of.")
            differing = {
                task: {
                    "task": task,
                    **self.overrides,
                    "custom_dataset": Splits(task, rows.get(task, rows.get(None))),
                    "dataset_kwargs": None,
                }
                for task in chosen
            }
        # Built-in tasks take other fields inside a group only.
        return [{"group": f"{name} with local settings", "task": list(differing.values())}]


# Local files

LocalRows = dict[str | None, dict[str | None, list[Row]]]
"""Rows by task and split; None where the file does not say which."""


def read_local_rows(name: str, files: list[Any], task_of: Callable[[Row], str] | None) -> LocalRows:
    """Read files of one task's problems or, told apart by `task_of`, of several's; or folders of `TASK[.SPLIT].jsonl`.

    Raises:
        DataError: for a file that cannot be read or a bad row; it names file and row.
    """
    found: LocalRows = defaultdict(lambda: defaultdict(list))
    for path in map(Path, files):
        for file in sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]:
            task, split = None, None
            if path.is_dir():
                task, _, split = file.name.removesuffix(".gz").rpartition(".")[0].partition(".")
            for place, row in read_files([file]):
                if isinstance(row, BadRow):
                    raise DataError(f"{place} is not a problem of `{name}`: {row}")
                try:
                    row_task = task if path.is_dir() or task_of is None else task_of(row)
                except KeyError as error:
                    raise DataError(f"{place} is not a problem of `{name}`: the field {error} is missing") from None
                found[row_task][split or None].append(row)
    if not found:
        raise DataError(f"`{name}` has no problems.")
    return found


class Splits:
    """A task's dataset of local rows. A split without rows of its own has those of the file that names none."""

    def __init__(self, task: str, splits: Mapping[str | None, list[Row]]) -> None:
        self.task = task
        self.splits = splits

    def __call__(self, **kwargs: Any) -> Splits:
        """Return itself: lm-eval calls what gives it the dataset of a task."""
        return self

    def __getitem__(self, split: str) -> Dataset:
        rows = self.splits.get(split, self.splits.get(None))
        if rows is None:
            raise DataError(f"There is no file {self.task}.{split}.jsonl with the rows of the split `{split}`.")
        return Dataset.from_list(rows)

    def check_examples(self, name: str, task: Any) -> None:
        """Refuse examples in the prompt that would be test problems, because their own split has no rows.

        Raises:
            DataError: if there are such.
        """
        config = task.config
        tested = config.test_split or config.validation_split
        source = config.fewshot_split or config.training_split or tested
        given = (config.fewshot_config or {}).get("samples") if isinstance(config.fewshot_config, dict) else None
        if config.num_fewshot and not given and source != tested and source not in self.splits:
            raise DataError(
                f"`{name}` shows {config.num_fewshot} examples of the split `{source}`: let `benchmark_files` name a folder "
                f"with {self.task}.jsonl and {self.task}.{source}.jsonl."
            )


# Running


@dataclass
class LmEvalBenchmark(Benchmark):
    """Loaded tasks of lm-eval.

    Attributes:
        name: for reports and files.
        spec: which tasks these are, and what differs from lm-eval's own settings.
        tasks: lm-eval's objects.
        manager: that loaded them.
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

    def settings(self, subject: Subject) -> dict[str, Any]:
        problems = [
            [task.task_name, task.VERSION, *(repr(doc) for doc in islice(task.eval_docs, self.limit))]
            for task in self.tasks
        ]
        return {
            "benchmark": self.name,
            "problems_sha256": sha256_of_json(problems),
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
        table = {task: _numbers(row) for task, row in results["results"].items()}
        wanted = self.spec.metrics
        if wanted is None:
            keys = [key for row in table.values() for key in row]
            wanted = {key: key for key in dict.fromkeys(keys)}
        predictions, values = [], {name: [] for name in wanted}
        first = next(iter(wanted.values()))
        for task in self.tasks:
            documents: dict[int, dict[str, dict]] = defaultdict(dict)  # problem -> filter -> sample
            for sample in results["samples"][task.task_name]:
                documents[sample["doc_id"]][sample["filter"]] = sample
            for place, samples in sorted(documents.items()):
                scored = {name: _value(samples, key) for name, key in wanted.items()}
                for name, value in scored.items():
                    if value is not None:
                        values[name].append(value)
                predictions.append(_prediction(samples, first, scored, task.task_name, place, len(self.tasks) > 1))
        metrics = {}
        for name, key in wanted.items():
            if len(values[name]) == len(predictions) and all(0 <= value <= 1 for value in values[name]):
                metrics[name] = Metric.of(values[name])
            else:  # no share of the problems, such as a perplexity: as lm-eval gives it
                number = table.get(self.spec.tasks, next(iter(table.values()))).get(key)
                if number is not None:
                    metrics[name] = Metric(number, None, None, len(predictions))
        if not metrics:
            raise ValueError(f"lm-eval gives `{self.name}` no finite number for {', '.join(wanted) or 'any metric'}.")
        return BenchmarkResult(self.name, predictions, metrics, {"lm_eval": table})


def _prediction(
    samples: Mapping[str, dict], first: str, scored: Mapping[str, float | None], task: str, place: int, grouped: bool
) -> Prediction:
    filtered = first.rpartition(",")[2]
    sample = samples.get(filtered) or next(iter(samples.values()))
    responses = [response[0] for response in sample["resps"]]
    prompt, log_likelihoods = sample["arguments"][0][0], None
    if isinstance(responses[0], str):
        completion, extracted = responses[0], sample["filtered_resps"][0]
        extracted = None if extracted in ("[invalid]", "", None) else str(extracted)
    else:  # log-likelihoods of choices, or of the text itself
        log_likelihoods = [float(each[0] if isinstance(each, tuple | list) else each) for each in responses]
        best = max(range(len(responses)), key=log_likelihoods.__getitem__)
        completion = sample["arguments"][best][1] if len(sample["arguments"][best]) > 1 else ""
        extracted = completion.strip()
    value = scored[next(iter(scored))]
    integer = value in (0, 1)
    return Prediction(
        prompt=prompt,
        completion=completion,
        reference=str(sample["target"]),
        extracted=extracted,
        correct=bool(value) if integer else None,
        id=f"{task}/{place}" if grouped else str(place),
        values=None
        if integer and len(scored) == 1
        else {name: value for name, value in scored.items() if value is not None},
        group=task if grouped else None,
        log_likelihoods=log_likelihoods,
    )


def _value(samples: Mapping[str, dict], key: str) -> float | None:
    """Return a problem's value of a metric, if it is a finite number."""
    metric, _, filtered = key.rpartition(",")
    value = samples.get(filtered, {}).get(metric)
    return float(value) if isinstance(value, Real | np.bool_) and math.isfinite(value) else None


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row of lm-eval's table that are finite numbers."""
    return {
        key: float(value)
        for key, value in row.items()
        if "," in key and "_stderr" not in key and isinstance(value, Real) and math.isfinite(value)
    }
