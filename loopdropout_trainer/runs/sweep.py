"""Sweeps: methods, learning rates and seeds, compared in parts, and shared by any number of processes.

A run is a folder, `output_dir/METHOD/lr_X/seed_S`. A learning rate is chosen for each method on a benchmark of held-out rows,
with the first seed; all seeds are then trained at it and measured (Appendix "Hyperparameters"). What is done is a trial of
an Optuna study, so that no run is done by two processes at once, and a run whose process was lost is done again.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import socket
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any

import optuna
import psutil
import yaml
from filelock import FileLock
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from loopdropout_trainer.evaluation.statistics import summarize
from loopdropout_trainer.runs.result import DIVERGED_FILE, RESULTS_FILE
from loopdropout_trainer.runs.workers import check_recipes, launch_script, run_workers
from loopdropout_trainer.saving.files import sha256_of_json, write_atomically
from loopdropout_trainer.saving.lock import LockedError, folder_lock
from loopdropout_trainer.settings.arguments import BenchmarkArguments, RunArguments
from loopdropout_trainer.settings.parser import RecipeParser
from loopdropout_trainer.settings.ranges import check_folder, check_integer, check_number, shown
from loopdropout_trainer.settings.recipe import RecipeError, build, for_another_rule, load_recipe
from loopdropout_trainer.settings.secrets import public_settings


HEARTBEAT_SECONDS = 10
SUMMARY_FILE = "summary.json"
LOST_AFTER_SECONDS = 60  # without a heartbeat; what died on this machine is noticed at once
DONE = (TrialState.COMPLETE, TrialState.PRUNED)  # pruned: the training diverged

# What `measure` may set: what becomes of a trained adapter. All other fields make the training what it is.
_MEASURED = {f.name for f in fields(RunArguments)} - {"compare_with", "dry_run"}
_ONLY_FINAL = _MEASURED - {f.name for f in fields(BenchmarkArguments)}
# A sweep sets these itself; of a base recipe they are left out.
_SET_BY_SWEEP = {
    "output_dir", "run_name", "learning_rate", "seed", "resume_from_checkpoint", "compare_with", "dry_run",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class SweepError(RuntimeError):
    """A run of the sweep failed, or the folder belongs to another sweep."""


@dataclass(kw_only=True)
class PartArguments:
    """What is compared; a sweep has these fields for all of its parts, and a part may have its own."""

    learning_rates: list[float] = field(metadata={"help": "Candidates of every method.", "nargs": "+"})
    methods: dict[str, Any] | list[str] | str = field(
        default_factory=lambda: ["lora", "loop_dropout"],
        metadata={
            "help": "Rules and recipes (.yaml), or name: rule, recipe, or fields on top of `recipe`; in a part, names."
        },
    )
    seeds: list[int] = field(
        default_factory=lambda: [101, 102, 103],
        metadata={"help": "Training seeds; the first of them choose the learning rate.", "nargs": "+"},
    )
    full_grid: bool = field(
        default=False, metadata={"help": "Train every seed at every rate, and choose nothing; so it is with one rate."}
    )
    settings: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "Fields of every training recipe (JSON on the command line). A part's own make methods METHOD@PART."
        },
    )
    measure: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "Fields of a recipe that say what is measured of the final runs: `benchmarks`, `benchmark_limit`, "
            "`depths` and others. Default: as the recipe has them."
        },
    )

    def __post_init__(self):
        self.methods = [self.methods] if isinstance(self.methods, str) else self.methods
        for name in ("learning_rates", "methods", "seeds"):
            values = list(getattr(self, name))
            if not values or len(set(map(str, values))) != len(values):
                raise ValueError(f"`{name}` must be one or more different values; got {values!r}.")
        for rate in self.learning_rates:
            check_number("learning_rates", rate, above=True)
        for seed in self.seeds:
            check_integer("seeds", seed, 0)
        for name in self.measure or ():
            if name not in _MEASURED:
                raise ValueError(
                    f"`measure` must have fields among {', '.join(sorted(_MEASURED))}; got {shown(name)}."
                )
        self.learning_rates = sorted(float(rate) for rate in self.learning_rates)


@dataclass(kw_only=True)
class SweepArguments(PartArguments):
    """A sweep, and what to do of it."""

    recipe: str = field(metadata={"help": "Training recipe that all methods start from."})
    script: str = field(default="sft", metadata={"help": "Script of the recipe.", "choices": ["sft", "dpo", "grpo"]})
    parts: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "Name: {methods, learning_rates, seeds, full_grid, settings, measure}, in order of priority. A run "
            "that two parts share is trained once, and measured as the first one says. Default: one part, `all`."
        },
    )
    only: list[str] | None = field(default=None, metadata={"help": "Parts to do. Default: all.", "nargs": "+"})
    rate_factors: dict[str, float] | None = field(
        default=None, metadata={"help": "Factors on learning rates, {method: factor} (JSON on the command line)."}
    )
    select_on: str = field(
        default="development",
        metadata={"help": "Benchmark whose score chooses the rate; `development`: held-out rows."},
    )
    selection_seeds: int = field(default=1, metadata={"help": "How many of a part's first seeds choose the rate."})
    minutes: dict[str, float] | None = field(
        default=None, metadata={"help": "Minutes of a training by method, and `default`, for the plan."}
    )
    device: str = field(default="one GPU", metadata={"help": "What the minutes were measured on."})
    output_dir: str = field(default="outputs/sweep", metadata={"help": "Folder of all runs."})
    storage: str | None = field(
        default=None,
        metadata={"help": "URL of a database that several machines share. Default: sweep.db in `output_dir`."},
    )
    launcher: str | None = field(
        default=None, metadata={"help": "What starts a training, e.g. `accelerate launch`. Default: a fork."}
    )
    workers: int = field(default=1, metadata={"help": "Runs at a time on this machine, each on a GPU of its own."})
    print_commands: bool = field(
        default=False, metadata={"help": "Print the commands that can start now, for a scheduler, and stop."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Print how many trainings each part takes, and stop."})

    def __post_init__(self):
        super().__post_init__()
        if self.parts is not None and not self.parts:
            raise ValueError("`parts` must name one or more parts; got {}.")
        check_folder("output_dir", self.output_dir)
        check_integer("workers", self.workers, 1)
        check_integer("selection_seeds", self.selection_seeds, 1)
        for factor in (self.rate_factors or {}).values():
            check_number("rate_factors", factor, above=True)
        try:
            shlex.split(self.launcher or "")
        except ValueError as error:
            raise ValueError(f"`launcher` cannot be split into words ({error}); got {self.launcher!r}.") from None


@dataclass(frozen=True)
class Job:
    """One start of a training script: it trains a run, or only measures one that is trained.

    Attributes:
        run: folder below `output_dir`.
        method, learning_rate, seed: of the run.
        selects: whether the run is only evaluated on `select_on`, to choose the rate.
        settings: the recipe, complete but for `output_dir`; by its `run_name` results.json is known as this job's.
        key: tells these settings from others.
    """

    run: str
    method: str
    learning_rate: float
    seed: int
    selects: bool
    settings: Mapping[str, Any]
    key: str


def load_runs(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the finished runs of a sweep in the order of its parts, from its folder alone.

    Returns:
        For each part and run: `part`, `method`, `learning_rate`, `seed`; `chosen`, whether the rate is the method's (None:
        the part chooses nothing); `final`, whether it was measured as the part says; `selection_score`, in percent;
        `diverged`; `folder`, below `output_dir`; `results`, its results.json ({} if it diverged).

    Raises:
        OSError, ValueError: if the folder holds no summary of a sweep, or a file is damaged.
    """
    runs = json.loads((Path(output_dir) / SUMMARY_FILE).read_text(encoding="utf-8"))["runs"]
    for run in runs:
        path = Path(output_dir) / run["folder"] / RESULTS_FILE
        run["results"] = {} if run["diverged"] else json.loads(path.read_text(encoding="utf-8"))
    return runs


