"""One run of diagnostics: every diagnostic on every subject, results on disk as they come, then tables and figures."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from loopdropout_trainer.data import load_data, load_tokenizer
from loopdropout_trainer.diagnostics.arguments import DiagnosticArguments, RowArguments
from loopdropout_trainer.diagnostics.diagnostic import DIAGNOSTICS, Context, Diagnostic, Problems, Report
from loopdropout_trainer.diagnostics.rows import Rows, load_rows, raw_problems
from loopdropout_trainer.diagnostics.subjects import Subject, check_comparable, find_subjects
from loopdropout_trainer.evaluation.answer_log import SettingsChangedError
from loopdropout_trainer.evaluation.benchmarks import load_benchmark
from loopdropout_trainer.evaluation.development import DEVELOPMENT, development_benchmark
from loopdropout_trainer.evaluation.evaluator import evaluate_subject
from loopdropout_trainer.evaluation.loading import load_model, model_identity
from loopdropout_trainer.evaluation.processes import all_processes
from loopdropout_trainer.evaluation.subject import Subject as EvaluatedModel
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.files import write_atomically
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.command import one_line
from loopdropout_trainer.settings.recipe import RecipeError
from loopdropout_trainer.settings.versions import library_versions


FOLDER = "diagnostics"
SCHEMA = 1


def run_diagnostics(
    model: ModelArguments, rows: RowArguments, arguments: DiagnosticArguments, console: Console | None = None
) -> list[Report]:
    """Run the diagnostics over all processes, write their files, and print their tables in the first process.

    Raises:
        RecipeError: if something that is named cannot be loaded or compared.
        SettingsChangedError: if the folder holds results of other settings.
        DataError: if there are no rows to measure on.
    """
    return _Run(model, rows, arguments, console or Console()).run()


def choose(names: Sequence[str] | None, imports: Sequence[str] = ()) -> list[Diagnostic]:
    """Import the user's own files, and return the diagnostics of these names; None: all.

    Raises:
        RecipeError: for a file that cannot be imported, or an unknown name.
    """
    for given in imports:
        _import(given)
    for name in names or ():
        if name not in DIAGNOSTICS:
            raise RecipeError(f"`diagnostics` must be among {', '.join(DIAGNOSTICS)}; got {name!r}.")
    return [DIAGNOSTICS[name]() for name in (DIAGNOSTICS if names is None else dict.fromkeys(names))]


def _import(given: str) -> None:
    path = Path(given)
    try:
        if path.suffix != ".py":
            importlib.import_module(given)
            return
        name = f"user_diagnostic_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    except Exception as error:  # whatever the file does
        raise RecipeError(f"`import` names {given}, which cannot be imported: {error!r}.") from error


class _Run:
    """The steps of a run, and what they share."""

    def __init__(
        self, model: ModelArguments, rows: RowArguments, arguments: DiagnosticArguments, console: Console
    ) -> None:
        self.model_arguments, self.row_arguments, self.arguments = model, rows, arguments
        self.console = console
        self.processes = all_processes(timeout=timedelta(days=7))  # the first process may wait long for the last one
        self.folder = Path(arguments.output_dir) / FOLDER
        self.diagnostics = choose(arguments.diagnostics, arguments.imports)
        self.subjects = find_subjects(arguments.adapters, arguments.models, arguments.evaluations)
        check_comparable(self.subjects, model.model_name_or_path)

    def run(self) -> list[Report]:
        with self.processes.main_process_first():
            self.tokenizer = load_tokenizer(self.model_arguments)
            self.problems = self._load_problems() if self._need("problems") else []
            self.rows = self._load_rows() if self._need("rows") else None
            base, _ = load_model(self.model_arguments)
        self.num_loops = find_looped_model(base).config.num_loops
        self.base_identity = model_identity(self.model_arguments, base)
        self.depths = self.arguments.depths or list(range(1, 2 * self.num_loops + 1))
        del base
        measured = [self._measure_subject(index, subject) for index, subject in enumerate(self.subjects)]
        reports = []
        for diagnostic in self.diagnostics:
            parts = [(s, of[diagnostic.name]) for s, of in zip(self.subjects, measured, strict=True)]
            reports.append(self._finish(diagnostic, parts))
        return [report for report in reports if report.runs]

    def _need(self, what: str) -> bool:
        return any(diagnostic.needs == what for diagnostic in self.diagnostics)

    # What is measured on.

    def _load_rows(self) -> Rows:
        arguments = self.row_arguments
        return load_rows(
            arguments,
            self.tokenizer,
            arguments.rows,
            arguments.num_rows,
            arguments.rows_batch_size,
            arguments.max_length,
            (self.arguments.benchmark_files or {}).get(arguments.rows),
        )

    def _load_problems(self) -> list[Problems]:
        if not self.arguments.benchmarks:
            if self.arguments.diagnostics:
                raise RecipeError("`benchmarks` must name what is answered: diagnostics that generate are asked for.")
            self.diagnostics = [each for each in self.diagnostics if each.needs != "problems"]
            if self.processes.is_main_process:
                self.console.print("No `benchmarks`: what answers problems is left out.")
            return []
        try:
            return [self._problems(name) for name in self.arguments.benchmarks]
        except (OSError, ValueError) as error:
            raise RecipeError(one_line(error)) from error

    def _problems(self, name: str) -> Problems:
        limit = self.arguments.benchmark_limit
        if name == DEVELOPMENT:
            held_out = load_data(self.row_arguments, self.tokenizer, self.row_arguments.max_length).eval
            return Problems(development_benchmark(held_out, self.row_arguments.preparation, limit))
        files = (self.arguments.benchmark_files or {}).get(name)
        benchmark = load_benchmark(name, files, limit, self.arguments.confirm_run_unsafe_code)
        rows = list(raw_problems(name, files, limit))
        columns = [
            column for column in self.arguments.group_by if rows and all(row.get(column) is not None for row in rows)
        ]
        return Problems(benchmark, {column: [str(row[column]) for row in rows] for column in columns})

    # One subject.

    def _measure_subject(self, index: int, subject: Subject) -> dict[str, dict[str, Any]]:
        """Return what every diagnostic found; what was found before the run was interrupted is read."""
        arguments = self.model_arguments
        if subject.kind == "merged":
            arguments = replace(arguments, model_name_or_path=subject.path)
        adapter = subject.path if subject.kind == "adapter" else None
        model = None
        context = Context(subject, self.num_loops, self.rows, self.problems, self.depths, self.processes)
        same = sum(before.method == subject.method for before in self.subjects[:index])
        name = f"{_file_name(subject.method)}-{same}"
        with self.processes.main_process_first():
            model, _ = load_model(arguments, adapter)
        identity = model_identity(arguments, model, adapter)
        context.model = model.to(self.processes.device)
        self._note_benchmarks(context)
        found, todo = {}, []
        for diagnostic in self.diagnostics:
            path = self.folder / "parts" / diagnostic.name / f"{name}.json"
            settings = self._settings(diagnostic, context, identity)
            part = self._saved(path, settings)
            if part is None:
                todo.append((diagnostic, path, settings))
            else:
                found[diagnostic.name] = part
        with self._progress(context, [diagnostic for diagnostic, _, _ in todo]) as progress:
            context.answer = self._answering(context, identity, self.folder / "parts" / "answering" / name, progress)
            for diagnostic, path, settings in todo:
                if progress is not None:
                    progress.update(progress.task_ids[0], description=f"{subject.method}: {diagnostic.name}")
                part = self._measure(diagnostic, context)
                if self.processes.is_main_process:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(path, json.dumps({"settings": settings, **part}, ensure_ascii=False) + "\n")
                found[diagnostic.name] = part
        context.model = model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found

    def _measure(self, diagnostic: Diagnostic, context: Context) -> dict[str, Any]:
        reason = diagnostic.why_not(context)
        if reason is not None:
            return {"left_out": reason}
        began = time.perf_counter()
        measured = json.loads(json.dumps(diagnostic.measure(context)))  # as it will be read again
        return {"seconds": round(time.perf_counter() - began, 2), "measured": measured}

    def _settings(self, diagnostic: Diagnostic, context: Context, identity: Mapping[str, Any]) -> dict[str, Any]:
        settings = {**identity, "num_loops": self.num_loops, **self._measured_on(diagnostic)}
        return json.loads(json.dumps({**settings, **diagnostic.settings(context)}))

    def _measured_on(self, diagnostic: Diagnostic) -> dict[str, Any]:
        if diagnostic.needs == "rows":
            return {"rows": self.rows.identity}
        return {"benchmarks": self.benchmark_settings}

    def _note_benchmarks(self, context: Context) -> None:
        """Note what answers depend on beside the model, its depth and its gates, which are noted elsewhere."""
        try:
            settings = {
                each.benchmark.name: each.benchmark.settings(self._evaluated(context)) for each in self.problems
            }
        except ValueError as error:  # such as turns without a chat template
            raise RecipeError(one_line(error)) from error
        elsewhere = ("benchmark", "num_loops", "gates", "readout")
        self.benchmark_settings = {
            name: {key: value for key, value in found.items() if key not in elsewhere}
            for name, found in settings.items()
        }

    def _evaluated(self, context: Context) -> EvaluatedModel:
        return EvaluatedModel.of(context.model, self.tokenizer, self.arguments)

    def _saved(self, path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Return an earlier measurement of these settings, the same in every process."""
        found: list[Any] = [None]
        if self.processes.is_main_process and path.is_file():
            part = json.loads(path.read_text(encoding="utf-8"))
            before = part.pop("settings")
            found = [SettingsChangedError(text) if (text := _difference(before, settings, path)) else part]
        (part,) = broadcast_object_list(found)
        if isinstance(part, SettingsChangedError):
            raise part
        return part

    def _answering(self, context: Context, identity: Mapping[str, Any], folder: Path, progress: Progress | None):
        """Return the function that answers problems; answers are kept, so that no diagnostic asks for them again."""

        def answer(problems: Problems, gates: Sequence[float] | None, depth: int | None):
            depth = depth or self.num_loops
            gates = None if gates is None or all(gate == 1 for gate in gates) else [float(gate) for gate in gates]
            label = f"depth_{depth}" + ("" if gates is None else "_gates_" + "_".join(f"{g:g}" for g in gates))
            with context.at_depth(depth), context.gated(gates), _paused(progress):
                if progress is not None:
                    progress.console.print(f"{context.subject.method}: {problems.benchmark.name}, {label}")
                answers = folder / problems.benchmark.name.replace("/", "_") / label
                return evaluate_subject(
                    self._evaluated(context), problems.benchmark, answers, {**identity, "gates_used": gates}
                )

        return answer

    @contextmanager
    def _progress(self, context: Context, diagnostics: Sequence[Diagnostic]):
        """Show a bar with an estimate in the first process, if there is anything to do."""
        if not self.processes.is_main_process or not diagnostics:
            yield None
            return
        batches = 0 if self.rows is None else len(self.rows.batches[:: self.processes.num_processes])
        passes = sum(each.passes(context) for each in diagnostics if each.why_not(context) is None)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("batches"))
        with Progress(
            *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)
        ) as progress:
            task = progress.add_task(context.subject.method, total=passes * batches)
            context.advance = lambda: progress.advance(task)
            yield progress

    # All subjects.

    def _finish(self, diagnostic: Diagnostic, parts: Sequence[tuple[Subject, dict[str, Any]]]) -> Report:
        content = {
            "schema": SCHEMA,
            "diagnostic": diagnostic.name,
            "title": diagnostic.title,
            "settings": {
                **{key: value for key, value in self.base_identity.items() if key != "adapter"},
                "num_loops": self.num_loops,
                **self._measured_on(diagnostic),
            },
            "runs": [{**subject.facts, **part} for subject, part in parts if "measured" in part],
            "comparison": None,
            "left_out": [
                {**subject.facts, "reason": part["left_out"]} for subject, part in parts if "left_out" in part
            ],
            "versions": library_versions(),
            "device": _device_name(self.processes.device),
            "num_processes": self.processes.num_processes,
        }
        report = Report(content)
        if not report.runs or not self.processes.is_main_process:
            return report
        content["comparison"] = diagnostic.compare(report)
        path = self.folder / diagnostic.name
        write_atomically(path.with_suffix(".json"), json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        table = diagnostic.table(report)
        if table is not None:
            self.console.print(f"\n{diagnostic.title}", highlight=False)
            self.console.print(table)
        if find_spec("matplotlib") is not None:
            diagnostic.draw(report, path)
        return report


@contextmanager
def _paused(progress: Progress | None):
    """Take the bar away while another one is shown."""
    if progress is None:
        yield
        return
    progress.stop()
    try:
        yield
    finally:
        progress.start()


def _difference(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> str | None:
    old, new = _flat(before), _flat(now)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not changed:
        return None
    key = changed[0]
    return (
        f"{path} was measured with other settings (`{key}` was {old.get(key)!r} and is {new.get(key)!r}): give another "
        "`output_dir`, or remove that file."
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _file_name(method: str) -> str:
    return re.sub(r"[^0-9a-zA-Z.=-]+", "_", method).strip("_") or "method"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
