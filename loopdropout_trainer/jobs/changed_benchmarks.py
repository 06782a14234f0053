"""Own benchmarks whose problems have changed since a run was measured on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.results.problems import Problems
from loopdropout_trainer.results.run_files import is_of_base, is_of_training, read_own_results
from loopdropout_trainer.settings.fields import items_of


def find_changed_benchmarks(folder: str | Path, recipe: Mapping[str, Any]) -> list[str]:
    """Return the own benchmarks of a recipe whose problems are not those that the run in a folder was measured on.

    The accuracy at the training depth decides, because each measurement of a run renews it. A benchmark whose files are not on
    this computer, as in a copy of a sweep, counts as unchanged.
    """
    own_benchmarks = recipe.get("own_benchmarks") or {}
    names = [name for name in recipe.get("benchmarks") or () if name in own_benchmarks]
    if not names:
        return []
    rows = read_own_results(folder)
    depths = {row["num_loops"] for row in rows if is_of_training(row)}
    changed = []
    for row in rows:
        is_own = row["task"] in names and row["metric"] == "accuracy" and not is_of_base(row)
        if not is_own or row["gates"] != "unit" or row["num_loops"] not in depths:
            continue
        problems = load_problems(row["task"], own_benchmarks[row["task"]], recipe.get("benchmark_limit"))
        if problems is not None and not problems.are_those_of({**row, "folder": str(folder)}):
            changed.append(row["task"])
    return changed


def load_problems(name: str, fields: Any, limit: int | None) -> Problems | None:
    """Return the first problems of an own benchmark, or None if its files are not on this computer or cannot be read.

    Args:
        name: Name of the benchmark.
        fields: Its fields in the recipe.
        limit: `benchmark_limit`.
    """
    files = items_of(fields.get("files") or ()) if isinstance(fields, Mapping) else []
    paths = [Path(file) for file in files]
    if not paths or not all(path.is_file() for path in paths):
        return None
    # Every worker of a sweep asks for each run, and only a change of a file makes another answer.
    states = tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
    return _load_once(name, json.dumps(fields), str(Path.cwd()), states, limit)


@cache
def _load_once(
    name: str, fields: str, place: str, states: tuple[tuple[int, int], ...], limit: int | None
) -> Problems | None:
    """Return the problems of an own benchmark. `place` and `states`: what its relative paths and its files depend on."""
    from loopdropout_trainer.evaluation.harness import list_problems  # takes seconds to import
    from loopdropout_trainer.evaluation.loading import own_benchmark

    try:
        task = own_benchmark(name, **json.loads(fields))
    except UserError:  # which the measurement raises
        return None
    return list_problems(task, limit)
