"""HumanEval, HumanEval+, MBPP and MBPP+: EvalPlus's verdicts on generated programs, computed in the sandbox."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation.sandbox import check_program, run_scorer, sandbox_fault


Problem = Mapping[str, Any]

# EvalPlus's prompt for chat models. It is inside one of EvalPlus's functions.
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)
STOP_STRINGS = ("<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint(", "\n```\n")

_verdicts: dict[tuple[str, str, str], str] = {}  # HumanEval and HumanEval+ have the same programs


def load_problems(dataset: str, file: str = "", **metadata: Any) -> dict[str, Dataset]:
    """Return the problems of EvalPlus as the split `test`.

    Args:
        dataset: "humaneval" or "mbpp".
        file: Local file in EvalPlus's format (.jsonl, .jsonl.gz). Default: EvalPlus's release, which is downloaded once.
        **metadata: Further fields of the task.
    """
    rows = []
    for problem in read_problems(dataset, file).values():
        prompt = f"{INSTRUCTION}\n```\n{problem['prompt'].strip()}\n```\n"
        rows.append({"task_id": problem["task_id"], "text": prompt, "dataset": dataset, "file": file})
    return {"test": Dataset.from_list(rows)}


def read_problems(dataset: str, file: str = "") -> dict[str, Problem]:
    """Return EvalPlus's problems with their tests, by id."""
    module, variable = import_module(f"evalplus.data.{dataset}"), f"{dataset.upper()}_OVERRIDE_PATH"
    before = getattr(module, variable)  # EvalPlus reads the environment variable of this name when it is imported
    setattr(module, variable, file or before)
    try:
        return module.get_human_eval_plus() if dataset == "humaneval" else module.get_mbpp_plus()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file or dataset} must be EvalPlus's data of {dataset} ({error}).") from error
    finally:
        setattr(module, variable, before)


def run_programs(responses: Sequence[Sequence[str]], problems: Sequence[Problem]) -> list[str]:
    """Return EvalPlus's verdict on each completion: `pass`, `base: fail`, `plus: timeout`, ...

    `base` are the problem's own tests, `plus` the tests that EvalPlus adds. Programs run in the sandbox. Where there is none,
    lm-eval asks for `confirm_run_unsafe_code` first.
    """
    sandboxed = sandbox_fault() is None
    dataset, file = problems[0]["dataset"], problems[0]["file"]
    keys = [(file, doc["task_id"], texts[0]) for doc, texts in zip(problems, responses, strict=True)]
    missing = [key for key in dict.fromkeys(keys) if key not in _verdicts]
    with tempfile.TemporaryDirectory(prefix="programs_") as name:
        folder = Path(name)
        sources = read_problems(dataset, file) if missing else {}
        jobs = [(dataset, sources[task_id], cut_at_stop(text)) for _, task_id, text in missing]
        (folder / "problems.pickle").write_bytes(pickle.dumps(jobs))
        if missing and run_scorer("prepare", folder, seconds=None, sandboxed=sandboxed) != 0:
            raise RuntimeError(f"EvalPlus could not compute the expected outputs of {dataset}.")
        (folder / "problems.pickle").unlink()  # it has the reference solutions
        pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2))  # as many as EvalPlus runs at a time
        try:
            verdicts = pool.map(lambda number: check_program(folder, number, sandboxed), range(len(missing)))
            for key, verdict in zip(missing, tqdm(verdicts, "Running programs", len(missing)), strict=True):
                _verdicts[key] = verdict
        finally:
            pool.shutdown(cancel_futures=True)  # after an interrupt, no further program starts
    return [_verdicts[key] for key in keys]


def cut_at_stop(completion: str) -> str:
    """Return a completion up to the earliest stop string, with spaces for tabs, as EvalPlus does."""
    return min((completion.split(stop)[0] for stop in STOP_STRINGS), key=len).replace("\t", "    ")


def score_base(problem: Problem, verdicts: Sequence[str]) -> dict[str, bool]:
    """Return whether the program passes the problem's own tests."""
    return {"acc": verdicts[0].startswith(("pass", "plus"))}


def score_plus(problem: Problem, verdicts: Sequence[str]) -> dict[str, bool]:
    """Return whether the program also passes the tests that EvalPlus adds."""
    return {"acc": verdicts[0] == "pass"}