class Sweep:
    """The runs of a sweep, and what is done of them.

    Args:
        arguments: of the sweep.
        scripts: folder of the training scripts.

    Attributes:
        parts: by name, with all of their fields.
        methods: resolved recipes by name, frozen here: no recipe's file is read again.

    Raises:
        RecipeError: for a method, part or field that there is not, or a recipe that cannot be read.
    """

    def __init__(self, arguments: SweepArguments, scripts: Path) -> None:
        self.arguments = arguments
        self.output_dir = Path(arguments.output_dir)
        self.script = scripts / f"{arguments.script}.py"
        self.launcher = shlex.split(arguments.launcher or "")
        self.methods: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, PartArguments] = {}
        self._measure: dict[str, dict[str, Any]] = {}
        self._jobs: dict[tuple, Job] = {}
        definitions = _definitions(arguments.methods)
        for name, given in (arguments.parts or {"all": {}}).items():
            part = self.parts[name] = self._part(name, given, list(definitions))
            for place, method in enumerate(part.methods):
                own = part.methods[place] = f"{method}@{name}" if part.settings else method
                if own not in self.methods:
                    self.methods[own] = self._resolved(definitions[method], part.settings or {})
                    self._measure[own] = part.measure or {}
                if not {**self.methods[own], **self._measure[own]}.get("benchmarks"):
                    raise RecipeError(
                        f"`measure` of the part `{name}` must name `benchmarks`, which its recipe does not."
                    )
        for of, names, valid in (
            ("only", arguments.only or (), self.parts),
            ("rate_factors", arguments.rate_factors or (), definitions),
            ("minutes", arguments.minutes or (), {*definitions, "default"}),
        ):
            for name in names:
                if name not in valid:
                    raise RecipeError(f"`{of}` names `{name}`, which is not among {', '.join(valid)}.")
        self._index([])

    def _part(self, name: str, given: Any, methods: list[str]) -> PartArguments:
        """Return a part with its own fields, and the sweep's where it has none."""
        _check_name("parts", name)
        parser = RecipeParser([PartArguments])
        if not isinstance(given, (Mapping, NoneType)):
            raise RecipeError(f"The part `{name}` must be a mapping; got {shown(given)}.")
        given = parser.read_recipe(given or {}, f"the part `{name}`")
        shared = {key: getattr(self.arguments, key) for key in parser.hints}
        measure = {**(self.arguments.measure or {}), **(given.get("measure") or {})}
        try:
            part = build(PartArguments, {**shared, "methods": methods, "settings": None, **given, "measure": measure})
        except ValueError as error:
            raise RecipeError(f"The part `{name}`: {error}") from None
        part.methods, part.full_grid = list(part.methods), part.full_grid or len(part.learning_rates) == 1
        for method in part.methods:
            if method not in methods:
                raise RecipeError(
                    f"`methods` of the part `{name}` has `{method}`, which is not among {', '.join(methods)}."
                )
        return part

    def _resolved(self, definition: Any, of_part: Mapping[str, Any]) -> dict[str, Any]:
        """Return a method's recipe with nothing left to look up elsewhere."""
        is_recipe = isinstance(definition, str) and _is_recipe(definition)
        recipe = {**load_recipe(definition if is_recipe else self.arguments.recipe), **(self.arguments.settings or {})}
        if not is_recipe:
            own = {"rule": definition} if isinstance(definition, str) else definition
            recipe = {**(for_another_rule(recipe, own["rule"]) if "rule" in own else recipe), **own}
        recipe = {key: value for key, value in {**recipe, **of_part}.items() if key not in _SET_BY_SWEEP}
        public = _plain(public_settings(recipe))
        for key, value in _plain(recipe).items():
            if public.get(key) != value:
                raise RecipeError(f"`{key}` holds a secret, which a sweep would write down: give it as HF_TOKEN.")
        if public.get("save_strategy") == "no":  # measured after the choice, without another training
            public["save_strategy"] = "epoch"
        return public

    # The runs

    def _job(self, method: str, rate: float, seed: int, selects: bool) -> Job:
        place = (method, rate, seed, selects)
        if place not in self._jobs:
            settings = self.selection_settings(method) if selects else {**self.methods[method], "evaluate_base": False}
            settings |= {} if selects else self._measure[method]
            settings |= {"learning_rate": rate, "seed": seed, "resume_from_checkpoint": "true"}
            settings = _plain(settings)
            run, key = f"{method}/lr_{rate:.6g}/seed_{seed}", sha256_of_json(settings)[:16]
            self._jobs[place] = Job(run, *place, {**settings, "run_name": f"{run} {key}"}, key)
        return self._jobs[place]

    def selection_settings(self, method: str) -> dict[str, Any]:
        """Return the settings with which a method's rate is chosen. `measure` does not change them."""
        kept = {key: value for key, value in self.methods[method].items() if key not in _ONLY_FINAL}
        return {**kept, "evaluate_base": False, "benchmarks": [self.arguments.select_on]}

    def rates(self, part: PartArguments, method: str) -> list[float]:
        """Return a method's candidates in a part, the smallest first."""
        factor = (self.arguments.rate_factors or {}).get(method.split("@")[0], 1.0)
        return [float(f"{factor * rate:.6g}") for rate in part.learning_rates]

    def selection_jobs(self, part: PartArguments, method: str) -> list[Job]:
        """Return the jobs that choose a method's rate in a part."""
        seeds = [] if part.full_grid else part.seeds[: self.arguments.selection_seeds]
        return [self._job(method, rate, seed, True) for rate in self.rates(part, method) for seed in seeds]

    def chosen_rate(self, part: PartArguments, method: str) -> float | None:
        """Return the rate with the best score, mean over the seeds that choose; the smaller of equals.

        None while a run is unfinished, if all rates diverged, and if the part chooses nothing.
        """
        scores: dict[float, list[float | None]] = {}
        for job in self.selection_jobs(part, method):
            if not self.is_done(job):
                return None
            scores.setdefault(job.learning_rate, []).append(self._selected[job.run].value)  # None: it diverged
        means = {rate: sum(each) / len(each) for rate, each in scores.items() if None not in each}
        return max(means, key=means.get, default=None)  # the first of equals, and the rates ascend

    def final_jobs(self, part: PartArguments, method: str) -> list[Job]:
        """Return the jobs that train and measure a method's runs in a part, as far as their rates are known."""
        rates = self.rates(part, method) if part.full_grid else [self.chosen_rate(part, method)]
        return [self._job(method, rate, seed, False) for rate in rates if rate is not None for seed in part.seeds]

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs known now, in order of priority: part by part, then seed by seed.

        A sweep that is stopped has then compared its methods on the same seeds.
        """
        selecting = {
            j.run: j for part in self.parts.values() for m in part.methods for j in self.selection_jobs(part, m)
        }
        seen: set[tuple[str, bool]] = set()
        for part in self._parts_to_do().values():
            of_methods = [[*self.selection_jobs(part, m), *self.final_jobs(part, m)] for m in part.methods]
            for seed in part.seeds:
                for job in (job for jobs in of_methods for job in jobs if job.seed == seed):
                    if not job.selects and not self.is_done(selecting.get(job.run, job)):
                        job = selecting.get(
                            job.run, job
                        )  # first, since its results would take the place of final ones
                    if (job.run, job.selects) not in seen:
                        seen.add((job.run, job.selects))
                        yield job

    def _parts_to_do(self) -> dict[str, PartArguments]:
        return {name: part for name, part in self.parts.items() if name in (self.arguments.only or self.parts)}

    def _methods_to_do(self) -> list[str]:
        return list(dict.fromkeys(method for part in self._parts_to_do().values() for method in part.methods))

    # What is done

    def _index(self, trials: Sequence[FrozenTrial]) -> None:
        """Take in the trials: the last finished one of each run, the one that chooses its rate, and those under way."""
        self._trials = trials
        self._last: dict[str, FrozenTrial] = {}
        self._selected: dict[str, FrozenTrial] = {}
        self._active = {trial.user_attrs.get("run") for trial in trials if trial.state == TrialState.RUNNING}
        for trial in trials:
            run = trial.user_attrs.get("run", "")
            files = (self.output_dir / run / name for name in (RESULTS_FILE, DIVERGED_FILE))
            if trial.state in DONE and any(file.exists() for file in files):
                self._last[run] = trial
                if trial.user_attrs["selects"] or trial.state == TrialState.PRUNED:
                    self._selected[run] = trial

    def is_done(self, job: Job) -> bool:
        """Say whether there is nothing left to do for a job, as far as the trials were read."""
        if job.selects:
            return job.run in self._selected
        last = self._last.get(job.run)
        return last is not None and (last.state == TrialState.PRUNED or last.user_attrs["key"] == job.key)

    def _outcome(self, job: Job) -> dict[str, Any] | None:
        """Return what a job left in its folder, as attributes of a trial: `benchmarks`, or the `error` of a run that diverged.

        None if the job is not finished.
        """
        folder = self.output_dir / job.run
        damaged = (OSError, ValueError, KeyError, TypeError, AttributeError)  # or not there: done again
        with suppress(*damaged):
            report = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
            if report["run_info"]["settings"]["run_name"] == job.settings["run_name"]:
                counts = ("score", "correct", "total")
                scores = {name: {key: each.get(key) for key in counts} for name, each in report["benchmarks"].items()}
                cost = {name: report["train_info"].get(name) for name in ("train_seconds", "peak_memory_gb")}
                return {"benchmarks": scores, **cost}
        with suppress(*damaged):
            return {"error": json.loads((folder / DIVERGED_FILE).read_text(encoding="utf-8"))["error"]}
        return None

    # Doing it

    def start(self) -> None:
        """Check everything, write down whose folder this is, and open the storage.

        Raises:
            RecipeError: if the script refuses a recipe, or there is no such benchmark.
            SweepError: if the folder belongs to another sweep; nothing was written then.
        """
        self._check_recipes(self._identity())
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.output_dir / "_sweep.lock")
        with self._lock:
            known = self._identity()
            known["methods"] |= {method: self.selection_settings(method) for method in self._methods_to_do()}
            if not self.arguments.print_commands:
                known["checked"] = sorted({*known["checked"], *self._keys().values()})
            write_atomically(self.output_dir / "sweep.json", json.dumps(known, indent=1) + "\n")
            self._open_storage(known["name"])
        self._refresh()

    def _identity(self) -> dict[str, Any]:
        """Return what sweep.json says of the folder, or is to say. Parts, rates, seeds and `measure` are not in it."""
        path = self.output_dir / "sweep.json"
        mine = {name: getattr(self.arguments, name) for name in ("script", "select_on", "selection_seeds")}
        if not path.exists():
            return {"name": f"{self.output_dir.name}-{uuid.uuid4().hex[:8]}", **mine, "methods": {}, "checked": []}
        known = _read_sweep_file(path)
        pairs = [("", {key: known.get(key) for key in mine}, mine)]
        for method in self.methods:
            now = self.selection_settings(method)
            pairs.append((f"{method}: ", known["methods"].get(method, now), now))
        for prefix, before, now in pairs:
            for key in sorted({*before, *now}):
                if before.get(key) != now.get(key):
                    raise SweepError(
                        f"The runs in {self.output_dir} were made with `{prefix}{key}` {before.get(key)!r}, and now it is "
                        f"{now.get(key)!r}: put it back, or choose another `output_dir`."
                    )
        return known

    def _keys(self) -> dict[str, str]:
        """Return what tells the final recipe of each method from others."""
        return {method: self._job(method, 1.0, 0, False).key for method in self._methods_to_do()}

    def _check_recipes(self, known: Mapping[str, Any]) -> None:
        """Let the script read the final recipe of every method that it has not read before."""
        new = [method for method, key in self._keys().items() if key not in known["checked"]]
        benchmarks = [self.arguments.select_on]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log.txt")
            for method in new:
                settings = {**self._job(method, 1.0, 0, False).settings, "output_dir": str(self.output_dir / method)}
                Path(folder, f"{method}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
                benchmarks += settings["benchmarks"]
            recipes = [Path(folder, f"{method}.yaml") for method in new]
            with_model = not self.arguments.print_commands  # which may be printed where no model is
            if new and check_recipes(self.script, recipes, list(dict.fromkeys(benchmarks)), with_model, log):
                text = log.read_text(encoding="utf-8", errors="replace").replace(f"{folder}/", "")
                lines = [line.strip() for line in text.splitlines() if line.strip()]
                reading = [line for line in lines if line in {path.name for path in recipes}]
                of = f"The method `{Path(reading[-1]).stem}`" if reading else "`select_on` or `measure`"
                raise RecipeError(f"{of}: {lines[-1].removeprefix(f'{self.script.name}: ')}")

    def _open_storage(self, name: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # of heartbeats
        url = self.arguments.storage or f"sqlite:///{(self.output_dir / 'sweep.db').resolve()}"
        try:
            storage = optuna.storages.RDBStorage(
                url,
                engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None,
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=LOST_AFTER_SECONDS,
            )
            self.study = optuna.create_study(
                storage=storage, study_name=name, direction="maximize", load_if_exists=True
            )
        except Exception as error:  # whatever the driver of a database raises
            place = "`storage`" if self.arguments.storage else self.output_dir / "sweep.db"
            raise SweepError(f"{place} cannot be opened: {' '.join(str(error).split())[:300]}.") from error

    def _refresh(self) -> None:
        self._index(self.study.get_trials(deepcopy=False))

    def run(self) -> None:
        """Do all that is not done yet, with as many processes as `workers` says.

        Raises:
            SweepError: if a run fails, here or in another process, or the folder belongs to another sweep.
        """
        self.start()
        if self.arguments.workers == 1:
            self.work(len(self._trials))
            return
        arguments = (self.arguments, self.script.parent, len(self._trials))
        status = run_workers(self.arguments.workers, work_on, arguments)
        self._refresh()
        if not all(map(self.is_done, self.jobs())):
            raise SweepError(f"A worker ended with exit status {status}; the same command goes on from there.")

    def work(self, known_trials: int) -> None:
        """Do one job after the other, until there are none left.

        Args:
            known_trials: what failed among so many first trials is tried again; a later failure ends this process, too.
        """
        while True:
            with self._lock:  # one process at a time decides what it does, and says so
                self._give_up_lost_trials()
                for trial in self._trials[known_trials:]:
                    if trial.state == TrialState.FAIL and "error" in trial.user_attrs:
                        raise SweepError(f"Stopped, since another process met this: {trial.user_attrs['error']}")
                self._take_over_finished_jobs()
                self._save_summary()
                job = next(self._ready_jobs(), None)
                if job is not None:
                    # `optimize` begins a trial, keeps up its heartbeat, and ends it as the function ends.
                    self.study.optimize(lambda trial, job=job: self._do(trial, job), n_trials=1)
            if job is None:
                if not self._active:
                    return
                time.sleep(0.5)  # others are at work: what they finish may be needed here, or they may be lost

    def _ready_jobs(self) -> Iterator[Job]:
        """Yield the jobs that nobody has done and nobody does."""
        return (job for job in self.jobs() if not self.is_done(job) and job.run not in self._active)

    def _take_over_finished_jobs(self) -> None:
        """Make trials of jobs that were done without one: by a scheduler, or before the storage was lost."""
        while finished := next(((j, o) for j in self._ready_jobs() if (o := self._outcome(j)) is not None), None):
            job, outcome = finished
            state = TrialState.PRUNED if "error" in outcome else TrialState.COMPLETE
            value = None if "error" in outcome else self._value(job, outcome)
            attributes = {**self._attributes(job), **outcome}
            self.study.add_trial(optuna.create_trial(state=state, value=value, user_attrs=attributes))
            self._refresh()  # what has waited for it is known now

    def _give_up_lost_trials(self) -> None:
        """Fail the trials whose process is gone. The lock is held: no trial is just beginning."""
        optuna.storages.fail_stale_trials(self.study)
        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            host, _, pid = trial.user_attrs.get("worker", "").rpartition(":")
            if not pid or (host == socket.gethostname() and not psutil.pid_exists(int(pid))):
                self.study.tell(trial.number, state=TrialState.FAIL)
        self._refresh()

    def _attributes(self, job: Job) -> dict[str, Any]:
        return {f.name: getattr(job, f.name) for f in fields(Job) if f.name != "settings"}

    def _value(self, job: Job, outcome: Mapping[str, Any]) -> float:
        return float(outcome["benchmarks"][job.settings["benchmarks"][0]]["score"])

    def _do(self, trial: optuna.Trial, job: Job) -> float:
        """Do a job as a trial, and return its score. The lock is held until it is written down whose the job is."""
        for name, value in {"worker": f"{socket.gethostname()}:{os.getpid()}", **self._attributes(job)}.items():
            trial.set_user_attr(name, value)
        self._lock.release()
        began, folder = time.monotonic(), self.output_dir / job.run
        while True:
            try:
                with folder_lock(folder):
                    (folder / DIVERGED_FILE).unlink(missing_ok=True)
                break
            except LockedError:  # a training that outlives its worker for as long as its last checkpoint takes
                time.sleep(0.5)
        log = folder / "log.txt"
        status = launch_script(self.script, self._argv(job), self.launcher, log)
        outcome, seconds = self._outcome(job), time.monotonic() - began
        if outcome is None or (status and "error" not in outcome):
            ended = f"failed with exit status {status}" if status else f"ended without {RESULTS_FILE} of its settings"
            trial.set_user_attr("error", f"{job.run} {ended}, see {log}; the same command goes on from there.")
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
            last = [f"  {line}" for line in lines if line.strip()][-12:]
            raise SweepError(
                "\n".join([f"{job.run} {ended}; the same command goes on from there. {log} ends:", *last])
            )
        for name, value in {**outcome, "seconds": seconds}.items():
            trial.set_user_attr(name, value)
        self._print_progress(job, outcome, seconds)
        if "error" in outcome:
            raise optuna.TrialPruned(outcome["error"])
        return self._value(job, outcome)

    def _argv(self, job: Job) -> list[str]:
        """Return a job's arguments for its script, after writing its recipe to a file that is named by its content."""
        path = self.output_dir / "recipes" / f"{job.run.replace('/', '_')}_{job.key}.yaml"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, yaml.safe_dump(dict(job.settings), sort_keys=False, allow_unicode=True))
        return [str(path), "--output_dir", str(self.output_dir / job.run)]

    def commands(self) -> list[str]:
        """Return the commands of the jobs that can start now, for a scheduler."""
        self.start()
        with self._lock:
            self._give_up_lost_trials()
            self._take_over_finished_jobs()
            self._save_summary()
            words = [*(self.launcher or [sys.executable]), str(self.script)]
            return [shlex.join([*words, *self._argv(job)]) for job in self._ready_jobs()]

    # What it takes

    def planned(self, part: PartArguments) -> set[tuple[str, str, int]]:
        """Return (method, rate, seed) of a part's trainings; a rate that is still to be chosen is called `chosen`."""
        jobs = [job for method in part.methods for job in self.selection_jobs(part, method)]
        if part.full_grid:
            jobs = [job for method in part.methods for job in self.final_jobs(part, method)]
        later = [] if part.full_grid else part.seeds[self.arguments.selection_seeds :]
        runs = {(job.method, f"{job.learning_rate:g}", job.seed) for job in jobs}
        return runs | {(method, "chosen", seed) for method in part.methods for seed in later}

    def plan_table(self) -> Table:
        """Return how many trainings each part adds, and how many hours they take by the sweep's own `minutes`."""
        table = Table(title=f"Trainings, in hours of {self.arguments.device}", title_justify="left")
        for column in ("part", "methods", "seeds", "rates", "new", "hours"):
            table.add_column(column, justify="left" if column == "part" else "right")
        minutes, seen = self.arguments.minutes or {}, set()

        def hours(runs: set[tuple[str, str, int]]) -> str:
            known = [minutes.get(method.split("@")[0], minutes.get("default")) for method, _, _ in runs]
            return "-" if None in known else f"{sum(known) / 60:.1f}"

        for name, part in self._parts_to_do().items():
            new = self.planned(part) - seen
            seen |= new
            counts = (len(part.methods), len(part.seeds), len(part.learning_rates), len(new))
            table.add_row(name, *map(str, counts), hours(new))
        table.add_section()
        table.add_row("all", "", "", "", str(len(seen)), hours(seen))
        return table

    def _print_progress(self, job: Job, outcome: Mapping[str, Any], seconds: float) -> None:
        """Print what came of a job, how many are done, and how long the others will take."""
        self._refresh()
        jobs, waiting = {(job.run, job.selects): job}, set()
        for part in self._parts_to_do().values():
            for method in part.methods:
                final = self.final_jobs(part, method)
                jobs |= {(j.run, j.selects): j for j in [*self.selection_jobs(part, method), *final]}
                waiting |= set() if final else {(method, seed) for seed in part.seeds}  # for the choice of their rate
        done, total = (
            1 + sum(self.is_done(each) for each in jobs.values() if each is not job),
            len(jobs) + len(waiting),
        )
        timed = [trial.user_attrs["seconds"] for trial in self._trials if "seconds" in trial.user_attrs]
        minutes = (total - done) * sum(timed) / len(timed) / max(1, len(self._active)) / 60
        scores = ", ".join(f"{name} {each['score']:.2f}%" for name, each in outcome.get("benchmarks", {}).items())
        print(
            f"{done} of at most {total}, about {minutes:.0f} min left. {job.run}: {scores or outcome['error']} "
            f"({seconds:.0f} s)",
            flush=True,
        )

    # Results

    def trials_dataframe(self):
        """Return all trials as a `pandas.DataFrame`, also those that failed or were lost."""
        return self.study.trials_dataframe()

    def summary(self) -> list[dict[str, Any]]:
        """Return the finished runs of each part, with their scores, as plain JSON; see `load_runs`.

        Runs of other sweeps that share the folder follow: those of other parts and methods, and those that no rate is chosen
        from.
        """
        rows = [
            row
            for name, part in self.parts.items()
            for method in part.methods
            for row in self._rows_of(name, part, method)
        ]
        places = {tuple(row[key] for key in ("part", "method", "folder")) for row in rows}
        methods = {place[:2] for place in places}
        with suppress(OSError, ValueError, KeyError, TypeError):  # not there yet, or damaged
            for row in json.loads((self.output_dir / SUMMARY_FILE).read_text(encoding="utf-8"))["runs"]:
                place = (row["part"], row["method"], row["folder"])
                file = self.output_dir / row["folder"] / (DIVERGED_FILE if row["diverged"] else RESULTS_FILE)
                is_others = place[:2] not in methods or (row["chosen"] is None and place not in places)
                rows += [row] if is_others and file.exists() else []
        return rows

    def _rows_of(self, name: str, part: PartArguments, method: str) -> Iterator[dict[str, Any]]:
        chosen = self.chosen_rate(part, method)
        jobs = {job.run: job for job in [*self.selection_jobs(part, method), *self.final_jobs(part, method)]}
        for run, job in jobs.items():
            if (trial := self._last.get(run)) is not None:
                selected = self._selected.get(run)
                yield {
                    "part": name,
                    **{key: getattr(job, key) for key in ("method", "learning_rate", "seed")},
                    "chosen": None if part.full_grid else job.learning_rate == chosen,
                    "final": not job.selects and self.is_done(job),
                    "selection_score": selected and selected.value,
                    "diverged": trial.state == TrialState.PRUNED,
                    "folder": run,
                    **{key: trial.user_attrs.get(key) for key in ("benchmarks", "train_seconds", "peak_memory_gb")},
                }

    def _save_summary(self) -> None:
        """Write `summary.json`, and the tables as `summary.txt`."""
        write_atomically(self.output_dir / SUMMARY_FILE, json.dumps({"runs": self.summary()}, indent=1) + "\n")
        console = Console(width=200, file=io.StringIO(), record=True)
        for table in self.tables():
            console.print(table)
        write_atomically(self.output_dir / "summary.txt", console.export_text())

    def tables(self) -> Iterator[Table]:
        """Yield for each part the scores that rates are chosen by, a star at the chosen one, and the means over seeds."""
        rows = self.summary()
        for name in dict.fromkeys(row["part"] for row in rows):
            of_part = [row for row in rows if row["part"] == name]
            choosing = [row for row in of_part if row["chosen"] is not None]
            if choosing:
                table = Table("method", "learning rate: score", title=f"{name}: {self.arguments.select_on}, %")
                for method in dict.fromkeys(row["method"] for row in choosing):
                    mine = [row for row in choosing if row["method"] == method]
                    rates = sorted({row["learning_rate"] for row in mine})
                    table.add_row(method, "  ".join(_choice(mine, rate) for rate in rates))
                yield table
            final = [row for row in of_part if row["final"]]
            benchmarks = list(dict.fromkeys(name for row in final for name in row["benchmarks"] or ()))
            table = Table("method", "learning rate", title=f"{name}: %, mean ± SD (seeds)")
            for column in (*benchmarks, "minutes", "GB"):
                table.add_column(column, justify="right")
            for method, rate in dict.fromkeys((row["method"], row["learning_rate"]) for row in final):
                same = [row for row in final if (row["method"], row["learning_rate"]) == (method, rate)]
                table.add_row(method, f"{rate:.6g}", *(_mean_and_sd(same, each) for each in benchmarks), *_costs(same))
            yield table


