"""Studies: several sweeps from one file, whose runs are shared, and what is measured of every adapter.

A study names methods (a recipe, or fields on top of the study's own recipe) and parts (which methods, seeds and rates are
compared with each other). Every part is a `Sweep` in one folder, so that a run which two parts need is done once, and a
study that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from loopdropout_trainer.runs.replication import CLAIMS, text_around, write_document
from loopdropout_trainer.runs.sweep import Sweep, SweepArguments, is_recipe
from loopdropout_trainer.runs.workers import RAY_HELP, WORKERS_HELP, Job, do_jobs, make_workers
from loopdropout_trainer.saving.files import write_atomically
from loopdropout_trainer.saving.lock import folder_lock
from loopdropout_trainer.settings.ranges import check_whole
from loopdropout_trainer.settings.recipe import RecipeError, load_recipe


MEASURED = "measured.json"
_PART_FIELDS = {"methods", "seeds", "learning_rates", "full_grid", "measure"}


@dataclass
class MeasureArguments:
    """What is measured of a trained adapter.

    Attributes:
        benchmarks: answered at the training depth; the first one also at other depths.
        limit: problems of each benchmark; None: all.
        depths: recurrence depths for the first benchmark.
        single_loop_answers: whether the first benchmark is also answered with the adapter in one loop at a time.
        doses: gates, the same in all loops, with which the first benchmark is also answered; inference has 1.
        depth_limit: problems at each of the other depths, with the adapter in one loop, and for each dose.
        diagnostic_problems: problems of the first benchmark whose reference answers the diagnostics score; 0: none.
        batch_size: problems answered at a time.
    """

    benchmarks: list[str] = field(default_factory=list)
    limit: int | None = None
    depths: list[int] = field(default_factory=list)
    single_loop_answers: bool = False
    doses: list[float] = field(default_factory=list)
    depth_limit: int | None = None
    diagnostic_problems: int = 0
    batch_size: int = 100

    def __post_init__(self):
        if not self.benchmarks:
            raise ValueError("`measure` must name one or more `benchmarks`.")


@dataclass
class StudyArguments:
    """A study, and what to do with it."""

    recipe: str = field(metadata={"help": "Training recipe that all methods start from."})
    methods: dict[str, Any] = field(
        metadata={"help": "Name -> fields on top of the recipe, or the path of a recipe of its own."}
    )
    parts: dict[str, Any] = field(
        metadata={
            "help": "Name -> {methods, seeds, learning_rates, full_grid, measure}: one sweep each, in order of priority. "
            "A method is measured as its first part says."
        }
    )
    learning_rates: list[float] = field(metadata={"help": "Candidates of every method.", "nargs": "+"})
    measure: dict[str, Any] = field(metadata={"help": "What is measured of every final adapter."})
    settings: dict[str, Any] | None = field(default=None, metadata={"help": "Fields that every run has."})
    rate_factors: dict[str, float] | None = field(
        default=None, metadata={"help": "Factors on a method's learning rates."}
    )
    minutes: dict[str, float] | None = field(
        default=None,
        metadata={"help": "Minutes that one training run takes, by method; `default` for the others. For the plan."},
    )
    device: str = field(default="one CPU core", metadata={"help": "What the minutes were measured on."})
    scales: dict[str, Any] | None = field(
        default=None, metadata={"help": "Name -> fields that replace those above: other sizes of the same study."}
    )
    scale: str | None = field(default=None, metadata={"help": "Size of the study: a name from `scales`."})
    output_dir: str = field(default="outputs/study", metadata={"help": "Folder of all runs."})
    only: list[str] | None = field(default=None, metadata={"help": "Parts to do. Default: all.", "nargs": "+"})
    launcher: str | None = field(default=None, metadata={"help": "What starts sft.py, e.g. `accelerate launch`."})
    workers: int = field(default=1, metadata={"help": WORKERS_HELP})
    ray_address: str | None = field(default=None, metadata={"help": RAY_HELP})
    print_commands: bool = field(
        default=False, metadata={"help": "Print the commands that can start now, for a scheduler, and stop."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Print the plan with its cost, and stop."})
    results: str | None = field(
        default=None, metadata={"help": "JSON of what was measured so far. Default: results.json in output_dir."}
    )
    document: str | None = field(
        default=None,
        metadata={"help": "Markdown that gets the claims and tables. Default: replication.md in output_dir."},
    )
    claims: str = field(
        default="paper", metadata={"help": f"What the document tests with the results: {', '.join(CLAIMS)}."}
    )
    collect_only: bool = field(default=False, metadata={"help": "Write results and document, and run nothing."})
    measure_adapter: str | None = field(
        default=None, metadata={"help": "Measure this one adapter of the study, and nothing else."}
    )


class StudySweep(Sweep):
    """A sweep whose final adapters are measured by the study, instead of answering the recipe's benchmarks."""

    def __init__(self, arguments: SweepArguments, scripts: Path, measuring: tuple[str, ...]) -> None:
        super().__init__(arguments, scripts)
        self.measuring = measuring

    def runs_of(self, method: str) -> list[tuple[float, int]]:
        """Return (rate, seed) of a method's trainings that are known so far: those that choose its rate, and the others."""
        grid = [(rate, self.arguments.seeds[0]) for rate in self.rates(method)]
        return list(dict.fromkeys([*grid, *self.final_runs(method)]))

    def test(self, method: str, rate: float, seed: int) -> Job | None:
        """Return the job that measures a trained adapter."""
        folder = self.training(method, rate, seed).results.parent
        return Job((*self.measuring, "--measure_adapter", str(folder)), folder / MEASURED)

    def ready_jobs(self) -> Iterator[Job]:
        """Yield the unfinished jobs that need nothing but what is finished, seed by seed.

        A study that is stopped has then compared its methods on the same seeds.
        """
        for seed in self.arguments.seeds:
            for method in self.arguments.methods:
                for run in self.runs_of(method):
                    if run[1] == seed and not (job := self.training(method, *run)).done:
                        yield job
                for run in (run for run in self.final_runs(method) if run[1] == seed):
                    done = self.training(method, *run).benchmarks() is not None
                    if done and (job := self.test(method, *run)).benchmarks() is None:
                        yield job

    def save_summary(self) -> None:
        """Leave it to the study, whose sweeps share a folder."""


