"""Sweeps: methods, learning rates and seeds, compared in parts, and shared by any number of processes.

A run is a folder, `output_dir/METHOD/lr_X/seed_S`. A learning rate is chosen for each method on a benchmark of held-out rows,
with the first seed; all seeds are then trained at it and measured (Appendix "Hyperparameters"). What is done is a trial of
an Optuna study, so that no run is done by two processes at once, and a run whose process was lost is done again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import tempfile
import time
import typing
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import optuna
import yaml
from filelock import FileLock
from optuna.trial import FrozenTrial, TrialState
from rich.table import Table

from loopdropout_trainer.evaluation.statistics import summarize
from loopdropout_trainer.runs.workers import check_recipes, run_script, run_workers
from loopdropout_trainer.saving.files import sha256_of_json, write_atomically
from loopdropout_trainer.saving.lock import LockedError, only_process_in
from loopdropout_trainer.settings.arguments import RunArguments
from loopdropout_trainer.settings.field_types import described, fits, json_of, shown
from loopdropout_trainer.settings.ranges import check_folder, check_number, check_whole
from loopdropout_trainer.settings.recipe import RecipeError, for_another_rule, load_recipe
from loopdropout_trainer.settings.secrets import public_settings


SWEEP_FILE, SUMMARY_FILE, LOG_FILE = "sweep.json", "summary.json", "log.txt"
RESULTS_FILE, DIVERGED_FILE = "results.json", "diverged.json"
HEARTBEAT_SECONDS = 10
LOST_AFTER_SECONDS = 60  # without a heartbeat; a process that died on this machine is noticed at once
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What `measure` may set: what becomes of a trained adapter. Everything else makes the training what it is.
_MEASURED = {f.name for f in fields(RunArguments)} - {"compare_with", "dry_run"}
# The sweep sets these itself for each run; a base recipe may have them, a sweep compares methods without `compare_with`.
_SET_BY_SWEEP = {"output_dir", "learning_rate", "seed", "resume_from_checkpoint", "compare_with", "dry_run"}


class SweepError(RuntimeError):
    """A run of the sweep failed, or the folder belongs to another sweep."""


@dataclass
class PartArguments:
    """What a part of a sweep compares; a sweep has these fields for all of its parts, and each part may have its own."""

    methods: dict[str, Any] | list[str] | str = field(
        default_factory=lambda: ["lora", "loop_dropout"],
        metadata={
            "help": "Rules and recipes (.yaml), or name: rule, recipe, or fields on top of `recipe`; in a part, names."
        },
    )
    learning_rates: list[float] = field(
        default_factory=list, metadata={"help": "Candidates of every method.", "nargs": "+"}
    )
    seeds: list[int] = field(
        default_factory=lambda: [101, 102, 103],
        metadata={"help": "Training seeds; the first of them choose the learning rate.", "nargs": "+"},
    )
    full_grid: bool = field(default=False, metadata={"help": "Train every seed at every rate, and choose nothing."})
    settings: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Fields of every training recipe (JSON on the command line). A part's own make methods of their own, "
            "METHOD@PART."
        },
    )
    measure: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What is measured of the final runs: `benchmarks`, `benchmark_limit`, `depths` and other fields of "
            "recipes. Default: as the recipe has it."
        },
    )

    def __post_init__(self):
        for name in ("settings", "measure"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, json_of(name, value))
        for name in ("learning_rates", "methods", "seeds"):
            values = getattr(self, name)
            values = [values] if isinstance(values, str) else list(values)
            if not values or len(set(map(str, values))) != len(values):
                raise ValueError(f"`{name}` must be one or more different values; got {values!r}.")
        for rate in self.learning_rates:
            check_number("learning_rates", rate, above=True)
        for seed in self.seeds:
            check_whole("seeds", seed, 0)
        self.learning_rates = sorted(float(rate) for rate in self.learning_rates)
        for name in self.measure or ():
            if name not in _MEASURED:
                raise ValueError(
                    f"`measure` must have fields among {', '.join(sorted(_MEASURED))}; got {shown(name)}."
                )


@dataclass
class SweepArguments(PartArguments):
    """Methods x learning rates on the first seed, then methods x the other seeds at the chosen rates."""

    recipe: str = field(default="", metadata={"help": "Training recipe that all methods start from."})
    script: str = field(default="sft", metadata={"help": "Script of the recipe.", "choices": ["sft", "dpo", "grpo"]})
    parts: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Name: {methods, learning_rates, seeds, full_grid, settings, measure}, in order of priority. Runs that "
            "two parts share are trained once, and measured as the first one says."
        },
    )
    only: list[str] | None = field(default=None, metadata={"help": "Parts to do. Default: all.", "nargs": "+"})
    rate_factors: dict[str, float] | str | None = field(
        default=None, metadata={"help": "Factors on learning rates, {method: factor} (JSON on the command line)."}
    )
    select_on: str = field(
        default="development",
        metadata={"help": "Benchmark whose score chooses the rate; `development`: held-out rows."},
    )
    selection_seeds: int = field(default=1, metadata={"help": "How many of a part's first seeds choose the rate."})
    minutes: dict[str, float] | str | None = field(
        default=None, metadata={"help": "Minutes of a training by method, and `default`, for the plan."}
    )
    device: str = field(default="one GPU", metadata={"help": "What the minutes were measured on."})
    output_dir: str = field(default="outputs/sweep", metadata={"help": "Folder of all runs."})
    storage: str | None = field(
        default=None,
        metadata={"help": "Database that several machines share, as a URL. Default: sweep.db in `output_dir`."},
    )
    launcher: str | None = field(
        default=None, metadata={"help": "What starts a training, e.g. `accelerate launch`. Default: a fork."}
    )
    workers: int = field(default=1, metadata={"help": "Runs at a time on this machine, each on a GPU of its own."})
    print_commands: bool = field(
        default=False,
        metadata={"help": "Print the commands of the runs that can start now, for a scheduler, and stop."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Print how many runs each part takes, and stop."})

    def __post_init__(self):
        if not self.recipe:
            raise ValueError("`recipe` is required: the training recipe that all methods start from.")
        for name in ("parts", "rate_factors", "minutes"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, json_of(name, value))
        if not self.learning_rates and not self.parts:
            raise ValueError("`learning_rates` is required: candidates of every method.")
        if self.parts is not None and not self.parts:
            raise ValueError("`parts` must name one or more parts; got {}.")
        if not self.learning_rates:  # each part has its own
            self.learning_rates = [1.0]
            needed = [name for name, part in self.parts.items() if "learning_rates" not in (part or {})]
            if needed:
                raise ValueError(f"`learning_rates` is required, here or in the part `{needed[0]}`.")
        super().__post_init__()
        check_folder("output_dir", self.output_dir)
        check_whole("workers", self.workers, 1)
        check_whole("selection_seeds", self.selection_seeds, 1)
        for factor in (self.rate_factors or {}).values():
            check_number("rate_factors", factor, above=True)
        try:
            shlex.split(self.launcher or "")
        except ValueError as error:
            raise ValueError(f"`launcher` cannot be split into words ({error}); got {self.launcher!r}.") from None


@dataclass(frozen=True)
class Job:
    """One start of a training script: it trains a run, or measures what was trained before.

    Attributes:
        method, learning_rate, seed: of the run.
        selects: whether it only answers `select_on`, to choose the rate.
        settings: the recipe, complete but for `output_dir`.
    """

    method: str
    learning_rate: float
    seed: int
    selects: bool
    settings: Mapping[str, Any]

    @property
    def run(self) -> str:
        """The run's folder below `output_dir`."""
        return f"{self.method}/lr_{self.learning_rate:.6g}/seed_{self.seed}"

    @property
    def key(self) -> str:
        """What tells these settings from others."""
        return sha256_of_json(self.settings)[:16]


