"""Which problems of a task a result was measured on.

A result of an evaluation has a digest of its problems and their answers in the column `problems`. An older result does not
have it. Then the answers in the file of its samples tell its problems.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from loopdropout_trainer.results.run_files import read_samples


def digest_problems(problems: Iterable[tuple[Mapping[str, Any], Any]]) -> str:
    """Return a digest of problems in their order: the columns of each one, and its reference answer."""
    digest = hashlib.sha256()
    for columns, answer in problems:
        text = json.dumps([columns, str(answer)], sort_keys=True, default=str)
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()[:16]


def have_other_problems(result: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether it is known that two results of a task were measured on different problems."""
    if result["n"] != other["n"]:
        return True
    ours, others = name_problems([result, other])
    return None not in (ours, others) and ours != others


def name_problems(results: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return a text for each result of a task that is the same for the same problems, or None where it is not known.

    It is the digest if all results have one, because it cannot be compared with the answers in the samples of an older result.
    A result without a digest and without samples, as in a copy without these files, does not count.
    """
    uses_digests = all(_has_text(result, "problems") or not _has_samples(result) for result in results)
    names: list[str | None] = []
    for result in results:
        if uses_digests and _has_text(result, "problems"):
            names.append(result["problems"])
        elif not uses_digests and _has_samples(result):
            names.append(_digest_targets(result))
        else:
            names.append(None)
    return names


class Problems:
    """The problems of a task, whose digests are made once for all results that are compared with them.

    Args:
        problems: Columns and reference answer of each problem.
    """

    def __init__(self, problems: Iterable[tuple[Mapping[str, Any], Any]]) -> None:
        self.problems = [*problems]

    @cached_property
    def digest(self) -> str:
        """Digest as in the column `problems` of a result."""
        return digest_problems(self.problems)

    @cached_property
    def digest_of_answers(self) -> str:
        """Digest as of the answers in the samples of a result."""
        return digest_problems(({}, answer) for _, answer in self.problems)

    def are_those_of(self, result: Mapping[str, Any]) -> bool:
        """Return whether a result can be one on these problems, as far as an older result without samples tells it.

        Args:
            result: Result of an evaluation, with its column `folder`.
        """
        if result["n"] != len(self.problems):
            return False
        if _has_text(result, "problems"):
            return result["problems"] == self.digest
        if _has_samples(result):
            return _digest_targets(result) == self.digest_of_answers
        return True


def _has_text(result: Mapping[str, Any], column: str) -> bool:
    return isinstance(result.get(column), str)  # a missing cell of a data frame is a number


def _has_samples(result: Mapping[str, Any]) -> bool:
    return _has_text(result, "samples") and Path(result["folder"], result["samples"]).is_file()


def _digest_targets(result: Mapping[str, Any]) -> str:
    """Return a digest of the answers in the samples of a result. An unchanged file is read once for a report."""
    folder, name = result["folder"], result["samples"]
    return _digest_file(folder, name, Path(folder, name).stat().st_mtime_ns)


@cache
def _digest_file(folder: str, name: str, changed: int) -> str:
    """Return the digest of the answers in a file of samples. `changed`: time of its last change, in ns."""
    samples = read_samples({"folder": folder, "samples": name})
    return digest_problems(({}, sample.get("target")) for sample in samples)
