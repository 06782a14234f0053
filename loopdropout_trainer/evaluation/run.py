"""One evaluation: models (a base, merged ones, adapters of it), some benchmarks, one file with all results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock

from loopdropout_trainer.evaluation.answer_log import check_same
from loopdropout_trainer.evaluation.averages import averages_of
from loopdropout_trainer.evaluation.benchmark import Benchmark
from loopdropout_trainer.evaluation.benchmarks import find_task, load_benchmark
from loopdropout_trainer.evaluation.evaluator import put_to
from loopdropout_trainer.evaluation.loading import load_model, model_identity, one_line, train_info
from loopdropout_trainer.evaluation.processes import all_processes
from loopdropout_trainer.evaluation.results import FORMAT, BenchmarkResult, read_results
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.files import write_atomically
from loopdropout_trainer.settings.arguments import BenchmarkArguments, ModelArguments
from loopdropout_trainer.settings.ranges import check_folder
from loopdropout_trainer.settings.recipe import RecipeError, public_settings
from loopdropout_trainer.settings.versions import library_versions


RESULTS_FILE = "evaluation.json"
SESSIONS_FILE = "sessions.jsonl"
ANSWERS_FOLDER = "answers"
BASE = "base"
"""Name of the row of the model alone."""


@dataclass
class EvaluationArguments(BenchmarkArguments):
    """Which adapters to evaluate, at which depth and gates, on what, and where the results go."""

    adapter: list[str] | None = field(
        default=None,
        metadata={
            "help": "Adapters, each a row of the results: PATH or NAME=PATH, a folder or Hub name; `none`: the model alone "
            "(base or merged), which is the default."
        },
    )
    gates: str | None = field(
        default=None, metadata={"help": "Gate of the adapter in each loop, such as 1-0-0-0. Default: ones."}
    )
    readout: int | None = field(
        default=None, metadata={"help": "Loop, from 1, whose readout answers. Default: the last one."}
    )
    averages: dict[str, list[str]] | str | None = field(
        default=None,
        metadata={"help": "Averages of metrics, as a mapping name: [metric, ...] (JSON on the command line)."},
    )
    output_dir: str = field(
        default="outputs/evaluation",
        metadata={"help": f"Folder of {RESULTS_FILE}, and of the answers found so far if the run is interrupted."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_folder("output_dir", self.output_dir)
        if not isinstance(self.benchmarks, list) or not self.benchmarks:
            raise ValueError(
                f"`benchmarks` must name one or more benchmarks, such as [gsm8k]; got {self.benchmarks!r}."
            )
        for name in self.benchmarks:
            find_task(name)
        self.benchmark_files = self.benchmark_files or {}
        for name in self.benchmark_files:
            find_task(name)
        self.averages = self.averages or {}
        self.rows()

    def rows(self) -> dict[str, str | None]:
        """Return the adapters by the names of their rows; None: the model alone.

        Raises:
            ValueError: if two rows have one name.
        """
        given = [self.adapter] if isinstance(self.adapter, str) else self.adapter or ["none"]  # text in a recipe
        rows: dict[str, str | None] = {}
        for each in map(str, given):
            name, named, path = each.partition("=")
            path = path if named else each
            if path == "none":
                path = None
            if not named:
                name = BASE if path is None else Path(path).name
            if not name or "/" in name or name in rows:
                raise ValueError(f"`adapter` must give each row a name of its own, as NAME=PATH; got {each!r}.")
            rows[name] = path
        return rows


def run_evaluation(model: ModelArguments, arguments: EvaluationArguments) -> dict[str, list[BenchmarkResult]]:
    """Evaluate each row on every benchmark, over all processes, and write the results file.

    What the file holds already is not run again.

    Returns:
        The results by row.

    Raises:
        RecipeError: if model, adapter or a benchmark cannot be loaded, or gates or turns do not fit.
        SettingsChangedError: if `output_dir` holds answers of another evaluation.
    """
    state = all_processes(timeout=timedelta(days=7))  # the first process may wait long for the last one
    with state.main_process_first():
        benchmarks = load_benchmarks(arguments)
    evaluation = Evaluation(model, arguments, benchmarks, state)
    return {row: evaluation.run(row, adapter) for row, adapter in arguments.rows().items()}


class Evaluation:
    """What one call of `run_evaluation` does.

    Args:
        model, arguments: of the recipe.
        benchmarks: loaded ones.
        state: this process among all.
    """

    def __init__(
        self,
        model: ModelArguments,
        arguments: EvaluationArguments,
        benchmarks: list[Benchmark],
        state: PartialState,
    ) -> None:
        self.model = model
        self.arguments = arguments
        self.benchmarks = benchmarks
        self.state = state
        self.report = Report(Path(arguments.output_dir), arguments.averages)

    def run(self, row: str, adapter: str | None) -> list[BenchmarkResult]:
        """Evaluate one row."""
        subject = self._load(adapter)
        identity = self._from_main(lambda: model_identity(self.model, subject.model, adapter))
        try:  # for all of them, before the first one runs
            settings = {each.name: {**identity, **each.settings(subject)} for each in self.benchmarks}
        except ValueError as error:  # such as turns without a chat template
            raise RecipeError(one_line(error)) from error
        row_info = {
            "meta_info": {**identity, "adapter_path": adapter, **_facts_of(subject)},
            "train_info": train_info(adapter),
        }
        self._from_main(lambda: self.report.check_row(row, row_info["meta_info"]))
        return [self._answer(row, row_info, subject, each, identity, settings[each.name]) for each in self.benchmarks]

    def _load(self, adapter: str | None) -> Subject:
        with self.state.main_process_first():
            model, tokenizer = load_model(self.model, adapter)
        gates = None if adapter is None else self.arguments.gates  # the model alone has nothing to multiply
        try:
            return Subject.of(
                model.to(self.state.device), tokenizer, self.arguments, gates=gates, readout=self.arguments.readout
            )
        except ValueError as error:
            raise RecipeError(one_line(error)) from error

    def _answer(
        self,
        row: str,
        row_info: dict[str, Any],
        subject: Subject,
        benchmark: Benchmark,
        identity: dict[str, Any],
        settings: dict[str, Any],
    ) -> BenchmarkResult:
        """Return the result of one benchmark: what the results file holds, or a new one."""
        result = self._from_main(lambda: self.report.finished(row, benchmark.name, settings))
        if result is not None:
            return result
        began = time.perf_counter()
        answers = self.report.folder / ANSWERS_FOLDER / row / benchmark.name.replace("/", "_")
        result = put_to(subject, benchmark, answers, identity)
        if self.state.is_main_process:
            run_info = self._run_info()
            self.report.add(row, row_info, benchmark, settings, run_info, result)
            self.report.note(row, benchmark.name, time.perf_counter() - began, run_info)
        return result

    def _run_info(self) -> dict[str, Any]:
        device = self.state.device
        return {
            "settings": public_settings({**asdict(self.model), **asdict(self.arguments)}),
            "versions": library_versions(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "num_processes": self.state.num_processes,
        }

    def _from_main(self, compute: Callable[[], Any]) -> Any:
        """Return in all processes what the main one computes, or raise what it raises."""
        found: list[Any] = [None]
        if self.state.is_main_process:
            try:
                found = [compute()]
            except ValueError as error:
                found = [error]
        (found,) = broadcast_object_list(found)
        if isinstance(found, ValueError):
            raise found
        return found


def _facts_of(subject: Subject) -> dict[str, Any]:
    looped = find_looped_model(subject.model)
    added = ("lora_", "loop_gates")
    own = (p.numel() for name, p in looped.named_parameters() if not any(part in name for part in added))
    return {
        "num_loops": subject.num_loops,
        "gates": subject.gates,
        "readout": subject.readout,
        "model_type": looped.config.model_type,
        "num_parameters": sum(own),
    }


def load_benchmarks(arguments: EvaluationArguments) -> list[Benchmark]:
    """Load the benchmarks, from the Hub or the named files.

    Raises:
        RecipeError: for a file that cannot be read, or a bad row.
    """
    names = list(dict.fromkeys(arguments.benchmarks))
    names = [name for name in names if find_task(name).part_of not in names]
    try:
        return [load_benchmark(name, arguments.benchmark_files.get(name), arguments.benchmark_limit) for name in names]
    except (OSError, ValueError) as error:
        raise RecipeError(one_line(error)) from error


class Report:
    """The results file of a folder, which several evaluations may add to; see docs/results.md.

    Args:
        folder: of the file.
        averages: of metrics, by name; for each row that has them all.
    """

    def __init__(self, folder: Path, averages: Mapping[str, list[str]]) -> None:
        self.folder = folder
        self.path = folder / RESULTS_FILE
        self.averages = averages

    def read(self) -> dict[str, Any]:
        """Return what is there."""
        try:
            return read_results(self.path) if self.path.is_file() else {"format": FORMAT, "rows": {}}
        except ValueError as error:  # another program's, or an older format
            raise RecipeError(f"{one_line(error)} Give another `output_dir`.") from error

    def check_row(self, row: str, meta_info: Mapping[str, Any]) -> None:
        """Refuse to add another model's results to a row.

        Raises:
            SettingsChangedError: if the row is of another model, depth or gates.
        """
        there = self.read()["rows"].get(row)
        if there is not None:
            before, now = ({**info, "adapter_path": None} for info in (there["meta_info"], meta_info))  # it may move
            check_same(before, now, f"{self.path}, row `{row}`,")

    def finished(self, row: str, benchmark: str, settings: Mapping[str, Any]) -> BenchmarkResult | None:
        """Return the result of a benchmark that is there, or None.

        Raises:
            SettingsChangedError: if it was made under other settings.
        """
        measured = self.read()["rows"].get(row, {}).get("benchmarks", {}).get(benchmark)
        if measured is None:
            return None
        check_same(measured["settings"], json.loads(json.dumps(settings)), f"{self.path}, row `{row}`, `{benchmark}`,")
        return BenchmarkResult.from_json(benchmark, measured)

    def add(
        self,
        row: str,
        row_info: Mapping[str, Any],
        benchmark: Benchmark,
        settings: Mapping[str, Any],
        run_info: Mapping[str, Any],
        result: BenchmarkResult,
    ) -> None:
        """Write a result to the file, beside what others may have written since."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.path.name}.lock")):
            report = self.read()
            entry = report["rows"].setdefault(row, {**row_info, "benchmarks": {}})
            entry["benchmarks"][benchmark.name] = {
                "kind": benchmark.kind,
                **result.as_json(),
                "settings": settings,
                "run_info": run_info,
            }
            entry["averages"] = {**entry.get("averages", {}), **averages_of(entry["benchmarks"], self.averages)}
            write_atomically(self.path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")

    def note(self, row: str, benchmark: str, seconds: float, run_info: Mapping[str, Any]) -> None:
        """Add a line about this call: what it worked on, when and for how long."""
        line = {
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "row": row,
            "benchmark": benchmark,
            "seconds": round(seconds, 1),
            "device": run_info["device"],
            "num_processes": run_info["num_processes"],
        }
        with (self.folder / SESSIONS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