@dataclass(frozen=True)
class SweepRun:
    """A run as a part of a sweep has it.

    Attributes:
        part, method, learning_rate, seed: whose it is.
        chosen: whether the rate is the one chosen for the method; None: the part chooses nothing.
        selection_score: on `select_on`, in percent, if the run was to choose by.
        diverged: whether its loss became NaN.
        results: its `results.json`; {} if it diverged.
    """

    part: str
    method: str
    learning_rate: float
    seed: int
    chosen: bool | None
    selection_score: float | None
    diverged: bool
    folder: str
    results: dict[str, Any]


def load_runs(output_dir: str | Path) -> list[SweepRun]:
    """Return the finished runs of a sweep, in the order of its parts, from its folder alone.

    Raises:
        OSError, ValueError: if the folder holds no sweep's summary, or a file is damaged.
    """
    summary = json.loads((Path(output_dir) / SUMMARY_FILE).read_text(encoding="utf-8"))
    runs = []
    for row in summary["runs"]:
        row = {name: row[name] for name in (f.name for f in fields(SweepRun)) if name != "results"}
        path = Path(output_dir) / row["folder"] / RESULTS_FILE
        results = {} if row["diverged"] else json.loads(path.read_text(encoding="utf-8"))
        runs.append(SweepRun(**row, results=results))
    return runs


