"""The work on a sweep, shared by any number of processes: each takes a job, does it, and takes the next.

Each job is a trial of an Optuna study, so that no two processes do it at once, and it is done again if its process was lost.
A run joins the finished ones only if it has their base, data, settings and versions.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import fields
from itertools import cycle, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import optuna
import psutil
from filelock import FileLock
from optuna.storages._heartbeat import get_heartbeat_thread
from optuna.trial import TrialState

from loopdropout_trainer.errors import run_command, user_supplied
from loopdropout_trainer.record.identity import ONE_SETTING, Identity, computing_versions, differences
from loopdropout_trainer.record.measurement import DIVERGED_FILE
from loopdropout_trainer.runs import workers
from loopdropout_trainer.runs.result import (
    EXPECTED_FILE,
    FORMER_FILE,
    RUN_FILE,
    is_finished,
    is_of_former_version,
    read_run,
)
from loopdropout_trainer.runs.summary import SUMMARY_FILE, summary_text
from loopdropout_trainer.runs.sweep import Job, Sweep
from loopdropout_trainer.saving.files import LOCK_FILE, read_json, write_atomically, write_json
from loopdropout_trainer.settings.arguments import AdapterArguments, BenchmarkArguments
from loopdropout_trainer.settings.recipe import settings_yaml


HEARTBEAT, GRACE = 10, 60  # seconds; of a process on this machine it is known at once that it has died
_OF_ADAPTER = {"rule", "p", "rule_args", *(f.name for f in fields(AdapterArguments))}
_OF_BENCHMARKS = {f.name for f in fields(BenchmarkArguments)}
_OF_SUMMARY = ("method", "learning_rate", "seed", "benchmarks", "train_seconds", "peak_memory_gb")
_DAMAGED = (OSError, ValueError, KeyError, TypeError)  # a file that is not there or not complete

Outcome = dict[str, Any]
"""What a finished run's trial keeps: its `identity`, and its `benchmarks`, their `problems` and costs, or the `error` at which
it diverged."""


class SweepError(RuntimeError):
    """A run of the sweep failed, or the folder belongs to another sweep."""


class Queue:
    """The jobs of a sweep, and what is known of them; `scripts` is the folder of the training scripts."""

    def __init__(self, sweep: Sweep, scripts: Path) -> None:
        self.sweep, self.output_dir = sweep, sweep.output_dir
        self.script = scripts / f"{sweep.arguments.script}.py"
        self.launcher = shlex.split(sweep.arguments.launcher)
        self.lock = FileLock(self.output_dir / "sweep.lock")

    def open(self, check: bool = True) -> None:
        """Check everything, unless another process has, open the storage, and write down there whose folder this is.

        Raises:
            RecipeError: if the script refuses a recipe, or there is no such benchmark.
            SweepError: if the folder belongs to another sweep.
        """
        if check:
            self._check_recipes()
        self.output_dir.mkdir(parents=True, exist_ok=True)
        with self.lock:
            self._open_storage()
            self._claim_folder()
            self._refresh()
            self._check_alike("A run of now", {"versions": computing_versions()})
            if check:
                self.study.set_user_attr("failure", None)  # what failed before is tried again

    def _methods(self) -> list[str]:
        return list(dict.fromkeys(method for part in self.sweep.to_do for method in part.methods))

    def _check_recipes(self) -> None:
        select_on = self.sweep.arguments.select_on
        recipes = {}
        benchmarks = {select_on}
        choosing = {method for part in self.sweep.to_do if not part.full_grid for method in part.methods}
        for method in self._methods():
            recipe = self.sweep.recipe(Job(method, 1.0, 0, False))
            if method in choosing:
                recipe["benchmarks"] = sorted({*recipe["benchmarks"], select_on})
            recipes[method] = {**recipe, "output_dir": str(self.output_dir / method)}
            benchmarks |= set(recipe["benchmarks"])
        with_model = not self.sweep.arguments.print_commands  # which may be printed where no model is
        with ProcessPoolExecutor(1, mp_context=workers.forks(self.script)) as pool:
            pool.submit(workers.check_recipes, str(self.script), recipes, benchmarks, with_model).result()

    def _open_storage(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # of heartbeats
        warnings.filterwarnings("ignore", "Heartbeat of storage")  # they come from `_do`, not from `optimize`
        given = self.sweep.arguments.storage
        file = self.output_dir.resolve() / "sweep.db"
        wait = None if given else {"connect_args": {"timeout": 60}}
        with user_supplied(f"{'`storage`' if given else file} cannot be opened"):
            self.storage = optuna.storages.RDBStorage(
                given or f"sqlite:///{file}", wait, heartbeat_interval=HEARTBEAT, grace_period=GRACE
            )
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=str(file.parent) if given else "sweep",
                direction="maximize",
                load_if_exists=True,
            )

    def _claim_folder(self) -> None:
        """Write down the settings of this sweep, apart from parts, rates, seeds and `measure`, which may change."""
        arguments = self.sweep.arguments
        before = self.study.user_attrs
        now = {"": {name: getattr(arguments, name) for name in ("script", "select_on", "selection_seeds")}}
        now |= {f"{method}: ": self.sweep.settings(method, selects=True) for method in self._methods()}
        for owner, settings in now.items():
            old = before.get(owner, settings)
            for name in sorted({*old, *settings}):
                if old.get(name) != settings.get(name):
                    raise SweepError(
                        f"The runs in {self.output_dir} were made with `{owner}{name}` {old.get(name)!r}, and now it is "
                        f"{settings.get(name)!r}: put it back, or choose another `output_dir`."
                    )
        for owner, settings in now.items():
            self.study.set_user_attr(owner, settings)

    # What is done

    def _refresh(self) -> None:
        """Read the trials: the last finished one of each run, the scores that choose rates, and the runs under way."""
        self._last: dict[str, dict[str, Any]] = {}
        self._scores: dict[str, float | None] = {}
        self._active: set[str] = set()
        for trial in self.study.get_trials(deepcopy=False):
            facts = {**trial.user_attrs.get("job", {}), **trial.user_attrs.get("outcome", {})}
            run = facts.get("run", "")
            if facts.get("anew"):
                self._last.pop(run, None)
                self._scores.pop(run, None)
            if trial.state == TrialState.RUNNING:
                self._active.add(run)
            elif self._is_there(trial.state, self.output_dir / run):
                self._last[run] = facts
                if facts["selects"] or "error" in facts:
                    self._scores[run] = trial.value

    def _is_there(self, state: TrialState, folder: Path) -> bool:
        """Return whether a run's folder still holds what its trial has left there, and nobody has changed it."""
        if state == TrialState.COMPLETE:
            return is_finished(folder)
        return state == TrialState.PRUNED and (folder / DIVERGED_FILE).exists()

    def is_done(self, job: Job) -> bool:
        """Say whether there is nothing left to do for a job, as far as the trials were read."""
        if job.selects:
            return job.run in self._scores
        last = self._last.get(job.run, {})
        return "error" in last or last.get("run_name") == self.sweep.run_name(job)

    def _outcome(self, job: Job) -> Outcome | None:
        """Return what a finished run has left in its folder; None if it is unfinished.

        Raises:
            SweepError: if an earlier version of this package has finished it.
        """
        folder = self.output_dir / job.run
        run_name = self.sweep.run_name(job)
        if is_of_former_version(folder):
            raise SweepError(
                f"{folder} holds the {FORMER_FILE} of an earlier version of this package, which is not read: choose another "
                "`output_dir`, or delete that file to have the trained adapter measured again."
            )
        run = read_run(folder)
        if run is not None and run.facts["run_name"] == run_name:
            costs = {row.metric: row.value for row in run.result.rows if row.family == "cost"}
            scores = run.result.scores()
            benchmarks = {name: row.value for name, row in scores.items()}
            problems = {name: run.result.identities[row.identity].get("data", {}) for name, row in scores.items()}
            return {**costs, "identity": run.identity, "benchmarks": benchmarks, "problems": problems}
        with suppress(*_DAMAGED):
            diverged = read_json(folder / DIVERGED_FILE)
            if diverged["run_name"] == run_name:
                return {"identity": diverged["run"], "error": diverged["error"]}
        return None

    def _expected(self, run: str, method: str) -> Iterator[tuple[str, Identity]]:
        """Yield each finished run, with those fields of its identity that a run of a method must share.

        Runs of one method differ in seed and learning rate only; methods that differ in rule and adapter only have one base
        and one data set; and all runs have the same versions.
        """
        for other, facts in self._last.items():
            of_other = facts["method"]
            identity = facts["identity"]
            parts = ("versions",)
            if of_other == method:
                parts = ONE_SETTING
            elif method and self._beside_adapter(of_other) == self._beside_adapter(method):
                parts = ("base", "data", "versions")
            expected = {part: dict(identity[part]) for part in parts if part in identity}
            expected.get("settings", {}).pop("learning_rate", None)
            yield "its own earlier results" if other == run else other, expected

    def _problems_expected(self, job: Job) -> Iterator[tuple[str, dict[str, dict]]]:
        """Yield each finished run that was asked what a job asks, with the problems of its benchmarks."""
        asked = self._asked(job)
        for other, facts in self._last.items():
            of_other = Job(*(facts[name] for name in Job._fields))
            is_of_now = of_other.method in self.sweep.methods and facts["run_name"] == self.sweep.run_name(of_other)
            if is_of_now and self._asked(of_other) == asked:
                yield other, facts.get("problems", {})

    def _asked(self, job: Job) -> dict[str, Any]:
        """Return the settings that a job's problems come from."""
        settings = self.sweep.settings(job.method, job.selects)
        of_training = self.sweep.settings(job.method, selects=True)
        asked = {**of_training, **{name: settings.get(name) for name in _OF_BENCHMARKS}}
        return {name: value for name, value in asked.items() if name not in {*_OF_ADAPTER, "benchmarks"}}

    def _check_finished(self, job: Job, outcome: Outcome) -> None:
        """Raise SweepError if a finished job's numbers depend on something else than those of the others do."""
        self._check_alike(job.run, outcome["identity"], job.method)
        for other, problems in self._problems_expected(job):
            for name, data in outcome.get("problems", {}).items():
                _check_same(job.run, other, {"data": problems.get(name, {})}, {"data": data})

    def _check_alike(self, run: str, identity: Identity, method: str = "") -> None:
        """Raise SweepError if a run depends on something else than the finished runs do."""
        for other, expected in self._expected(run, method):
            _check_same(run, other, expected, identity)

    def _write_expected(self, job: Job) -> None:
        """Write into a job's folder what its training compares itself with before its first step."""
        file = self.output_dir / job.run / EXPECTED_FILE
        file.unlink(missing_ok=True)
        runs = list(self._expected(job.run, job.method))
        if runs:
            run, expected = max(runs, key=lambda pair: len(pair[1]))  # they are alike: the one that says most
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"run": run, "identity": expected})

    def _beside_adapter(self, method: str) -> dict[str, Any]:
        """Return a method's settings without those of its rule and adapter."""
        settings = self.study.user_attrs[f"{method}: "]
        return {name: value for name, value in settings.items() if name not in _OF_ADAPTER}

    # Doing it

    def run(self) -> None:
        """Do all that is not done yet, with as many processes as `workers` says.

        Raises:
            SweepError: if a run fails, here or in another process, or the folder belongs to another sweep.
        """
        self.open()
        number = self.sweep.arguments.workers
        if number == 1:
            self.work()
            return
        start = multiprocessing.get_context("spawn").Process
        gpus = islice(cycle(workers.gpus()), number)
        processes = [start(target=_work, args=(self.sweep, self.script.parent, gpu)) for gpu in gpus]
        status = workers.run_processes(processes)
        with self.lock:
            remain = self._ready_jobs()
        if remain:
            raise SweepError(f"A worker ended with exit status {status}; the same command goes on from there.")

    def work(self) -> None:
        """Do one job after the other until none is left."""
        while True:
            with self.lock:  # one process at a time decides what it does, and says so
                ready = self._ready_jobs()
                if failure := self.study.user_attrs.get("failure"):
                    raise SweepError(f"Stopped, since another process met this: {failure}")
                trial = self._begin(ready[0]) if ready else None
            if trial is not None:
                self._do(ready[0], trial)
            elif self._active:
                time.sleep(0.5)  # others are at work: what they finish may be needed here, or they may be lost
            else:
                return

    def commands(self) -> list[str]:
        """Return the commands of the jobs that can start now, for a scheduler."""
        self.open()
        words = [*(self.launcher or [sys.executable]), str(self.script)]
        with self.lock:
            return [shlex.join([*words, *self._argv(job)]) for job in self._ready_jobs()]

    def _ready_jobs(self) -> list[Job]:
        """Return the jobs that are neither done nor running, after reading the trials again; this process has the lock."""
        self._give_up_lost_trials()
        self._refresh()
        jobs = self.sweep.jobs(self._scores, self.is_done)
        for job in jobs:  # done without a trial: by a scheduler, or before the storage was lost
            if job.run not in self._active and (outcome := self._outcome(job)):
                self._check_finished(job, outcome)
                self._end(self._begin(job), outcome)
                return self._ready_jobs()
        self._write_summary()
        return [job for job in jobs if job.run not in self._active]

    def _give_up_lost_trials(self) -> None:
        """Mark the trials whose process has died as failed."""
        optuna.storages.fail_stale_trials(self.study)
        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            job = trial.user_attrs.get("job", {"worker": ""})  # none: its process died as it began
            host, _, pid = job["worker"].rpartition(":")
            if not pid or (host == socket.gethostname() and not psutil.pid_exists(int(pid))):
                self.study.tell(trial.number, state=TrialState.FAIL)

    def _begin(self, job: Job) -> optuna.Trial:
        """Return a new trial for a job, which is this process's; it has the lock."""
        folder = self.output_dir / job.run
        trial = self.study.ask()
        facts = {
            **job._asdict(),
            "worker": f"{socket.gethostname()}:{os.getpid()}",
            "run": job.run,
            "run_name": self.sweep.run_name(job),
            # Whose folder is gone is trained anew: what its earlier trials say is of another training.
            "anew": not any((folder / name).exists() for name in (RUN_FILE, DIVERGED_FILE)),
        }
        trial.set_user_attr("job", facts)
        return trial

    def _end(self, trial: optuna.Trial, outcome: Outcome) -> None:
        """End a trial with what came of it: a score, or none if it diverged."""
        trial.set_user_attr("outcome", outcome)
        if "error" in outcome:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, next(iter(outcome["benchmarks"].values())))

    def _do(self, job: Job, trial: optuna.Trial) -> None:
        """Train and evaluate a job's run; whatever goes wrong ends its trial."""
        began = time.monotonic()
        try:
            with get_heartbeat_thread(trial._trial_id, self.storage):
                outcome = self._train(job)
            with self.lock:
                self._refresh()  # others have worked in the meantime
                self._check_finished(job, outcome)
                self._end(trial, outcome)
                self._refresh()
        except BaseException as error:
            if isinstance(error, SweepError):
                self.study.set_user_attr("failure", str(error))
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        jobs = {job for part in self.sweep.to_do for job in self.sweep.jobs_of(part, self._scores)}
        done = sum(job.learning_rate is not None and self.is_done(job) for job in jobs)
        scores = ", ".join(f"{name} {score:.2f}%" for name, score in outcome.get("benchmarks", {}).items())
        seconds = f"{time.monotonic() - began:.0f} s"
        print(f"{done} of at most {len(jobs)}. {job.run}: {scores or outcome['error']} ({seconds})", flush=True)

    def _train(self, job: Job) -> Outcome:
        """Start the script for a job, and return its outcome."""
        folder = self.output_dir / job.run
        with FileLock(folder / LOCK_FILE):  # a training outlives its worker for as long as its last checkpoint takes
            pass
        log = folder / "log.txt"
        arguments = (str(self.script), self._argv(job), self.launcher, str(log))
        process = workers.forks(self.script).Process(target=workers.train, args=arguments)
        status = workers.run_processes([process])
        outcome = self._outcome(job)
        if outcome is None or (status and "error" not in outcome):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
            error = SweepError(
                f"{job.run} failed with exit status {status}; the same command goes on from there. {log} ends:"
            )
            for line in [line for line in lines if line.strip()][-12:]:
                error.add_note(f"  {line}")
            raise error
        return outcome

    def _argv(self, job: Job) -> list[str]:
        """Return a job's arguments for its script, after writing its recipe to a file that is named by its content."""
        self._write_expected(job)
        recipe = self.sweep.recipe(job)
        path = self.output_dir / "recipes" / f"{re.sub('[/ ]', '_', recipe['run_name'])}.yaml"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, settings_yaml(recipe))
        return [str(path), "--output_dir", str(self.output_dir / job.run)]

    # What came of it

    def _choices(self) -> list[dict[str, Any]]:
        """Return the chosen rates as plain JSON, also those of other sweeps in this folder."""
        choices = self.study.user_attrs.get("choices", [])
        new = [
            {"method": method, "part": part, **choice._asdict(), "edge": choice.edge}
            for part, method, choice in self.sweep.choices(self._scores)
            if choice.learning_rate is not None
        ]
        methods = {choice["method"] for choice in new}
        return [*(choice for choice in choices if choice["method"] not in methods), *new]

    def summary(self) -> dict[str, list[dict[str, Any]]]:
        """Return the finished runs in this folder, also those of other sweeps, and the chosen rates; see `load_runs`."""
        runs = []
        choices = self._choices()
        chosen = [(choice["method"], choice["learning_rate"]) for choice in choices]
        for folder, facts in self._last.items():
            runs.append(
                {
                    **{name: facts.get(name) for name in _OF_SUMMARY},
                    "folder": folder,
                    "chosen": (facts["method"], facts["learning_rate"]) in chosen,
                    "final": not facts["selects"],
                    "diverged": "error" in facts,
                    "selection_score": self._scores.get(folder),
                }
            )
        runs.sort(key=itemgetter("method", "learning_rate", "seed"))
        return {"runs": runs, "choices": choices}

    def table(self) -> str:
        """Return the summary as people read it."""
        return summary_text(self.summary(), self.sweep.arguments.select_on)

    def _write_summary(self) -> None:
        summary = self.summary()
        self.study.set_user_attr("choices", summary["choices"])
        write_json(self.output_dir / SUMMARY_FILE, summary)
        write_atomically(self.output_dir / "summary.txt", self.table() + "\n")


def _check_same(run: str, other: str, expected: Identity, identity: Identity) -> None:
    if changed := differences(expected, identity):
        raise SweepError(
            f"{run} cannot stand beside {other}: {changed[0]}. Put it back and delete the folder of the one that is wrong, or "
            "choose another `output_dir`."
        )


def _work(sweep: Sweep, scripts: Path, gpu: str) -> None:
    """Be one of several workers of a sweep that another process has checked, with one GPU if there are any."""
    workers.stop_with_parent()
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu

    def work() -> None:
        with workers.sigterm_as_interrupt():
            queue = Queue(sweep, scripts)
            queue.open(check=False)
            queue.work()

    run_command(work)
