"""Tasks of the package and of lm-eval by name, task files, own benchmarks, and held-out examples as a task."""

from __future__ import annotations

import functools
import inspect
import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import lm_eval.tasks
import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from datasets.exceptions import DatasetsError
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from loopdropout_trainer.costs.published import PUBLISHED_TASKS
from loopdropout_trainer.data import FIELD, PROMPT_TEMPLATES, fill, read_files
from loopdropout_trainer.data.files import check_files
from loopdropout_trainer.data.preparations import SCORED_LIKE
from loopdropout_trainer.errors import (
    UserError,
    check_type,
    choose_advice,
    closest_match,
    hint_at_login,
    hint_at_own_file,
    is_unreachable,
    short_repr,
)
from loopdropout_trainer.evaluation.development import check_development
from loopdropout_trainer.evaluation.program_checks import check_named_programs, check_programs, check_programs_of_file
from loopdropout_trainer.hints import list_hint, own_benchmark_hint
from loopdropout_trainer.own_code import IMPORTED
from loopdropout_trainer.results.run_files import DEVELOPMENT
from loopdropout_trainer.rewards import REWARDS
from loopdropout_trainer.settings.fields import items_of


logger = logging.getLogger(__name__)

TASKS = Path(__file__).with_name("tasks")
"""Folder of the package's own tasks."""

_OWN = "own"
"""Task that own benchmarks are made of, which has no problems itself."""

_MADE_NAMES: set[str] = set()
"""Names of the own benchmarks that this process has made, which are no tasks that a name loads."""

_TEXTS = str | list[str]
_OWN_TYPES = {
    "files": _TEXTS | Path | list[str | Path] | None,
    "prompt": str | None,
    "target": str | None,
    "scorer": str | None,
    "like": str | None,
    "max_new_tokens": int | None,
    "stop": _TEXTS | None,
    "chat": bool | None,
}
"""Types of the fields of an own benchmark, which a recipe gives as a mapping."""

_FOLDERS = {"mmlu": "mmlu/default", "bbh": "bbh/cot_fewshot", "truthfulqa": "truthfulqa"}
_LM_EVAL = Path(lm_eval.tasks.__file__).parent


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Seed the random states as lm-eval does, and restore them after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            random.seed(0)
            np.random.seed(1234)
            torch.manual_seed(1234)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def load_benchmarks(
    names: Sequence[str],
    own_benchmarks: Mapping[str, Mapping[str, Any]] | None = None,
    revisions: Mapping[str, str] | None = None,
    limit: int | None = None,
    preparation: str | None = None,
    held_out: Dataset | None = None,
) -> list[Task | Group]:
    """Load the tasks that a recipe names.

    Args:
        names: Tasks of the package or of lm-eval, keys of `own_benchmarks`, or task files that `--import` allows.
        own_benchmarks: Arguments of `own_benchmark` by name.
        revisions: Branch, tag or commit of the dataset on the Hub by task.
        limit: Number of generated problems.
        preparation: Preparation of the training data, for the task `development`.
        held_out: Held-out examples, for the task `development`.

    Raises:
        UserError: if there is no such task, or its data cannot be loaded.
    """
    own_benchmarks, revisions = own_benchmarks or {}, revisions or {}
    check_revisions(revisions, names)
    tasks = []
    for name in names:
        if name in own_benchmarks:
            tasks.append(_make_own(name, own_benchmarks[name]))
        elif name == DEVELOPMENT:
            tasks.append(development_task(preparation, held_out))
        else:
            _check_task_file(name)
            tasks += _load_task(name, revisions.get(name), limit, own_benchmarks).values()
    return tasks


