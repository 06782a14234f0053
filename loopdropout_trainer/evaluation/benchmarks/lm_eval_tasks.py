"""Tasks of lm-eval as benchmarks: its prompts and scorers, this package's model backend, and a log of every answer.

Every process builds all requests, computes its share of those that the log does not answer, and gets the others' answers
from them. So the results do not depend on the number of processes, and a killed evaluation continues inside a task.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
from loopdropout_trainer.settings.command import user_supplied
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
    check_scorer: Callable[[], None] = lambda: None

    def metric_names(self, name: str) -> tuple[str, ...]:
        return tuple(self.metrics or ())

    def load(self, name: str, files: Files | None, limit: int | None, confirmed: bool) -> LmEvalBenchmark:
        import lm_eval.tasks

        where = {} if self.folder is None else {"include_defaults": False}
        if self.folder is not None:
            where["include_path"] = str(Path(lm_eval.tasks.__file__).parent / self.folder)
        rows = None if files is None else read_local_rows(name, list_of(files), self.task_of)
        with (
            user_supplied(f"`{name}` cannot be loaded"),
            quiet("lm_eval.api.task"),
        ):  # of local datasets, for each task
            manager = lm_eval.tasks.TaskManager(**where)
            tasks = list(manager.load(self._specs(name, manager, rows))["tasks"].values())
        self.check_scorer()
        for task in tasks:
            if getattr(task, "UNSAFE_CODE", False) and not confirmed:
                raise ValueError(
                    f"`{name}` runs programs that the model has written, and lm-eval does not contain them: give "
                    "`--confirm_run_unsafe_code true` on the command line to run them with your own rights."
                )
            own = task.get_config("num_fewshot") or 0
            task.set_config(key="num_fewshot", value=own if self.num_fewshot is None else self.num_fewshot)
            if self.generation:
                task.set_config(key="generation_kwargs", value=dict(self.generation), update=True)
            if rows is not None:
                task.dataset.check_examples(name, task.config)
        return LmEvalBenchmark(name, self, tasks, manager, limit, confirmed)

    def _specs(self, name: str, manager: Any, rows: LocalRows | None) -> list[Any]:
        """Return what lm-eval's task manager loads: names, and dictionaries of what differs from the built-in tasks."""
        known = manager.all_subtasks
        names = [self.tasks] if self.tasks in (manager.all_tasks if self.folder is None else known) else []
        if self.folder is not None:
            names = names or [task for task in known if task.startswith(f"{self.tasks}_")]
        if not names:
            raise ValueError(
                f"lm-eval has no task `{self.tasks}`; `python -m loopdropout_trainer.lm_eval ls tasks` lists them"
            )
        if rows is None and not self.overrides:
            return names
        specs = {task: {"task": task, **self.overrides} for task in names}
        if rows is not None:
            of_one = set(rows) == {None}  # the files do not say of which task their rows are
            if of_one and (len(names) != 1 or names[0] not in known):
                raise DataError(
                    f"`{name}` has several tasks: `benchmark_files` must name a folder with TASK.jsonl for each."
                )
            for task in () if of_one else rows:
                if task not in (names if names[0] in known else known):  # the members of a group are not listed
                    raise DataError(f"`{name}` has no task `{task}`, which the local files have rows of.")
            specs = {
                task: {"task": task, **self.overrides, "custom_dataset": Splits(task, of_task), "dataset_kwargs": None}
                for task, of_task in ({names[0]: rows[None]} if of_one else dict(sorted(rows.items()))).items()
            }
        # Built-in tasks take other fields inside a group only.
        return [{"group": f"{name} with local settings", "task": list(specs.values())}]


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
            task, _, split = file.name.removesuffix(".gz").rpartition(".")[0].partition(".")
            for place, row in read_files([file]):
                try:
                    if isinstance(row, BadRow):
                        raise row
                    of_file = None if task_of is None else task_of(row)
                except (BadRow, KeyError) as error:
                    reason = f"the field {error} is missing" if isinstance(error, KeyError) else error
                    raise DataError(f"{place} is not a problem of `{name}`: {reason}.") from None
                found[task if path.is_dir() else of_file][split or None if path.is_dir() else None].append(row)
    if not found:
        raise DataError(f"`{name}` has no problems.")
    return found


