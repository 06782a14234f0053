"""What a sweep trains, in which order, and which learning rates it chooses.

A run is a folder, `output_dir/METHOD/lr_X/seed_S`. A learning rate is chosen for each method on a benchmark of held-out rows,
with the first seed or seeds; all seeds are then trained at it and evaluated (Appendix "Hyperparameters").
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from loopdropout_trainer.checks import check_choice, check_folder, check_number, check_numbers, shown
from loopdropout_trainer.errors import RecipeError, UserError, public_settings, user_supplied
from loopdropout_trainer.saving.files import sha256_of_json
from loopdropout_trainer.settings.arguments import BenchmarkArguments, RunArguments, setting
from loopdropout_trainer.settings.recipe import build, for_another_rule, laid_over, load_recipe


_ONE_TRAINING = {"compare_with", "dry_run"}  # what makes several of a training, or none
# What `measure` may set: what is done with a trained adapter. All other fields affect the training.
_MEASURED = {f.name for f in fields(RunArguments)} - _ONE_TRAINING
_ONLY_FINAL = _MEASURED - {f.name for f in fields(BenchmarkArguments)}
# A sweep sets these itself; those of a base recipe are ignored.
_SET_BY_SWEEP = {"output_dir", "run_name", "learning_rate", "seed", "resume_from_checkpoint", *_ONE_TRAINING}

Scores = Mapping[str, float | None]
"""The scores that choose the learning rate, by run, in percent; None: it diverged."""


@dataclass(kw_only=True)
class PartArguments:
    """What is compared; a sweep has these fields for all of its parts, and a part may have its own."""

    learning_rates: list[float] = setting(help="Candidates of every method.")
    methods: dict[str, str | dict[str, Any]] | list[str] | str = setting(
        help="Rules and recipes (.yaml), or name: rule, recipe, or fields on top of `recipe`; in a part, names.",
        default_factory=lambda: ["lora", "loop_dropout"],
    )
    seeds: list[int] = setting(
        help="The first ones choose the learning rate.", default_factory=lambda: [101, 102, 103]
    )
    full_grid: bool = setting(False, "Train every seed at every rate; so it is with one rate.")
    extend_grid: bool = setting(
        False, "While a method's best rate is the smallest or largest of its grid, add the next one there."
    )
    max_extensions: int = setting(4, "How many rates `extend_grid` adds to a method's grid at most.")
    settings: dict[str, Any] | None = setting(
        None, "Fields of every recipe (JSON). A part's own make methods METHOD@PART."
    )
    measure: dict[str, Any] | None = setting(
        None, "Fields of a recipe on what is measured of final runs: `benchmarks`, `depths`, ..."
    )

    def __post_init__(self):
        self.methods = [self.methods] if isinstance(self.methods, str) else self.methods
        for name in ("learning_rates", "methods", "seeds"):
            values = list(getattr(self, name))
            if not values or len(set(map(str, values))) != len(values):
                raise UserError(f"`{name}` must be one or more different values; got {values!r}.")
        check_numbers(self)
        for name in self.measure or ():
            check_choice("measure", name, sorted(_MEASURED))
        self.learning_rates = sorted(self.learning_rates)
        if self.extend_grid and len(self.learning_rates) == 1:
            raise UserError(
                f"`extend_grid` needs two or more `learning_rates`, whose distance says where the next one is; got "
                f"{self.learning_rates}."
            )


@dataclass(kw_only=True)
class SweepArguments(PartArguments):
    """A sweep, and what to do of it."""

    recipe: str = setting(help="Training recipe that all methods start from.")
    script: str = setting("sft", "Script of the recipe.", choices=["sft", "dpo", "grpo"])
    parts: dict[str, dict[str, Any] | None] | None = setting(
        None,
        "Name: {methods, learning_rates, seeds, full_grid, extend_grid, settings, measure}, in order of priority. A run "
        "that two parts share is trained once, and measured as the first one says. Default: one part, `all`.",
    )
    only: list[str] | None = setting(None, "Parts to do. Default: all.")
    rate_factors: dict[str, float] | None = setting(None, "Factors on learning rates by method (JSON).")
    select_on: str = setting("development", "Benchmark that chooses the rate. Default: held-out rows.")
    selection_seeds: int = setting(1, "How many of a part's first seeds choose the rate.")
    output_dir: str = setting("outputs/sweep", "Folder of all runs.")
    storage: str | None = setting(None, "URL of a database that machines share. Default: a file, sweep.db.")
    launcher: str = setting("", "What starts a training, e.g. `accelerate launch`. Default: a fork.")
    workers: int = setting(1, "Runs at a time on this machine, each on a GPU of its own.")
    print_commands: bool = setting(False, "Print the commands that a scheduler can start now, and stop.")
    dry_run: bool = setting(False, "Print how many trainings each part takes, and stop.")

    def __post_init__(self):
        super().__post_init__()
        check_folder("output_dir", self.output_dir)
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


class Choice(NamedTuple):
    """A method's learning rates in a part, the smallest first, and the one that is chosen; None: not yet, or all diverged."""

    rates: list[float]
    learning_rate: float | None

    @property
    def edge(self) -> str | None:
        """`smallest` or `largest` if the chosen rate is one of these, so that a rate beyond it may be better."""
        return {self.rates[0]: "smallest", self.rates[-1]: "largest"}.get(self.learning_rate)


