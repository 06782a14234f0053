"""One evaluation: models (a base, merged ones, adapters of it), some benchmarks, one file with all results."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers.hf_argparser import HfArg

from loopdropout_trainer.evaluation.answer_log import check_same
from loopdropout_trainer.evaluation.averages import averages_of, check_averages
from loopdropout_trainer.evaluation.benchmark import Benchmark
from loopdropout_trainer.evaluation.benchmarks import find_task, load_benchmark
from loopdropout_trainer.evaluation.evaluator import evaluate_subject
from loopdropout_trainer.evaluation.loading import load_model, model_identity, train_info
from loopdropout_trainer.evaluation.processes import all_processes, from_main_process
from loopdropout_trainer.evaluation.results import FORMAT, BenchmarkResult, read_evaluation
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.files import write_atomically
from loopdropout_trainer.settings.arguments import BenchmarkArguments, ModelArguments, check_depths
from loopdropout_trainer.settings.command import user_supplied
from loopdropout_trainer.settings.ranges import check_folder
from loopdropout_trainer.settings.recipe import RecipeError, public_settings
from loopdropout_trainer.settings.versions import library_versions


RESULTS_FILE = "evaluation.json"
SESSIONS_FILE = "sessions.jsonl"
ANSWERS_FOLDER = "answers"
BASE = "base"
"""Name of the row of the model alone."""

SINGLE_LOOP = "single_loop"
"""For `gates`: a row for each loop, with the adapter in this loop alone."""


@dataclass
class EvaluationArguments(BenchmarkArguments):
    """Which adapters to evaluate, at which depths and gates, on what, and where the results go."""

    adapter: list[str] | None = HfArg(
        default=None,
        help="Adapters, each a row of the results: PATH or NAME=PATH, a folder or Hub name; `none`: the model alone (base or "
        "merged), which is the default.",
    )
    at_depths: list[int] | None = HfArg(
        default=None,
        help="Recurrence depths, each a row of its own. Default: `num_loops`, or the model's own.",
    )
    gates: list[str] | None = HfArg(
        default=None,
        help="Gate of the adapter in each loop, such as 1-0-0-0; several are several rows. `single_loop`: a row for each "
        "loop, with the adapter in this loop alone. Default: ones.",
    )
    readout: int | None = HfArg(
        default=None, help="Loop, from 1, whose readout gives the logits. Default: the last one."
    )
    averages: dict[str, list[str]] | str | None = HfArg(
        default=None, help="Averages of metrics, as a mapping name: [metric, ...] (JSON on the command line)."
    )
    output_dir: str = HfArg(
        default="outputs/evaluation",
        help=f"Folder of {RESULTS_FILE}, and of the answers that an interrupted evaluation continues from.",
    )

    def __post_init__(self):
        super().__post_init__()
        check_folder("output_dir", self.output_dir)
        if not isinstance(self.benchmarks, list) or not self.benchmarks:
            raise ValueError(
                f"`benchmarks` must name one or more benchmarks, such as [gsm8k]; got {self.benchmarks!r}."
            )
        self.benchmark_files = self.benchmark_files or {}
        for name in (*self.benchmarks, *self.benchmark_files):
            find_task(name)
        self.averages = self.averages or {}
        check_averages(self.averages)
        check_depths("at_depths", self.at_depths)
        self.gates = [self.gates] if isinstance(self.gates, str) else self.gates  # text in a recipe
        if len(self.at_depths or ()) > 1 and set(self.gates or ()) - {SINGLE_LOOP}:
            raise ValueError(
                f"`gates` must be {SINGLE_LOOP} where there are several `at_depths`; got {', '.join(self.gates)}."
            )
        if self.at_depths and self.readout is not None and self.readout > min(self.at_depths):
            raise ValueError(f"`readout` must be one of the loops of all `at_depths`; got {self.readout}.")
        self.rows()

    def rows(self) -> dict[str, tuple[str | None, int | None]]:
        """Return adapter (None: the model alone) and depth (None: that of the settings) of each row's model, by name.

        Raises:
            ValueError: if two rows have one name.
        """
        given = [self.adapter] if isinstance(self.adapter, str) else self.adapter or ["none"]
        rows: dict[str, tuple[str | None, int | None]] = {}
        for each in map(str, given):
            name, named, path = each.partition("=")
            path = path if named else each
            if path == "none":
                path = None
            if not named:
                name = BASE if path is None else Path(path).name
            new = {f"{name}_K{depth}": (path, depth) for depth in self.at_depths or ()} or {name: (path, None)}
            if not name or "/" in name or name in (".", "..") or rows.keys() & new:
                raise ValueError(f"`adapter` must give each row a name of its own, as NAME=PATH; got {each!r}.")
            rows |= new
        return rows

    def gate_rows(self, row: str, num_loops: int) -> dict[str, str | None]:
        """Return the gates of the rows that a model of K loops with an adapter has, by name."""
        loops = range(num_loops)
        single = {f"{row}_loop{t + 1}": "-".join("1" if t == loop else "0" for loop in loops) for t in loops}
        if not self.gates or len(self.gates) == 1:
            gates = self.gates[0] if self.gates else None
            return single if gates == SINGLE_LOOP else {row: gates}
        rows: dict[str, str | None] = {}
        for gates in self.gates:
            rows |= single if gates == SINGLE_LOOP else {f"{row}_gates_{gates}": gates}
        return rows


def run_evaluation(model: ModelArguments, arguments: EvaluationArguments) -> dict[str, list[BenchmarkResult]]:
    """Evaluate each row on every benchmark, over all processes, and write the results file.

    Answers that are on disk are not computed again.

    Returns:
        The results by row.

    Raises:
        RecipeError: if model, adapter or a benchmark cannot be loaded, or gates or chat template do not fit.
        SettingsChangedError: if `output_dir` holds answers of another evaluation.
    """
    state = all_processes(timeout=timedelta(days=7))  # the first process may wait long for the last one
    file = ResultsFile(Path(arguments.output_dir), arguments.averages)
    file.read()
    with state.main_process_first():
        trained = {adapter: train_info(adapter) for adapter, _ in arguments.rows().values()}
        benchmarks = load_benchmarks(arguments)
    results: dict[str, list[BenchmarkResult]] = {}
    for name, (adapter, depth) in arguments.rows().items():
        settings = model if depth is None else replace(model, num_loops=depth)
        results |= _evaluate_model(settings, arguments, name, adapter, trained[adapter], benchmarks, file)
    return results


def _evaluate_model(
    model: ModelArguments,
    arguments: EvaluationArguments,
    name: str,
    adapter: str | None,
    trained: dict[str, Any],
    benchmarks: list[Benchmark],
    file: ResultsFile,
) -> dict[str, list[BenchmarkResult]]:
    """Evaluate a model under all of its gates, one row for each of them, and add each result to the file as it is there."""
    state = all_processes()
    with state.main_process_first():
        loaded, tokenizer = load_model(model, adapter)
    loaded.to(state.device)
    identity = from_main_process(lambda: model_identity(model, loaded, adapter))
    rows = {name: None} if adapter is None else arguments.gate_rows(name, find_looped_model(loaded).config.num_loops)
    try:
        subjects = {
            row: Subject.of(loaded, tokenizer, arguments, gates=gates, readout=arguments.readout)
            for row, gates in rows.items()
        }
        for subject in subjects.values():
            for benchmark in benchmarks:  # all of them, before the first one runs: a chat template may be missing
                benchmark.settings(subject)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    results: dict[str, list[BenchmarkResult]] = {}
    for row, subject in subjects.items():
        meta_info = {**identity, "adapter_path": adapter, **_facts_of(subject)}
        from_main_process(partial(file.check_row, row, meta_info))
        results[row] = []
        for benchmark in benchmarks:
            began = time.perf_counter()
            log_dir = file.folder / ANSWERS_FOLDER / row / benchmark.name.replace("/", "_")
            result = evaluate_subject(subject, benchmark, log_dir, identity)
            results[row].append(result)
            if not state.is_main_process:
                continue
            on_gpu = state.device.type == "cuda"
            entry = {
                "kind": benchmark.kind,
                **result.as_json(),
                "settings": {**identity, **benchmark.settings(subject)},
                "run_info": {
                    "settings": public_settings({**asdict(model), **asdict(arguments)}),
                    "versions": library_versions(),
                    "device": torch.cuda.get_device_name(state.device) if on_gpu else str(state.device),
                    "num_processes": state.num_processes,
                },
            }
            row_info = {"meta_info": meta_info, "train_info": trained}
            file.add(row, row_info, benchmark.name, entry, time.perf_counter() - began)
    return results


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


def load_benchmarks(arguments: BenchmarkArguments) -> list[Benchmark]:
    """Load the benchmarks, from the Hub or the named files.

    Raises:
        RecipeError: for a file that cannot be read, a bad row, or something missing that scoring needs.
    """
    names = [name for name in arguments.benchmarks if find_task(name).part_of not in arguments.benchmarks]
    files, confirmed = arguments.benchmark_files or {}, arguments.confirm_run_unsafe_code
    loaded = []
    for name in names:
        with user_supplied(f"The benchmark `{name}` cannot be loaded"):
            loaded.append(load_benchmark(name, files.get(name), arguments.benchmark_limit, confirmed))
    return loaded


class ResultsFile:
    """The results file of a folder, which several evaluations may add to; see docs/evaluation.md.

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
            return read_evaluation(self.path) if self.path.is_file() else {"format": FORMAT, "rows": {}}
        except ValueError as error:  # another program's, or an older format
            raise RecipeError(f"{error} Give another `output_dir`.") from error

    def check_row(self, row: str, meta_info: Mapping[str, Any]) -> None:
        """Refuse to add another model's results to a row.

        Raises:
            SettingsChangedError: if the row is of another model, depth or gates.
        """
        there = self.read()["rows"].get(row)
        if there is not None:
            before, now = ({**info, "adapter_path": None} for info in (there["meta_info"], meta_info))  # it may move
            check_same(before, now, f"{self.path}, row `{row}`,")

    def add(
        self, row: str, row_info: Mapping[str, Any], benchmark: str, entry: Mapping[str, Any], seconds: float
    ) -> None:
        """Write a benchmark's entry to the file, beside what others may have written since; and note the time it took."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.path.name}.lock")):
            report = self.read()
            content = report["rows"].setdefault(row, {**row_info, "benchmarks": {}})
            content["benchmarks"][benchmark] = entry
            content["averages"] = {**content.get("averages", {}), **averages_of(content["benchmarks"], self.averages)}
            text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
            write_atomically(self.path, text + "\n")
        line = {
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "row": row,
            "benchmark": benchmark,
            "seconds": round(seconds, 1),
            **{key: entry["run_info"][key] for key in ("device", "num_processes")},
        }
        with (self.folder / SESSIONS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