class Splits:
    """A task's dataset of local rows. A split without rows of its own has those of the file that names none."""

    def __init__(self, task: str, splits: Mapping[str | None, list[Row]]) -> None:
        self.task, self.splits = task, splits

    def __call__(self, **kwargs: Any) -> Splits:
        """Return itself: lm-eval calls what gives it the dataset of a task."""
        return self

    def __getitem__(self, split: str) -> Dataset:
        rows = self.splits.get(split, self.splits.get(None))
        if rows is None:
            raise DataError(f"There is no file {self.task}.{split}.jsonl with the rows of the split `{split}`.")
        return Dataset.from_list(rows)

    def check_examples(self, name: str, config: Any) -> None:
        """Refuse examples in the prompt that would be test problems, because their own split has no rows."""
        tested = config.test_split or config.validation_split
        source = config.fewshot_split or config.training_split or tested
        given = isinstance(config.fewshot_config, dict) and config.fewshot_config.get("samples")
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
        table = {
            task: {key: float(row[key]) for key in row if "," in key and "_stderr" not in key and _is_finite(row[key])}
            for task, row in results["results"].items()
        }
        wanted = self.spec.metrics or {key: key for row in table.values() for key in row}
        predictions, values = [], {name: [] for name in wanted}
        for task, samples in self._problems(results["samples"]):
            scored = {}
            for name, key in wanted.items():
                metric, _, filtered = key.rpartition(",")
                value = samples.get(filtered, {}).get(metric)
                if _is_finite(value):
                    scored[name] = float(value)
                    values[name].append(float(value))
            first = next(iter(wanted.values())).rpartition(",")[2]
            sample = samples.get(first) or next(iter(samples.values()))
            predictions.append(_prediction(sample, scored, scored.get(next(iter(wanted))), task))
        of_all = table.get(self.spec.tasks, next(iter(table.values())))
        metrics = {}
        for name, key in wanted.items():
            if len(values[name]) == len(predictions) and all(0 <= value <= 1 for value in values[name]):
                metrics[name] = Metric.of(values[name])
            elif key in of_all:  # no share of the problems, such as a perplexity: as lm-eval gives it
                metrics[name] = Metric(of_all[key], None, None, len(predictions))
        if not metrics:
            raise ValueError(f"lm-eval gives `{self.name}` no finite number for {', '.join(wanted) or 'any metric'}.")
        return BenchmarkResult(self.name, predictions, metrics, {"lm_eval": table})

    def _problems(self, logged: Mapping[str, list[dict]]) -> Iterator[tuple[str | None, dict[str, dict]]]:
        """Yield each problem's task (None if there is one task only) and its samples by filter."""
        for task in self.tasks:
            problems: dict[int, dict[str, dict]] = defaultdict(dict)
            for sample in logged[task.task_name]:
                problems[sample["doc_id"]][sample["filter"]] = sample
            for _, samples in sorted(problems.items()):
                yield (task.task_name if len(self.tasks) > 1 else None), samples


def _prediction(sample: dict, scored: dict[str, float], value: float | None, task: str | None) -> Prediction:
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
    place, is_verdict = str(sample["doc_id"]), value in (0, 1)
    return Prediction(
        prompt=prompt,
        completion=completion,
        reference=str(sample["target"]),
        extracted=extracted,
        correct=bool(value) if is_verdict else None,
        id=place if task is None else f"{task}/{place}",
        values=None if is_verdict and len(scored) == 1 else scored,
        group=task,
        log_likelihoods=log_likelihoods,
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real | np.bool_) and math.isfinite(value)
