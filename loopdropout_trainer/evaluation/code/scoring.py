"""HumanEval, HumanEval+, MBPP and MBPP+ by EvalPlus: what is asked, and which answers are right.

    for task_id, prompt in prompts("humaneval", file):
        # a user turn `prompt`, and an assistant turn that begins with ANSWER_BEGINNING; one greedy answer of at most
        # MAX_NEW_TOKENS tokens, cut before the earliest of STOP_STRINGS
    scores = score("humaneval", {task_id: answer, ...}, file, allow_code_execution=True, log="scores.jsonl")
    scores["HumanEval/0"]  # {"base": True, "plus": False, "why": "plus: fail: 12 of 500 inputs right"}

`base` is HumanEval (or MBPP), `plus` is HumanEval+ (or MBPP+), which asks for both: one answer gives the two scores. The
rules are EvalPlus's own, with these differences:

- A program runs in a box (containment.py) that has no right answers, and EvalPlus compares what it returned, as data.
  So a program cannot reach the comparison: an object that claims to be equal to everything is equal to nothing.
- Where EvalPlus compares with the help of the input, it sees the input as it was before the call.
- After a wrong value a program is called with the remaining inputs, too.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers.utils import logging

from loopdropout_trainer.evaluation.code.containment import (
    ContainmentError,
    Limits,
    containment_report,
    library_folders,
    run_contained,
)
from loopdropout_trainer.saving.files import sha256_of_json


logger = logging.get_logger(__name__)

MAX_NEW_TOKENS = 1024
"""Most tokens of an answer (Appendix "Evaluation")."""

# EvalPlus's own words for models that chat, which its scores are compared by; they stand inside one of its functions.
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)
ANSWER_BEGINNING = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:\n"
    "```python\n"
)
"""What an answer continues."""

STOP_STRINGS = ("<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint(", "\n```\n")

DATASETS = {"humaneval": "HUMANEVAL_OVERRIDE_PATH", "mbpp": "MBPP_OVERRIDE_PATH"}
"""The data sets, and where EvalPlus looks for a file that replaces the download."""

READING_SECONDS = 300
"""Most time to find the program in an answer, or to compare its results."""

Score = dict[str, Any]


class CodeExecutionError(ValueError):
    """Generated programs were not to be run, or cannot be."""


def prompts(dataset: str, file: str | Path | None = None) -> list[tuple[str, str]]:
    """Return (task id, user turn) for every problem.

    Args:
        dataset: `humaneval` or `mbpp`.
        file: EvalPlus's data as a local file, JSON lines, plain or .gz; default: the release that EvalPlus downloads.

    Raises:
        CodeExecutionError: if EvalPlus is not installed, or there is no such data set or file.
    """
    with _JudgeProcess(dataset, file) as judge:
        asked = judge.ask("describe")["prompts"]
    return [(task_id, f"{INSTRUCTION}\n```\n{prompt.strip()}\n```\n") for task_id, prompt in asked]


def score(
    dataset: str,
    answers: Mapping[str, str],
    file: str | Path | None = None,
    limits: Limits = Limits(),  # noqa: B008
    *,
    allow_code_execution: bool = False,
    log: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> dict[str, Score]:
    """Run the program in each answer on EvalPlus's inputs, contained, and return {task id: {"base", "plus", "why"}}.

    Args:
        dataset, file: see `prompts`.
        answers: the model's text, after ANSWER_BEGINNING, for some or all task ids.
        limits: what a program may use.
        allow_code_execution: must be true; what programs are not kept from here is in the log before the first one runs.
        log: file that keeps each score as soon as it is there; scores of the same answers in it are not computed again.
        workers: programs that run at a time; default: half of the processors, as in EvalPlus.
        progress: show a bar.

    Raises:
        CodeExecutionError: without `allow_code_execution`, without EvalPlus, or for a task id that is not in the data.
        ContainmentError: if programs cannot be contained as announced.
    """
    if not allow_code_execution:
        raise CodeExecutionError(
            f"{dataset} runs programs that the model has written: give --allow_code_execution to allow it. "
            f"{containment_report()}"
        )
    with _JudgeProcess(dataset, file) as judge:
        described = judge.ask("describe")
        known = {task_id for task_id, _ in described["prompts"]}
        if unknown := sorted(set(answers) - known):
            raise CodeExecutionError(f"{dataset} has no problem {unknown[0]!r}; its data has {len(known)} others.")
        rules = {"data": described["hash"], "evalplus": metadata.version("evalplus"), **asdict(limits)}
        keys = {task_id: sha256_of_json({"answer": answer, **rules}) for task_id, answer in answers.items()}
        scores = _logged(log, keys)
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for task_id in answers:
            if task_id not in scores:
                waiting.put(task_id)
        if waiting.empty():
            return {task_id: scores[task_id] for task_id in answers}
        logger.warning(containment_report())
        workers = min(waiting.qsize(), workers or max(1, (os.cpu_count() or 2) // 2))
        bar = tqdm(total=len(answers), initial=len(scores), unit=" programs", disable=not progress)

        def work(judge: _JudgeProcess) -> None:
            while True:
                try:
                    task_id = waiting.get_nowait()
                except queue.Empty:
                    return
                scores[task_id] = _score(judge, task_id, answers[task_id], limits)
                _append(log, {"task_id": task_id, "key": keys[task_id], **scores[task_id]})
                bar.update()

        with bar, ExitStack() as stack, ThreadPoolExecutor(workers) as pool:
            judges = [judge]
            judges += [stack.enter_context(_JudgeProcess(dataset, file)) for _ in range(workers - 1)]
            try:
                list(pool.map(work, judges))
            except BaseException:
                while not waiting.empty():  # what has not begun does not begin
                    waiting.get()
                raise
    return {task_id: scores[task_id] for task_id in answers}


def _score(judge: _JudgeProcess, task_id: str, answer: str, limits: Limits) -> Score:
    """Return the score of one answer."""
    # As EvalPlus reads a decoded answer.
    text = min((answer[: answer.find(stop)] for stop in STOP_STRINGS if stop in answer), key=len, default=answer)
    try:
        jobs = judge.ask("prepare", task_id, text.replace("\t", "    "), READING_SECONDS)
    except JudgeError as error:
        return {"base": False, "plus": False, "why": f"no program can be read: {error}"}
    for part in ("base", "plus"):
        why = _check(judge, task_id, part, jobs[part], limits)
        if why:
            return {"base": part == "plus", "plus": False, "why": f"{part}: {why}"}
    return {"base": True, "plus": True, "why": ""}


def _check(judge: _JudgeProcess, task_id: str, part: str, job: dict, limits: Limits) -> str:
    """Run a program on the inputs of one part; return why it does not pass, or nothing."""
    job = {**job, "memory_bytes": limits.memory_bytes, "folders": library_folders()}
    program = Path(__file__).with_name("program.py")
    outcome = run_contained(
        [sys.executable, "-s", "-B", str(program)], json.dumps(job).encode(), job["all_seconds"], limits
    )
    if outcome.results is None:
        return outcome.why
    try:
        results = json.loads(outcome.results)
        returned, error = results["returned"], results["error"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "its results cannot be read"
    if error is not None:
        return f"{str(error)[:100]} at input {len(returned)}"
    try:
        verdict = judge.ask("compare", task_id, part, returned, READING_SECONDS)
    except JudgeError as broken:
        return f"its results cannot be compared: {broken}"
    if verdict["status"] == "pass":
        return ""
    return f"{verdict['status']}: {verdict['right']} of {verdict['inputs']} inputs right, up to the first wrong one"


class JudgeError(RuntimeError):
    """A question that the judge could not answer."""


class _JudgeProcess:
    """A running judge.py, for one question at a time."""

    def __init__(self, dataset: str, file: str | Path | None) -> None:
        if dataset not in DATASETS:
            raise CodeExecutionError(f"The code data sets are {', '.join(DATASETS)}; got {dataset!r}.")
        if util.find_spec("evalplus") is None:
            raise CodeExecutionError(
                f"{dataset} needs EvalPlus, which is not installed: `pip install 'loopdropout-trainer[eval]'`."
            )
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        environment.pop(DATASETS[dataset], None)
        if file is not None:
            if not Path(file).is_file():
                raise CodeExecutionError(f"The data of {dataset} is not there: {file}.")
            environment[DATASETS[dataset]] = str(Path(file).resolve())
        self.process = subprocess.Popen(
            [sys.executable, "-B", str(Path(__file__).with_name("judge.py")), dataset],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # an interrupt from the keyboard is for this process, which ends the other
        )

    def ask(self, question: str, *arguments: Any) -> Any:
        """Return the answer.

        Raises:
            JudgeError: if it has none.
        """
        try:
            self.process.stdin.write(json.dumps([question, *arguments]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ContainmentError("EvalPlus's process broke off; what it said is on the standard error.")
        reply = json.loads(line)
        if "error" in reply:
            raise JudgeError(reply["error"])
        return reply["answer"]

    def __enter__(self) -> _JudgeProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()


def _logged(log: str | Path | None, keys: Mapping[str, str]) -> dict[str, Score]:
    """Return the scores in a log that are of these answers."""
    if log is None or not Path(log).exists():
        return {}
    found = {}
    for line in Path(log).read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            if keys.get(record["task_id"]) == record["key"]:
                found[record["task_id"]] = {name: record[name] for name in ("base", "plus", "why")}
        except (ValueError, TypeError, KeyError):  # the last line, when a run was killed
            continue
    return found


def _append(log: str | Path | None, record: Mapping[str, Any]) -> None:
    if log is None:
        return
    with Path(log).open("a+b") as file:  # one write, so that workers' lines stay whole
        file.seek(0, os.SEEK_END)
        begins = b""
        if file.tell():
            file.seek(-1, os.SEEK_END)
            begins = b"" if file.read(1) == b"\n" else b"\n"  # after half a line of a run that was killed
        file.write(begins + json.dumps(record).encode() + b"\n")
