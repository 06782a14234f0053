"""Where jobs run: one by one or side by side on this machine, one on each GPU, or over a Ray cluster.

Everywhere a job is the same command, which works in the same folder under its lock. A job that is lost with its machine is
started again elsewhere and goes on from its newest checkpoint, so that a cluster's machines must share the folder.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from loopdropout_trainer.runs.result import DIVERGED_FILE
from loopdropout_trainer.settings.secrets import public_words


LOG_FILE = "log.txt"
"""What a job prints when others run beside it."""


WORKERS_HELP = (
    "Runs at a time on this machine, each on a GPU of its own if there are any; what they print is in log.txt."
)
RAY_HELP = "Ray cluster that the runs are handed out over, e.g. `auto`; its machines must share this one's files."


class SweepError(RuntimeError):
    """A run of the sweep failed, or the folder belongs to another sweep."""


@dataclass(frozen=True)
class Job:
    """One command, finished when its results file is there, or the word that its training diverged.

    Attributes:
        command: words of the command line.
        results: file that the command writes at its end.
    """

    command: tuple[str, ...]
    results: Path

    def report(self) -> dict[str, Any] | None:
        """Return what the results file says about the adapter, or None if the job is not finished."""
        try:
            report = json.loads(self.results.read_text(encoding="utf-8"))
            if "rows" in report:  # an evaluation's file may hold several adapters
                report = report["rows"][self.results.parent.parent.name]
            return report if isinstance(report["benchmarks"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):  # not there, or cut off while it was written
            return None

    def benchmarks(self) -> dict[str, dict[str, Any]] | None:
        """Return the results by benchmark, or None if the job is not finished."""
        report = self.report()
        return None if report is None else report["benchmarks"]

    def diverged(self) -> str | None:
        """Return why the training stopped for good, or None if it did not."""
        try:
            return json.loads((self.results.parent / DIVERGED_FILE).read_text(encoding="utf-8"))["error"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        return self.benchmarks() is not None or self.diverged() is not None


class Workers(Protocol):
    """What runs jobs.

    Attributes:
        size: how many at a time.
    """

    @property
    def size(self) -> int: ...

    def start(self, job: Job) -> None:
        """Start a job; at most `size` may be running."""

    def wait(self) -> tuple[Job, int]:
        """Return the next job that has ended, and its exit status."""

    def stop(self) -> None:
        """End what is running, and return when it has ended."""


class LocalWorkers:
    """Processes of this machine, each with one GPU to itself if there are any; they end when this process does.

    Args:
        size: jobs at a time.
        gpus: names for CUDA_VISIBLE_DEVICES, dealt out in turn; default: those that this process sees.
    """

    def __init__(self, size: int = 1, gpus: Sequence[str] | None = None) -> None:
        self.size = size
        gpus = visible_gpus() if gpus is None else gpus
        self._places = [gpus[slot % len(gpus)] if gpus else None for slot in range(size)]
        self._running: list[tuple[Job, subprocess.Popen, str | None]] = []

    def start(self, job: Job) -> None:
        """Start a job."""
        gpu = self._places.pop(0)
        # One job at a time may have all GPUs: its launcher knows how many it wants.
        environment = None if gpu is None or self.size == 1 else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        log = None if self.size == 1 else job.results.parent / LOG_FILE
        self._running.append((job, open_process(job.command, signal.SIGTERM, environment, log), gpu))

    def wait(self) -> tuple[Job, int]:
        """Return the next job that has ended, and its exit status."""
        while True:
            for running in self._running:
                job, process, gpu = running
                if (status := process.poll()) is not None:
                    self._running.remove(running)
                    self._places.append(gpu)
                    return job, status
            time.sleep(0.05)

    def stop(self) -> None:
        """Ask what is running to stop, and wait for it."""
        for _, process, _ in self._running:
            process.terminate()
        for _, process, _ in self._running:
            process.wait()


class RayWorkers:
    """The machines of a Ray cluster, which share this one's files and Python environment; one GPU or else one CPU a job.

    Args:
        address: of the cluster, as `ray.init` takes it; `auto`: the one that this machine belongs to.
    """

    def __init__(self, address: str) -> None:
        import ray

        self._ray = ray
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        self._resource = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        # By value: the workers need not have this package on their path before the job's own environment is set.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        gpus = 1 if self._resource == "GPU" else 0
        self._run = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=-1)(_run_on_cluster)
        self._running: dict[Any, Job] = {}

    @property
    def size(self) -> int:
        """Jobs at a time, of the machines that are there now."""
        return max(1, int(self._ray.cluster_resources().get(self._resource, 0)))

    def start(self, job: Job) -> None:
        """Hand out a job, which starts again on another machine if its own is lost."""
        path = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HF_HOME") if name in os.environ}
        reference = self._run.remote(job.command, path, str(Path.cwd()), str(job.results.parent / LOG_FILE))
        self._running[reference] = job

    def wait(self) -> tuple[Job, int]:
        """Return the next job that has ended, and its exit status."""
        (ended,), _ = self._ray.wait(list(self._running), num_returns=1)
        return self._running.pop(ended), self._ray.get(ended)

    def stop(self) -> None:
        """End what is running at once; a training goes on from its newest checkpoint when it is started again."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)


