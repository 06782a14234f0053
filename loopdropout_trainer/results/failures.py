"""The runs of a sweep that failed: their logs and their causes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loopdropout_trainer.results.run_files import has_trained


LOG = "log.txt"
"""File in the folder of a run with the output of each process that the sweep has started for it."""

FAILED = "sweep.failed"
"""File in the folder of a run that failed and is not done since, with the cause. Another process of the sweep then trains it
again. An older version has left it empty."""

_MOST_CAUSES = 3
"""Number of failed runs whose causes are named, because many runs often have the same one."""


def name_log(run: Path) -> str:
    """Return the words that name the log of a run, by the run's folder."""
    return f"(log: {run / LOG})"


def describe_failure(run: Path, name: str, cause: str) -> str:
    """Return a sentence, without its period, about a run that failed.

    Args:
        run: Folder of the run.
        name: Name of the run in its sweep.
        cause: Words such as "ended with exit code 1: ValueError: ...".
    """
    subject = f"{name} was trained, but its measurement" if has_trained(run) else name
    return f"{subject} {cause} {name_log(run)}"


def describe_failures(folder: str | Path, names: Sequence[str]) -> list[str]:
    """Return sentences with the causes and the logs of failed runs in the folder of a sweep.

    A run whose log was removed has no sentence.

    Args:
        folder: Folder of the sweep.
        names: Names of the runs.
    """
    with_log = [name for name in names if Path(folder, name, LOG).is_file()]
    sentences = []
    for name in with_log[:_MOST_CAUSES]:
        run = Path(folder, name)
        cause = ""
        if (run / FAILED).is_file():
            cause = (run / FAILED).read_text(encoding="utf-8")
        sentences.append(f"{describe_failure(run, name, cause or 'failed')}.")
    if len(with_log) > _MOST_CAUSES:
        sentences.append(f"The other failed runs have their logs in {LOG} of their folders.")
    return sentences
