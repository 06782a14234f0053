"""Sweeps: methods, learning rates and seeds, compared in parts, and shared by any number of processes.

A run is a folder, `output_dir/METHOD/lr_X/seed_S`. A learning rate is chosen for each method on a benchmark of held-out rows,
with the first seed or seeds; all seeds are then trained at it and evaluated (Appendix "Hyperparameters"). Each job is a
trial of an Optuna study, so that no two processes do it at once, and it is done again if its process was lost.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import pandas as pd
import psutil
import torch
from filelock import FileLock
from optuna.trial import TrialState
from transformers.hf_argparser import HfArg

from loopdropout_trainer.errors import UserError, run_command, user_supplied
from loopdropout_trainer.evaluation.results import mean_sd
from loopdropout_trainer.runs import workers
from loopdropout_trainer.runs.result import DIVERGED_FILE, RESULTS_FILE
from loopdropout_trainer.saving.files import LOCK_FILE, sha256_of_json, write_atomically
from loopdropout_trainer.secrets import public_settings
from loopdropout_trainer.settings.arguments import BenchmarkArguments, RunArguments
from loopdropout_trainer.settings.parser import RecipeParser
from loopdropout_trainer.settings.ranges import check_choice, check_folder, check_integer, check_number, shown
from loopdropout_trainer.settings.recipe import (
    RecipeError,
    build,
    for_another_rule,
    laid_over,
    load_recipe,
    settings_yaml,
)


SUMMARY_FILE = "summary.json"
_ONE_TRAINING = {"compare_with", "dry_run"}  # what makes several of a training, or none
# What `measure` may set: what is done with a trained adapter. All other fields affect the training.
_MEASURED = {f.name for f in fields(RunArguments)} - _ONE_TRAINING
_ONLY_FINAL = _MEASURED - {f.name for f in fields(BenchmarkArguments)}
# A sweep sets these itself; those of a base recipe are ignored.
_SET_BY_SWEEP = {"output_dir", "run_name", "learning_rate", "seed", "resume_from_checkpoint", *_ONE_TRAINING}
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)  # results that are not there or not complete


class SweepError(RuntimeError):
    """A run of the sweep failed, or the folder belongs to another sweep."""


@dataclass(kw_only=True)
class PartArguments:
    """What is compared; a sweep has these fields for all of its parts, and a part may have its own."""

    learning_rates: list[float] = HfArg(help="Candidates of every method.")
    methods: dict[str, str | dict[str, Any]] | list[str] | str = HfArg(
        default_factory=lambda: ["lora", "loop_dropout"],
        help="Rules and recipes (.yaml), or name: rule, recipe, or fields on top of `recipe`; in a part, names.",
    )
    seeds: list[int] = HfArg(default_factory=lambda: [101, 102, 103], help="The first ones choose the learning rate.")
    full_grid: bool = HfArg(default=False, help="Train every seed at every rate; so it is with one rate.")
    settings: dict[str, Any] | None = HfArg(
        default=None, help="Fields of every recipe (JSON). A part's own make methods METHOD@PART."
    )
    measure: dict[str, Any] | None = HfArg(
        default=None, help="Fields of a recipe on what is measured of final runs: `benchmarks`, `depths`, ..."
    )

    def __post_init__(self):
        self.methods = [self.methods] if isinstance(self.methods, str) else self.methods
        for name in ("learning_rates", "methods", "seeds"):
            values = list(getattr(self, name))
            if not values or len(set(map(str, values))) != len(values):
                raise UserError(f"`{name}` must be one or more different values; got {values!r}.")
        for rate in self.learning_rates:
            check_number("learning_rates", rate, above=True)
        for seed in self.seeds:
            check_integer("seeds", seed, least=0, most=2**32 - 1)
        for name in self.measure or ():
            check_choice("measure", name, sorted(_MEASURED))
        self.learning_rates = sorted(float(rate) for rate in self.learning_rates)


@dataclass(kw_only=True)
class SweepArguments(PartArguments):
    """A sweep, and what to do of it."""

    recipe: str = HfArg(help="Training recipe that all methods start from.")
    script: str = HfArg(default="sft", help="Script of the recipe.", metadata={"choices": ["sft", "dpo", "grpo"]})
    parts: dict[str, dict[str, Any] | None] | None = HfArg(
        default=None,
        help="Name: {methods, learning_rates, seeds, full_grid, settings, measure}, in order of priority. A run that two "
        "parts share is trained once, and measured as the first one says. Default: one part, `all`.",
    )
    only: list[str] | None = HfArg(default=None, help="Parts to do. Default: all.")
    rate_factors: dict[str, float] | None = HfArg(default=None, help="Factors on learning rates by method (JSON).")
    select_on: str = HfArg(default="development", help="Benchmark that chooses the rate. Default: held-out rows.")
    selection_seeds: int = HfArg(default=1, help="How many of a part's first seeds choose the rate.")
    output_dir: str = HfArg(default="outputs/sweep", help="Folder of all runs.")
    storage: str | None = HfArg(default=None, help="URL of a database that machines share. Default: a file, sweep.db.")
    launcher: str = HfArg(default="", help="What starts a training, e.g. `accelerate launch`. Default: a fork.")
    workers: int = HfArg(default=1, help="Runs at a time on this machine, each on a GPU of its own.")
    print_commands: bool = HfArg(default=False, help="Print the commands that a scheduler can start now, and stop.")
    dry_run: bool = HfArg(default=False, help="Print how many trainings each part takes, and stop.")

    def __post_init__(self):
        super().__post_init__()
        check_folder("output_dir", self.output_dir)
        check_integer("workers", self.workers)
        check_integer("selection_seeds", self.selection_seeds)
        for factor in (self.rate_factors or {}).values():
            check_number("rate_factors", factor, above=True)
        with user_supplied(f"`launcher` {self.launcher!r} cannot be split into words"):
            shlex.split(self.launcher)


class Job(NamedTuple):
    """One start of a training script: it trains and evaluates a run, or only evaluates one that is trained.

    `learning_rate` None: still to be chosen. `selects`: evaluated on `select_on` alone, to choose the rate.
    """

    method: str
    learning_rate: float | None
    seed: int
    selects: bool

    @property
    def run(self) -> str:
        """Folder below `output_dir`."""
        return f"{self.method}/lr_{self.learning_rate:.6g}/seed_{self.seed}"


def load_runs(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the finished runs of a sweep from its folder alone, by method, learning rate and seed.

    Returns:
        For each run: `method`, `learning_rate`, `seed`; `chosen`, whether the rate was chosen for the method; `final`, whether
        it was measured, not only compared with other rates; `selection_score`, in percent; `diverged`; `folder`, below
        `output_dir`; `results`, its results.json ({} if it diverged).

    Raises:
        OSError, ValueError: if the folder holds no summary of a sweep, or a file is damaged.
    """
    runs = json.loads((Path(output_dir) / SUMMARY_FILE).read_text(encoding="utf-8"))["runs"]
    for run in runs:
        path = Path(output_dir) / run["folder"] / RESULTS_FILE
        run["results"] = {} if run["diverged"] else json.loads(path.read_text(encoding="utf-8"))
    return runs


