"""One evaluation: models (a base, merged ones, adapters of it), some benchmarks, one file with all results."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.evaluation.answer_log import check_same
from loopdropout_trainer.evaluation.benchmark import Benchmark, evaluate_subject
from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, find_task, load_benchmark
from loopdropout_trainer.evaluation.loading import load_model, model_identity, train_info
from loopdropout_trainer.evaluation.results import BenchmarkResult, add_result, read_evaluation
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.processes import all_processes, from_main_process
from loopdropout_trainer.settings.arguments import BenchmarkArguments, ModelArguments, check_depths
from loopdropout_trainer.settings.ranges import check_distinct, check_folder
from loopdropout_trainer.settings.recipe import public_settings
from loopdropout_trainer.settings.versions import library_versions
from loopdropout_trainer.training.memory import device_name


RESULTS_FILE = "evaluation.json"
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
        default=None, help="Recurrence depths, each a row of its own. Default: `num_loops`, or the model's own."
    )
    gates: list[str] | None = HfArg(
        default=None,
        help="Gate of the adapter in each loop, such as 1-0-0-0; several are several rows. `single_loop`: a row for each "
        "loop, with the adapter in this loop alone. Default: ones.",
    )
    use_cpu: bool = HfArg(default=False, help="Evaluate on the CPU, also where there is an accelerator.")
    readout: int | None = HfArg(default=None, help="Loop, from 1, whose readout gives the logits. Default: the last.")
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
        if not self.benchmarks:
            raise UserError("`benchmarks` must name one or more benchmarks, such as [gsm8k].")
        self.benchmark_files = self.benchmark_files or {}
        for name in (*self.benchmarks, *self.benchmark_files):
            find_task(name)
        self.averages = self.averages or {}
        known = {metric for name, task in BENCHMARKS.items() for metric in task.metric_names(name)}
        averages = self.averages if isinstance(self.averages, dict) else {"": self.averages}
        for name, metrics in averages.items():  # lm-eval's own metrics are written `metric,filter`
            valid = isinstance(metrics, list) and all(each in known or "," in str(each) for each in metrics)
            if not (valid and metrics):
                raise UserError(f"`averages` must map names to lists of {', '.join(known)}; got `{name}: {metrics}`.")
            check_distinct("averages", metrics)
        check_depths("at_depths", self.at_depths)
        self.gates = [self.gates] if isinstance(self.gates, str) else self.gates  # text in a recipe
        if len(self.at_depths or ()) > 1 and set(self.gates or ()) - {SINGLE_LOOP}:
            raise UserError(
                f"`gates` must be {SINGLE_LOOP} where there are several `at_depths`; got {', '.join(self.gates)}."
            )
        if self.at_depths and self.readout is not None and self.readout > min(self.at_depths):
            raise UserError(f"`readout` must be one of the loops of all `at_depths`; got {self.readout}.")
        check_distinct("gates", self.gates or [])
        if not any(adapter for adapter, _ in self.rows().values()) and self.gates:
            raise UserError("`gates` multiply an adapter's update: give `adapter`, or leave them out.")

    def rows(self) -> dict[str, tuple[str | None, int | None]]:
        """Return adapter (None: the model alone) and depth (None: that of the settings) of each row, by its own name."""
        rows: dict[str, tuple[str | None, int | None]] = {}
        for each in [self.adapter] if isinstance(self.adapter, str) else self.adapter or ["none"]:
            name, path = str(each).split("=", 1) if "=" in str(each) else ("", str(each))
            adapter = None if path == "none" else path
            name = name or (BASE if adapter is None else Path(path).name)
            new = {f"{name}_K{depth}": (adapter, depth) for depth in self.at_depths or ()} or {name: (adapter, None)}
            is_of_gates = self.gates and re.search(r"_(loop\d+|gates_.+)$", name)  # as `gate_rows` names them
            if name in ("", ".", "..") or "/" in name or not path or is_of_gates or rows.keys() & new:
                raise UserError(f"`adapter` must give each row a name of its own, as NAME=PATH; got {each!r}.")
            rows |= new
        return rows

    def gate_rows(self, row: str, num_loops: int) -> dict[str, str | None]:
        """Return the gates of the rows that a model of K loops with an adapter has, by name."""
        loops, several = range(num_loops), len(self.gates or ()) > 1
        rows: dict[str, str | None] = {}
        for gates in self.gates or [None]:
            if gates == SINGLE_LOOP:
                rows |= {f"{row}_loop{t + 1}": "-".join(str(int(t == loop)) for loop in loops) for t in loops}
            else:
                rows[f"{row}_gates_{gates}" if several else row] = gates
        return rows


def run_evaluation(model: ModelArguments, arguments: EvaluationArguments) -> dict[str, list[BenchmarkResult]]:
    """Evaluate each row on every benchmark, over all processes, and write the results file; return the results by row.

    Answers that are on disk are not computed again.

    Raises:
        ValueError: if model, adapter or a benchmark cannot be loaded, or gates or chat template do not fit.
        SettingsChangedError: if `output_dir` holds answers of another evaluation.
    """
    if model.num_loops and arguments.at_depths:
        raise UserError("`num_loops` and `at_depths` exclude each other: the depths are all that is evaluated.")
    state = all_processes(arguments.use_cpu)
    path = Path(arguments.output_dir, RESULTS_FILE)
    if path.is_dir() or path.with_name("answers").is_file():
        raise UserError(
            f"`output_dir` {arguments.output_dir} has a folder in the place of the file {RESULTS_FILE}, or a file in that "
            "of the folder answers."
        )
    before = from_main_process(lambda: read_evaluation(path)["rows"] if path.is_file() else {})
    with state.main_process_first():
        trained = {adapter: train_info(adapter) for adapter, _ in arguments.rows().values()}
        files, benchmarks = arguments.benchmark_files, []
        for name in arguments.benchmarks:
            if find_task(name).part_of not in arguments.benchmarks:
                with user_supplied(f"The benchmark `{name}` cannot be loaded"):
                    limit, confirmed = arguments.benchmark_limit, arguments.confirm_run_unsafe_code
                    revision = (arguments.benchmark_revisions or {}).get(name)
                    benchmarks.append(load_benchmark(name, files.get(name), limit, confirmed, revision))
    run_info = {
        "settings": public_settings({**asdict(model), **asdict(arguments)}),
        "versions": library_versions(),
        "device": device_name(),
        "num_processes": state.num_processes,
    }
    results: dict[str, list[BenchmarkResult]] = {}
    for name, (adapter, depth) in arguments.rows().items():
        settings = model if depth is None else replace(model, num_loops=depth)
        for row, (subject, meta_info, identity) in _rows_of(settings, arguments, name, adapter, benchmarks).items():
            if row in before:  # another model's results are not added to; where the adapter lies may change
                there = {**before[row]["meta_info"], "adapter_path": adapter}
                check_same(there, meta_info, f"{path}, row `{row}`,")
            results[row] = []
            for benchmark in benchmarks:
                log_dir = path.parent / "answers" / row / benchmark.name.replace("/", "_")
                result = evaluate_subject(subject, benchmark, log_dir, identity)
                results[row].append(result)
                if state.is_main_process:
                    depends_on = {**identity, **benchmark.settings(subject)}
                    entry = {"kind": benchmark.kind, **result.as_json(), "settings": depends_on, "run_info": run_info}
                    row_info = {"meta_info": meta_info, "train_info": trained[adapter]}
                    add_result(path, row, row_info, benchmark.name, entry, arguments.averages)
    return results


def _rows_of(
    model: ModelArguments, arguments: EvaluationArguments, name: str, adapter: str | None, benchmarks: list[Benchmark]
) -> dict[str, tuple[Subject, dict[str, Any], dict[str, Any]]]:
    """Load a model, and return it under each of its gates, with the row's `meta_info` and what tells its weights."""
    state = all_processes()
    with state.main_process_first():
        loaded, tokenizer = load_model(model, adapter)
    looped = find_looped_model(loaded.to(state.device))
    identity = from_main_process(lambda: model_identity(model, loaded, adapter))
    sizes = [p.numel() for key, p in looped.named_parameters() if not ("lora_" in key or "loop_gates" in key)]
    facts = {"adapter_path": adapter, "model_type": looped.config.model_type, "num_parameters": sum(sizes)}
    rows = {}
    gates_of = {name: None} if adapter is None else arguments.gate_rows(name, looped.config.num_loops)
    for row, gates in gates_of.items():
        subject = Subject.of(loaded, tokenizer, arguments, gates=gates, readout=arguments.readout)
        for benchmark in benchmarks:  # all of them, before the first one runs: a chat template may be missing
            benchmark.settings(subject)
        run_as = {key: getattr(subject, key) for key in ("num_loops", "gates", "readout")}
        rows[row] = (subject, {**identity, **facts, **run_as}, identity)
    return rows