def work_on(arguments: SweepArguments, scripts: Path, known_trials: int) -> None:
    """Be one of several workers of a sweep that another process has checked."""
    sweep = Sweep(arguments, scripts)
    sweep.start()
    sweep.work(known_trials)


def _definitions(methods: dict[str, Any] | list[str]) -> dict[str, Any]:
    """Return methods by name: a rule's own, or that of a recipe's file."""
    if not isinstance(methods, Mapping):
        names = [Path(each).stem if _is_recipe(each) else each for each in methods]
        if len(set(names)) != len(names):
            raise RecipeError(f"`methods` must have different names; got {', '.join(names)}.")
        methods = dict(zip(names, methods, strict=True))
    for name, definition in methods.items():
        _check_name("methods", name)
        if not isinstance(definition, (str, Mapping)):
            raise RecipeError(
                f"`methods`: `{name}` must be a rule, a recipe (.yaml) or fields; got {shown(definition)}."
            )
    return dict(methods)


def _is_recipe(method: str) -> bool:
    return method.endswith((".yaml", ".yml"))


def _check_name(what: str, name: Any) -> None:
    """Refuse names that are no plain folder's."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RecipeError(f"`{what}` must have names of letters, digits, `.`, `_` and `-`; got {shown(name)}.")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON gives them back."""
    return json.loads(json.dumps(settings, default=str))


