"""One run of diagnostics: every diagnostic on every model, kept on disk as they come, then files and tables."""

from __future__ import annotations

import gc
import importlib
import json
import runpy
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from loopdropout_trainer.data import load_tokenizer
from loopdropout_trainer.diagnostics.arguments import DiagnosticArguments, RowArguments
from loopdropout_trainer.diagnostics.compared import ComparedModel, find_models
from loopdropout_trainer.diagnostics.diagnostic import DIAGNOSTICS, Context, Diagnostic
from loopdropout_trainer.diagnostics.rows import held_out_rows, load_rows_to_score
from loopdropout_trainer.evaluation.answer_log import AnswerLog, check_same
from loopdropout_trainer.evaluation.benchmark import Benchmark
from loopdropout_trainer.evaluation.benchmarks import load_benchmark
from loopdropout_trainer.evaluation.development import DEVELOPMENT, development_benchmark
from loopdropout_trainer.evaluation.evaluator import evaluate_subject
from loopdropout_trainer.evaluation.loading import load_model, model_identity
from loopdropout_trainer.evaluation.processes import all_processes, from_main_process
from loopdropout_trainer.evaluation.results import BenchmarkResult
from loopdropout_trainer.evaluation.subject import Subject, run_as
from loopdropout_trainer.saving.files import sha256_of_json, write_atomically
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.command import user_supplied
from loopdropout_trainer.settings.recipe import RecipeError
from loopdropout_trainer.settings.versions import library_versions
from loopdropout_trainer.training.resources import device_name


FOLDER = "diagnostics"
SCHEMA = 1


def run_diagnostics(model: ModelArguments, rows: RowArguments, arguments: DiagnosticArguments) -> list[dict[str, Any]]:
    """Run the diagnostics over all processes, write their files, and return the content of these.

    What an earlier run in the same folder measured of the same models on the same rows or benchmarks is not measured again.

    Raises:
        RecipeError, SetupError, DataError: if something that is named cannot be loaded or compared.
    """
    run = _Run(model, rows, arguments)
    of_models = [run.measure(each) for each in run.models]
    run.progress.close()
    files = [run.publish(each, [parts[each.name] for parts in of_models]) for each in run.diagnostics]
    return [content for content in files if content["runs"]]


def choose(arguments: DiagnosticArguments) -> list[Diagnostic]:
    """Import the user's own files, and return the diagnostics that are asked for and can be measured.

    Raises:
        RecipeError, SetupError: for a file that cannot be imported, an unknown name, or if benchmarks are missing.
    """
    for given in arguments.imports:
        with user_supplied(f"`import` names {given}, which cannot be imported"):
            runpy.run_path(given) if given.endswith(".py") else importlib.import_module(given)
    for name in arguments.diagnostics or ():
        if name not in DIAGNOSTICS:
            raise RecipeError(f"`diagnostics` must be among {', '.join(DIAGNOSTICS)}; got {name!r}.")
        if DIAGNOSTICS[name].needs == "benchmarks" and not arguments.benchmarks:
            raise RecipeError(f"`benchmarks` must name one or more: the diagnostic {name} generates completions.")
    chosen = [DIAGNOSTICS[name]() for name in arguments.diagnostics or DIAGNOSTICS]
    return [each for each in chosen if arguments.benchmarks or each.needs != "benchmarks"]


