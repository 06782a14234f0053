"""Evaluate a model on tasks with lm-eval, and return results and per-problem samples."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from accelerate.utils import broadcast_object_list
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate as run_lm_eval

from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.evaluation.loading import load_task, preserved_random_states
from loopdropout_trainer.evaluation.looped_lm import LoopedLM
from loopdropout_trainer.evaluation.program_checks import check_programs, leaves_of
from loopdropout_trainer.evaluation.sample_files import write_samples
from loopdropout_trainer.keywords import explain_unknown
from loopdropout_trainer.results.problems import Problems, digest_problems


# lm-eval gives advice on custom data sets for each task that has one.
logging.getLogger("lm_eval.api.task").addFilter(lambda record: "Custom kwargs" not in str(record.msg))

logger = logging.getLogger(__name__)

_GROUPS = ("subject", "level", "num_steps")


@preserved_random_states()
@explain_unknown
def evaluate_tasks(
    lm: LoopedLM,
    tasks: Sequence[str | Task | Group],
    *,
    limit: int | None = None,
    cache_dir: str | Path | None = None,
    output_dir: str | Path | None = None,
    allow_unsafe_code: bool = False,
    apply_chat_template: bool | None = None,
    system_instruction: str | None = None,
    max_new_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """Evaluate a model on tasks.

    With several processes, call it in all of them. Each process evaluates a share of the problems, and all return the results.

    Args:
        lm: Model with its depth, gates and readout.
        tasks: Tasks of the package, tasks and groups of lm-eval, task files, or `own_benchmark(...)`.
        limit: Number of problems of each task.
        cache_dir: Folder that keeps each answer. An interrupted evaluation generates only the missing answers.
        output_dir: Folder for `samples_<task>_K<num_loops>_<gates>.jsonl`, which has one line for each problem. A file with
            other answers, as of another model, is kept, and the new one has a number.
        allow_unsafe_code: Whether to run generated programs outside of the sandbox.
        apply_chat_template: Whether prompts are turns of a chat. Default: as each task defines.
        system_instruction: System turn of the chat.
        max_new_tokens: Maximum number of tokens of an answer. Default: as each task defines.

    Returns:
        Results without the columns `method`, `seed` and `step`. The metrics of each task are `accuracy` in percent, further
        metrics of the task, `missing` (percentage of answers not in the task's format) and `accuracy_by_<column>`. The column
        `samples` names the file of the samples in `output_dir`.

    Raises:
        UserError: if a task does not exist, its data cannot be loaded, or its programs cannot be contained.
    """
    _check_arguments(lm, tasks, limit=limit, max_new_tokens=max_new_tokens)
    selected: dict[str, Task | Group] = {}
    for task in tasks:
        if isinstance(task, str):
            selected |= load_task(task, limit=limit)
        elif isinstance(task, Task | Group):
            selected[name_of(task)] = task
        else:
            raise UserError(
                f"`tasks` must have names of tasks, or tasks as of `own_benchmark`, got {short_repr(task)}."
            )
    check_programs(selected.values(), allow_unsafe_code)
    chats = {}
    for name, task in selected.items():
        for leaf in leaves_of(task):
            _prepare(leaf, max_new_tokens)
        chats[name] = asks_in_chat(task, apply_chat_template)
        if chats[name] and not lm.tokenizer.chat_template:
            raise UserError(f"`chat_template` must be set, because the prompts of `{name}` are turns of a chat.")
    rows, place = [], lm.columns  # before the evaluation, because the gates of a block may have no name
    for name, task in selected.items():
        with _asking(lm, chats[name]), lm.keep_answers(cache_dir), preserved_random_states():
            results = run_lm_eval(
                lm,
                {"tasks": {leaf.task_name: leaf for leaf in leaves_of(task)}, "groups": {}},
                limit=limit,
                bootstrap_iters=0,
                system_instruction=system_instruction if chats[name] else None,
                apply_chat_template=chats[name],
                fewshot_as_multiturn=chats[name],
                confirm_run_unsafe_code=True,  # `check_programs` has checked it
            )
        own_rows = [None if results is None else _collect(lm, name, task, results, output_dir, place)]
        rows += broadcast_object_list(own_rows)[0]
    return rows


def _check_arguments(lm: Any, tasks: Any, **numbers: Any) -> None:
    """Raise UserError unless these are arguments of `evaluate_tasks`. `numbers`: integers of at least 1, or None."""
    if not isinstance(lm, LoopedLM):
        given = f"{str(lm)!r}" if isinstance(lm, str | Path) else "model, tokenizer"
        raise UserError(f"`lm` must be a `LoopedLM`, got {short_repr(lm)}. Give `LoopedLM({given})`.")
    if isinstance(tasks, str):
        raise UserError(f"`tasks` must be a list, got {tasks!r}. Did you mean [{tasks!r}]?")
    if isinstance(tasks, Task | Group):
        raise UserError(f"`tasks` must be a list, got the task {name_of(tasks)!r}. Give it as `[task]`.")
    if not isinstance(tasks, Iterable):
        raise UserError(f"`tasks` must be a list of names or tasks, got {short_repr(tasks)}.")
    for field, value in numbers.items():
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= 1):
            raise UserError(f"`{field}` must be an integer of at least 1, got {short_repr(value)}.")


@contextmanager
def _asking(lm: LoopedLM, is_chat: bool) -> Iterator[None]:
    """Let a model read its prompts as turns of a chat inside the block, or as texts."""
    own_choice = lm.add_bos_token
    if is_chat:
        lm.add_bos_token = False  # a chat template writes the special tokens itself
    try:
        yield
    finally:
        lm.add_bos_token = own_choice


def asks_in_chat(task: Task | Group, apply_chat_template: bool | None = None) -> bool:
    """Return whether the prompts of a task are turns of a chat. `apply_chat_template`: the user's choice, or None."""
    own_choice = bool((leaves_of(task)[0].get_config("metadata") or {}).get("apply_chat_template"))
    return own_choice if apply_chat_template is None else apply_chat_template


def _prepare(task: Task, max_new_tokens: int | None) -> None:
    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(1234)
    if max_new_tokens is not None and task.OUTPUT_TYPE == "generate_until":
        task.set_config("generation_kwargs", {"max_gen_toks": max_new_tokens}, update=True)


def name_of(task: Task | Group) -> str:
    """Return the name of a task, which its results have."""
    return task.name if isinstance(task, Group) else task.task_name


def _collect(
    lm: LoopedLM,
    name: str,
    task: Task | Group,
    evaluation: Mapping[str, Any],
    output_dir: str | Path | None,
    place: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the results of lm-eval's evaluation of a task, and write its samples. `place`: the columns of `lm`."""
    leaves = leaves_of(task)
    numbers = evaluation["results"][leaves[0].task_name]  # by METRIC,FILTER, and the standard errors
    keys = [key for key in numbers if "," in key and "_stderr," not in key]
    main_key = keys[0]  # a task lists its main metric first
    main_metric, main_filter = main_key.split(",", 1)
    samples = _group_samples(leaves, evaluation)
    lines = pd.DataFrame([_make_line(sample, main_metric) for sample in samples[main_filter]])
    problems = digest_problems((sample["doc"], sample["target"]) for sample in samples[main_filter])
    shared = {"task": name, **place, "problems": problems}
    by_key = {}
    for key in keys:
        metric, filter_name = key.split(",", 1)
        values = [sample.get(metric) for sample in samples[filter_name]]
        if _are_scores(values):
            title = "accuracy" if key == main_key else _name_metric(key, main_metric)
            by_key[key] = _make_percentage(title, values, shared)
        elif len(leaves) == 1:  # lm-eval has the number of the task
            title = _name_metric(key, main_metric)
            by_key[key] = {"metric": title, **shared, "n": len(lines), "value": float(numbers[key]), "unit": ""}
        else:
            logger.warning(
                f"`{metric}` of {name} is not reported, because {name} has several tasks and the values are not from 0 to 1. "
                "Evaluate the tasks one by one."
            )
    main_row = by_key.get(main_key)
    rows = [*by_key.values()]
    if lines["completion"].notna().all():
        rows.append(_make_percentage("missing", ~lines["answered"], shared))
    if main_row is not None and main_row["metric"] == "accuracy":
        for column, groups in _group_problems(lines):
            for group, correct in groups:
                rows.append(_make_percentage(f"accuracy_by_{column}", correct, {"group": str(group), **shared}))
    if output_dir is not None:
        file = _write_samples(lm, name, lines, output_dir)
        if main_row is not None:  # whose values the samples have
            main_row["samples"] = file
    return rows


def _are_scores(values: Iterable[Any]) -> bool:
    """Return whether each value is a number from 0 to 1."""
    return all(isinstance(value, Real | np.bool_) and 0 <= value <= 1 for value in values)


def _make_percentage(metric: str, scores: Sequence[float], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result: the mean of scores from 0 to 1, in percent. `shared`: further columns."""
    return {"metric": metric, **shared, "n": len(scores), "value": 100 * float(np.mean(scores)), "unit": "%"}


def _group_problems(lines: pd.DataFrame) -> Iterator[tuple[str, Iterable[tuple[Any, pd.Series]]]]:
    """Yield the columns that divide the problems of a task into several groups, each with the groups and their values."""
    columns = [column for column in _GROUPS if column in lines] or ["task"]
    for column in columns:
        groups = lines.groupby(column)["correct"]
        if len(groups) > 1:
            yield column, groups


def list_problems(task: Task | Group, limit: int | None) -> Problems:
    """Return the problems that an evaluation of a task is on. A limit is one of each task of a group."""
    problems = []
    for leaf in leaves_of(task):
        for row in islice(leaf.eval_docs, limit):
            problems.append((row, leaf.doc_to_target(row)))
    return Problems(problems)


def _group_samples(leaves: Iterable[Task], evaluation: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of each filter, in the order of the problems."""
    samples = defaultdict(list)
    for leaf in leaves:
        for sample in sorted(evaluation["samples"][leaf.task_name], key=lambda sample: sample["doc_id"]):
            samples[sample["filter"]].append({**sample, "task": leaf.task_name})
    return samples


def _name_metric(key: str, main_metric: str) -> str:
    """Return the name of a metric that lm-eval calls METRIC,FILTER. Several filters may have the main metric."""
    metric, filter_name = key.split(",", 1)
    if filter_name == "none":
        return metric
    if metric == main_metric:
        return filter_name
    return key


def _write_samples(lm: LoopedLM, name: str, lines: pd.DataFrame, output_dir: str | Path) -> str:
    """Write the samples of a task to a folder, and return the name of their file."""
    gates = lm.columns["gates"].replace(" ", "_")
    readout = f"_readout_{lm.readout}" if lm.readout else ""
    path = Path(output_dir, f"samples_{name}_K{lm.num_loops}_{gates}{readout}.jsonl")
    return write_samples(path, lines).name


def _make_line(sample: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the columns of one line of a file of samples."""
    arguments, responses = sample["arguments"], [response[0] for response in sample["resps"]]
    completion, answer, target = responses[0], sample["filtered_resps"][0], sample["target"]
    if not isinstance(completion, str):  # log-likelihoods of choices, or of a text
        scores = []
        for response in responses:
            is_pair = isinstance(response, tuple | list)  # of the log-likelihood, and whether it is the greedy answer
            scores.append(response[0] if is_pair else response)
        completion, answer = None, arguments[int(np.argmax(scores))][-1].strip()
        if isinstance(target, int):  # the index of a choice
            target = arguments[target][-1].strip()
    elif answer == "[invalid]":
        answer = None
    elif sample["filter"] == "none" and not completion.strip():
        answer = None
    value = sample.get(metric)
    return {
        "task": sample["task"],
        "doc_id": sample["doc_id"],
        "prompt": arguments[0][0],
        "completion": completion,
        "target": str(target),
        "answer": None if answer is None else str(answer),
        "answered": answer is not None,
        "correct": float(value) if isinstance(value, Real | np.bool_) else np.nan,
        **{column: sample["doc"][column] for column in _GROUPS if column in sample["doc"]},
    }