def check_benchmarks(
    names: Sequence[str],
    own_benchmarks: Mapping[str, Mapping[str, Any]],
    preparation: str | None,
    num_held_out: int | None,
    allow_unsafe_code: bool,
) -> None:
    """Raise the errors of tasks that need no dataset of the Hub, so that a plan finds them before a training.

    Args:
        names, own_benchmarks, preparation: As in `load_benchmarks`.
        num_held_out: Number of held-out examples, or None if only the loaded examples tell it.
        allow_unsafe_code: As in `check_programs`.

    Raises:
        UserError: If there is no such task, an own benchmark cannot be made of its files, or the programs of a task cannot be
            contained.
    """
    for name in names:
        if name in own_benchmarks:
            try:
                check_programs([_make_own(name, own_benchmarks[name])], allow_unsafe_code)
            except UserError as error:
                if not is_unreachable(error):  # its files may be on the Hub, which a plan does not need
                    raise
        elif name == DEVELOPMENT:
            check_development(preparation, num_held_out)
        elif name.endswith(".yaml"):
            _check_task_file(name)
            check_programs_of_file(name, allow_unsafe_code)
        else:
            check_named_programs(_find_manager(name, own_benchmarks), name, allow_unsafe_code)


def check_revisions(revisions: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise UserError if `benchmark_revisions` has a name that is not a task. It may name tasks that are not measured now."""
    for name in revisions:
        if name in names or name in PUBLISHED_TASKS:
            continue
        try:
            _find_manager(name)
        except UserError:
            hint = closest_match(name, names) or closest_match(name, PUBLISHED_TASKS)
            raise UserError(
                f"`benchmark_revisions` must map tasks to revisions, got {name!r}, which is not a task.{hint}"
            ) from None


def _check_task_file(name: str) -> None:
    """Raise UserError if a task is a file of lm-eval that `--import` does not allow."""
    if not name.endswith(".yaml") or str(Path(name).resolve()) in IMPORTED:
        return
    fix = choose_advice(
        f"Add `--import {name}` to the command line.",
        f"Allow it first by `loopdropout_trainer.settings.recipe.import_files([{name!r}])`.",
    )
    raise UserError(f"{name} can run code, as any task file of lm-eval. {fix}")


def _make_own(name: str, fields: Mapping[str, Any]) -> Task:
    """Return the task of a benchmark in a recipe, whose fields must be a mapping of arguments of `own_benchmark`."""
    if not isinstance(fields, Mapping):
        raise UserError(
            f"`own_benchmarks` must map {name!r} to a mapping of fields such as `files` and `like`, got {short_repr(fields)}."
        )
    _, *valid = inspect.signature(own_benchmark).parameters  # the first one is the name
    for field in fields:
        if field not in valid:
            raise UserError(f"The benchmark `{name}` has no field `{field}`.{closest_match(field, valid)}")
    return own_benchmark(name, **fields)


@preserved_random_states()
def own_benchmark(
    name: str,
    files: str | Sequence[str] = (),
    *,
    prompt: str | None = None,
    target: str | None = None,
    scorer: str | None = None,
    like: str | None = None,
    max_new_tokens: int | None = None,
    stop: Sequence[str] | None = None,
    chat: bool | None = None,
) -> Task:
    """Make a task of your own problems.

    Args:
        name: Name of the task in results. It must not be the name of a task of the package or of lm-eval.
        files: JSONL, JSON, CSV (also compressed) or Parquet files with the problems.
        prompt: `alpaca`, `question`, or a text with {column} fields.
        target: Reference answer, a text with {column} fields.
        scorer: Comparison of an answer with the target, by its name in `REWARDS`.
        like: Task with the scorer, and with the prompt, the target and the decoding where they are not given.
        max_new_tokens: Maximum number of tokens of an answer. Default: 256.
        stop: Texts that end an answer. Default: the end token alone.
        chat: Whether the prompt is a turn of a chat.

    Raises:
        UserError: if the files cannot be read, or the arguments do not describe a task.
    """
    _check_own_name(name)
    given = (files, prompt, target, scorer, like, max_new_tokens, stop, chat)
    for (field, hint), value in zip(_OWN_TYPES.items(), given, strict=True):
        listed = list(value) if isinstance(value, tuple) else value
        kinds = "a file or a list of files" if field == "files" else None
        check_type(f"`{field}` of the benchmark `{name}`", listed, hint, kinds)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise UserError(f"`max_new_tokens` of the benchmark `{name}` must be at least 1, got {max_new_tokens}.")
    if like is None:
        is_described = None not in (prompt, target, scorer)
    else:
        is_described = scorer is None
    if not files or not is_described:
        raise UserError(
            f"The benchmark `{name}` must have `files`, and either `prompt`, `target` and `scorer` or `like`."
        )
    if scorer not in (None, *REWARDS):
        raise UserError(
            f"`scorer` must be one of {', '.join(REWARDS)}, got {scorer!r}.{closest_match(scorer, REWARDS)}"
            f"{hint_at_own_file()}"
        )
    templates = {"doc_to_text": PROMPT_TEMPLATES.get(prompt, prompt), "doc_to_target": target}
    config = {field: functools.partial(fill, text) for field, text in templates.items() if text is not None}
    if scorer is not None:

        def score(row: Mapping[str, Any], answers: Sequence[str]) -> dict[str, bool]:
            (reward,) = REWARDS[scorer](answers[:1], answer=[fill(target, row)])
            return {"acc": reward == 1}

        config["process_results"] = score
    if chat is not None:
        config["metadata"] = {"apply_chat_template": chat}
    with _explained(name):
        check_files(items_of(files), benchmark=name)
        rows = read_files(files)
    with _explained(name, rows.column_names, {"prompt": templates["doc_to_text"], "target": target}):
        task = task_of_rows(name, like or _OWN, rows, **config)
    options = {"until": stop, "max_gen_toks": max_new_tokens}
    options = {option: value for option, value in options.items() if value is not None}
    task.set_config("generation_kwargs", options, update=True)
    _MADE_NAMES.add(name)
    return task


def _check_own_name(name: str) -> None:
    if name in (DEVELOPMENT, *_load_manager(None, False).all_tasks) or (_LM_EVAL / name).exists():
        raise UserError(
            f"An own benchmark must not have the name of a task of lm-eval or the package, got {name!r}. Choose another name."
        )


def task_of_rows(name: str, like: str, rows: Dataset, **config: Any) -> Task:
    """Return a task of some rows in all splits, with the fields of the task `like` where `config` has none."""
    config |= {"task": like, "custom_dataset": lambda **_: defaultdict(lambda: rows), "dataset_kwargs": None}
    # lm-eval overrides the fields of a task only in a new group.
    (task,) = _find_manager(like).load([{"group": name, "task": [config]}])["tasks"].values()
    if task.get_config("num_fewshot") and task.fewshot_cfg.samples is None:
        raise UserError(f"`like` must be a task without examples of another split in its prompt, got {like!r}.")
    task.set_config("task", name)
    return task


@contextmanager
def _explained(
    name: str, columns: Sequence[str] = (), templates: Mapping[str, str | None] = MappingProxyType({})
) -> Iterator[None]:
    """Turn an error about the data of a task into one message, which lists the columns of own problems.

    Args:
        name: Name of the task.
        columns: Columns of own problems.
        templates: Texts with {column} fields by the names of the fields of the benchmark that have them.
    """
    try:
        yield
    except (OSError, KeyError, jinja2.TemplateError, DatasetsError) as error:
        reason = str(error.__cause__ or error)
        if isinstance(error, KeyError):
            reason = f"`{error.args[0]}` is missing"
        if columns and isinstance(error, KeyError | jinja2.UndefinedError):
            reason += f", and the columns are {', '.join(columns)}"
        if columns and isinstance(error, KeyError):
            reason += _explain_missing_column(error.args[0], columns, templates)
        raise UserError(f"The task `{name}` cannot be loaded: {reason}{hint_at_login(error)}") from None


def _explain_missing_column(column: str, columns: Sequence[str], templates: Mapping[str, str | None]) -> str:
    """Return the end of the message about a column that own problems lack: the field that asks for it, and what is meant.

    Args:
        column: Missing column.
        columns, templates: As in `_explained`.
    """
    fields = [f"`{field}`" for field, text in templates.items() if column in FIELD.findall(text or "")]
    if not fields:
        return ""
    verb = "asks" if len(fields) == 1 else "ask"
    return f". {' and '.join(fields)} {verb} for `{column}`.{closest_match(column, columns)}"


def development_task(preparation: str | None, examples: Dataset | None) -> Task:
    """Return held-out training examples as a task, with the prompt and the scorer of the preparation's test set.

    Args:
        preparation: Preparation of the training data.
        examples: Held-out examples with the columns `question` and `answer`.

    Raises:
        UserError: if the examples do not have questions with answers that can be scored.
    """
    check_development(preparation, len(examples or ()))
    return task_of_rows(DEVELOPMENT, SCORED_LIKE[preparation], examples)


def load_task(name: str, revision: str | None = None, limit: int | None = None) -> dict[str, Task | Group]:
    """Load a task, or a group of tasks, by name. A tag of lm-eval gives several tasks.

    Args:
        name: Task of the package or of lm-eval, or a task file of lm-eval (.yaml), which can run code.
        revision: Branch, tag or commit of the dataset on the Hub.
        limit: Number of generated problems.

    Raises:
        UserError: if there is no such task, or its data cannot be loaded.
    """
    if name in _MADE_NAMES:
        raise UserError(
            f"`{name}` is the name of an own benchmark, by which no task is loaded. Put the task that `own_benchmark` has "
            f"returned into the list, as in `evaluate_tasks(lm, [own_benchmark({name!r}, ...)])`."
        )
    return _load_task(name, revision, limit)


@preserved_random_states()
def _load_task(
    name: str, revision: str | None, limit: int | None, own_names: Iterable[str] = ()
) -> dict[str, Task | Group]:
    """Load a task as `load_task` does. A message about an unknown one has the names of the user's own benchmarks, too."""
    if name.endswith(".yaml"):
        with _explained(name):
            tasks = _load_manager(None, False).load([name])["tasks"]
        for own_name in tasks:
            _check_own_name(own_name)
        return tasks
    manager = _find_manager(name, own_names)
    overrides: dict[str, Any] = {"dataset_kwargs": {"revision": revision}} if revision else {}
    if name.startswith("arithmetic_") and limit:
        overrides["dataset_kwargs"] = {"split": name.removeprefix("arithmetic_"), "num_examples": limit}
    with _explained(name):
        # lm-eval applies overrides only to the tasks of a new group.
        specs: list[Any] = [name]
        if overrides:
            members = [{"task": member, **overrides} for member in _members(manager, name)]
            specs = [{"group": "selected", "task": members}]
        tasks = manager.load(specs)["tasks"]
    if name not in manager.all_groups:
        return tasks
    group = Group(name)
    for task in tasks.values():
        group.add(task)
    return {name: group}


def _members(manager: TaskManager, name: str) -> list[str]:
    """Return the names of all tasks of a task, a group or a tag."""
    entry = manager.task_index[name]
    if name in manager.all_groups:
        parts = entry.cfg["task"]
    elif name in manager.all_tags:
        parts = sorted(entry.tags)
    else:
        return [name]
    members = []
    for part in parts:
        members += _members(manager, part)
    return members


def _find_manager(name: str, own_names: Iterable[str] = ()) -> TaskManager:
    """Return an index with the task. The index of all tasks of lm-eval takes 10 seconds, which a warning says before.

    Args:
        name: Name of the task.
        own_names: Names of the user's own benchmarks, which can be meant.

    Raises:
        UserError: If there is no such task.
    """
    manager = _load_manager(_FOLDERS.get(name.partition("_")[0]), False)
    if name in manager.all_tasks:
        return manager
    packaged = [task for task in _load_manager(None, False).all_tasks if task != _OWN]
    hint = (
        list_hint(name) or closest_match(name, own_names) or own_benchmark_hint(name) or closest_match(name, packaged)
    )
    if PartialState().is_main_process:
        logger.warning(
            "`%s` is not a task of this package.%s Looking in lm-eval's index (about 10 seconds).", name, hint
        )
    manager = _load_manager(None, True)
    if name in manager.all_tasks:
        return manager
    hint = hint or closest_match(name, manager.all_tasks)
    raise UserError(f"`{name}` must be a task of lm-eval or one of {', '.join([*own_names, *packaged])}.{hint}")


@functools.cache
def _load_manager(folder: str | None, include_defaults: bool) -> TaskManager:
    logging.getLogger("lm_eval.tasks._index").addFilter(lambda record: "overrides existing" not in str(record.msg))
    paths = [str(TASKS)]
    if folder is not None:
        paths.append(str(_LM_EVAL / folder))
    return TaskManager(include_path=paths, include_defaults=include_defaults)