class _Run:
    """The steps of a run, and what they share."""

    def __init__(self, model: ModelArguments, rows: RowArguments, arguments: DiagnosticArguments) -> None:
        self.base, self.arguments = model, arguments
        self.folder = Path(arguments.output_dir) / FOLDER
        self.processes = all_processes(timeout=timedelta(days=7))  # the first process may wait long for the last one
        self.diagnostics = choose(arguments)
        needs = {each.needs for each in self.diagnostics}
        files, self.batches = arguments.benchmark_files or {}, []
        with self.processes.main_process_first():
            self.models = find_models(arguments, model.model_name_or_path)
            self.tokenizer = load_tokenizer(model)
            with user_supplied("The rows or benchmarks cannot be loaded"):
                if "rows" in needs:
                    self.batches, self.rows = load_rows_to_score(rows, self.tokenizer, files.get(rows.rows))
                names = arguments.benchmarks if "benchmarks" in needs else ()
                self.benchmarks = [self._benchmark(name, files.get(name), rows) for name in names]
        self.log = AnswerLog(self.folder / "parts", self.processes.process_index)
        self.log.found = from_main_process(lambda: self.log.read({}))
        self.settings: dict[str, Any] = {}  # of the base model, which comes first
        total = len(self.models) * len(self.diagnostics)
        self.progress = tqdm(total=total, unit="measurement", disable=not self.processes.is_main_process)

    def _benchmark(self, name: str, file: str | None, rows: RowArguments) -> Benchmark:
        limit = self.arguments.benchmark_limit
        if name == DEVELOPMENT:
            return development_benchmark(held_out_rows(rows, self.tokenizer), rows.preparation, limit)
        return load_benchmark(name, file, limit, self.arguments.confirm_run_unsafe_code)

    def measure(self, compared: ComparedModel) -> dict[str, dict[str, Any]]:
        """Return what every diagnostic finds of one model, by name; what was measured before is read."""
        gc.collect()  # the model before
        torch.cuda.empty_cache()
        adapter = compared.path if compared.kind == "adapter" else None
        merged = {"model_name_or_path": compared.path} if compared.kind == "merged" else {}
        arguments = replace(self.base, **merged)
        with self.processes.main_process_first():
            model, _ = load_model(arguments, adapter)
        identity = from_main_process(lambda: model_identity(arguments, model, adapter))
        with user_supplied(f"`{compared.method}` cannot be evaluated"):  # such as a chat without a chat template
            subject = Subject.of(model.to(self.processes.device), self.tokenizer, self.arguments)
            settings = {each.name: each.settings(subject) for each in self.benchmarks}
        self.settings = self.settings or {**identity, "num_loops": subject.num_loops, "benchmarks": settings}
        given = _given(compared, identity, settings)

        def evaluate(benchmark: Benchmark, gates: Sequence[float] | None, depth: int | None) -> BenchmarkResult:
            """Evaluate the model; completions are kept, so that none is generated twice."""
            if depth in (None, subject.num_loops) and gates is None and benchmark.name in given:
                return given[benchmark.name]
            with run_as(model, readout=depth):
                gated = replace(subject, gates=gates)
                key = sha256_of_json({**identity, **benchmark.settings(gated)})[:20]
                log_dir = self.folder / "parts" / "generated" / benchmark.name.replace("/", "_") / key
                return evaluate_subject(gated, benchmark, log_dir, identity)

        depths = self.arguments.depths or list(range(1, 2 * subject.num_loops + 1))
        context = Context(subject, compared.kind, self.batches, self.benchmarks, depths, evaluate)
        facts = {"method": compared.method, "kind": compared.kind, "path": compared.path, **compared.facts}
        found = {}
        for each in self.diagnostics:
            self.progress.set_description(f"{compared.method}: {each.name}")
            found[each.name] = facts | {"reason": each.skip_reason(context)}
            if found[each.name]["reason"] is None:
                on = self.rows if each.needs == "rows" else settings
                key = {"diagnostic": each.name, **identity, "num_loops": subject.num_loops, "on": on}
                key |= {"depths": depths} if each.runs_at_depths else {}
                found[each.name] = facts | self._remembered(each, context, sha256_of_json(key))
            self.progress.update()
        return found

    def _remembered(self, diagnostic: Diagnostic, context: Context, key: str) -> dict[str, Any]:
        """Return a measurement and its seconds; the key is a hash of all that it depends on."""
        if key not in self.log.found:
            began = time.perf_counter()
            measured = diagnostic.measure(context)
            self.log.keep([(key, {"seconds": round(time.perf_counter() - began, 2), "measured": measured})])
        return self.log.found[key]

    def publish(self, diagnostic: Diagnostic, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Write the JSON file of a diagnostic of all models, and return its content."""
        settings = {key: value for key, value in self.settings.items() if key not in ("adapter", "benchmarks")}
        if diagnostic.needs == "rows":
            settings["rows"] = self.rows
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
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
            write_atomically(self.folder / f"{diagnostic.name}.json", text)
        return content


def _given(compared: ComparedModel, identity: dict[str, Any], settings: dict[str, dict[str, Any]]):
    """Return the results of a model's evaluation by benchmark, {} without one.

    Raises:
        SetupError, SettingsChangedError: if one is missing, or is of another model or other settings.
    """
    found = {}
    for name, now in settings.items() if compared.evaluation else ():
        where = f"`evaluations`: the result of `{compared.method}` on `{name}`"
        with user_supplied(f"{where} cannot be read"):
            found[name] = BenchmarkResult.from_json(name, compared.evaluation[name])
            check_same(compared.evaluation[name]["settings"], json.loads(json.dumps({**identity, **now})), where)
    return found
