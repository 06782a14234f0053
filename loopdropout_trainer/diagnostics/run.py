"""One run of diagnostics: every diagnostic on every model, kept on disk as they come, then files and tables."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from loopdropout_trainer.data import load_tokenizer
from loopdropout_trainer.diagnostics.arguments import DiagnosticArguments, RowArguments
from loopdropout_trainer.diagnostics.compared import ComparedModel, find_models
from loopdropout_trainer.diagnostics.diagnostic import DIAGNOSTICS, Context, Diagnostic, GroupedBenchmark
from loopdropout_trainer.diagnostics.rows import held_out_rows, load_rows_to_score, raw_rows
from loopdropout_trainer.evaluation.answer_log import check_same
from loopdropout_trainer.evaluation.benchmarks import load_benchmark
from loopdropout_trainer.evaluation.development import DEVELOPMENT, development_benchmark
from loopdropout_trainer.evaluation.evaluator import evaluate_subject
from loopdropout_trainer.evaluation.loading import load_model, model_identity
from loopdropout_trainer.evaluation.processes import all_processes, from_main_process
from loopdropout_trainer.evaluation.results import BenchmarkResult
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.saving.files import sha256_of_json, write_atomically
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.command import one_line
from loopdropout_trainer.settings.recipe import RecipeError
from loopdropout_trainer.settings.versions import library_versions
from loopdropout_trainer.training.memory import device_name


FOLDER = "diagnostics"
SCHEMA = 1


def run_diagnostics(model: ModelArguments, rows: RowArguments, arguments: DiagnosticArguments) -> list[dict[str, Any]]:
    """Run the diagnostics over all processes, write their files, and return the content of these.

    What an earlier run in the same folder measured of the same models on the same rows or benchmarks is not measured again.

    Raises:
        RecipeError: if something that is named cannot be loaded or compared.
        DataError: if there are no rows to measure on.
    """
    run = _Run(model, rows, arguments)
    of_models = [run.measure(each) for each in run.models]
    run.progress.close()
    files = [run.publish(each, [parts[each.name] for parts in of_models]) for each in run.diagnostics]
    return [content for content in files if content["runs"]]


def choose(names: Sequence[str] | None, imports: Sequence[str] = ()) -> list[Diagnostic]:
    """Import the user's own files, and return the diagnostics of these names; None: all.

    Raises:
        RecipeError: for a file that cannot be imported, or an unknown name.
    """
    for given in imports:
        try:
            _import(given)
        except Exception as error:  # whatever the file does
            raise RecipeError(f"`import` names {given}, which cannot be imported: {error!r}.") from error
    for name in names or ():
        if name not in DIAGNOSTICS:
            raise RecipeError(f"`diagnostics` must be among {', '.join(DIAGNOSTICS)}; got {name!r}.")
    return [DIAGNOSTICS[name]() for name in (DIAGNOSTICS if names is None else dict.fromkeys(names))]


def _import(given: str) -> None:
    if not given.endswith(".py"):
        importlib.import_module(given)
        return
    name = f"user_diagnostic_{Path(given).stem}"
    spec = importlib.util.spec_from_file_location(name, given)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


class _Run:
    """The steps of a run, and what they share."""

    def __init__(self, model: ModelArguments, rows: RowArguments, arguments: DiagnosticArguments) -> None:
        self.base, self.arguments = model, arguments
        self.folder = Path(arguments.output_dir) / FOLDER
        self.processes = all_processes(timeout=timedelta(days=7))  # the first process may wait long for the last one
        self.diagnostics = choose(arguments.diagnostics, arguments.imports)
        if not arguments.benchmarks:
            if arguments.diagnostics and self._need("benchmarks"):
                raise RecipeError(
                    "`benchmarks` must name one or more: diagnostics that generate answers are asked for."
                )
            self.diagnostics = [each for each in self.diagnostics if each.needs != "benchmarks"]
        files = arguments.benchmark_files or {}
        with self.processes.main_process_first():
            self.models = find_models(arguments, model.model_name_or_path)
            self.tokenizer = load_tokenizer(model)
            self.rows, self.benchmarks = None, []
            try:
                if self._need("rows"):
                    self.rows = load_rows_to_score(rows, self.tokenizer, files.get(rows.rows))
                if self._need("benchmarks"):
                    self.benchmarks = [self._benchmark(name, files.get(name), rows) for name in arguments.benchmarks]
            except OSError as error:
                raise RecipeError(one_line(error)) from error
        self.settings: dict[str, Any] = {}  # of the base model, which comes first
        total = len(self.models) * len(self.diagnostics)
        self.progress = tqdm(total=total, unit="measurement", disable=not self.processes.is_main_process)

    def _need(self, what: str) -> bool:
        return any(diagnostic.needs == what for diagnostic in self.diagnostics)

    def _benchmark(self, name: str, files: str | None, rows: RowArguments) -> GroupedBenchmark:
        limit = self.arguments.benchmark_limit
        if name == DEVELOPMENT:
            held_out = held_out_rows(rows, self.tokenizer)
            return GroupedBenchmark(development_benchmark(held_out, rows.preparation, limit))
        benchmark = load_benchmark(name, files, limit, self.arguments.confirm_run_unsafe_code)
        published = raw_rows(name, files, limit)
        columns = [
            c for c in self.arguments.group_by if published and all(row.get(c) is not None for row in published)
        ]
        return GroupedBenchmark(benchmark, {column: [str(row[column]) for row in published] for column in columns})

    def measure(self, compared: ComparedModel) -> dict[str, dict[str, Any]]:
        """Return what every diagnostic finds of one model, by name; what was measured before is read."""
        adapter = compared.path if compared.kind == "adapter" else None
        merged = {"model_name_or_path": compared.path} if compared.kind == "merged" else {}
        arguments = replace(self.base, **merged)
        with self.processes.main_process_first():
            model, _ = load_model(arguments, adapter)
        identity = from_main_process(lambda model=model: model_identity(arguments, model, adapter))
        try:
            subject = Subject.of(model.to(self.processes.device), self.tokenizer, self.arguments)
            settings = {each.benchmark.name: each.benchmark.settings(subject) for each in self.benchmarks}
        except ValueError as error:  # such as a chat without a chat template
            raise RecipeError(one_line(error)) from error
        self.settings = self.settings or {**identity, "num_loops": subject.num_loops, "benchmarks": settings}
        depths = self.arguments.depths or list(range(1, 2 * subject.num_loops + 1))
        context = Context(subject, compared.kind, self.rows, self.benchmarks, depths, self.processes)
        context.evaluate = self._evaluation(context, identity, _given(compared, identity, settings))
        found = {}
        for diagnostic in self.diagnostics:
            self.progress.set_description(f"{compared.method}: {diagnostic.name}")
            part = {"reason": diagnostic.skip_reason(context)}
            if part["reason"] is None:
                on = self.rows.identity if diagnostic.needs == "rows" else settings
                key = {**identity, "num_loops": subject.num_loops, "on": on, **diagnostic.settings(context)}
                part = self._remembered(diagnostic, context, key)
            found[diagnostic.name] = {**compared.facts, **part}
            self.progress.update()
        del model, subject, context
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found

    def _remembered(self, diagnostic: Diagnostic, context: Context, key: dict[str, Any]) -> dict[str, Any]:
        """Return a measurement and its seconds: from a file, or measured now and written.

        The file's name is a hash of all that the measurement depends on, so that none is taken for another one.
        """
        path = self.folder / "parts" / diagnostic.name / f"{sha256_of_json(key)[:20]}.json"

        def read() -> dict[str, Any] | None:
            with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged
                return json.loads(path.read_bytes())["found"]

        part = from_main_process(read)
        if part is None:
            began = time.perf_counter()
            measured = json.loads(json.dumps(diagnostic.measure(context), allow_nan=False))  # as it will be read again
            part = {"seconds": round(time.perf_counter() - began, 2), "measured": measured}
            if self.processes.is_main_process:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps({"settings": key, "found": part}, ensure_ascii=False) + "\n")
        return part

    def _evaluation(self, context: Context, identity: dict[str, Any], given: dict[str, BenchmarkResult]):
        """Return the function that evaluates a model; answers are kept, so that none is generated twice."""

        def evaluate(grouped: GroupedBenchmark, gates: Sequence[float] | None, depth: int | None) -> BenchmarkResult:
            benchmark, own = grouped.benchmark, context.num_loops
            if depth in (None, own) and gates is None and benchmark.name in given:
                return given[benchmark.name]
            with context.at_depth(depth or own):
                subject = replace(context.subject, gates=gates)
                key = sha256_of_json({**identity, **benchmark.settings(subject)})[:20]
                log = self.folder / "parts" / "generated" / benchmark.name.replace("/", "_") / key
                return evaluate_subject(subject, benchmark, log, identity)

        return evaluate

    def publish(self, diagnostic: Diagnostic, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Write the JSON file of a diagnostic of all models, and return its content."""
        settings = {key: value for key, value in self.settings.items() if key not in ("adapter", "benchmarks")}
        if diagnostic.needs == "rows":
            settings["rows"] = self.rows.identity
        else:
            of_gates = ("benchmark", "num_loops", "gates", "readout")  # which differ within a diagnostic
            settings["benchmarks"] = {
                name: {key: value for key, value in each.items() if key not in of_gates}
                for name, each in self.settings["benchmarks"].items()
            }
        runs = [part for part in parts if "measured" in part]
        content = {
            "schema": SCHEMA,
            "diagnostic": diagnostic.name,
            "title": diagnostic.title,
            "settings": settings,
            "runs": runs,
            "comparison": diagnostic.compare(runs) if runs else None,
            "left_out": [part for part in parts if "reason" in part],
            "versions": library_versions(),
            "device": device_name(),
            "num_processes": self.processes.num_processes,
        }
        if runs and self.processes.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
            write_atomically(self.folder / f"{diagnostic.name}.json", text)
        return content


def _given(compared: ComparedModel, identity: dict[str, Any], settings: dict[str, dict[str, Any]]):
    """Return the results of a model's evaluation by benchmark, {} without one.

    Raises:
        RecipeError, SettingsChangedError: if one is missing, or is of another model or other settings.
    """
    found = {}
    for name, now in settings.items() if compared.evaluation else ():
        where = f"`evaluations`: the result of `{compared.method}` on `{name}`"
        try:
            before = dict(compared.evaluation[name]["settings"])
            found[name] = BenchmarkResult.from_json(name, compared.evaluation[name])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecipeError(f"{where} cannot be read: {error!r}.") from error
        check_same(before, json.loads(json.dumps({**identity, **now})), where)
    return found
