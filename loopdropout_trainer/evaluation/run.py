"""One evaluation: models (a base, merged ones, adapters of it) on some benchmarks, and the rows of what was measured."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.checks import check_distinct, check_folder
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.evaluation.benchmark import AnswerLog, Benchmark, check_same, evaluate_subject
from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, find_task, load_from
from loopdropout_trainer.evaluation.results import ANSWERS_FOLDER, BenchmarkResult, answers_folder
from loopdropout_trainer.evaluation.subject import Subject, load_in_all_processes, training_of
from loopdropout_trainer.processes import all_processes, from_main_process
from loopdropout_trainer.record.identity import ONE_MODEL, ONE_RUN, Identity, differences, identity_key
from loopdropout_trainer.record.measurement import (
    BASE,
    MEASUREMENTS_FILE,
    read_measurements,
    write_measurements,
)
from loopdropout_trainer.saving.files import folder_lock_for_all
from loopdropout_trainer.settings.arguments import BenchmarkArguments, ModelArguments, setting


logger = logging.getLogger(__name__)

WRITER = "evaluation"
"""Of measurements: `evaluation/ROW/BENCHMARK`."""


SINGLE_LOOP = "single_loop"
"""For `gates`: a row for each loop, with the adapter in this loop alone."""


@dataclass
class EvaluationArguments(BenchmarkArguments):
    """Which adapters to evaluate, at which depths and gates, on what, and where the results go."""

    adapter: list[str] | None = setting(
        None,
        "Adapters, each a row of the results: PATH or NAME=PATH, a folder or Hub name; `none`: the model alone (base or "
        "merged), which is the default.",
    )
    at_depths: list[int] | None = setting(
        None, "Recurrence depths, each a row of its own. Default: `num_loops`, or the model's own."
    )
    gates: list[str] | None = setting(
        None,
        "Gate of the adapter in each loop, such as 1-0-0-0; several are several rows. `single_loop`: a row for each "
        "loop, with the adapter in this loop alone. Default: ones.",
    )
    use_cpu: bool = setting(False, "Evaluate on the CPU, also where there is an accelerator.")
    readout: int | None = setting(None, "Loop, from 1, whose readout gives the logits. Default: the last.")
    averages: dict[str, list[str]] | None = setting(
        None, "Averages of metrics, as a mapping name: [metric, ...] (JSON on the command line)."
    )
    output_dir: str = setting(
        "outputs/evaluation",
        f"Folder of {MEASUREMENTS_FILE}, and of the answers that an interrupted evaluation continues from.",
    )

    def __post_init__(self):
        super().__post_init__()
        check_folder("output_dir", self.output_dir)
        if not self.benchmarks:
            raise UserError("`benchmarks` must name one or more benchmarks, such as [gsm8k].")
        for name in (*self.benchmarks, *(self.benchmark_files or ())):
            find_task(name)
        self.averages = self.averages or {}
        for name, metrics in self.averages.items():
            _check_average(name, metrics)
        check_distinct("at_depths", self.at_depths or [])
        if len(self.at_depths or ()) > 1 and set(self.gates or ()) - {SINGLE_LOOP}:
            raise UserError(
                f"`gates` must be {SINGLE_LOOP} where there are several `at_depths`; got {', '.join(self.gates)}."
            )
        if self.at_depths and self.readout is not None and self.readout > min(self.at_depths):
            raise UserError(f"`readout` must be one of the loops of all `at_depths`; got {self.readout}.")
        check_distinct("gates", self.gates or [])
        if not any(row.adapter for row in self.rows()) and self.gates:
            raise UserError("`gates` multiply an adapter's update: give `adapter`, or leave them out.")

    def rows(self) -> list[Row]:
        """Return a row for each adapter (none: the model alone) at each depth; `under_gates` makes those under gates of it."""
        rows: list[Row] = []
        for given in self.adapter or ["none"]:
            name, mark, path = given.partition("=")
            if not mark:
                name, path = "", name
            adapter = None if path == "none" else path
            name = name or (BASE if adapter is None else Path(path).name)
            is_of_gates = self.gates and re.search(r"_(loop\d+|gates_.+)$", name)  # as `under_gates` names them
            depths = {f"{name}_K{depth}": depth for depth in self.at_depths or ()} or {name: None}
            is_taken = any(row.name in depths for row in rows)
            if name in ("", ".", "..") or "/" in name or not path or is_of_gates or is_taken:
                raise UserError(f"`adapter` must give each row a name of its own, as NAME=PATH; got {given!r}.")
            rows += [Row(row, depth, name, adapter) for row, depth in depths.items()]
        return rows

    def under_gates(self, row: Row, num_loops: int) -> list[Row]:
        """Return the rows of a model of K loops: one for each of the gates, if it has an adapter."""
        if row.adapter is None or not self.gates:
            return [row]
        rows = []
        for gates in self.gates:
            if gates == SINGLE_LOOP:
                for loop in range(1, num_loops + 1):
                    one_hot = ["1" if other == loop else "0" for other in range(1, num_loops + 1)]
                    rows.append(row._replace(name=f"{row.name}_loop{loop}", gates="-".join(one_hot)))
            else:
                name = f"{row.name}_gates_{gates}" if len(self.gates) > 1 else row.name
                rows.append(row._replace(name=name, gates=gates))
        return rows


def _check_average(name: str, metrics: Sequence[str]) -> None:
    """Refuse what are no metrics: those of this package's benchmarks, or lm-eval's own, written `metric,filter`."""
    valid = {metric for benchmark, task in BENCHMARKS.items() for metric in task.metric_names(benchmark)}
    if not metrics or not all(metric in valid or "," in metric for metric in metrics):
        raise UserError(f"`averages` must map names to lists of {', '.join(sorted(valid))}; got `{name}: {metrics}`.")
    check_distinct("averages", metrics)


class Row(NamedTuple):
    """One row of the table: an adapter, or none, at a depth (None: the model's own) and under gates.

    `of_adapter` is the name that the adapter was given, which its rows at several depths share.
    """

    name: str
    depth: int | None
    of_adapter: str
    adapter: str | None
    gates: str | None = None


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
    with folder_lock_for_all(folder / ANSWERS_FOLDER):
        evaluation = _Evaluation(model, arguments)
        return {row.name: evaluation.evaluate(row) for row in evaluation.checked_rows()}


class _Evaluation:
    """An evaluation at work: its benchmarks, and the model that was loaded last, which several rows may share."""

    def __init__(self, model: ModelArguments, arguments: EvaluationArguments) -> None:
        self.base, self.arguments, self.folder = model, arguments, Path(arguments.output_dir)
        with all_processes().main_process_first():
            self.benchmarks = _load_benchmarks(arguments)
        self._loaded: tuple[str | None, int | None] | None = None
        self.model: nn.Module | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.identity: Identity = {}

    def subject(self, row: Row) -> Subject:
        """Return the model of a row, which is loaded unless it is there."""
        if self._loaded != (row.adapter, row.depth):
            self.model = None  # before the next one takes its place in memory
            model = self.base if row.depth is None else replace(self.base, num_loops=row.depth)
            self.model, self.tokenizer, self.identity = load_in_all_processes(model, row.adapter)
            self._loaded = (row.adapter, row.depth)
        options = {"gates": row.gates, "readout": self.arguments.readout}
        return Subject.of(self.model, self.tokenizer, self.arguments, **options)

    def checked_rows(self) -> list[Row]:
        """Return all rows, after loading every model once, and comparing each row with what was measured under its name."""
        before, rows = from_main_process(self._measured_before), []
        for row in self.arguments.rows():
            num_loops = self.subject(row).num_loops
            for under_gates in self.arguments.under_gates(row, num_loops):
                self._check(under_gates, before)
                rows.append(under_gates)
        return rows

    def _measured_before(self) -> dict[str, Identity]:
        """Return what the measurements of earlier evaluations in the folder depend on, by their writer."""
        measured, identities, faults = read_measurements(self.folder)
        for fault in faults:
            logger.warning("Left out: %s", fault)
        return {row.writer: identities[row.identity] for row in measured if row.writer.startswith(f"{WRITER}/")}

    def _check(self, row: Row, before: Mapping[str, Identity]) -> None:
        subject = self.subject(row)
        for benchmark in self.benchmarks:  # a chat template may be missing, too
            identity = benchmark.identity(subject, self.identity)
            for writer, measured in before.items():
                if writer.startswith(f"{WRITER}/{row.name}/"):
                    parts = ONE_RUN if writer == _writer(row, benchmark) else ONE_MODEL
                    check_same(measured, identity, f"{self.folder}, row `{row.name}`,", parts)
            log = AnswerLog(answers_folder(self.folder, row.name, benchmark.name))
            from_main_process(log.check, identity)

    def evaluate(self, row: Row) -> list[BenchmarkResult]:
        """Evaluate one row on every benchmark, and write what was measured as soon as it is there."""
        subject, is_main = self.subject(row), all_processes().is_main_process
        training = from_main_process(training_of, row.adapter)
        if is_main:
            for difference in differences(training.identity, self.identity, ("base",)):
                logger.warning("The adapter %s was trained on another base: %s.", row.adapter, difference)
        facts = {"model": self.base.base_name, **training.facts, **subject.place}
        facts["method"] = training.method or row.of_adapter
        results = []
        for benchmark in self.benchmarks:
            folder = answers_folder(self.folder, row.name, benchmark.name)
            result = evaluate_subject(subject, benchmark, folder, self.identity)
            results.append(result)
            if is_main:
                identity = benchmark.identity(subject, self.identity)
                named = {"writer": _writer(row, benchmark), "identity": identity_key(identity)}
                write_measurements(self.folder, result.measurements(**named, **facts), [identity, training.identity])
        return results


def _writer(row: Row, benchmark: Benchmark) -> str:
    return f"{WRITER}/{row.name}/{benchmark.name}"


def _load_benchmarks(arguments: EvaluationArguments) -> list[Benchmark]:
    """Return the benchmarks that are asked for, but those that are parts of others among them."""
    limit, confirmed = arguments.benchmark_limit, arguments.confirm_run_unsafe_code
    benchmarks = []
    for name in arguments.benchmarks:
        if find_task(name).part_of not in arguments.benchmarks:
            with user_supplied(f"The benchmark `{name}` cannot be loaded"):
                benchmarks.append(load_from(arguments, name, limit, confirmed))
    return benchmarks
