"""HumanEval, HumanEval+, MBPP and MBPP+: EvalPlus's verdicts on generated programs, computed in the sandbox."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm

from loopdropout_trainer.evaluation.sandbox import judge_programs, run_program, run_scorer, sandbox_fault


Problem = Mapping[str, Any]

# EvalPlus's prompt for chat models. It is inside one of EvalPlus's functions.
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)
JUDGED_TOGETHER = 64
"""Number of programs whose outputs are on the disk at a time, of at most 16 MB each."""

_verdicts: dict[tuple[str, str], str] = {}  # HumanEval and HumanEval+ have the same programs


def load_problems(dataset: str, **metadata: Any) -> dict[str, Dataset]:
    """Return EvalPlus's problems of "humaneval" or "mbpp" as the split `test`."""
    rows = []
    for task_id, problem in read_problems(dataset).items():
        prompt = f"{INSTRUCTION}\n```\n{problem['prompt'].strip()}\n```\n"
        rows.append({"task_id": task_id, "text": prompt, "dataset": dataset})
    return {"test": Dataset.from_list(rows)}


def read_problems(dataset: str) -> dict[str, Problem]:
    """Return EvalPlus's problems with their tests, by id.

    EvalPlus downloads its release once, or reads the file in `HUMANEVAL_OVERRIDE_PATH` or `MBPP_OVERRIDE_PATH`.
    """
    from evalplus.data import get_human_eval_plus, get_mbpp_plus

    return get_human_eval_plus() if dataset == "humaneval" else get_mbpp_plus()


def run_programs(responses: Sequence[Sequence[str]], problems: Sequence[Problem]) -> list[str]:
    """Return EvalPlus's verdict on each completion: `pass`, `base: fail`, `plus: timeout`, ...

    `base` are the problem's own tests, `plus` the tests that EvalPlus adds. Programs run in the sandbox. Where there is none,
    lm-eval asks for `confirm_run_unsafe_code` first.
    """
    dataset = problems[0]["dataset"]
    # EvalPlus replaces tabs, too.
    texts = [completions[0].replace("\t", "    ") for completions in responses]
    keys = [(problem["task_id"], text) for problem, text in zip(problems, texts, strict=True)]
    missing = [key for key in dict.fromkeys(keys) if key not in _verdicts]
    if missing:
        _run_missing(dataset, missing)
    return [_verdicts[key] for key in keys]


def _run_missing(dataset: str, missing: Sequence[tuple[str, str]]) -> None:
    """Run the programs of pairs of a problem's id and a completion, and keep EvalPlus's verdicts in `_verdicts`."""
    sandboxed = sandbox_fault() is None
    sources = read_problems(dataset)
    with tempfile.TemporaryDirectory(prefix="programs_") as name:
        folder = Path(name)
        jobs = [(dataset, sources[task_id], text) for task_id, text in missing]
        (folder / "problems.pickle").write_bytes(pickle.dumps(jobs))
        if run_scorer("prepare", folder, seconds=None, sandboxed=sandboxed) != 0:
            raise RuntimeError(f"EvalPlus could not compute the expected outputs of {dataset}.")
        (folder / "problems.pickle").unlink()  # it has the reference solutions
        pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2))  # as many as EvalPlus runs at a time
        bar = tqdm(total=len(missing), desc="Running programs")
        try:
            for first in range(0, len(missing), JUDGED_TOGETHER):
                numbers = range(first, min(first + JUDGED_TOGETHER, len(missing)))
                for _ in pool.map(lambda number: run_program(folder, number, sandboxed), numbers):
                    bar.update()
                verdicts = judge_programs(folder, sandboxed)
                for number in numbers:
                    _verdicts[missing[number]] = verdicts.get(number, "base: no program can be read")
        finally:
            bar.close()
            pool.shutdown(cancel_futures=True)  # after an interrupt, no further program starts


def score_base(problem: Problem, verdicts: Sequence[str]) -> dict[str, bool]:
    """Return whether the program passes the problem's own tests."""
    return {"acc": verdicts[0].startswith(("pass", "plus"))}


def score_plus(problem: Problem, verdicts: Sequence[str]) -> dict[str, bool]:
    """Return whether the program also passes the tests that EvalPlus adds."""
    return {"acc": verdicts[0] == "pass"}
