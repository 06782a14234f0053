"""One evaluation: models (a base, merged ones, adapters of it) on some benchmarks, and the rows of what was measured."""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from loopdropout_trainer.checks import check_distinct, check_folder
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.evaluation.answer_log import AnswerLog, check_same
from loopdropout_trainer.evaluation.benchmark import Benchmark, evaluate_subject
from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, find_task, load_benchmark
from loopdropout_trainer.evaluation.loading import load_model, training_of
from loopdropout_trainer.evaluation.results import ANSWERS_FOLDER, BenchmarkResult
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.processes import all_processes, from_main_process
from loopdropout_trainer.record.identity import ONE_MODEL, ONE_RUN, Identity, differences, identity_key, model_identity
from loopdropout_trainer.record.measurement import (
    BASE,
    MEASUREMENTS_FILE,
    Measurement,
    read_measurements,
    write_measurements,
)
from loopdropout_trainer.saving.files import folder_lock
from loopdropout_trainer.settings.arguments import BenchmarkArguments, ModelArguments, check_depths


logger = logging.getLogger(__name__)

WRITER = "evaluation"
"""Of measurements: `evaluation/ROW/BENCHMARK`."""


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
        help=f"Folder of {MEASUREMENTS_FILE}, and of the answers that an interrupted evaluation continues from.",
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
        averages = self.averages if isinstance(self.averages, dict) else {"": self.averages}
        tasks = BENCHMARKS.items() if averages else ()
        known = {metric for name, task in tasks for metric in task.metric_names(name)}
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
        if not any(adapter for _, adapter, _ in self.rows().values()) and self.gates:
            raise UserError("`gates` multiply an adapter's update: give `adapter`, or leave them out.")

    def rows(self) -> dict[str, tuple[str, str | None, int | None]]:
        """Return of each row, by its name, that of its adapter, the adapter (None: the model alone), and the depth, if any."""
        rows: dict[str, tuple[str, str | None, int | None]] = {}
        for each in [self.adapter] if isinstance(self.adapter, str) else self.adapter or ["none"]:
            name, path = str(each).split("=", 1) if "=" in str(each) else ("", str(each))
            adapter = None if path == "none" else path
            name = name or (BASE if adapter is None else Path(path).name)
            new = {f"{name}_K{depth}": (name, adapter, depth) for depth in self.at_depths or ()}
            new = new or {name: (name, adapter, None)}
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


class _Row(NamedTuple):
    """One row of the results: an adapter, or none, at a depth and under gates; `given` is the name of its adapter's rows."""

    name: str
    given: str
    model: ModelArguments
    adapter: str | None
    gates: str | None


class _Models:
    """Loads models, and keeps the last one, which several rows may share."""

    def __init__(self) -> None:
        self._key: tuple[str | None, int | None] | None = None
        self.model: nn.Module | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.identity: Identity = {}

    def load(self, model: ModelArguments, adapter: str | None) -> None:
        if self._key == (adapter, model.num_loops):
            return
        self.model, state = None, all_processes()  # before the next one takes its place in memory
        with state.main_process_first():
            self.model, self.tokenizer = load_model(model, adapter)
        self.model.to(state.device)
        self.identity = from_main_process(lambda: model_identity(self.model, self.tokenizer))
        self._key = (adapter, model.num_loops)


def run_evaluation(model: ModelArguments, arguments: EvaluationArguments) -> dict[str, list[BenchmarkResult]]:
    """Evaluate each row on every benchmark, over all processes, and write what was measured; return the results by row.

    Answers that are on disk are not computed again.

    Raises:
        ValueError: if model, adapter or a benchmark cannot be loaded, or gates or chat template do not fit.
        SettingsChangedError: if `output_dir` holds answers of another evaluation.
        LockedError: if another evaluation is at work there.
    """
    if model.num_loops and arguments.at_depths:
        raise UserError("`num_loops` and `at_depths` exclude each other: the depths are all that is evaluated.")
    all_processes(arguments.use_cpu)
    folder = Path(arguments.output_dir)
    if (folder / MEASUREMENTS_FILE).is_dir() or (folder / ANSWERS_FOLDER).is_file():
        raise UserError(
            f"`output_dir` {folder} has a folder in the place of the file {MEASUREMENTS_FILE}, or a file in that of the "
            f"folder {ANSWERS_FOLDER}."
        )
    if (old := folder / "evaluation.json").exists():
        raise UserError(f"{old} is of an earlier version of this package: move it away, or give another `output_dir`.")
    with ExitStack() as lock:
        from_main_process(lambda: lock.enter_context(folder_lock(folder / ANSWERS_FOLDER)))
        with all_processes().main_process_first():
            benchmarks = _load_benchmarks(arguments)
        models = _Models()
        rows = _checked_rows(model, arguments, benchmarks, models)
        return {row.name: _evaluate_row(row, arguments, benchmarks, models) for row in rows}


