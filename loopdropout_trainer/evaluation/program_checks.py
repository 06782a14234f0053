"""Checks of tasks whose answers are programs: each program must be contained, or the user must have allowed it to run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import yaml
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from loopdropout_trainer.evaluation.programs import load_problems
from loopdropout_trainer.evaluation.sandbox import check_allowed
from loopdropout_trainer.files import PACKAGE


def check_programs(tasks: Iterable[Task | Group], allow_unsafe_code: bool) -> None:
    """Raise `UserError` if the programs of a task cannot be contained, and the user has not allowed them to run anyway."""
    for leaf in chain.from_iterable(map(leaves_of, tasks)):
        if getattr(leaf, "UNSAFE_CODE", False):
            check_allowed(leaf.task_name, allow_unsafe_code, leaf.config.custom_dataset is load_problems)


def check_named_programs(manager: TaskManager, name: str, allow_unsafe_code: bool) -> None:
    """Raise the error of `check_programs` for a task, a group or a tag of an index, without its data."""
    entry = manager.task_index[name]
    config = entry.cfg or {}
    if config.get("unsafe_code", False) is not False:
        check_allowed(name, allow_unsafe_code, can_be_sandboxed=entry.yaml_path.is_relative_to(PACKAGE))
    members = config.get("task")
    if name in manager.all_tags:
        members = sorted(entry.tags)
    if not isinstance(members, list):  # a task
        return
    for member in members:
        if isinstance(member, str) and member in manager.all_tasks:
            check_named_programs(manager, member, allow_unsafe_code)


class _TaskFileLoader(yaml.SafeLoader):
    """Reader of a task file that imports no function of a tag `!function`."""


_TaskFileLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def check_programs_of_file(path: str, allow_unsafe_code: bool) -> None:
    """Raise the error of `check_programs` for a task file of lm-eval (.yaml), without its data and its code.

    A file with `custom_dataset` may use the sandbox, and `include` can name further files. Loading the task tells both.
    """
    try:
        fields = yaml.load(Path(path).read_text(encoding="utf-8"), _TaskFileLoader)
    except (OSError, ValueError, yaml.YAMLError):  # loading it says what is wrong
        return
    if not isinstance(fields, dict) or "custom_dataset" in fields:
        return
    if fields.get("unsafe_code", False) is not False:
        check_allowed(path, allow_unsafe_code, can_be_sandboxed=False)


def leaves_of(task: Task | Group) -> list[Task]:
    """Return the tasks of a group, or the task itself."""
    return task.get_all_tasks() if isinstance(task, Group) else [task]