class Sweep:
    """The methods, parts and jobs of a sweep. It reads recipes, and nothing of what has run.

    Attributes:
        methods: each method's training recipe, with nothing left to look up elsewhere.
        parts: all of them, by name. to_do: those that are asked for.

    Raises:
        ValueError: for a method, part or field that does not exist, or a recipe that cannot be read.
    """

    def __init__(self, arguments: SweepArguments) -> None:
        self.arguments, self.output_dir = arguments, Path(arguments.output_dir)
        self.methods: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, PartArguments] = {}
        self._measure: dict[str, dict[str, Any]] = {}
        definitions = _definitions(arguments.methods)
        parts = arguments.parts or {"all": {}}
        _check_names("methods", definitions)
        _check_names("parts", parts)
        for name in arguments.only or ():
            check_choice("only", name, list(parts))
        for name in arguments.rate_factors or ():
            check_choice("rate_factors", name, list(definitions))
        for name, given in parts.items():
            self.parts[name] = self._part(name, given or {}, definitions)
        self.to_do = [self.parts[name] for name in arguments.only or parts]

    def _part(self, name: str, given: dict[str, Any], definitions: Mapping[str, Any]) -> PartArguments:
        """Return a part with its own fields, and the sweep's where it has none; its methods join the others."""
        from loopdropout_trainer.settings.parser import RecipeParser

        parser = RecipeParser([PartArguments])
        given = parser.read_recipe(given, f"the part `{name}`")
        shared = {field: getattr(self.arguments, field) for field in parser.hints}
        shared |= {"methods": list(definitions), "settings": None}
        if len(given.get("learning_rates", ())) == 1:
            shared["extend_grid"] = False  # the sweep's grid is extended, and not this one rate
        measure = {**(self.arguments.measure or {}), **(given.get("measure") or {})}
        try:
            part = build(PartArguments, {**shared, **given, "measure": measure})
        except ValueError as error:
            raise RecipeError(f"The part `{name}`: {error}") from None
        for method in part.methods:
            check_choice(f"methods` of the part `{name}", method, list(definitions))
        own_name = {method: f"{method}@{name}" if part.settings else method for method in part.methods}
        for method, own in own_name.items():
            if own not in self.methods:
                self.methods[own] = self._resolved(definitions[method], part.settings or {})
                self._measure[own] = measure
            if not self.settings(own, selects=False).get("benchmarks"):
                raise RecipeError(f"`measure` of the part `{name}` must name `benchmarks`: its recipe does not.")
        part.methods = list(own_name.values())
        part.full_grid = part.full_grid or len(part.learning_rates) == 1
        return part

    def _resolved(self, definition: str | Mapping[str, Any], of_part: Mapping[str, Any]) -> dict[str, Any]:
        """Return a method's recipe, frozen: no file is read again."""
        path = self.arguments.recipe
        own = definition
        if isinstance(definition, str):
            path, own = (definition, {}) if _is_recipe(definition) else (path, {"rule": definition})
        recipe = {name: value for name, value in load_recipe(path).items() if name not in _SET_BY_SWEEP}
        recipe = laid_over(recipe, self.arguments.settings or {})
        if "rule" in own:
            recipe = for_another_rule(recipe, own["rule"])
        recipe = laid_over(recipe, {**own, **of_part})
        if of_sweep := sorted(_SET_BY_SWEEP & recipe.keys()):
            raise RecipeError(f"`{of_sweep[0]}` is the sweep's: it can be no field of `methods` or `settings`.")
        public = public_settings(recipe)
        if secret := [name for name in recipe if public.get(name) != recipe[name]]:
            raise RecipeError(f"`{secret[0]}` holds a secret, which a sweep would write down: give it as HF_TOKEN.")
        if recipe.get("save_strategy") == "no":  # measured after the choice, without another training
            recipe["save_strategy"] = "epoch"
        return recipe

    def settings(self, method: str, selects: bool) -> dict[str, Any]:
        """Return a method's recipe without rate and seed; `selects`: to choose the rate, without what `measure` sets."""
        recipe = self.methods[method]
        measure = self._measure[method]
        if selects:
            recipe = {name: value for name, value in recipe.items() if name not in _ONLY_FINAL}
            measure = {"benchmarks": [self.arguments.select_on]}
        recipe = {**recipe, "resume_from_checkpoint": "true", "evaluate_base": False, **measure}
        return json.loads(json.dumps(recipe, default=str))

    def run_name(self, job: Job) -> str:
        """Return the name in run.json that tells whether a finished run is of this job: with a hash of its settings."""
        return f"{job.run} {sha256_of_json(self.settings(job.method, job.selects))[:16]}"

    def recipe(self, job: Job) -> dict[str, Any]:
        """Return a job's settings."""
        of_job = {"learning_rate": job.learning_rate, "seed": job.seed, "run_name": self.run_name(job)}
        return {**self.settings(job.method, job.selects), **of_job}

    # Learning rates

    def rates(self, part: PartArguments, method: str) -> list[float]:
        """Return a method's candidates in a part, the smallest first."""
        factor = (self.arguments.rate_factors or {}).get(method.split("@")[0], 1.0)
        return [_rounded(factor * rate) for rate in part.learning_rates]

    def choice(self, part: PartArguments, method: str, scores: Scores) -> Choice:
        """Return the learning rates that a method is tried at, and the one with the best mean over the selection seeds.

        Of equal ones it is the smallest, which changes the base least. A rate at which a seed diverged is out. While the best
        is at an edge of the grid, `extend_grid` adds a rate there, as far from its neighbour as that is from the next.
        """
        choice = self._choice(part, self.rates(part, method), method, scores)
        for _ in range(part.max_extensions if part.extend_grid else 0):
            rates = choice.rates
            if choice.edge == "smallest":
                rates = [_rounded(rates[0] ** 2 / rates[1]), *rates]
            if choice.edge == "largest":
                rates = [*rates, _rounded(rates[-1] ** 2 / rates[-2])]
            choice = self._choice(part, rates, method, scores)
        return choice

    def _choice(self, part: PartArguments, rates: list[float], method: str, scores: Scores) -> Choice:
        means = {}
        for rate in rates:
            runs = [job.run for job in self._selection_jobs(part, method, [rate])]
            if not all(run in scores for run in runs):
                return Choice(rates, None)
            values = [scores[run] for run in runs]
            if None not in values:
                means[rate] = sum(values) / len(values)
        return Choice(rates, max(means, key=means.get, default=None))  # the first of equals, and the rates ascend

    def choices(self, scores: Scores) -> Iterator[tuple[str, str, Choice]]:
        """Yield part, method and choice wherever a learning rate is chosen."""
        for name, part in self.parts.items():
            for method in () if part.full_grid else part.methods:
                yield name, method, self.choice(part, method, scores)

    # Jobs

    def _selection_jobs(self, part: PartArguments, method: str, rates: list[float]) -> list[Job]:
        seeds = part.seeds[: self.arguments.selection_seeds]
        return [Job(method, rate, seed, True) for rate in rates for seed in seeds]

    def jobs_of(self, part: PartArguments, scores: Scores) -> list[Job]:
        """Return the jobs of a part, by method; the final ones have no learning rate until it is chosen."""
        jobs = []
        for method in part.methods:
            final_rates = self.rates(part, method)
            if not part.full_grid:
                choice = self.choice(part, method, scores)
                jobs += self._selection_jobs(part, method, choice.rates)
                final_rates = [choice.learning_rate]
            jobs += [Job(method, rate, seed, False) for rate in final_rates for seed in part.seeds]
        return jobs

    def jobs(self, scores: Scores, is_done: Callable[[Job], bool]) -> list[Job]:
        """Return the jobs that have a learning rate and are not done, in order of priority: part by part, then seed by seed.

        A sweep that is stopped has then compared its methods on the same seeds.
        """
        choosing = {job for part in self.parts.values() for job in self.jobs_of(part, scores) if job.selects}
        jobs = []
        for part in self.to_do:
            with_rates = [job for job in self.jobs_of(part, scores) if job.learning_rate is not None]
            for job in sorted(with_rates, key=lambda job: part.seeds.index(job.seed)):
                # Another part may choose by this run: first, since its results would take the place of the final ones.
                first = job._replace(selects=True)
                jobs.append(first if first in choosing and not is_done(first) else job)
        return [job for job in dict.fromkeys(jobs) if not is_done(job)]

    def trainings(self, part: PartArguments) -> set[tuple[str, float | None, int]]:
        """Return (method, rate, seed) of a part's trainings before the first one; None: a rate that is still to be chosen."""
        first = part.seeds[: self.arguments.selection_seeds]
        return {job[:3] for job in self.jobs_of(part, {}) if job.learning_rate is not None or job.seed not in first}

    def plan(self) -> str:
        """Return how many trainings each part adds to those before it."""
        lines = ["Trainings"]
        trainings = set()
        extensions = 0
        for name, part in zip(self.arguments.only or self.parts, self.to_do, strict=True):
            before = len(trainings)
            trainings |= self.trainings(part)
            lines.append(f"{name:<40} {len(trainings) - before:>5}")
            if part.extend_grid and not part.full_grid:
                seeds = len(part.seeds[: self.arguments.selection_seeds])
                extensions += len(part.methods) * part.max_extensions * seeds
        lines.append(f"{'all':<40} {len(trainings):>5}")
        if extensions:
            lines.append(f"{'at most, to extend grids':<40} {extensions:>5}")
        return "\n".join(lines)


def _definitions(methods: Mapping[str, Any] | list[str]) -> Mapping[str, Any]:
    """Return the definition of each method by its name: that of a recipe is its file's."""
    if isinstance(methods, Mapping):
        return methods
    definitions = {Path(method).stem if _is_recipe(method) else method: method for method in methods}
    if len(definitions) < len(methods):
        raise RecipeError(f"`methods` must have different names; got {', '.join(methods)}.")
    return definitions


def _check_names(field: str, names: Mapping[str, Any]) -> None:
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise RecipeError(f"`{field}` must have names of letters, digits, `._-`; got {shown(name)}.")


def _is_recipe(method: Any) -> bool:
    return isinstance(method, str) and method.endswith((".yaml", ".yml"))


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")  # as in the name of its folder