def _load_benchmarks(arguments: EvaluationArguments) -> list[Benchmark]:
    """Return the benchmarks that are asked for, but those that are parts of others among them."""
    benchmarks, files = [], arguments.benchmark_files
    for name in arguments.benchmarks:
        if find_task(name).part_of not in arguments.benchmarks:
            with user_supplied(f"The benchmark `{name}` cannot be loaded"):
                limit, confirmed = arguments.benchmark_limit, arguments.confirm_run_unsafe_code
                revision = (arguments.benchmark_revisions or {}).get(name)
                benchmarks.append(load_benchmark(name, files.get(name), limit, confirmed, revision))
    return benchmarks


def _checked_rows(
    model: ModelArguments, arguments: EvaluationArguments, benchmarks: list[Benchmark], models: _Models
) -> list[_Row]:
    """Return all rows, after loading every model once, and comparing each row with what was measured under its name."""
    folder = Path(arguments.output_dir)
    before, known = from_main_process(lambda: _measured_before(folder))
    rows = []
    for name, (given, adapter, depth) in arguments.rows().items():
        settings = model if depth is None else replace(model, num_loops=depth)
        models.load(settings, adapter)
        num_loops = find_looped_model(models.model).config.num_loops
        gates_of = {name: None} if adapter is None else arguments.gate_rows(name, num_loops)
        for row, gates in gates_of.items():
            rows.append(_Row(row, given, settings, adapter, gates))
            for benchmark in benchmarks:  # a chat template may be missing, too
                now = benchmark.identity(_subject(models, arguments, gates), models.identity)
                for measured in before.get(row, ()):
                    parts = ONE_RUN if measured.benchmark == benchmark.name else ONE_MODEL
                    check_same(known[measured.identity], now, f"{folder}, row `{row}`,", parts)
                answers = AnswerLog(_log_dir(folder, row, benchmark))
                from_main_process(lambda answers=answers, now=now: answers.check(now))
    return rows


def _measured_before(folder: Path) -> tuple[dict[str, list[Measurement]], dict[str, Identity]]:
    """Return the measurements of earlier evaluations in a folder by row, and the identities that they refer to."""
    measured, known, faults = read_measurements(folder)
    for fault in faults:
        logger.warning("Left out: %s", fault)
    rows: dict[str, list[Measurement]] = {}
    for each in measured:
        writer, *names = each.writer.split("/", 2)
        if writer == WRITER:
            rows.setdefault(names[0], []).append(each)
    return rows, known


def _log_dir(folder: Path, row: str, benchmark: Benchmark) -> Path:
    return folder / ANSWERS_FOLDER / row / benchmark.name.replace("/", "_")


def _subject(models: _Models, arguments: EvaluationArguments, gates: str | None) -> Subject:
    return Subject.of(models.model, models.tokenizer, arguments, gates=gates, readout=arguments.readout)


def _evaluate_row(
    row: _Row, arguments: EvaluationArguments, benchmarks: list[Benchmark], models: _Models
) -> list[BenchmarkResult]:
    """Evaluate one row on every benchmark, and write each result as soon as it is there."""
    folder, state = Path(arguments.output_dir), all_processes()
    models.load(row.model, row.adapter)
    subject, trained = _subject(models, arguments, row.gates), from_main_process(lambda: training_of(row.adapter))
    if state.is_main_process and trained["identity"]:
        for each in differences(trained["identity"], models.identity, ("base",)):
            logger.warning("The adapter %s was trained on another base: %s.", row.adapter, each)
    results = []
    for benchmark in benchmarks:
        result = evaluate_subject(subject, benchmark, _log_dir(folder, row.name, benchmark), models.identity)
        results.append(result)
        if state.is_main_process:
            identity = benchmark.identity(subject, models.identity)
            measurements = result.measurements(
                **subject.place,
                writer=f"{WRITER}/{row.name}/{benchmark.name}",
                method=trained["method"] or row.given,
                model=row.model.base_name,
                identity=identity_key(identity),
                run=trained["identity"] and identity_key(trained["identity"]),
                seed=trained["seed"],
                steps=trained["steps"],
            )
            write_measurements(folder, measurements, [identity, trained["identity"]])
    return results