class Sweep:
    """The runs of a sweep, and what is done of them.

    Args:
        arguments: of the sweep.
        scripts: folder of the training scripts.

    Attributes:
        parts: by name, with all of their fields.
        methods: resolved recipes by name, frozen here: nothing reads the recipes' files later.

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
        definitions = _definitions(arguments.methods)
        for name, given in (arguments.parts or {"all": {}}).items():
            part = self._part(name, given, list(definitions))
            for method in part.methods:
                own = f"{method}@{name}" if (given or {}).get("settings") else method
                if own not in self.methods:
                    self.methods[own] = self._resolved(method, definitions[method], part.settings)
                self._measure.setdefault(own, part.measure)
                if not self._final_settings(own).get("benchmarks"):
                    raise RecipeError(
                        f"`measure` of the part `{name}` must name `benchmarks`, which the recipe does not."
                    )
            if (given or {}).get("settings"):
                part.methods = [f"{method}@{name}" for method in part.methods]
            self.parts[name] = part
        for name in arguments.only or ():
            if name not in self.parts:
                raise RecipeError(f"`only` must be among {', '.join(self.parts)}; got {name!r}.")
        for field_name in ("rate_factors", "minutes"):
            for name in set(getattr(arguments, field_name) or ()) - {"default"}:
                if name not in definitions:
                    raise RecipeError(
                        f"`{field_name}` names `{name}`, which is not among the methods {', '.join(definitions)}."
                    )
        self._trials: list[FrozenTrial] = []
        self._index()

    def _part(self, name: str, given: Any, methods: Sequence[str]) -> PartArguments:
        """Return a part with its own fields, and the sweep's where it has none."""
        _check_name("parts", name)
        hints = typing.get_type_hints(PartArguments)
        if not isinstance(given or {}, Mapping) or not set(given or ()) <= set(hints):
            raise RecipeError(f"The part `{name}` may have {', '.join(hints)}; got {shown(given)}.")
        for key, value in (given or {}).items():
            if not fits(value, hints[key]):
                raise RecipeError(f"`{key}` of the part `{name}` must be {described(hints[key])}; got {shown(value)}.")
        shared = {key: getattr(self.arguments, key) for key in hints if key not in ("methods", "settings")}
        shared["measure"] = {**(self.arguments.measure or {}), **((given or {}).get("measure") or {})}
        try:
            part = PartArguments(**{"methods": list(methods), **shared, **(given or {}), "measure": shared["measure"]})
        except ValueError as error:
            raise RecipeError(f"The part `{name}`: {error}") from None
        part.methods = [part.methods] if isinstance(part.methods, str) else list(part.methods)
        for method in part.methods:
            if method not in methods:
                raise RecipeError(
                    f"`methods` of the part `{name}` names `{method}`, which is not among {', '.join(methods)}."
                )
        return part

    def _resolved(self, name: str, definition: Any, of_part: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a method's recipe with nothing left to look up elsewhere."""
        settings, base = self.arguments.settings or {}, self.arguments.recipe
        if isinstance(definition, str) and _is_recipe(definition):
            recipe = {**load_recipe(definition), **settings}
        else:
            own = {"rule": definition} if isinstance(definition, str) else definition
            recipe = {**load_recipe(base), **settings}
            recipe = {**(for_another_rule(recipe, own["rule"]) if "rule" in own else recipe), **own}
        recipe |= of_part or {}
        recipe = {key: value for key, value in recipe.items() if key not in _SET_BY_SWEEP}
        for key in sorted(set(_plain(recipe)) - set(_plain(public_settings(recipe)))):
            raise RecipeError(f"`{key}` is a secret, which a sweep would write down: give it as HF_TOKEN.")
        if (
            recipe.get("save_strategy") == "no"
        ):  # a run is measured after its rate was chosen, without another training
            recipe["save_strategy"] = "epoch"
        return _plain(public_settings(recipe))

    # The runs

    def rates(self, part: PartArguments, method: str) -> list[float]:
        """Return a method's candidates in a part, the smallest first."""
        factor = (self.arguments.rate_factors or {}).get(method.split("@")[0], 1.0)
        return [float(f"{factor * rate:.6g}") for rate in part.learning_rates]

    def _selection_settings(self, method: str) -> dict[str, Any]:
        """Return the settings with which a method's rate is chosen: `measure` does not change them."""
        only_final = _MEASURED - {f.name for f in fields(RunArguments.__mro__[1])}
        kept = {key: value for key, value in self.methods[method].items() if key not in only_final}
        return {**kept, "evaluate_base": False, "benchmarks": [self.arguments.select_on]}

    def _final_settings(self, method: str) -> dict[str, Any]:
        return {**self.methods[method], "evaluate_base": False, **self._measure[method]}

    def _job(self, method: str, rate: float, seed: int, selects: bool) -> Job:
        settings = self._selection_settings(method) if selects else self._final_settings(method)
        settings |= {"learning_rate": rate, "seed": seed, "resume_from_checkpoint": "true"}
        return Job(method, rate, seed, selects, _plain(settings))

    def selection_jobs(self, part: PartArguments, method: str) -> list[Job]:
        """Return the jobs that choose a method's rate in a part."""
        seeds = [] if part.full_grid else part.seeds[: self.arguments.selection_seeds]
        return [self._job(method, rate, seed, True) for seed in seeds for rate in self.rates(part, method)]

    def chosen_rate(self, part: PartArguments, method: str) -> float | None:
        """Return the rate with the best score, mean over the seeds that choose; the smaller of equals.

        None while a run is unfinished, if all rates diverged, and if the part chooses nothing.
        """
        scores: dict[float, list[float]] = {}
        for job in self.selection_jobs(part, method):
            if not self.is_done(job):
                return None
            trial = self._selected[job.run]
            scores.setdefault(job.learning_rate, []).append(
                -1.0 if trial.state == TrialState.PRUNED else trial.value  # a rate that diverged is out
            )
        means = {rate: sum(each) / len(each) for rate, each in scores.items() if min(each) >= 0}
        return max(means, key=means.get, default=None)  # the first of equals, and the rates ascend

    def final_jobs(self, part: PartArguments, method: str) -> list[Job]:
        """Return the jobs that train and measure a method's runs in a part, as far as their rates are known."""
        rates = self.rates(part, method) if part.full_grid else [self.chosen_rate(part, method)]
        return [self._job(method, rate, seed, False) for seed in part.seeds for rate in rates if rate is not None]

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs known now, in order of priority: part by part, then seed by seed.

        A sweep that is stopped has then compared its methods on the same seeds.
        """
        choosing = {
            job.run: job for part in self.parts.values() for m in part.methods for job in self.selection_jobs(part, m)
        }
        seen: set[tuple[str, bool]] = set()
        for part in self._parts_to_do().values():
            for seed in part.seeds:
                for method in part.methods:
                    jobs = [*self.selection_jobs(part, method), *self.final_jobs(part, method)]
                    for job in jobs:
                        if job.seed != seed:
                            continue
                        first = choosing.get(job.run)
                        if not job.selects and first is not None and not self.is_done(first):
                            job = first  # a run's selection never takes the place of its final results
                        if (job.run, job.selects) not in seen:
                            seen.add((job.run, job.selects))
                            yield job

    # What is done

    def _index(self) -> None:
        """Read the trials: the last finished one of each run, the one that its rate is chosen by, and who is at work."""
        self._last: dict[str, FrozenTrial] = {}
        self._selected: dict[str, FrozenTrial] = {}
        self._active: dict[str, FrozenTrial] = {}
        for trial in self._trials:
            run = trial.user_attrs.get("run")
            if run is None:
                continue
            if trial.state == TrialState.RUNNING:
                self._active[run] = trial
            elif trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and self._files_of(run):
                self._last[run] = trial
                if trial.user_attrs["selects"] or trial.state == TrialState.PRUNED:
                    self._selected[run] = trial

    def _files_of(self, run: str) -> bool:
        return any((self.output_dir / run / name).exists() for name in (RESULTS_FILE, DIVERGED_FILE))

    def is_done(self, job: Job) -> bool:
        """Say whether there is nothing left to do for a job, as far as the trials were read."""
        if job.selects:
            return job.run in self._selected
        last = self._last.get(job.run)
        return last is not None and (last.state == TrialState.PRUNED or last.user_attrs["key"] == job.key)

    def _outcome(self, job: Job) -> dict[str, Any] | None:
        """Return what a job has left in its folder, as a trial's attributes; None if it is not finished.

        Of a run that diverged only `error` is returned.
        """
        folder = self.output_dir / job.run
        try:
            report = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
            settings = {k: v for k, v in report["run_info"]["settings"].items() if k != "output_dir"}
            if settings == _plain(public_settings(job.settings)):
                kept = ("score", "correct", "total")
                return {
                    "benchmarks": {
                        name: {key: measured.get(key) for key in kept}
                        for name, measured in report["benchmarks"].items()
                    },
                    **{name: report["train_info"].get(name) for name in ("train_seconds", "peak_memory_gb")},
                }
        except (OSError, ValueError, KeyError, TypeError):  # not there, or another program's
            pass
        try:
            return {"error": json.loads((folder / DIVERGED_FILE).read_text(encoding="utf-8"))["error"]}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    # Doing it

    def start(self) -> None:
        """Check everything, write down whose folder this is, and open the storage.

        Raises:
            RecipeError: if a recipe, or a benchmark, is not one that the script takes.
            SweepError: if the folder belongs to another sweep; nothing was written then.
        """
        self.output_dir.parent.mkdir(parents=True, exist_ok=True)
        path = self.output_dir / SWEEP_FILE
        known = self._check_identity(_read_sweep_file(path) if path.exists() else None)
        self._check_recipes(known)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.output_dir / "_sweep.lock")
        with self._lock:
            known = self._check_identity(_read_sweep_file(path) if path.exists() else None)
            known["methods"] |= {name: self._identity_of(name) for name in self._methods_to_do()}
            known["checked"] = sorted(
                {*known["checked"], *(self._job(name, 1.0, 0, False).key for name in self._methods_to_do())}
            )
            write_atomically(path, json.dumps(known, indent=1) + "\n")
            self._open_storage(known["name"])
        self._refresh()

    def _parts_to_do(self) -> dict[str, PartArguments]:
        only = self.arguments.only or self.parts
        return {name: part for name, part in self.parts.items() if name in only}

    def _methods_to_do(self) -> list[str]:
        """Return the methods of the parts that are to be done."""
        return list(dict.fromkeys(method for part in self._parts_to_do().values() for method in part.methods))

    def _identity_of(self, method: str) -> dict[str, Any]:
        return {k: v for k, v in self._selection_settings(method).items() if k not in ("benchmarks", "evaluate_base")}

    def _check_identity(self, known: dict[str, Any] | None) -> dict[str, Any]:
        """Return what sweep.json says, or what it is to say; methods, parts, rates, seeds and measurements may change."""
        mine = {name: getattr(self.arguments, name) for name in ("script", "select_on", "selection_seeds")}
        if known is None:
            return {"name": f"{self.output_dir.name}-{uuid.uuid4().hex[:8]}", **mine, "methods": {}, "checked": []}
        pairs = [("", known, mine)]
        for name in self.methods:
            now = self._identity_of(name)
            pairs.append((f"{name}: ", known["methods"].get(name, now), now))
        for prefix, before, now in pairs:
            for key in now if not prefix else sorted({*before, *now}):
                if before.get(key) != now.get(key):
                    raise SweepError(
                        f"The runs in {self.output_dir} were made with `{prefix}{key}` {before.get(key)!r}, and now it is "
                        f"{now.get(key)!r}: put it back, or choose another `output_dir`."
                    )
        return known

    def _check_recipes(self, known: Mapping[str, Any]) -> None:
        """Let the script read the final recipe of every method that it has not read before."""
        with tempfile.TemporaryDirectory() as name:
            folder, recipes, benchmarks = Path(name), [], [self.arguments.select_on]
            for method in self._methods_to_do():
                job = self._job(method, 1.0, 0, False)
                if job.key in known["checked"]:
                    continue
                recipes.append(folder / f"{method}.yaml")
                settings = {
                    **job.settings,
                    "output_dir": str(self.output_dir / method),
                    "resume_from_checkpoint": "false",
                }
                recipes[-1].write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
                benchmarks += job.settings["benchmarks"]
            if recipes and check_recipes(self.script, recipes, list(dict.fromkeys(benchmarks)), folder / LOG_FILE):
                lines = (
                    (folder / LOG_FILE)
                    .read_text(encoding="utf-8", errors="replace")
                    .replace(f"{name}/", "")
                    .splitlines()
                )
                last = [line for line in lines if line.strip()][-1]
                where = [line.removesuffix(".yaml") for line in lines if line in {path.name for path in recipes}][-1:]
                of = f"The method `{where[0]}`: " if where else "`select_on` or `measure`: "
                raise RecipeError(of + last.partition(f"{self.script.name}: ")[2] or last)

    def _open_storage(self, name: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # of heartbeats
        url = self.arguments.storage or f"sqlite:///{(self.output_dir / 'sweep.db').resolve()}"
        options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
        try:
            storage = optuna.storages.RDBStorage(
                url, engine_kwargs=options, heartbeat_interval=HEARTBEAT_SECONDS, grace_period=LOST_AFTER_SECONDS
            )
            self._study = optuna.create_study(
                storage=storage, study_name=name, direction="maximize", load_if_exists=True
            )
        except Exception as error:  # whatever the database's driver raises
            place = "`storage`" if self.arguments.storage else str(self.output_dir / "sweep.db")
            raise SweepError(f"{place} cannot be opened: {' '.join(str(error).split())[:300]}.") from error

    def trials_dataframe(self):
        """Return the trials as a `pandas.DataFrame`, one row for each job that was ever begun."""
        return self._study.trials_dataframe()

    def _refresh(self) -> None:
        self._trials = self._study.get_trials(deepcopy=False)
        self._index()

    def run(self) -> None:
        """Do all that is not done yet, with as many processes as `workers` says.

        Raises:
            SweepError: if a run fails, here or in another process, or the folder belongs to another sweep.
        """
        self.start()
        if self.arguments.workers == 1:
            self.work(len(self._trials))
        elif status := run_workers(
            self.arguments.workers, _work, (self.arguments, self.script.parent, len(self._trials))
        ):
            raise SweepError(f"A worker ended with exit status {status}; the same command goes on from there.")
        self._refresh()

    def work(self, known_trials: int) -> None:
        """Do one job after the other, until there are none left.

        Args:
            known_trials: failures among so many first trials are tried again; a later one ends this process, too.
        """
        while True:
            with self._lock:  # one process at a time decides what it does, and says so
                self._refresh()
                self._give_up_lost_trials()
                for trial in self._trials[known_trials:]:
                    if trial.state == TrialState.FAIL and "error" in trial.user_attrs:
                        raise SweepError(f"Stopped, since another process met this: {trial.user_attrs['error']}")
                job = self._next_job()
                if job is not None:
                    # `optimize` begins the trial, keeps up its heartbeat, and ends it as the function does.
                    self._study.optimize(lambda trial, job=job: self._do(trial, job), n_trials=1)
            if job is None:
                if not self._active:
                    return
                time.sleep(0.5)  # others are at work: what they finish may be needed here, or they may be lost

    def _next_job(self) -> Job | None:
        """Return the first job that nobody does and nobody has done, and take over what was done without a trial."""
        for job in list(self.jobs()):
            if self.is_done(job) or job.run in self._active:
                continue
            outcome = self._outcome(job)
            if outcome is None:
                self._save_summary()
                return job
            state = TrialState.PRUNED if "error" in outcome else TrialState.COMPLETE
            attributes = {**self._attributes(job), **outcome}
            value = None if state == TrialState.PRUNED else self._value(job, outcome)
            self._study.add_trial(optuna.create_trial(state=state, value=value, user_attrs=attributes))
            self._refresh()
            return self._next_job()  # what was waiting for it may be known now
        self._save_summary()
        return None

    def _give_up_lost_trials(self) -> None:
        """Fail the trials whose process is gone. The lock is held: none is just beginning."""
        optuna.storages.fail_stale_trials(self._study)
        for trial in self._trials:
            if trial.state == TrialState.RUNNING:
                host, _, pid = trial.user_attrs.get("worker", "").rpartition(":")
                if not pid or (host == socket.gethostname() and not _is_alive(int(pid))):
                    self._study.tell(trial.number, state=TrialState.FAIL)
        self._refresh()

    def _attributes(self, job: Job) -> dict[str, Any]:
        named = {"method": job.method, "learning_rate": job.learning_rate, "seed": job.seed, "selects": job.selects}
        return {"run": job.run, "key": job.key, **named}

    def _value(self, job: Job, outcome: Mapping[str, Any]) -> float:
        name = self.arguments.select_on if job.selects else job.settings["benchmarks"][0]
        return float(outcome["benchmarks"][name]["score"])

    def _do(self, trial: optuna.Trial, job: Job) -> float:
        """Do a job as a trial and return its score; the lock is held until it is said whose the job is."""
        attributes = {"worker": f"{socket.gethostname()}:{os.getpid()}", **self._attributes(job)}
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        self._lock.release()
        began = time.monotonic()
        status = self._execute(job)
        outcome = self._outcome(job)
        if outcome is None or (status and "error" not in outcome):
            ended = f"failed with exit status {status}" if status else f"ended without its {RESULTS_FILE}"
            log = self.output_dir / job.run / LOG_FILE
            sentence = f"{job.run} {ended}; the same command goes on from there. The end of {log}:"
            trial.set_user_attr("error", sentence)
            raise SweepError("\n".join([sentence, *(f"  {line}" for line in _last_lines(log))]))
        seconds = time.monotonic() - began
        for name, value in {**outcome, "seconds": seconds}.items():
            trial.set_user_attr(name, value)
        self._say(job, outcome, seconds)
        if "error" in outcome:
            raise optuna.TrialPruned(outcome["error"])
        return self._value(job, outcome)

    def _execute(self, job: Job) -> int:
        """Run a job's script in its folder, when nobody else is at work there any more."""
        folder = self.output_dir / job.run
        while True:
            try:
                with only_process_in(folder):
                    (folder / DIVERGED_FILE).unlink(missing_ok=True)
                break
            except LockedError:  # a training that outlives its worker for a moment: it saves a checkpoint
                time.sleep(0.5)
        script, *argv = self._command(job)
        return run_script(Path(script), argv, self.launcher, folder / LOG_FILE)

    def _command(self, job: Job) -> list[str]:
        """Return script and arguments of a job, after writing its recipe, whose name is that of its content."""
        path = self.output_dir / "recipes" / f"{job.run.replace('/', '_')}_{job.key}.yaml"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, yaml.safe_dump(job.settings, sort_keys=False, allow_unicode=True))
        return [str(self.script), str(path), "--output_dir", str(self.output_dir / job.run)]

    def commands(self) -> list[str]:
        """Return the commands of the jobs that can start now, for a scheduler."""
        self.start()
        launcher = self.launcher or [sys.executable]
        commands = []
        with self._lock:
            self._next_job()  # takes over what the commands of before have done
            for job in self.jobs():
                if not self.is_done(job) and job.run not in self._active:
                    commands.append(shlex.join([*launcher, *self._command(job)]))
        return commands

    # What it takes

    def planned(self, part: PartArguments) -> set[tuple[str, str, int]]:
        """Return (method, rate, seed) of a part's trainings; a rate that is still to be chosen is called `chosen`."""
        runs = {
            (job.method, f"{job.learning_rate:g}", job.seed)
            for m in part.methods
            for job in self.selection_jobs(part, m)
        }
        for method in part.methods:
            rates = [f"{rate:g}" for rate in self.rates(part, method)] if part.full_grid else ["chosen"]
            seeds = part.seeds if part.full_grid else part.seeds[self.arguments.selection_seeds :]
            runs |= {(method, rate, seed) for rate in rates for seed in seeds}
        return runs

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

    def _say(self, job: Job, outcome: Mapping[str, Any], seconds: float) -> None:
        """Print what a job has come to, how many are done, and how long the others will take."""
        self._refresh()
        jobs = list(self.jobs())
        unknown = {  # the jobs of rates that are not chosen yet
            (method, seed)
            for part in self._parts_to_do().values()
            for method in part.methods
            if not part.full_grid and self.chosen_rate(part, method) is None
            for seed in part.seeds
        }
        done = 1 + sum(self.is_done(each) for each in jobs if each != job)
        total = len(jobs) + len(unknown)
        timed = [t.user_attrs["seconds"] for t in self._trials if "seconds" in t.user_attrs] or [seconds]
        left = (total - done) * sum(timed) / len(timed) / max(1, len(self._active))
        scores = ", ".join(f"{name} {each['score']:.2f}%" for name, each in outcome.get("benchmarks", {}).items())
        print(
            f"[{done} of at most {total}] {job.run}: {scores or outcome['error']} ({seconds:.0f} s); about "
            f"{left / 3600:.1f} h left",
            flush=True,
        )

    # Results

    def summary(self) -> list[dict[str, Any]]:
        """Return the finished runs of each part, with their scores, as plain JSON."""
        rows = []
        for name, part in self.parts.items():
            for method in part.methods:
                rate = self.chosen_rate(part, method)
                jobs = [*self.selection_jobs(part, method), *self.final_jobs(part, method)]
                for job in {job.run: job for job in jobs if job.run in self._last}.values():
                    trial, selected = self._last[job.run], self._selected.get(job.run)
                    rows.append(
                        {
                            "part": name,
                            "method": method,
                            "learning_rate": job.learning_rate,
                            "seed": job.seed,
                            "chosen": None if part.full_grid else job.learning_rate == rate,
                            "selection_score": None if selected is None else selected.value,
                            "diverged": trial.state == TrialState.PRUNED,
                            "folder": job.run,
                            "is_final": not job.selects and self.is_done(job),
                            **{
                                key: trial.user_attrs.get(key)
                                for key in ("benchmarks", "train_seconds", "peak_memory_gb")
                            },
                        }
                    )
        return rows

    def _save_summary(self) -> None:
        """Write `summary.json`, and the tables as `summary.md`."""
        rows = self.summary()
        write_atomically(self.output_dir / SUMMARY_FILE, json.dumps({"runs": rows}, indent=1) + "\n")
        text = [_markdown(title, *table) for title, table in self._tables(rows).items()]
        write_atomically(self.output_dir / "summary.md", "\n".join(text))

    def tables(self) -> list[Table]:
        """Return the scores that rates are chosen by, and the final means, as tables for a terminal."""
        rendered = []
        for title, (header, rows) in self._tables(self.summary()).items():
            table = Table(title=title, title_justify="left")
            for column in header:
                table.add_column(column, justify="left" if column in ("method", _RATES) else "right")
            for row in rows:
                table.add_row(*row)
            rendered.append(table)
        return rendered

    def _tables(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[str], list[list[str]]]]:
        """Return header and rows by title, two tables for each part; a star marks the chosen rate."""
        tables = {}
        for name, part in self.parts.items():
            mine = [row for row in rows if row["part"] == name]
            choices, finals = [], []
            final_rows = [row for row in mine if row["is_final"] or (row["diverged"] and row["chosen"] is None)]
            benchmarks = list(dict.fromkeys(b for row in final_rows for b in row["benchmarks"] or ()))
            for method in part.methods:
                of_method = [row for row in mine if row["method"] == method]
                if not part.full_grid:
                    choices.append([method, "  ".join(_choice(of_method, rate) for rate in self.rates(part, method))])
                for rate in self.rates(part, method):
                    same = [r for r in final_rows if r["method"] == method and r["learning_rate"] == rate]
                    if same:
                        means = (_mean_and_sd(same, each) for each in benchmarks)
                        finals.append([method, f"{rate:.6g}", *means, *_costs(same)])
            if choices:
                title = f"{name}: score on {self.arguments.select_on} (%) of the seeds that choose"
                tables[title] = (["method", _RATES], choices)
            header = ["method", "learning rate", *benchmarks, "minutes", "GB"]
            tables[f"{name}: score (%), mean ± SD (seeds)"] = (header, finals)
        return tables


