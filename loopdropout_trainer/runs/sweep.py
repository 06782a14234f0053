"""Sweeps with development selection: a grid of learning rates on the first seed, the best rate for the others.

A run is a folder, and it is finished when its results file is there: a sweep that was interrupted starts again at the
run that was interrupted, and nothing is done twice (Appendix "Hyperparameters").
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from loopdropout_trainer.settings.field_types import json_of
from loopdropout_trainer.settings.ranges import check_folder, check_list, check_number, check_whole
from loopdropout_trainer.settings.recipe import load_recipe
from loopdropout_trainer.settings.secrets import public_settings, public_words


class SweepError(RuntimeError):
    """A run of the sweep failed, or the folder belongs to another sweep."""


@dataclass
class SweepArguments:
    """What to train: methods x learning rates on the first seed, then methods x the other seeds."""

    recipe: str = field(metadata={"help": "Training recipe that all runs start from."})
    learning_rates: list[float] = field(metadata={"help": "Candidates of every method.", "nargs": "+"})
    methods: list[str] = field(
        default_factory=lambda: ["lora", "loop_dropout"],
        metadata={"help": "Rules, or recipes (.yaml) that stand for the whole method.", "nargs": "+"},
    )
    seeds: list[int] = field(
        default_factory=lambda: [101, 102, 103],
        metadata={"help": "Training seeds; the learning rate is chosen on the first.", "nargs": "+"},
    )
    rate_factors: dict[str, float] | str | None = field(
        default=None,
        metadata={"help": "Factors on a method's learning rates, {method: factor} (JSON on the command line)."},
    )
    select_on: str = field(
        default="development",
        metadata={"help": "Benchmark whose score chooses the rate; `development`: held-out rows."},
    )
    full_grid: bool = field(default=False, metadata={"help": "Train every seed at every rate, and choose nothing."})
    test_benchmarks: list[str] | None = field(
        default=None,
        metadata={"help": "Benchmarks for the final runs. Default: the recipe's `benchmarks`.", "nargs": "+"},
    )
    output_dir: str = field(default="outputs/sweep", metadata={"help": "Folder of all runs and of sweep.json."})
    launcher: str = field(
        default=shlex.quote(sys.executable), metadata={"help": "What starts a script, e.g. `accelerate launch`."}
    )
    print_commands: bool = field(
        default=False,
        metadata={"help": "Print the commands of the runs that can start now, for a scheduler, and stop."},
    )

    def __post_init__(self):
        if isinstance(self.rate_factors, str):
            self.rate_factors = json_of("rate_factors", self.rate_factors)
        check_folder("output_dir", self.output_dir)
        check_list("methods", self.methods)
        check_list("test_benchmarks", self.test_benchmarks)
        for name in ("learning_rates", "methods", "seeds"):
            values = getattr(self, name)
            if not values or len(set(map(str, values))) != len(values):
                raise ValueError(f"`{name}` must be one or more different values; got {values!r}.")
        for rate in self.learning_rates:
            check_number("learning_rates", rate, above=True)
        for seed in self.seeds:
            check_whole("seeds", seed, 0)
        for factor in (self.rate_factors or {}).values():
            check_number("rate_factors", factor, above=True)
        self.learning_rates = sorted(float(rate) for rate in self.learning_rates)
        names = [method_name(method) for method in self.methods]
        if len(set(names)) != len(names):
            raise ValueError(f"`methods` must have different names; got {', '.join(names)}.")
        unknown = [name for name in self.rate_factors or () if name not in names]
        if unknown:
            raise ValueError(
                f"`rate_factors` names `{unknown[0]}`, which is not among the methods {', '.join(names)}."
            )


@dataclass(frozen=True)
class Job:
    """One command, finished when its results file is there.

    Attributes:
        command: words of the command line.
        results: file that the command writes at its end.
    """

    command: tuple[str, ...]
    results: Path

    def benchmarks(self) -> dict[str, dict[str, Any]] | None:
        """Return the results by benchmark, or None if the job is not finished."""
        try:
            return json.loads(self.results.read_text(encoding="utf-8"))["benchmarks"]
        except (OSError, ValueError, KeyError):  # not there, or cut off while it was written
            return None


def method_name(method: str) -> str:
    """Return the name of a method given as a rule or as a recipe's path."""
    return Path(method).stem if is_recipe(method) else method


def is_recipe(method: str) -> bool:
    """Say whether a method is given as the path of a recipe."""
    return method.endswith((".yaml", ".yml"))


