"""Workers of a sweep: each trains one run after the other in a subprocess.

Several workers use one GPU each, in turn if there are fewer GPUs than workers. A single worker leaves the choice to its
trainings.

The state of a run is its folder, so that several sweeps, also on several machines, can share the runs. A lock on
`sweep.lock` in the folder says that somebody trains the run.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import checkpoint_step
from loopdropout_trainer.results.failures import FAILED, LOG, describe_failure, name_log
from loopdropout_trainer.results.imported_code import find_other_code
from loopdropout_trainer.results.run_files import has_trained, read_run
from loopdropout_trainer.results.run_states import name_runs
from loopdropout_trainer.saving.checkpoints import newest_checkpoint
from loopdropout_trainer.settings.recipe_folders import LOCK
from loopdropout_trainer.sweeps.run_times import MEASURING, RunKind, RunTimes
from loopdropout_trainer.terminal import print_sentences


_BAR = re.compile(r"(\d+%\||\d+it).*\[.*\]$")
"""End of a line with a progress bar, such as "Drop last:  38%|███▊      | 15/40 [00:08<00:13, 1.85it/s]"."""

_ERRORS = (re.compile(r"loopdropout \w+: "), re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b"))
"""Begin of a line with an error, first the sentence of a script, then the last line of a traceback."""

_NOISE = re.compile(r"Warning: |warnings\.warn|resource_tracker|CalledProcessError|ChildFailedError")
"""Part of a line that says nothing about the error: warnings, also those at the end of Python, and errors of a launcher."""


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

    def count(self) -> tuple[int, int]:
        """Return the number of trainings that have ended, and of all trainings, as far as they are known."""

    def describe_uncounted(self) -> str:
        """Return words about the trainings that have ended and that `count` leaves out, or ""."""

    def kind(self, run: Any) -> RunKind:
        """Return the method and the kind of a run that is not done, which decide its time."""

    def count_done(self) -> int:
        """Return the number of runs that are done. A training that is measured later has two runs."""

    def describe_left(self, speed: float) -> str:
        """Return the time that is left with a number of runs at a time, or "" if nothing is left."""

    def save_progress(self) -> None:
        """Write how far the sweep is, and the mean seconds of a run of each kind."""

    def describe_fix(self) -> str:
        """Return how the sweep goes on after a failure."""

    def describe_score(self, run: Any) -> str:
        """Return the result of a run that is done, such as "accuracy 40.00% on development", or ""."""


class Workers:
    """Threads that train the runs of a sweep.

    Args:
        runs: Runs of the sweep.
        number: Number of runs at a time.
    """

    def __init__(self, runs: Runs, number: int) -> None:
        self.runs, self.number = runs, number
        self.stopped = threading.Event()
        self.processes: dict[Any, subprocess.Popen] = {}  # of the runs that are being trained here
        self.claimed: set[Any] = set()  # runs that a worker here trains, or tries to
        self.claiming = threading.Lock()
        self.unreported: set[Any] = set()  # runs whose training was started here, until the line about their end
        self.reporting = threading.Lock()
        self.failures: dict[Any, str] = {}  # sentences about the runs that failed, which are not tried again
        self.last_message: str | None = None  # of the last run that ended, if it failed
        self.times = RunTimes()  # of the runs that have ended here
        self.is_waiting = False  # since a line that says so
        self.done_before = 0  # number of runs that were done before `train_all`
        self.num_ended = 0  # number of runs that `train_all` has ended

    def train_all(self) -> None:
        """Train all runs that are not done. If a run fails, the others go on, and `failures` has a sentence about it.

        Raises:
            UserError: If two runs in a row fail with the same message, because the others would fail, too.
        """
        self.done_before = self.runs.count_done()
        environments = _gpus() if self.number > 1 else [{}]
        gpus = islice(cycle(environments), self.number)
        with ThreadPoolExecutor(self.number) as pool:
            try:
                for worker in as_completed([pool.submit(self._work, gpu) for gpu in gpus]):
                    worker.result()  # an error ends the sweep, in whichever worker it is
            except BaseException:
                self.stopped.set()
                for process in [*self.processes.values()]:
                    os.killpg(process.pid, signal.SIGTERM)  # each training saves a checkpoint
                raise

    def _work(self, gpu: dict[str, str]) -> None:
        """Train one run after the other until none is left."""
        while not self.stopped.is_set():
            pending = [run for run in self.runs.pending() if run not in self.failures]
            if not pending:
                return
            was_trained, is_of_others = False, True
            for run in pending:
                if not self._claim(run):
                    is_of_others = False
                    continue
                try:
                    was_trained = self._train_unless_locked(run, gpu)
                finally:
                    self._release(run)
                if was_trained:  # one run, because afterwards other runs may be able to start
                    break
            if was_trained:
                self.is_waiting = False
                continue
            if is_of_others:
                self._say_that_it_waits(pending)
            self.stopped.wait(1)  # other workers train all of them

    def _claim(self, run: Any) -> bool:
        """Keep the other workers here from a run, whose lock is then that of another process. Return False if one has it."""
        with self.claiming:
            if run in self.claimed:
                return False
            self.claimed.add(run)
            return True

    def _release(self, run: Any) -> None:
        with self.claiming:
            self.claimed.remove(run)

    def _say_that_it_waits(self, pending: Sequence[Any]) -> None:
        """Print once that other processes train all runs that can start."""
        with self.reporting:
            if self.is_waiting:
                return
            self.is_waiting = True
            names = name_runs([run.name for run in pending])
            print_sentences(
                f"Waiting, because other processes train all runs that can start now: {names} ({self._describe_left()})"
            )

    def _train_unless_locked(self, run: Any, gpu: dict[str, str]) -> bool:
        """Train a run, unless another worker trains it or it is done. Return whether this worker trained it."""
        folder = self.runs.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOCK, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError as error:
                raise UserError(
                    f"`output_dir` must be on a file system with `flock`, which keeps two workers from training one run, got "
                    f"{folder} ({error.strerror})."
                ) from None
            if self.runs.is_done(run):
                return False
            self._train(run, gpu, lock.fileno())
            return True

    def _train(self, run: Any, gpu: dict[str, str], lock: int) -> None:
        path = self.runs.folder(run) / LOG
        was_trained, kind = has_trained(path.parent), self.runs.kind(run)
        checkpoint = None if was_trained else _find_checkpoint(path.parent)
        is_whole = kind.kind == MEASURING or not (was_trained or checkpoint)
        if not was_trained:
            self.unreported.add(run)
        begin = _describe_start(was_trained, checkpoint)
        if Path(path.parent, FAILED).exists():
            begin += ", after it failed before"
        print_sentences(f"{run.name} {begin} {name_log(path.parent)}")
        start = time.monotonic()
        with open(path, "a", encoding="utf-8") as log:
            log_start = log.tell()  # behind the lines of former starts
            process = subprocess.Popen(
                self.runs.command(run),
                stdout=log,
                stderr=log,
                env={"TQDM_DISABLE": "1", **os.environ, **gpu},  # a bar would be one long line of the log
                pass_fds=[lock],  # the training keeps the lock, even if the sweep is killed
                start_new_session=True,
            )
        self.processes[run] = process
        if self.stopped.is_set():  # the sweep has ended since the training was started
            os.killpg(process.pid, signal.SIGTERM)
        status = process.wait()
        del self.processes[run]
        seconds = time.monotonic() - start
        with self.reporting:  # so that the lines of workers have their numbers in order
            self.unreported.discard(run)
            if self.runs.is_done(run):
                Path(path.parent, FAILED).unlink(missing_ok=True)
                self.num_ended += 1
                if is_whole:  # else it has left a part of its time to another start
                    self.times.add(kind, seconds)
            if self.runs.is_done(run) or self.stopped.is_set():
                self.last_message = None
                self.runs.save_progress()
                print_sentences(self._describe_end(run, was_trained))
            else:
                self._record_failure(run, status, path, log_start)

    def _record_failure(self, run: Any, status: int, log: Path, log_start: int) -> None:
        """Print a failure and keep it.

        Args:
            run: Run that failed.
            status: Exit code of its process.
            log: File with the output of its process.
            log_start: Number of bytes in the file before the process was started.

        Raises:
            UserError: If the run before has failed with the same message.
        """
        message = "" if status < 0 else read_message(log, log_start)
        was_stopped = status < 0 or status in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        if was_stopped:
            cause = f"was stopped by {signal.Signals(-status if status < 0 else status - 128).name}"
            if status == -signal.SIGKILL:
                cause += ", often because the memory was full"
        else:
            cause = f"ended with exit code {status}: {message}"
        self.failures[run] = describe_failure(log.parent, run.name, cause)
        Path(log.parent, FAILED).write_text(cause, encoding="utf-8")
        self.runs.save_progress()
        # Messages of two runs can be compared without their folders, and without numbers such as free memory or a process.
        message = re.sub(r"\d[\d.,]*", "0", message.replace(str(log.parent), ""))
        if message == self.last_message:
            raise UserError(
                f"The sweep has stopped, because two runs in a row failed with the same message: {self.failures[run]}. "
                f"{self.runs.describe_fix()}"
            )
        num_ended, total = self.runs.count()
        progress = [f"{num_ended} of {total} trainings have ended", self._describe_left()]
        print_sentences(f"{self.failures[run]} ({', '.join(filter(None, progress))})")
        self.last_message = None if was_stopped else message  # a signal says nothing about the other runs

    def measure_speed(self) -> float:
        """Return the number of runs at a time, with those of other machines that share the folder.

        They are as many times faster as they have ended more runs than this process since its start.
        """
        num_done = self.runs.count_done() - self.done_before
        return self.number * max(1, num_done / max(1, self.num_ended))

    def _describe_left(self) -> str:
        """Return the time that is left, as each line about the progress has it."""
        return self.runs.describe_left(self.measure_speed())

    def _describe_end(self, run: Any, was_trained: bool) -> str:
        """Return the line about a run that has ended: its number, its step, its score and the time that is left."""
        status = read_run(self.runs.folder(run)).get("status", "stopped")
        if not self.runs.is_done(run):
            status = "stopped after its training" if status == "trained" else "stopped"
        elif status == "finished":
            status = "measured" if was_trained else "trained"
        elif status in ("training", "stopped"):  # it failed afterwards, as on a full disk
            status = f"has its score, but did not end as it should (see its {LOG})"
        num_done, total = self.runs.count()
        parts = [status, self.runs.describe_score(run), self.runs.describe_uncounted()]
        parts.append(self._describe_left())
        text = f"{run.name} {', '.join(filter(None, parts))}"
        if not self.runs.is_done(run):  # a number in front would look like its own
            return f"{text} ({num_done} of {total} trainings have ended)"
        return f"{num_done} of {total}: {text}"


def _describe_start(was_trained: bool, checkpoint: str | None) -> str:
    """Return what a run begins with: its measurement, the step of its checkpoint, or its first step."""
    if was_trained:
        return "is being measured"
    if checkpoint is not None:
        return f"continues from step {checkpoint_step(checkpoint)}"
    return "starts"


def _find_checkpoint(folder: Path) -> str | None:
    """Return the checkpoint that the training in a folder continues from, which is not one of other imported code."""
    if find_other_code(folder) is not None:
        return None
    return newest_checkpoint(folder)


def read_message(log: Path, start: int = 0) -> str:
    """Return the line of a log with the error: the sentence of a script, the last line of a traceback, or the last line.

    Args:
        log: File with the output of a process, where progress bars and warnings may follow the error.
        start: Number of bytes that are skipped.
    """
    with open(log, encoding="utf-8", errors="replace") as file:
        file.seek(start)
        # The parts of a bar end with "\r", which ends a line here.
        lines = [line.strip() for line in file if line.strip()]
    messages = [line for line in lines if re.search(r"\w", line) and not _BAR.search(line) and not _NOISE.search(line)]
    for pattern in _ERRORS:
        errors = [line for line in messages if pattern.match(line)]
        if errors:
            return errors[-1]
    return (messages or lines or [""])[-1]


def _gpus() -> list[dict[str, str]]:
    """Return an environment for each GPU."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names.split(",")]