_RATES = "learning rate: score"


def _work(arguments: SweepArguments, scripts: Path, known_trials: int) -> None:
    """Be one of several workers: the sweep was checked and begun by the process that started this one."""
    sweep = Sweep(arguments, scripts)
    sweep.start()
    sweep.work(known_trials)


def _definitions(methods: dict[str, Any] | list[str] | str) -> dict[str, Any]:
    """Return methods by name: of a rule its own, of a recipe its file's."""
    if not isinstance(methods, Mapping):
        methods = [methods] if isinstance(methods, str) else methods
        named = [(Path(each).stem if _is_recipe(each) else each, each) for each in methods]
        if len({name for name, _ in named}) != len(named):
            raise RecipeError(f"`methods` must have different names; got {', '.join(name for name, _ in named)}.")
        methods = dict(named)
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
        if {"name", "methods", "checked", "select_on"} <= set(known) and isinstance(known["methods"], dict):
            return known
        reason = "it is not a sweep's"
    except (OSError, ValueError, TypeError) as error:
        reason = str(error)
    raise SweepError(f"{path} cannot be read ({reason}): move it away, and the sweep goes on with the runs beside it.")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _last_lines(log: Path, number: int = 12) -> list[str]:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-number:]


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


def _markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return f"{title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sweep_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line whose first word may be a training recipe, which is then read as `--recipe`."""
    argv = list(argv)
    if argv and not argv[0].startswith("-") and "recipe" not in load_recipe(argv[0]):
        return ["--recipe", *argv]
    return argv