class Sweep:
    """The runs of a sweep, in order, and what came out of them.

    Args:
        arguments: of the sweep.
        scripts: folder of `sft.py` and `evaluate.py`.
        passed_on: further options for every `sft.py`.
    """

    def __init__(self, arguments: SweepArguments, scripts: Path, passed_on: Sequence[str] = ()) -> None:
        self.arguments = arguments
        self.scripts = scripts
        self.passed_on = tuple(passed_on)
        self.output_dir = Path(arguments.output_dir)

    # The runs

    def recipe(self, method: str) -> str:
        """Return the path of a method's training recipe."""
        return method if is_recipe(method) else self.arguments.recipe

    def rates(self, method: str) -> list[float]:
        """Return a method's candidates, the smallest first."""
        factor = (self.arguments.rate_factors or {}).get(method_name(method), 1.0)
        return [factor * rate for rate in self.arguments.learning_rates]

    def training(self, method: str, rate: float, seed: int) -> Job:
        """Return the job that trains one adapter and answers the development split with it."""
        folder = self.output_dir / method_name(method) / f"lr_{rate:.6g}" / f"seed_{seed}"
        options = [
            *([] if is_recipe(method) else ["--rule", method]),
            *("--learning_rate", f"{rate:.6g}", "--seed", str(seed), "--output_dir", str(folder)),
            *(
                "--benchmarks",
                self.arguments.select_on,
                "--evaluate_base",
                "false",
                "--resume_from_checkpoint",
                "true",
            ),
        ]
        return Job(self._command("sft.py", self.recipe(method), *options, *self.passed_on), folder / "results.json")

    def test(self, method: str, rate: float, seed: int) -> Job | None:
        """Return the job that answers the test benchmarks with a trained adapter, if there are any."""
        benchmarks = self.arguments.test_benchmarks
        if benchmarks is None:
            benchmarks = load_recipe(self.recipe(method)).get("benchmarks")
        if not benchmarks:
            return None
        adapter = self.training(method, rate, seed).results.parent
        options = ["--adapter", str(adapter), "--output_dir", str(adapter / "test"), "--benchmarks", *benchmarks]
        return Job(self._command("evaluate.py", self.recipe(method), *options), adapter / "test" / "evaluation.json")

    def _command(self, script: str, *options: str) -> tuple[str, ...]:
        return (*shlex.split(self.arguments.launcher), str(self.scripts / script), *options)

    def chosen_rate(self, method: str) -> float | None:
        """Return the rate with the best development score on the first seed, the smaller of equals; None while unknown."""
        scores = {}
        for rate in self.rates(method):
            benchmarks = self.training(method, rate, self.arguments.seeds[0]).benchmarks()
            if benchmarks is None:
                return None
            scores[rate] = self._score(benchmarks, method)
        return max(scores, key=scores.get)  # the first of equals, and the rates ascend

    def _score(self, benchmarks: Mapping[str, Mapping[str, Any]], method: str) -> float:
        if self.arguments.select_on not in benchmarks:
            raise SweepError(
                f"The results of `{method_name(method)}` have no benchmark `{self.arguments.select_on}` to choose by; "
                f"they have {', '.join(benchmarks) or 'none'}."
            )
        return benchmarks[self.arguments.select_on]["score"]

    def final_runs(self, method: str) -> list[tuple[float, int]]:
        """Return (rate, seed) of the runs that the sweep is for; none while the rate is not chosen."""
        if self.arguments.full_grid:
            return [(rate, seed) for rate in self.rates(method) for seed in self.arguments.seeds]
        rate = self.chosen_rate(method)
        return [] if rate is None else [(rate, seed) for seed in self.arguments.seeds]

    def ready_jobs(self) -> Iterator[Job]:
        """Yield the unfinished jobs that need nothing but what is finished."""
        for method in self.arguments.methods:
            runs = [(rate, self.arguments.seeds[0]) for rate in self.rates(method)]
            runs += [run for run in self.final_runs(method) if run not in runs]
            for run in runs:
                job = self.training(method, *run)
                if job.benchmarks() is None:
                    yield job
            for run in self.final_runs(method):
                job = self.test(method, *run)
                if (
                    job is not None
                    and job.benchmarks() is None
                    and self.training(method, *run).benchmarks() is not None
                ):
                    yield job

    # Doing them

    def run(self) -> None:
        """Do all that is not done yet, one job after another.

        Raises:
            SweepError: if a job fails, or the folder belongs to another sweep.
        """
        self.claim()
        while (job := next(self.ready_jobs(), None)) is not None:
            execute(job.command)
            if job.benchmarks() is None:
                raise SweepError(f"{shlex.join(job.command)} ended without writing {job.results}.")

    def claim(self) -> None:
        """Write down what the runs in this folder have in common, or check it if that was done before.

        Raises:
            SweepError: if the folder's runs were made with other settings; methods, rates and seeds may grow.
        """
        recipes = {
            method_name(method): public_settings(load_recipe(self.recipe(method))) for method in self.arguments.methods
        }
        mine = {
            "recipes": json.loads(json.dumps(recipes)),
            "passed_on": public_words(self.passed_on),
            "select_on": self.arguments.select_on,
        }
        path = self.output_dir / "sweep.json"
        if path.exists():
            theirs = _sweep_file(path)
            for name in ("passed_on", "select_on"):
                if theirs[name] != mine[name]:
                    raise SweepError(_other_sweep(self.output_dir, name, theirs[name], mine[name]))
            for method, recipe in mine["recipes"].items():
                before = theirs["recipes"].get(method, recipe)
                for key in sorted({*before, *recipe}):
                    if before.get(key) != recipe.get(key):
                        raise SweepError(
                            _other_sweep(self.output_dir, f"{method}: {key}", before.get(key), recipe.get(key))
                        )
            mine["recipes"] = {**theirs["recipes"], **mine["recipes"]}
        self.output_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(mine, indent=2) + "\n", encoding="utf-8")

    # What came out

    def grid_table(self) -> Table:
        """Return the score on the development split by method and rate; the chosen one has a star."""
        table = Table(
            title=f"{self.arguments.select_on}, % correct, seed {self.arguments.seeds[0]}", title_justify="left"
        )
        table.add_column("method")
        table.add_column("learning rate: score")
        for method in self.arguments.methods:
            chosen = None if self.arguments.full_grid else self.chosen_rate(method)
            cells = []
            for rate in self.rates(method):
                benchmarks = self.training(method, rate, self.arguments.seeds[0]).benchmarks()
                score = "-" if benchmarks is None else f"{self._score(benchmarks, method):.2f}"
                cells.append(f"{rate:.6g}: {score}{'*' if rate == chosen else ''}")
            table.add_row(method_name(method), "  ".join(cells))
        return table

    def final_table(self) -> Table:
        """Return mean and sample standard deviation over the finished seeds, from counts of correct answers."""
        rows = []
        for method in self.arguments.methods:
            for rate in dict.fromkeys(rate for rate, _ in self.final_runs(method)):
                rows.append((method, rate, self._scores(method, rate)))
        names = list(dict.fromkeys(name for _, _, scores in rows for name in scores))
        table = Table(title="Mean ± SD over seeds, % correct", title_justify="left")
        table.add_column("method")
        table.add_column("learning rate", justify="right")
        for name in names:
            table.add_column(name, justify="right")
        for method, rate, scores in rows:
            table.add_row(method_name(method), f"{rate:.6g}", *(_mean_and_sd(scores.get(name, [])) for name in names))
        return table

    def _scores(self, method: str, rate: float) -> dict[str, list[float]]:
        """Return the scores in percent by benchmark, one for each finished seed."""
        scores: dict[str, list[float]] = {}
        for seed in self.arguments.seeds:
            for job in (self.training(method, rate, seed), self.test(method, rate, seed)):
                for name, result in ((job and job.benchmarks()) or {}).items():
                    scores.setdefault(name, []).append(100 * result["correct"] / result["total"])
        return scores