def _run_on_cluster(command: Sequence[str], environment: dict[str, str], folder: str, log: str) -> int:
    """Run a command on a machine of the cluster and return its exit status.

    A Ray worker that is lost takes the command with it at once: whoever starts it again must find its folder free.
    """
    os.chdir(folder)
    return open_process(command, signal.SIGKILL, {**os.environ, **environment}, Path(log)).wait()


def make_workers(number: int, ray_address: str | None) -> Workers:
    """Return the workers that a sweep's or study's fields ask for."""
    return LocalWorkers(number) if ray_address is None else RayWorkers(ray_address)


def visible_gpus() -> list[str]:
    """Return the names of this process's GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    return [str(index) for index in range(torch.cuda.device_count())]


def do_jobs(ready: Callable[[], Iterator[Job]], workers: Workers, after_each: Callable[[], None]) -> None:
    """Do what is ready, in order, until nothing is left.

    Args:
        ready: yields the unfinished jobs that need nothing but what is finished.
        workers: who does them.
        after_each: called when a job has ended.

    Raises:
        SweepError: if a job fails, unless its training diverged; what runs beside it is stopped.
    """
    running: set[Path] = set()
    try:
        while True:
            while len(running) < workers.size:
                job = next((job for job in ready() if job.results not in running), None)
                if job is None:
                    break
                print(f"\n$ {shlex.join(public_words(job.command))}", flush=True)
                workers.start(job)
                running.add(job.results)
            if not running:
                return
            job, status = workers.wait()
            running.remove(job.results)
            _check(job, status)
            after_each()
    except BaseException:
        workers.stop()
        raise


def _check(job: Job, status: int) -> None:
    command = shlex.join(public_words(job.command))
    if status and (reason := job.diverged()):
        print(f"{reason} The sweep goes on without {job.results.parent}.", flush=True)
    elif status:
        raise SweepError(f"{command} failed with exit status {status}; the same sweep command goes on from there.")
    if not job.done:
        raise SweepError(f"{command} ended without writing {job.results}.")


def open_process(
    command: Sequence[str], end: signal.Signals, environment: dict[str, str] | None = None, log: Path | None = None
) -> subprocess.Popen:
    """Start a command, which gets the signal `end` when this process dies, however it dies (on Linux).

    Args:
        command: its words.
        end: the signal.
        environment: of the command; None: this process's.
        log: file that gets what it prints, after what stands there; None: this process's output.
    """
    before = _die_with(os.getpid(), end) if sys.platform == "linux" else None
    if log is None:
        return subprocess.Popen(command, env=environment, preexec_fn=before)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, preexec_fn=before)


def _die_with(parent: int, end: signal.Signals) -> Callable[[], None]:
    """Return what a child does before its program begins: ask the kernel for a signal when its parent dies."""
    import ctypes

    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(1, end)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has died already
            os.kill(os.getpid(), end)

    return ask
