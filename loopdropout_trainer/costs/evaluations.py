"""The largest numbers of problems and of generated tokens of the evaluations of trainings, before the tasks are loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from loopdropout_trainer.costs.published import PUBLISHED_TASKS, PublishedTask
from loopdropout_trainer.data.arguments import count_held_out
from loopdropout_trainer.data.files import read_files
from loopdropout_trainer.data.preparations import SCORED_LIKE
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.results.run_files import DEVELOPMENT
from loopdropout_trainer.settings.arguments import ScriptArguments


HOW_TO_TIME = "not timed: `loopdropout evaluate` with `--benchmark_limit 64 --output_dir outputs/try` prints a time"
"""Way to measure the time, which depends on the device and on the lengths of the answers."""

DEFAULT_MAX_NEW_TOKENS = 256
"""Largest number of tokens of an answer to a task that does not say it, in lm-eval and in own benchmarks."""


class Answers(NamedTuple):
    """Largest numbers of problems and of generated tokens, and the tasks whose problems are not known yet."""

    num_problems: int = 0
    num_tokens: int = 0
    uncounted: frozenset[str] = frozenset()

    def times(self, number: int) -> Answers:
        """Return the numbers of several equal evaluations."""
        return Answers(self.num_problems * number, self.num_tokens * number, self.uncounted)

    def describe(self, whose: str = "") -> str:
        """Return the numbers for a plan, or "" without any task. `whose`: end of the line, such as ", without others"."""
        parts = []
        if self.num_problems:
            parts.append(f"at most {self.num_problems:,} problems and {self.num_tokens:,} generated tokens{whose}")
        if self.uncounted:
            names = ", ".join(sorted(self.uncounted))
            parts.append(f"not counted before its problems are loaded: {names}")
        return "\n".join(parts)


def add_answers(parts: Iterable[Answers]) -> Answers:
    """Return the sum of several evaluations."""
    parts = [*parts]
    return Answers(
        sum(part.num_problems for part in parts),
        sum(part.num_tokens for part in parts),
        frozenset().union(*(part.uncounted for part in parts)),
    )


def is_on_hub(name: str, own_benchmarks: Collection[str]) -> bool:
    """Return whether the problems of a task are surely on the Hub, and neither generated nor in files of the user."""
    return name in PUBLISHED_TASKS and not name.startswith("arithmetic_") and name not in own_benchmarks


def count_answers(options: ScriptArguments, recipe: Mapping[str, Any], depth: int | None) -> Answers:
    """Return the numbers of the evaluations of one run.

    They are those of its adapter on all tasks, and on the first task at other depths and in one loop. With `evaluate_base`,
    the base model has the same ones, apart from single loops.

    Args:
        options: Steps after the training.
        recipe: Recipe of the training.
        depth: Recurrence depth K of the training, or None if it is not known.
    """
    tasks = [_count_task(name, options, recipe) for name in options.benchmarks or ()]
    num_depths = sum(other != depth for other in options.eval_num_loops or ())
    at_depths = add_answers([*tasks, *(task.times(num_depths) for task in tasks[:1])])
    parts = [at_depths]
    if options.evaluate_base:
        parts.append(at_depths)
    if options.single_loop_accuracy:
        parts += [task.times(depth or 0) for task in tasks[:1]]
    return add_answers(parts)


def _count_task(name: str, options: ScriptArguments, recipe: Mapping[str, Any]) -> Answers:
    """Return the numbers of one evaluation on a task. A wrong value gives none, because loading the task raises its error."""
    own_benchmarks, limit = options.own_benchmarks or {}, options.benchmark_limit
    scored_like = SCORED_LIKE.get(str(recipe.get("preparation")))
    if name in own_benchmarks:
        task = _find_own_task(own_benchmarks[name], limit)
    elif name == DEVELOPMENT and scored_like is not None:
        task = PUBLISHED_TASKS[scored_like]._replace(num_problems=count_held_out(recipe))
    elif name.startswith("arithmetic_") and name in PUBLISHED_TASKS and limit is not None:
        task = PUBLISHED_TASKS[name]._replace(num_problems=limit)  # the problems are generated
    else:
        task = PUBLISHED_TASKS.get(name)
    if task is None or not task.num_problems:
        return Answers(uncounted=frozenset([name]))
    number = task.num_problems
    if limit is not None:
        number = min(number, limit * task.num_parts)  # the limit is one of each task of a group
    return Answers(number, number * task.max_new_tokens)


def count_own_problems(options: ScriptArguments) -> dict[str, int]:
    """Return the number of problems that are evaluated of each own benchmark whose files are on this computer."""
    own_benchmarks, numbers = options.own_benchmarks or {}, {}
    for name in options.benchmarks or ():
        number = _count_problems(own_benchmarks.get(name), options.benchmark_limit)
        if number is not None:
            numbers[name] = number
    return numbers


def _count_problems(fields: Any, limit: int | None) -> int | None:
    """Return the number of problems of an own benchmark that are evaluated, or None if only the evaluation knows it."""
    number = _count_rows(fields)
    if number is None or limit is None:
        return number
    return min(number, limit)


def _count_rows(fields: Any) -> int | None:
    """Return the number of rows in the files of an own benchmark, or None if they are not files here that can be read."""
    files = fields.get("files") if isinstance(fields, Mapping) else None
    if isinstance(files, str):
        files = [files]
    if not files or not isinstance(files, Sequence):
        return None
    if not all(isinstance(file, str) and Path(file).is_file() for file in files):
        return None
    with suppress(UserError):  # which the evaluation raises
        return len(read_files(files))
    return None


def _find_own_task(fields: Any, limit: int | None) -> PublishedTask | None:
    """Return the size of an own benchmark by its fields, or None if it is not known before the evaluation."""
    number = _count_problems(fields, limit)
    if number is None:
        number = limit  # the largest number
    if not isinstance(fields, Mapping) or number is None:
        return None
    like = PUBLISHED_TASKS.get(str(fields.get("like")))
    length = fields.get("max_new_tokens")
    if length is None:
        length = like.max_new_tokens if like else DEFAULT_MAX_NEW_TOKENS
    return PublishedTask(number, length) if isinstance(length, int) else None