class Study:
    """The sweeps of a study, and their results.

    Args:
        arguments: of the study.
        scripts: folder of `sft.py` and `study.py`.
        command: words that start this study again, as `study.py` got them.

    Attributes:
        measure: what is measured of each method's adapters.

    Raises:
        RecipeError: for a part with an unknown method or field, an unknown scale or set of claims, or a wrong `measure`.
    """

    def __init__(self, arguments: StudyArguments, scripts: Path, command: tuple[str, ...] = ()) -> None:
        self.arguments = scaled(arguments)
        self.scripts = scripts
        self.command = command
        self.output_dir = Path(self.arguments.output_dir)
        check_whole("workers", self.arguments.workers, 1)
        self.measure: dict[str, MeasureArguments] = {}
        for name, part in self.arguments.parts.items():
            _check_part(name, part, self.arguments.methods)
            try:
                measure = MeasureArguments(**{**self.arguments.measure, **part.get("measure", {})})
            except (TypeError, ValueError) as error:
                raise RecipeError(f"`measure`: {error}") from error
            for method in part["methods"]:
                self.measure.setdefault(method, measure)
        if self.arguments.claims not in CLAIMS:
            raise RecipeError(f"`claims` must be among {', '.join(CLAIMS)}; got {self.arguments.claims!r}.")
        unknown = [name for name in self.arguments.only or () if name not in self.arguments.parts]
        if unknown:
            raise RecipeError(f"`only` must be among {', '.join(self.arguments.parts)}; got {unknown[0]!r}.")

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """The parts to do, in order."""
        only = self.arguments.only
        return {name: part for name, part in self.arguments.parts.items() if only is None or name in only}

    def recipe_path(self, method: str) -> Path:
        """Return where a method's whole recipe stands."""
        return self.output_dir / "recipes" / f"{method}.yaml"

    def write_recipes(self) -> None:
        """Write each method's recipe, with nothing left to look up elsewhere."""
        for method, given in self.arguments.methods.items():
            if isinstance(given, str):
                recipe = {**load_recipe(given), **(self.arguments.settings or {})}
            else:
                recipe = {**load_recipe(self.arguments.recipe), **(self.arguments.settings or {}), **given}
            path = self.recipe_path(method)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")

    def sweeps(self) -> Iterator[tuple[str, StudySweep]]:
        """Yield the name and the sweep of each part. The recipes must have been written."""
        for name, part in self.parts.items():
            methods = part["methods"]
            arguments = SweepArguments(
                recipe=self.arguments.recipe,
                learning_rates=part.get("learning_rates", self.arguments.learning_rates),
                methods=[str(self.recipe_path(method)) for method in methods],
                seeds=part["seeds"],
                rate_factors={m: f for m, f in (self.arguments.rate_factors or {}).items() if m in methods},
                full_grid=part.get("full_grid", False),
                output_dir=str(self.output_dir),
                **({"launcher": self.arguments.launcher} if self.arguments.launcher else {}),
            )
            yield name, StudySweep(arguments, self.scripts, self.command)

    def run(self) -> None:
        """Do all that is not done yet, the first parts first.

        Raises:
            SweepError: if a run fails, or the folder belongs to another study.
            LockedError: if another process runs a study in the folder.
            ValueError: if the document has no place for this study's tables.
        """
        text_around(self.document, self.arguments.claims)  # not after hours
        self.write_recipes()
        with folder_lock(self.output_dir):
            self.claim()
            workers = make_workers(self.arguments.workers, self.arguments.ray_address)
            try:
                do_jobs(self.ready_jobs, workers, after_each=self.save_results)
            finally:  # what is there, also of a study that was stopped
                self.save_document()

    def claim(self) -> None:
        """Write down what the runs in this folder have in common, or check it. The recipes must have been written."""
        for _, sweep in self.sweeps():
            sweep.claim()

    def ready_jobs(self) -> Iterator[Job]:
        """Yield the unfinished jobs of all parts that need nothing but what is finished, each once."""
        seen = set()
        for _, sweep in self.sweeps():
            for job in sweep.ready_jobs():
                if job.results not in seen:
                    seen.add(job.results)
                    yield job

    def commands(self) -> list[str]:
        """Return the commands of the jobs that can start now."""
        self.write_recipes()
        self.claim()
        return [shlex.join(job.command) for job in self.ready_jobs()]

    # What it takes

    def planned_runs(self, part: Mapping[str, Any]) -> set[tuple[str, ...]]:
        """Return what tells a part's training runs apart; a rate that is still to be chosen is called `chosen`."""
        runs = set()
        for method in part["methods"]:
            factor = (self.arguments.rate_factors or {}).get(method, 1.0)
            for rate in part.get("learning_rates", self.arguments.learning_rates):
                for seed in part["seeds"] if part.get("full_grid") else part["seeds"][:1]:
                    runs.add((method, f"{factor * rate:.6g}", str(seed)))
            if not part.get("full_grid"):
                runs.update((method, "chosen", str(seed)) for seed in part["seeds"][1:])
        return runs

    def hours(self, runs: set[tuple[str, ...]]) -> float:
        """Return the hours that training runs take by the study's own minutes; NaN if it gives none."""
        minutes = self.arguments.minutes or {}
        return sum(minutes.get(run[0], minutes.get("default", float("nan"))) for run in runs) / 60

    def plan_table(self) -> Table:
        """Return how many training runs each part adds, and how long they take."""
        table = Table(title=f"Training runs, hours of {self.arguments.device}", title_justify="left")
        for column in ("part", "methods", "seeds", "rates", "new runs", "hours"):
            table.add_column(column, justify="left" if column == "part" else "right")
        seen: set[tuple[str, ...]] = set()
        for name, part in self.parts.items():
            new = self.planned_runs(part) - seen
            seen |= new
            rates = part.get("learning_rates", self.arguments.learning_rates)
            counts = (len(part["methods"]), len(part["seeds"]), len(rates), len(new))
            table.add_row(name, *map(str, counts), f"{self.hours(new):.1f}")
        table.add_section()
        table.add_row("all", "", "", "", str(len(seen)), f"{self.hours(seen):.1f}")
        return table

    # Results

    @property
    def results(self) -> Path:
        """The JSON that gets what was measured."""
        return Path(self.arguments.results or self.output_dir / "results.json")

    @property
    def document(self) -> Path:
        """The Markdown that gets the claims and tables."""
        return Path(self.arguments.document or self.output_dir / "replication.md")

    def save_results(self) -> None:
        """Write what was measured so far."""
        self.results.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.results, json.dumps(self.collect(), indent=1) + "\n")

    def save_document(self) -> None:
        """Write what was measured so far, and the document with the claims."""
        self.save_results()
        self.document.parent.mkdir(parents=True, exist_ok=True)
        write_document(self.results, self.document)

    def collect(self) -> dict[str, Any]:
        """Return what was measured of every finished run, and the rates that were chosen."""
        self.write_recipes()
        runs: dict[tuple[str, str, int], dict[str, Any]] = {}
        chosen: dict[str, float] = {}
        parts: dict[str, Any] = {}
        for name, sweep in self.sweeps():
            part = parts[name] = {key: self.parts[name][key] for key in ("methods", "seeds")}
            part["trainings"] = {"planned": len(self.planned_runs(self.parts[name])), "done": 0}
            for path in sweep.arguments.methods:
                method = Path(path).stem
                rate = None if sweep.arguments.full_grid else sweep.chosen_rate(path)
                if rate is not None:
                    chosen[method] = rate
                for rate, seed in sweep.runs_of(path):
                    run = _read_run(sweep.training(path, rate, seed), sweep.test(path, rate, seed))
                    if run is not None:
                        part["trainings"]["done"] += 1
                        runs[method, f"{rate:.6g}", seed] = {"method": method, "rate": rate, "seed": seed, **run}
        planned = set().union(*(self.planned_runs(part) for part in self.parts.values()))
        return {
            "claims": self.arguments.claims,
            "measure": self.arguments.measure,
            "planned_trainings": len(planned),
            "parts": parts,
            "chosen_rates": chosen,
            "runs": list(runs.values()),
        }


