"""Files of samples, which have one line for each problem of a task. A file with other answers is never replaced."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from loopdropout_trainer.files import write_file


logger = logging.getLogger(__name__)

_ANSWER = ("prompt", "completion", "answer")
"""Columns that an equal model gives again. The scores may differ, as of a scorer that has changed."""


def write_samples(path: Path, lines: pd.DataFrame) -> Path:
    """Write the samples of a task to a file, and return its path, with a number if the file has other answers.

    Args:
        path: Path of the file. It is replaced if it has the same answers to the problems that both have, unless it has all of
            the new lines and more, as of a larger `benchmark_limit`.
        lines: One line for each problem, with the columns `task`, `doc_id`, `prompt`, `completion` and `answer`.
    """
    text = lines.to_json(orient="records", lines=True, force_ascii=False)
    answers = _read_answers(text)
    free, number = path, 1
    while free.exists() and not _agree(_read_answers(free.read_text(encoding="utf-8")), answers):
        number += 1
        free = path.with_name(f"{path.stem}_{number}{path.suffix}")
    if free != path:
        logger.warning(
            f"{path} has other answers to these problems, as of another model or another chat template. It is kept, and the "
            f"new answers are in {free.name}. Give each model an `output_dir` of its own."
        )
    if not (free.exists() and _has_more(free.read_text(encoding="utf-8"), text)):
        write_file(free, text)
    return free


def _has_more(former: str, text: str) -> bool:
    """Return whether a file of samples has all lines of a text and more."""
    lines, new_lines = {*former.rstrip("\n").split("\n")}, {*text.rstrip("\n").split("\n")}
    return new_lines < lines


def _read_answers(text: str) -> dict[tuple[Any, Any], list[Any]]:
    """Return the answer to each problem, by its task and number. {} for a text that is not a file of samples."""
    answers = {}
    try:
        for line in text.rstrip("\n").split("\n"):  # `splitlines` also splits at characters of answers
            sample = json.loads(line)
            answers[sample["task"], sample["doc_id"]] = [sample[column] for column in _ANSWER]
    except (ValueError, KeyError, TypeError):
        return {}
    return answers


def _agree(former: Mapping[Any, Any], new: Mapping[Any, Any]) -> bool:
    """Return whether two evaluations have problems in common, and the same answers to all of them."""
    common = former.keys() & new.keys()
    return bool(common) and all(former[problem] == new[problem] for problem in common)
