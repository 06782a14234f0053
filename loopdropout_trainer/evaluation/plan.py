"""The plan of an evaluation: what is measured on how many problems, where the results go, and which of them exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.models.utils import normalize_gen_kwargs

from loopdropout_trainer.costs.evaluations import DEFAULT_MAX_NEW_TOKENS, HOW_TO_TIME, is_on_hub
from loopdropout_trainer.errors import UserError, count
from loopdropout_trainer.evaluation.answer_code import count_kept
from loopdropout_trainer.evaluation.harness import list_problems, name_of
from loopdropout_trainer.evaluation.loading import load_benchmarks
from loopdropout_trainer.evaluation.program_checks import leaves_of
from loopdropout_trainer.gate_texts import expand_gates
from loopdropout_trainer.hub import can_reach_hub
from loopdropout_trainer.results.run_files import read_own_results, unneeded_columns
from loopdropout_trainer.terminal import titled


class Setting(NamedTuple):
    """A model that is measured at a depth and under gates.

    Attributes:
        name: Name of the model in the table.
        columns: Columns that identify the results of the model.
        num_loops: Recurrence depth, or None if only the model itself says it.
        gates: Gates as in results, such as "unit", or "none" without an adapter.
    """

    name: str
    columns: Mapping[str, Any]
    num_loops: int | None
    gates: str


def list_settings(
    name: str, columns: Mapping[str, Any], depths: Sequence[int | None], gates: Sequence[str], is_adapter: bool
) -> list[Setting]:
    """Return the settings of a model: each depth under each of the gates.

    At a depth that only the loaded model says, `single_loop` is one setting, because the number of loops is not known.
    """
    settings = []
    default = "unit" if is_adapter else "none"
    for num_loops in depths:
        texts = gates or [None]
        if num_loops is not None:
            texts = expand_gates(gates, num_loops)
        for text in texts:
            settings.append(Setting(name, columns, num_loops, text or default))
    return settings


def print_evaluation_plan(
    settings: Sequence[Setting],
    tasks: Sequence[Task | Group],
    limit: int | None,
    max_new_tokens: int | None,
    folder: str,
    command: str,
) -> None:
    """Print the models with their depths and gates, the tasks with their problems, the folder, and the results in it.

    Args:
        settings: Models at their depths and under their gates.
        tasks: Tasks to evaluate.
        limit: Number of problems of each task.
        max_new_tokens: Maximum number of tokens of an answer. Default: as each task defines.
        folder: Folder of the results.
        command: Command line of the evaluation.
    """
    numbers = {name_of(task): _count_problems(task, limit) for task in tasks}
    num_tokens = len(settings) * sum(_count_tokens(task, limit, max_new_tokens) for task in tasks)
    lines = {}
    for name in dict.fromkeys(setting.name for setting in settings):
        own = [setting for setting in settings if setting.name == name]
        gates = dict.fromkeys(setting.gates for setting in own)
        depths = _describe_depths([setting.num_loops for setting in own])
        lines[name] = f"{name}, {depths}, gates: {', '.join(gates)}"
    total = len(settings) * sum(numbers.values())
    in_all = [
        f"{count(total, 'problem')}, with {count(len(settings), 'setting')} of model, depth and gates",
        f"at most {num_tokens:,} generated tokens",
    ]
    if any(setting.gates == "single_loop" for setting in settings):
        in_all = [f"more than {in_all[0]}, because only the loaded model says its number of loops"]
    rows = read_own_results(folder)
    num_done = 0
    for task in tasks:
        own = [row for row in rows if (row["task"], row["metric"]) == (name_of(task), "accuracy")]
        if own:  # else the answers of a large task are not read
            problems = list_problems(task, limit)
            on_them = [row for row in own if problems.are_those_of({**row, "folder": folder})]
            num_done += sum(_is_done(setting, on_them) for setting in settings)
    plan = {
        "models": [*lines.values()],
        "tasks": [_describe_task(task, limit, max_new_tokens) for task in tasks],
        "in all": in_all,
        "time": [HOW_TO_TIME],
        "folder": [folder],
        "done": [f"{num_done:,} of {count(len(settings) * len(numbers), 'result')} on the same problems"],
        "answers": _describe_answers(folder),
    }
    _print_plan(plan)
    print(f"\nNext:\n  {command}")


def load_planned_tasks(
    names: Sequence[str],
    own_benchmarks: Mapping[str, Mapping[str, Any]],
    revisions: Mapping[str, str] | None,
    limit: int | None,
) -> dict[str, Task | Group | str]:
    """Return each task by its name, or the reason why its problems cannot be loaded.

    Args:
        names, own_benchmarks, revisions, limit: As in `load_benchmarks`.
    """
    tasks: dict[str, Task | Group | str] = {}
    for name in names:
        if is_on_hub(name, own_benchmarks) and not can_reach_hub():  # its client would try for half a minute
            tasks[name] = "problems not counted, because the Hub cannot be reached"
            continue
        try:
            loaded = load_benchmarks([name], own_benchmarks, revisions, limit)
        except UserError as error:
            tasks[name] = str(error)
        else:
            (tasks[name],) = loaded
    return tasks


def print_plan_without_models(
    models: Sequence[str],
    depths: Sequence[int | None],
    gates: Sequence[str],
    tasks: Mapping[str, Task | Group | str],
    limit: int | None,
    max_new_tokens: int | None,
    folder: str,
) -> None:
    """Print the part of the plan that is known if a model cannot be loaded.

    Args:
        models: Names of the models in the table.
        depths: Recurrence depths, or None for the depth that only the model itself says.
        gates: Gates that were asked for.
        tasks: Task by its name, or the reason why its problems cannot be loaded.
        limit: Number of problems of each task.
        max_new_tokens: Maximum number of tokens of an answer. Default: as each task defines.
        folder: Folder of the results.
    """
    texts, numbers, num_tokens = [], [], 0
    for name, task in tasks.items():
        if isinstance(task, str):
            texts.append(f"{name}: {task}")
        else:
            numbers.append(_count_problems(task, limit))
            num_tokens += _count_tokens(task, limit, max_new_tokens)
            texts.append(_describe_task(task, limit, max_new_tokens))
    suffix = f", gates of adapters: {', '.join(gates)}" if gates else ""
    plan = {"models": [f"{name}, {_describe_depths(depths)}{suffix}" for name in models], "tasks": texts}
    if len(numbers) == len(tasks) and not gates:  # gates such as `single_loop` multiply the settings of adapters only
        num_settings = len(models) * len(depths)
        plan["in all"] = [
            f"{count(num_settings * sum(numbers), 'problem')}, at all depths",
            f"at most {num_settings * num_tokens:,} generated tokens",
        ]
    _print_plan({**plan, "folder": [folder], "answers": _describe_answers(folder)})


def _describe_depths(depths: Sequence[int | None]) -> str:
    texts = dict.fromkeys(str(depth or "its own depth") for depth in depths)
    return f"K = {', '.join(texts)}"


def _print_plan(plan: Mapping[str, Sequence[str]]) -> None:
    """Print the lines of a plan below each other, the title only before the first one."""
    for title, texts in plan.items():
        print(titled(title, texts))


def _count_problems(task: Task | Group, limit: int | None) -> int:
    """Return the number of problems of a task. A limit is one of each task of a group."""
    sizes = [len(leaf.eval_docs) for leaf in leaves_of(task)]
    return sum(size if limit is None else min(size, limit) for size in sizes)


def _count_tokens(task: Task | Group, limit: int | None, max_new_tokens: int | None) -> int:
    """Return the largest number of tokens that one evaluation on a task generates."""
    return sum(_count_problems(leaf, limit) * _longest_answer(leaf, max_new_tokens) for leaf in leaves_of(task))


def _longest_answer(task: Task, max_new_tokens: int | None) -> int:
    """Return the largest number of tokens of an answer, or 0 if a task compares log-likelihoods."""
    if task.OUTPUT_TYPE != "generate_until":
        return 0
    options = normalize_gen_kwargs(task.get_config("generation_kwargs") or {}, DEFAULT_MAX_NEW_TOKENS)
    return max_new_tokens or options["max_gen_toks"]


def _describe_task(task: Task | Group, limit: int | None, max_new_tokens: int | None) -> str:
    """Return the number of problems of a task, and of the tokens of an answer at most."""
    length = max(_longest_answer(leaf, max_new_tokens) for leaf in leaves_of(task))
    answers = f"answers of at most {count(length, 'token')}" if length else "no generated answers"
    return f"{name_of(task)}, {count(_count_problems(task, limit), 'problem')}, {answers}"


def _is_done(setting: Setting, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether one of the results on the problems of a task is of a setting."""
    names = setting.columns.keys() - unneeded_columns(setting.columns)
    for row in rows:
        is_setting = all(row.get(name) == setting.columns[name] for name in names)
        is_depth = setting.num_loops in (None, row["num_loops"])
        if is_setting and is_depth and row["gates"] == setting.gates:
            return True
    return False


def _describe_answers(folder: str) -> list[str]:
    """Return the lines about how many answers the folder keeps, and how many of them other code has given."""
    num_kept, num_other = count_kept(Path(folder, "cache"))
    lines = ["none are kept in the folder"]
    if num_kept:
        lines = [
            f"{num_kept:,} are kept in the folder, and used again where model, code, prompt and settings are the same"
        ]
    if num_other:
        lines.append(f"{num_other:,} cannot be used, because this package or a file of `--import` changed since")
    return lines
