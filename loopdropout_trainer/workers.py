"""Workers of a sweep: each trains one run after the other in a subprocess, on a GPU of its own.

The state of a run is its folder, so that several sweeps, also on several machines, can share the runs. A lock on
`sweep.lock` in the folder says that somebody trains the run.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.results import read_run


class Runs(Protocol):
    """The runs of a sweep. A run has a `name`."""

    def pending(self) -> Sequence[Any]:
        """Return the runs that can start now, and those that are being trained."""

    def is_done(self, run: Any) -> bool:
        """Return whether a run is finished."""

    def folder(self, run: Any) -> Path:
        """Return the folder of a run."""

    def command(self, run: Any) -> list[str]:
        """Return the command that trains a run."""


class Workers:
    """Threads that train the runs of a sweep.

    Args:
        runs: Runs of the sweep.
        number: Number of runs at a time.
    """

    def __init__(self, runs: Runs, number: int) -> None:
        self.runs, self.number = runs, number
        self.stopped = threading.Event()
        self.processes: set[subprocess.Popen] = set()

    def train_all(self) -> None:
        """Train all runs that are not done.

        Raises:
            UserError: If a run fails.
        """
        environments = _gpus() if self.number > 1 else [{}]
        gpus = islice(cycle(environments), self.number)
        with ThreadPoolExecutor(self.number) as pool:
            try:
                for worker in as_completed([pool.submit(self._work, gpu) for gpu in gpus]):
                    worker.result()  # the first failure ends the sweep, in whichever worker it is
            except BaseException:
                self.stopped.set()
                for process in self.processes.copy():
                    os.killpg(process.pid, signal.SIGTERM)  # each training saves a checkpoint
                raise

    def _work(self, gpu: dict[str, str]) -> None:
        """Train one run after the other until none is left."""
        while not self.stopped.is_set():
            pending = self.runs.pending()
            if not pending:
                return
            if not any(self._train_unless_locked(run, gpu) for run in pending):
                self.stopped.wait(1)  # other workers train all of them

    def _train_unless_locked(self, run: Any, gpu: dict[str, str]) -> bool:
        """Train a run, and return whether this worker did it, because no other one trains it or has finished it."""
        folder = self.runs.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "sweep.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if self.runs.is_done(run):
                return False
            self._train(run, gpu, lock.fileno())
            return True

    def _train(self, run: Any, gpu: dict[str, str], lock: int) -> None:
        path = self.runs.folder(run) / "log.txt"
        with open(path, "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                self.runs.command(run),
                stdout=log,
                stderr=log,
                env={**os.environ, **gpu},
                pass_fds=[lock],  # the training keeps the lock, even if the sweep is killed
                start_new_session=True,
            )
        self.processes.add(process)
        status = process.wait()
        self.processes.remove(process)
        if not self.runs.is_done(run) and not self.stopped.is_set():
            last_line = path.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            raise UserError(f"{run.name} ended with exit code {status}: {last_line} (log: {path})")
        print(f"{run.name}: {read_run(path.parent).get('status', 'stopped')}", flush=True)


def _gpus() -> list[dict[str, str]]:
    """Return an environment for each GPU."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names.split(",")]