class Sweep:
    """Plans, starts and summarises the runs of a sweep; `scripts` is the folder of the training scripts.

    Raises:
        ValueError: for a method, part or field that does not exist, or a recipe that cannot be read.
    """

    def __init__(self, arguments: SweepArguments, scripts: Path) -> None:
        self.arguments, self.output_dir = arguments, Path(arguments.output_dir)
        self.script, self.launcher = scripts / f"{arguments.script}.py", shlex.split(arguments.launcher)
        self.methods: dict[str, dict[str, Any]] = {}  # resolved recipes, frozen here: no file is read again
        self.parts: dict[str, PartArguments] = {}
        self._measure: dict[str, dict[str, Any]] = {}
        self.study: optuna.Study | None = None
        definitions, parts = arguments.methods, arguments.parts or {"all": {}}
        if not isinstance(definitions, Mapping):
            definitions = {Path(each).stem if _is_recipe(each) else each: each for each in arguments.methods}
            if len(definitions) < len(arguments.methods):
                raise RecipeError(f"`methods` must have different names; got {', '.join(arguments.methods)}.")
        for field, names in (("methods", definitions), ("parts", parts)):
            for name in names:
                if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                    raise RecipeError(f"`{field}` must have names of letters, digits, `._-`; got {shown(name)}.")
        for field, names in (("only", parts), ("rate_factors", definitions)):
            for name in getattr(arguments, field) or ():
                check_choice(field, name, list(names))
        for name, given in parts.items():
            part = self.parts[name] = self._part(name, given or {}, list(definitions))
            for place, method in enumerate(part.methods):
                check_choice(f"methods` of the part `{name}", method, list(definitions))
                own = part.methods[place] = f"{method}@{name}" if part.settings else method
                if own not in self.methods:
                    self.methods[own] = self._resolved(definitions[method], part.settings or {})
                    self._measure[own] = part.measure
                if not self.settings(own, selects=False).get("benchmarks"):
                    raise RecipeError(f"`measure` of the part `{name}` must name `benchmarks`: its recipe does not.")
        self.to_do = [self.parts[name] for name in arguments.only or parts]
        self._refresh()

    def _part(self, name: str, given: dict[str, Any], methods: list[str]) -> PartArguments:
        """Return a part with its own fields, and the sweep's where it has none."""
        parser = RecipeParser([PartArguments])
        given = parser.read_recipe(given, f"the part `{name}`")
        shared = {key: getattr(self.arguments, key) for key in parser.hints} | {"methods": methods, "settings": None}
        measure = {**(self.arguments.measure or {}), **(given.get("measure") or {})}
        try:
            part = build(PartArguments, {**shared, **given, "measure": measure})
        except ValueError as error:
            raise RecipeError(f"The part `{name}`: {error}") from None
        part.methods, part.full_grid = list(part.methods), part.full_grid or len(part.learning_rates) == 1
        return part

    def _resolved(self, definition: Any, of_part: Mapping[str, Any]) -> dict[str, Any]:
        """Return a method's recipe with nothing left to look up elsewhere."""
        own = {} if _is_recipe(definition) else {"rule": definition} if isinstance(definition, str) else definition
        recipe = load_recipe(definition if _is_recipe(definition) else self.arguments.recipe)
        recipe = {key: value for key, value in recipe.items() if key not in _SET_BY_SWEEP}
        recipe = laid_over(recipe, self.arguments.settings or {})
        recipe = for_another_rule(recipe, own["rule"]) if "rule" in own else recipe
        recipe = laid_over(recipe, {**own, **of_part})
        if of_sweep := sorted(_SET_BY_SWEEP & recipe.keys()):
            raise RecipeError(f"`{of_sweep[0]}` is the sweep's: it can be no field of `methods` or `settings`.")
        if secret := [key for key in recipe if public_settings(recipe).get(key) != recipe[key]]:
            raise RecipeError(f"`{secret[0]}` holds a secret, which a sweep would write down: give it as HF_TOKEN.")
        if recipe.get("save_strategy") == "no":  # measured after the choice, without another training
            recipe["save_strategy"] = "epoch"
        return recipe

    # The runs

    def settings(self, method: str, selects: bool) -> dict[str, Any]:
        """Return a method's recipe without rate and seed; `selects`: to choose the rate, without what `measure` sets."""
        recipe, measure = self.methods[method], self._measure[method]
        if selects:
            recipe = {key: value for key, value in recipe.items() if key not in _ONLY_FINAL}
            measure = {"benchmarks": [self.arguments.select_on]}
        recipe = {**recipe, "resume_from_checkpoint": "true", "evaluate_base": False, **measure}
        return json.loads(json.dumps(recipe, default=str))

    def _recipe(self, job: Job) -> dict[str, Any]:
        """Return a job's settings; their `run_name` tells whether a results.json is of this job."""
        settings = self.settings(job.method, job.selects)
        run_name = f"{job.run} {sha256_of_json(settings)[:16]}"
        return {**settings, "learning_rate": job.learning_rate, "seed": job.seed, "run_name": run_name}

    def rates(self, part: PartArguments, method: str) -> list[float]:
        """Return a method's candidates in a part, the smallest first."""
        factor = (self.arguments.rate_factors or {}).get(method.split("@")[0], 1.0)
        return [float(f"{factor * rate:.6g}") for rate in part.learning_rates]

    def _selection_jobs(self, part: PartArguments, method: str) -> list[Job]:
        seeds = [] if part.full_grid else part.seeds[: self.arguments.selection_seeds]
        return [Job(method, rate, seed, True) for rate in self.rates(part, method) for seed in seeds]

    def chosen_rate(self, part: PartArguments, method: str) -> float | None:
        """Return the rate with the best mean score over the selection seeds, the smallest one of a tie.

        A rate at which a seed diverged is out. None if none is left, a run is unfinished, or the part chooses no rate.
        """
        scores: dict[float, list[float | None]] = {}
        for job in self._selection_jobs(part, method):
            if not self.is_done(job):
                return None
            scores.setdefault(job.learning_rate, []).append(self._selected[job.run].value)  # None: it diverged
        means = {rate: sum(each) / len(each) for rate, each in scores.items() if None not in each}
        return max(means, key=means.get, default=None)  # the first of equals, and the rates ascend

    def _choices(self) -> set[tuple[str, float]]:
        """Return (method, rate) of the rates that the parts have chosen."""
        choices = {(m, self.chosen_rate(part, m)) for part in self.parts.values() for m in part.methods}
        return {(method, rate) for method, rate in choices if rate is not None}

    def _jobs_of(self, part: PartArguments) -> list[Job]:
        jobs = []
        for method in part.methods:
            rates = self.rates(part, method) if part.full_grid else [self.chosen_rate(part, method)]
            jobs += self._selection_jobs(part, method)
            jobs += [Job(method, rate, seed, False) for rate in rates for seed in part.seeds]
        return jobs

    def jobs(self) -> list[Job]:
        """Return the jobs known now, in order of priority: part by part, then seed by seed.

        A sweep that is stopped has then compared its methods on the same seeds.
        """
        choosing = {job for part in self.parts.values() for m in part.methods for job in self._selection_jobs(part, m)}
        jobs = []
        for part in self.to_do:
            known = [job for job in self._jobs_of(part) if job.learning_rate is not None]
            for job in sorted(known, key=lambda job: part.seeds.index(job.seed)):
                first = job._replace(selects=True)
                # Another part chooses by this run: first, since its results would take the place of the final ones.
                jobs.append(first if first in choosing and not self.is_done(first) else job)
        return list(dict.fromkeys(jobs))

    # What is done

    def _refresh(self) -> None:
        """Read the trials: the last finished one of each run, the one that chooses its rate, and those under way."""
        self._trials = self.study.get_trials(deepcopy=False) if self.study else []
        self._last, self._selected = {}, {}
        self._active = {trial.user_attrs.get("run") for trial in self._trials if trial.state == TrialState.RUNNING}
        files = {TrialState.COMPLETE: RESULTS_FILE, TrialState.PRUNED: DIVERGED_FILE}
        for trial in self._trials:
            run, file = trial.user_attrs.get("run", ""), files.get(trial.state)
            if file and (self.output_dir / run / file).exists():
                self._last[run] = trial
                if trial.user_attrs["selects"] or trial.state == TrialState.PRUNED:
                    self._selected[run] = trial

    def is_done(self, job: Job) -> bool:
        """Say whether there is nothing left to do for a job, as far as the trials were read."""
        if job.selects or job.run not in self._last:
            return job.run in self._selected
        last = self._last[job.run]
        return last.state == TrialState.PRUNED or last.user_attrs["run_name"] == self._recipe(job)["run_name"]

    def _outcome(self, job: Job) -> dict[str, Any] | None:
        """Return a finished job's results as attributes of a trial, the `error` if it diverged; None if it is unfinished."""
        folder, run_name = self.output_dir / job.run, self._recipe(job)["run_name"]
        with suppress(*_DAMAGED):
            report = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
            if report["run_info"]["settings"]["run_name"] == run_name:
                cost = {name: report["train_info"].get(name) for name in ("train_seconds", "peak_memory_gb")}
                return {"benchmarks": {name: each["score"] for name, each in report["benchmarks"].items()}, **cost}
        with suppress(*_DAMAGED):
            report = json.loads((folder / DIVERGED_FILE).read_text(encoding="utf-8"))
            if report["run_name"] == run_name:
                return {"error": report["error"]}
        return None

    # Doing it

    def start(self, check: bool = True) -> None:
        """Check everything, unless another process has, open the storage, and write down there whose folder this is.

        Raises:
            RecipeError: if the script refuses a recipe, or there is no such benchmark.
            SweepError: if the folder belongs to another sweep.
        """
        methods = dict.fromkeys(method for part in self.to_do for method in part.methods)
        if check:
            recipes = {m: self._recipe(Job(m, 1.0, 0, False)) for m in methods}
            final = {m: {**recipe, "output_dir": str(self.output_dir / m)} for m, recipe in recipes.items()}
            benchmarks = [self.arguments.select_on, *(name for each in final.values() for name in each["benchmarks"])]
            with_model = not self.arguments.print_commands  # which may be printed where no model is
            with ProcessPoolExecutor(1, mp_context=workers.FORKS) as pool:
                pool.submit(workers.check_recipes, str(self.script), final, benchmarks, with_model).result()
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.output_dir / "sweep.lock")
        with self._lock:
            self._open_storage()
            mine = {"": {name: getattr(self.arguments, name) for name in ("script", "select_on", "selection_seeds")}}
            mine |= {f"{method}: ": self.settings(method, selects=True) for method in methods}
            for owner, now in mine.items():  # without parts, rates, seeds and `measure`, which may change
                before = self.study.user_attrs.get(owner, now)
                if changed := [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]:
                    raise SweepError(
                        f"The runs in {self.output_dir} were made with `{owner}{changed[0]}` {before.get(changed[0])!r}, and "
                        f"now it is {now.get(changed[0])!r}: put it back, or choose another `output_dir`."
                    )
            for owner, now in mine.items():
                self.study.set_user_attr(owner, now)
            if check:
                self.study.set_user_attr("failure", None)  # what failed before is tried again

    def _open_storage(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # of heartbeats
        given, file = self.arguments.storage, self.output_dir.resolve() / "sweep.db"
        wait = None if given else {"connect_args": {"timeout": 60}}
        # In seconds; what died on this machine is noticed at once.
        heartbeats = {"heartbeat_interval": 10, "grace_period": 60}
        with user_supplied(f"{'`storage`' if given else file} cannot be opened"):
            storage = optuna.storages.RDBStorage(given or f"sqlite:///{file}", wait, **heartbeats)
            study = {"study_name": str(file.parent) if given else "sweep", "direction": "maximize"}
            self.study = optuna.create_study(storage=storage, load_if_exists=True, **study)

    def run(self) -> None:
        """Do all that is not done yet, with as many processes as `workers` says.

        Raises:
            SweepError: if a run fails, here or in another process, or the folder belongs to another sweep.
        """
        self.start()
        number, spawn = self.arguments.workers, multiprocessing.get_context("spawn")
        if number == 1:
            self.work()
            return
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
        given = [(self.arguments, self.script.parent, gpus[place % len(gpus)]) for place in range(number)]
        status = workers.run_processes([spawn.Process(target=_work, args=each) for each in given])
        self._refresh()
        if not all(map(self.is_done, self.jobs())):
            raise SweepError(f"A worker ended with exit status {status}; the same command goes on from there.")

    def work(self, train: bool = True) -> list[Job]:
        """Do one job after the other until none is left, and return those that remain.

        Without `train`, it only records jobs that were done without a trial, by a scheduler or before the storage was lost.
        """
        while True:
            with self._lock:  # one process at a time decides what it does, and says so
                ready = self._ready_jobs()
                if failure := self.study.user_attrs.get("failure"):
                    raise SweepError(f"Stopped, since another process met this: {failure}")
                to_do = ready if train else [job for job in ready if self._outcome(job)]
                if to_do:
                    # `optimize` begins a trial, keeps up its heartbeat, and ends it as the function ends.
                    self.study.optimize(lambda trial, job=to_do[0]: self._do(trial, job), n_trials=1)
                elif not (train and self._active):
                    return ready
            if not to_do:
                time.sleep(0.5)  # others are at work: what they finish may be needed here, or they may be lost

    def _ready_jobs(self) -> list[Job]:
        """Return the jobs that are neither done nor running, after reading the trials again. The caller holds the lock."""
        optuna.storages.fail_stale_trials(self.study)
        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            host, _, pid = trial.user_attrs.get("worker", "").rpartition(":")  # none: its process died as it began
            if not pid or (host == socket.gethostname() and not psutil.pid_exists(int(pid))):
                self.study.tell(trial.number, state=TrialState.FAIL)
        self._refresh()
        write_atomically(self.output_dir / SUMMARY_FILE, json.dumps({"runs": self.summary()}, indent=1) + "\n")
        write_atomically(self.output_dir / "summary.txt", self.table() + "\n")
        return [job for job in self.jobs() if not self.is_done(job) and job.run not in self._active]

    def _do(self, trial: optuna.Trial, job: Job) -> float:
        """Do a job as a trial, and return its score. Releases the caller's lock once the trial names this process."""
        known = {"worker": f"{socket.gethostname()}:{os.getpid()}", "run": job.run, **job._asdict()}
        chosen = (job.method, job.learning_rate) in self._choices()
        for name, value in {**known, "run_name": self._recipe(job)["run_name"], "chosen": chosen}.items():
            trial.set_user_attr(name, value)
        self._lock.release()
        outcome = self._outcome(job) or self._train(job)
        for name, value in outcome.items():
            trial.set_user_attr(name, value)
        if "error" in outcome:
            raise optuna.TrialPruned(outcome["error"])
        return float(next(iter(outcome["benchmarks"].values())))

    def _train(self, job: Job) -> dict[str, Any]:
        """Start the script for a job, and return its outcome."""
        began, folder = time.monotonic(), self.output_dir / job.run
        with FileLock(folder / LOCK_FILE):  # a training outlives its worker for as long as its last checkpoint takes
            pass
        log = folder / "log.txt"
        arguments = (str(self.script), self._argv(job), self.launcher, str(log))
        status = workers.run_processes([workers.FORKS.Process(target=workers.train, args=arguments)])
        outcome = self._outcome(job)
        if outcome is None or (status and "error" not in outcome):
            error = f"{job.run} failed with exit status {status}; the same command goes on from there. {log} ends:"
            self.study.set_user_attr("failure", error)
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
            raise SweepError("\n  ".join([error, *[line for line in lines if line.strip()][-12:]]))
        self._refresh()  # others have worked in the meantime
        jobs = {job, *(each for part in self.to_do for each in self._jobs_of(part))}
        done = sum(each == job or each.learning_rate is not None and self.is_done(each) for each in jobs)
        text = ", ".join(f"{name} {score:.2f}%" for name, score in outcome.get("benchmarks", {}).items())
        text = f"{done} of at most {len(jobs)}. {job.run}: {text or outcome['error']}"
        print(f"{text} ({time.monotonic() - began:.0f} s)", flush=True)
        return outcome

    def _argv(self, job: Job) -> list[str]:
        """Return a job's arguments for its script, after writing its recipe to a file that is named by its content."""
        recipe = self._recipe(job)
        path = self.output_dir / "recipes" / f"{re.sub('[/ ]', '_', recipe['run_name'])}.yaml"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, settings_yaml(recipe))
        return [str(path), "--output_dir", str(self.output_dir / job.run)]

    def commands(self) -> list[str]:
        """Return the commands of the jobs that can start now, for a scheduler."""
        self.start()
        words = [*(self.launcher or [sys.executable]), str(self.script)]
        return [shlex.join([*words, *self._argv(job)]) for job in self.work(train=False)]

    # What it takes, and what came of it

    def planned(self, part: PartArguments) -> set[tuple[str, float | None, int]]:
        """Return (method, rate, seed) of a part's trainings before the first one; None: a rate that is still to be chosen."""
        first = part.seeds[: self.arguments.selection_seeds]
        return {job[:3] for job in self._jobs_of(part) if job.learning_rate is not None or job.seed not in first}

    def plan(self) -> str:
        """Return how many trainings each part adds to those before it."""
        lines, every = ["Trainings"], set()
        for name, part in zip(self.arguments.only or self.parts, self.to_do, strict=True):
            new = self.planned(part) - every
            lines.append(f"{name:<40} {len(new):>5}")
            every |= new
        return "\n".join([*lines, f"{'all':<40} {len(every):>5}"])

    def summary(self) -> list[dict[str, Any]]:
        """Return the finished runs in this folder, also those of other sweeps, as plain JSON; see `load_runs`."""
        rows, choices = [], self._choices()
        for run, trial in self._last.items():
            known, selected = trial.user_attrs, self._selected.get(run)
            row = {key: known[key] for key in ("method", "learning_rate", "seed")} | {"folder": run}
            # Without a choice here another sweep may have made one, as the trial then says.
            chose = any(method == row["method"] for method, _ in choices)
            row["chosen"] = (row["method"], row["learning_rate"]) in choices if chose else known["chosen"]
            row |= {"final": not known["selects"], "diverged": trial.state == TrialState.PRUNED}
            row["selection_score"] = selected and selected.value
            rows.append(row | {key: known.get(key) for key in ("benchmarks", "train_seconds", "peak_memory_gb")})
        return sorted(rows, key=lambda row: (row["method"], row["learning_rate"], row["seed"]))

    def table(self) -> str:
        """Return a line for each method and rate: selection score (* if chosen), minutes, GB, and mean ± SD over seeds."""
        rows, runs = [], self.summary()
        for (method, rate), same in pd.DataFrame(runs).groupby(["method", "learning_rate"]) if runs else ():
            final, score = same[same["final"]], same["selection_score"].mean()
            choice = "diverged" if same["diverged"].any() else "" if pd.isna(score) else f"{score:.2f}"
            row = {"method": method, "rate": f"{rate:.6g}"}
            row[self.arguments.select_on] = choice + "*" * bool(same["chosen"].any())
            row |= {"minutes": final["train_seconds"].mean() / 60, "GB": final["peak_memory_gb"].max()}
            scores = pd.DataFrame([each or {} for each in final["benchmarks"]])
            for name in scores:
                known = scores[name].dropna().tolist()
                diverged = f", {len(scores) - len(known)} diverged" * (len(known) < len(scores))
                row[f"{name} (seeds)"] = f"{mean_sd(known)} ({len(known)}{diverged})"
            rows.append(row)
        return pd.DataFrame(rows).to_string(index=False, na_rep="", float_format="{:.2f}".format)


def _work(arguments: SweepArguments, scripts: Path, gpu: str) -> None:
    """Be one of several workers of a sweep that another process has checked, with one GPU if there are any."""
    workers.stop_with_parent()
    workers.stop_on_sigterm()
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu

    def work() -> None:
        sweep = Sweep(arguments, scripts)
        sweep.start(check=False)
        sweep.work()

    run_command(work)


def _is_recipe(method: Any) -> bool:
    return isinstance(method, str) and method.endswith((".yaml", ".yml"))
