"""The processes that work on a sweep now, on any machine that shares its folder.

The lock of a run says that somebody trains it. Between two runs, no such lock is held, so each process of a sweep has a locked
file of its own, too. A killed process no longer holds its lock, and its trainings may go on without it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from loopdropout_trainer.files import is_locked, lock_path


class SweepProcess(NamedTuple):
    """A process that works on a sweep.

    Attributes:
        name: Name for messages, such as "process 4312 on node7".
        workers: Number of runs that it trains at a time.
        methods: Methods of its sweep.
    """

    name: str
    workers: int
    methods: list[str]


def _own_path(folder: str | Path) -> Path:
    return lock_path(Path(folder), f"sweep_{socket.gethostname()}_{os.getpid()}")


def _name_this_process() -> str:
    """Return the name of this process, with its SLURM job and the task of an array if it has one."""
    name = f"process {os.getpid()} on {socket.gethostname()}"
    job, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if job and task:
        return f"{name} (SLURM job {job}_{task})"
    job = os.environ.get("SLURM_JOB_ID")
    return f"{name} (SLURM job {job})" if job else name


@contextmanager
def working_on_sweep(folder: str | Path, methods: Collection[str], workers: int) -> Iterator[None]:
    """Let other processes know that this one works on the sweep in a folder, inside the block.

    In a folder that cannot be written, nobody knows it, because the first run has a message about the folder.
    """
    path = _own_path(folder)
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "w", encoding="utf-8"))
            stack.callback(path.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            json.dump(SweepProcess(_name_this_process(), workers, [*methods]), file)
            file.flush()
        yield


def find_processes(folder: str | Path, methods: Collection[str]) -> list[SweepProcess]:
    """Return the other processes that work on a sweep now, sorted by their names.

    Args:
        folder: Folder of the sweep, which other sweeps can share.
        methods: Methods of the sweep. A process of another sweep in the folder has none of them.
    """
    own = _own_path(folder)
    processes = []
    for path in own.parent.glob("sweep_*.lock"):
        process = _read_process(path) if path != own and is_locked(path) else None
        if process is not None and {*process.methods} & {*methods}:
            processes.append(process)
    return sorted(processes)


def _read_process(path: Path) -> SweepProcess | None:
    """Return the facts of a process from its file, or None if it has ended or has not written them yet."""
    try:
        return SweepProcess(*json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def describe_processes(processes: Collection[SweepProcess]) -> str:
    """Return the names of processes with a verb, such as "process 4312 on node7 works", or "" without any."""
    if not processes:
        return ""
    names = [process.name for process in processes]
    verb = "works" if len(names) == 1 else "work"
    return f"{' and '.join(names)} {verb}"