def _mean_and_sd(scores: Sequence[float]) -> str:
    if not scores:
        return "-"
    spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.2f}{spread} ({len(scores)})"


def _sweep_file(path: Path) -> dict[str, Any]:
    try:
        sweep = json.loads(path.read_text(encoding="utf-8"))
        if {"passed_on", "select_on", "recipes"} <= set(sweep) and isinstance(sweep["recipes"], dict):
            return sweep
        reason = "it is not a sweep's"
    except (OSError, ValueError, TypeError) as error:
        reason = str(error)
    raise SweepError(f"{path} cannot be read ({reason}): remove it, and the sweep goes on with the runs beside it.")


def _other_sweep(folder: Path, name: str, before: Any, now: Any) -> str:
    return (
        f"The runs in {folder} were made with `{name}` {before!r}, and now it is {now!r}: put it back, or choose another "
        "`output_dir`."
    )


def execute(command: Sequence[str]) -> None:
    """Run a command in a child process, which does not outlive this one if this one is asked to stop.

    Raises:
        SweepError: if it fails.
    """
    print(f"\n$ {shlex.join(public_words(command))}", flush=True)
    process = subprocess.Popen(command)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status:
        raise SweepError(
            f"{shlex.join(public_words(command))} failed with exit status {status}; the same sweep command goes on from there."
        )


def sweep_command_line(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the sweep's own words and those after `--`, which are for `sft.py`.

    The first word may be a sweep's YAML, or a training recipe, which is read as `--recipe`.
    """
    argv = list(argv)
    passed_on: list[str] = []
    if "--" in argv:
        place = argv.index("--")
        argv, passed_on = argv[:place], argv[place + 1 :]
    if argv and not argv[0].startswith("-") and "recipe" not in load_recipe(argv[0]):
        argv = ["--recipe", *argv]
    return argv, passed_on
