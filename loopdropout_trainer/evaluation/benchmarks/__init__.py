"""The benchmarks by name. A file here with a dictionary `BENCHMARKS` of tasks is all that a benchmark needs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from datasets import Dataset

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation.benchmark import Benchmark, Task
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedBenchmark
from loopdropout_trainer.evaluation.benchmarks.lm_eval_tasks import LmEvalTask
from loopdropout_trainer.evaluation.benchmarks.metamath import extract_number
from loopdropout_trainer.settings.arguments import BenchmarkSources


BENCHMARKS: dict[str, Task] = {}
for _module in iter_modules(__path__):
    BENCHMARKS |= getattr(import_module(f"{__name__}.{_module.name}"), "BENCHMARKS", {})

LM_EVAL = "lm_eval:"
"""Before the name of a task, group or tag of lm-eval's that has no name here."""

DEVELOPMENT = "development"
"""Held-out training rows as a benchmark, for choosing a learning rate."""

_SCORED_LIKE = {"metamath_gsm": "metamath_gsm8k", "gsm8k": "gsm8k", "arithmetic": "arithmetic_test"}


def find_task(name: str) -> Task:
    """Return the benchmark's task: one of `BENCHMARKS`, or any of lm-eval's as `lm_eval:TASK`."""
    if name.startswith(LM_EVAL) and name != LM_EVAL:
        return LmEvalTask(name.removeprefix(LM_EVAL))
    if name not in BENCHMARKS:
        raise UserError(f"`benchmarks` must be among {', '.join(BENCHMARKS)} or `{LM_EVAL}TASK`; got {name!r}.")
    return BENCHMARKS[name]


def load_benchmark(
    name: str,
    files: str | Path | Sequence[str | Path] | None = None,
    limit: int | None = None,
    confirm_run_unsafe_code: bool = False,
    revision: str | None = None,
) -> Benchmark:
    """Load a benchmark's problems, and check that everything is there that scoring needs.

    Args:
        name: key of `BENCHMARKS`, or `lm_eval:TASK`.
        files: local JSONL, JSON, CSV (also `.gz`) or Parquet files to read instead of the Hub; fields as published. For
            the tasks of a group in lm-eval also a folder of them (`TASK.jsonl`).
        limit: only the first problems, of each task in a group.
        confirm_run_unsafe_code: run programs that a model has written also where nothing contains them.
        revision: branch, tag or commit of the problems' dataset on the Hub; not read if there are `files`.

    Raises:
        ValueError: for an unknown name, a file that cannot be read, a bad row (it names file and row), or
            if something is missing that scoring needs.
    """
    files = [files] if isinstance(files, str | Path) else files
    task = find_task(name)
    if revision is not None and files is None:
        task = task.at_revision(name, revision)
    return task.load(name, files and list(map(Path, files)), limit, confirm_run_unsafe_code)


def load_from(sources: BenchmarkSources, name: str, limit: int | None = None, confirmed: bool = False) -> Benchmark:
    """Load a benchmark from where a recipe says; see `load_benchmark`."""
    files = (sources.benchmark_files or {}).get(name)
    revision = (sources.benchmark_revisions or {}).get(name)
    return load_benchmark(name, files, limit, confirmed, revision)


def check_development(preparation: str | None, has_held_out: bool) -> None:
    """Raise ValueError if the rows of a preparation make no benchmark, or none of them are held out."""
    if preparation not in _SCORED_LIKE or not has_held_out:
        raise UserError(
            f"The benchmark `{DEVELOPMENT}` needs held-out rows (`num_eval_examples`) of a `preparation` with questions and "
            f"answers ({', '.join(_SCORED_LIKE)}); got {preparation!r}{'' if has_held_out else ' without held-out rows'}."
        )


def development_benchmark(rows: Dataset | None, preparation: str | None, limit: int | None = None):
    """Return held-out rows (`load_data(...).eval`) as a benchmark, with prompts and metric of the preparation's test set."""
    check_development(preparation, bool(rows))
    task = BENCHMARKS[_SCORED_LIKE[preparation]]
    rows = rows.select(range(min(limit or len(rows), len(rows))))
    if preparation == "metamath_gsm":  # its answers are numbers for the scorer, and text for the others
        references = [str(extract_number(answer)) for answer in rows["answer"]]
    else:
        references = [task.reference(row) for row in rows]
    prompts = [task.prompt(row) for row in rows]
    return GeneratedBenchmark(DEVELOPMENT, prompts, references, task.metric, task.max_new_tokens, task.stop_strings)