def _read_run(training: Job, measuring: Job) -> dict[str, Any] | None:
    """Return what one run says of itself, or None if it is not trained."""
    if training.benchmarks() is None:
        return None
    results = json.loads(training.results.read_text(encoding="utf-8"))
    trained, versions = results["train_info"], results["run_info"]["versions"]
    run = {key: trained[key] for key in ("rule", "p", "num_loops", "steps", "train_loss", "train_seconds")}
    run["development"] = {
        name: {key: value for key, value in measured.items() if key != "predictions"}
        for name, measured in results["benchmarks"].items()
    }
    run["versions"] = {name: versions.get(name) for name in ("torch", "transformers", "trl", "peft")}
    if measuring.benchmarks() is not None:
        run["measured"] = json.loads(measuring.results.read_text(encoding="utf-8"))
    return run


def scaled(arguments: StudyArguments) -> StudyArguments:
    """Return the study at the size that is asked for.

    Raises:
        RecipeError: for a size that the study does not have, or one that changes an unknown field.
    """
    if arguments.scale is None:
        return arguments
    scales = arguments.scales or {}
    if arguments.scale not in scales:
        raise RecipeError(f"`scale` must be among {', '.join(scales) or 'none'}; got {arguments.scale!r}.")
    changes = dict(scales[arguments.scale])
    for name in ("settings", "measure"):
        if name in changes:
            changes[name] = {**(getattr(arguments, name) or {}), **changes[name]}
    try:
        return replace(arguments, **changes, output_dir=f"{arguments.output_dir}_{arguments.scale}")
    except TypeError as error:
        raise RecipeError(f"`scales`, {arguments.scale}: {error}") from error


def _check_part(name: str, part: Any, methods: Mapping[str, Any]) -> None:
    if not isinstance(part, Mapping) or not {"methods", "seeds"} <= set(part) <= _PART_FIELDS:
        raise RecipeError(
            f"The part `{name}` must have `methods` and `seeds`, and may have {_others()}; got {part!r}."
        )
    for method in part["methods"]:
        if method not in methods:
            raise RecipeError(
                f"The part `{name}` names `{method}`, which is not among the methods {', '.join(methods)}."
            )
        if isinstance(methods[method], str) and not is_recipe(methods[method]):
            raise RecipeError(
                f"The method `{method}` must be fields or the path of a recipe; got {methods[method]!r}."
            )


def _others() -> str:
    return ", ".join(f"`{name}`" for name in sorted(_PART_FIELDS - {"methods", "seeds"}))