def _read_sweep_file(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if {"name", "methods", "checked"} <= set(known) and isinstance(known["methods"], dict):
            return known
        reason = "it is not a sweep's"
    except (OSError, ValueError, TypeError) as error:
        reason = str(error)
    raise SweepError(f"{path} cannot be read ({reason}): move it away, and the sweep goes on with the runs beside it.")


def _choice(rows: Sequence[Mapping[str, Any]], rate: float) -> str:
    """Return a rate and its score, the mean over the seeds that choose."""
    same = [row for row in rows if row["learning_rate"] == rate]
    scores = [row["selection_score"] for row in same if row["selection_score"] is not None]
    text = "diverged" if any(row["diverged"] for row in same) else f"{summarize(scores).mean:.2f}" if scores else "-"
    return f"{rate:.6g}: {text}{'*' if any(row['chosen'] for row in same) else ''}"


def _mean_and_sd(runs: Sequence[Mapping[str, Any]], benchmark: str) -> str:
    """Return mean and sample standard deviation over the finished seeds, from counts where there are counts."""
    counts = [run["benchmarks"][benchmark] for run in runs if benchmark in (run["benchmarks"] or ())]
    scores = [each["score"] if each["correct"] is None else 100 * each["correct"] / each["total"] for each in counts]
    diverged = sum(run["diverged"] for run in runs)
    number = f"{len(scores)}, {diverged} diverged" if diverged else str(len(scores))
    return f"{summarize(scores) if scores else '-'} ({number})"


def _costs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the mean minutes of a training, and the most memory of any."""
    seconds = [run["train_seconds"] for run in runs if run["train_seconds"] is not None]
    peaks = [run["peak_memory_gb"] for run in runs if run["peak_memory_gb"] is not None]
    return [f"{summarize(seconds).mean / 60:.1f}" if seconds else "-", f"{max(peaks):.2f}" if peaks else "-"]


def sweep_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line whose first word may be a training recipe, which is then read as `--recipe`."""
    argv = list(argv)
    if argv and not argv[0].startswith("-") and "recipe" not in load_recipe(argv[0]):
        return ["--recipe", *argv]
    return argv
