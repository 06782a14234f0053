"""Sweeps with development selection: a grid of learning rates on the first seed, the best rate for the others.

A run is a folder, and it is finished when its results file is there: a sweep that was interrupted starts again at the
run that was interrupted, and nothing is done twice (Appendix "Hyperparameters"). A run whose loss became NaN is finished,
too: its rate is out.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from loopdropout_trainer.evaluation.statistics import summarize
from loopdropout_trainer.looped import check_num_loops
from loopdropout_trainer.runs.workers import RAY_HELP, WORKERS_HELP, Job, SweepError, do_jobs, make_workers
from loopdropout_trainer.saving.files import write_atomically
from loopdropout_trainer.saving.lock import folder_lock
from loopdropout_trainer.settings.arguments import BenchmarkArguments, ModelArguments
from loopdropout_trainer.settings.ranges import check_folder, check_integer, check_list, check_number
from loopdropout_trainer.settings.recipe import load_recipe
from loopdropout_trainer.settings.secrets import public_settings, public_words
from loopdropout_trainer.settings.versions import library_versions


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
    test_depths: list[int] | None = field(
        default=None,
        metadata={"help": "Further recurrence depths at which the final runs answer them.", "nargs": "+"},
    )
    output_dir: str = field(default="outputs/sweep", metadata={"help": "Folder of all runs and of sweep.json."})
    launcher: str = field(
        default=shlex.quote(sys.executable), metadata={"help": "What starts a script, e.g. `accelerate launch`."}
    )
    workers: int = field(default=1, metadata={"help": WORKERS_HELP})
    ray_address: str | None = field(default=None, metadata={"help": RAY_HELP})
    print_commands: bool = field(
        default=False,
        metadata={"help": "Print the commands of the runs that can start now, for a scheduler, and stop."},
    )

    def __post_init__(self):
        check_folder("output_dir", self.output_dir)
        check_integer("workers", self.workers, 1)
        check_list("methods", self.methods)
        check_list("test_benchmarks", self.test_benchmarks)
        if self.test_depths is not None and not isinstance(self.test_depths, (list, tuple)):
            raise ValueError(f"`test_depths` must be a list of depths, such as [4, 6]; got {self.test_depths!r}.")
        for depth in self.test_depths or ():
            check_num_loops(depth, "test_depths")
        for name in ("learning_rates", "methods", "seeds"):
            values = getattr(self, name)
            if not values or len(set(map(str, values))) != len(values):
                raise ValueError(f"`{name}` must be one or more different values; got {values!r}.")
        for rate in self.learning_rates:
            check_number("learning_rates", rate, above=True)
        for seed in self.seeds:
            check_integer("seeds", seed, 0)
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


def method_name(method: str) -> str:
    """Return the name of a method given as a rule or as a recipe's path."""
    return Path(method).stem if is_recipe(method) else method


def is_recipe(method: str) -> bool:
    """Say whether a method is given as the path of a recipe."""
    return method.endswith((".yaml", ".yml"))


class Sweep:
    """The runs of a sweep, in order, and their results.

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

    def test(self, method: str, rate: float, seed: int, depth: int | None = None) -> Job | None:
        """Return the job that answers the test benchmarks with a trained adapter, if there are any.

        Args:
            method, rate, seed: of the training.
            depth: recurrence depth of the evaluation; default: the training's.
        """
        benchmarks = self.arguments.test_benchmarks
        if benchmarks is None:
            benchmarks = load_recipe(self.recipe(method)).get("benchmarks")
        if not benchmarks:
            return None
        adapter = self.training(method, rate, seed).results.parent
        folder = adapter / ("test" if depth is None else f"test_depth_{depth}")
        options = ["--adapter", str(adapter), "--output_dir", str(folder), "--benchmarks", *benchmarks]
        options += options_among(self.passed_on, _FIELDS_OF_TESTS)  # the model and depth that it was trained with
        options += [] if depth is None else ["--num_loops", str(depth)]
        return Job(self._command("evaluate.py", self.recipe(method), *options), folder / "evaluation.json")

    def tests(self, method: str, rate: float, seed: int) -> list[Job]:
        """Return the jobs that test a trained adapter: at the depth of its training, and at `test_depths`."""
        own = load_recipe(self.recipe(method)).get("num_loops")
        depths = [depth for depth in self.arguments.test_depths or () if depth != own]
        jobs = [self.test(method, rate, seed), *(self.test(method, rate, seed, depth) for depth in depths)]
        return [job for job in jobs if job is not None]

    def _command(self, script: str, *options: str) -> tuple[str, ...]:
        return (*shlex.split(self.arguments.launcher), str(self.scripts / script), *options)

    def chosen_rate(self, method: str) -> float | None:
        """Return the rate with the best development score on the first seed, the smaller of equals.

        None while a rate is unfinished, and if all of them diverged.
        """
        scores = {}
        for rate in self.rates(method):
            job = self.training(method, rate, self.arguments.seeds[0])
            if not job.done:
                return None
            if (benchmarks := job.benchmarks()) is not None:
                scores[rate] = self._score(benchmarks, method)
        return max(scores, key=scores.get, default=None)  # the first of equals, and the rates ascend

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
                if not job.done:
                    yield job
            for run in self.final_runs(method):
                if self.training(method, *run).benchmarks() is not None:
                    yield from (job for job in self.tests(method, *run) if job.benchmarks() is None)

    # Doing them

    def run(self) -> None:
        """Do all that is not done yet.

        Raises:
            SweepError: if a job fails, or the folder belongs to another sweep.
            LockedError: if another process runs a sweep in the folder.
        """
        with folder_lock(self.output_dir):
            self.claim()
            workers = make_workers(self.arguments.workers, self.arguments.ray_address)
            do_jobs(self.ready_jobs, workers, after_each=self.save_summary)
            self.save_summary()

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
        write_atomically(path, json.dumps(mine, indent=2) + "\n")

    # Results

    def summary(self) -> dict[str, Any]:
        """Return every score, the choice and what it cost, by method, as plain JSON."""
        return {
            "select_on": self.arguments.select_on,
            "seeds": self.arguments.seeds,
            "full_grid": self.arguments.full_grid,
            "methods": {method_name(method): self._summary_of(method) for method in self.arguments.methods},
            "versions": library_versions(),
        }

    def _summary_of(self, method: str) -> dict[str, Any]:
        grid = []
        for rate in self.rates(method):
            job = self.training(method, rate, self.arguments.seeds[0])
            benchmarks = job.benchmarks()
            row = {"learning_rate": rate, "score": None, "diverged": job.diverged()}
            if benchmarks is not None:
                row["score"] = self._score(benchmarks, method)
            grid.append(row)
        runs = self.final_runs(method)
        return {
            "recipe": self.recipe(method),
            "grid": grid,
            "chosen_learning_rate": None if self.arguments.full_grid else self.chosen_rate(method),
            "runs": [run for each in runs if (run := self._run(method, *each)) is not None],
        }

    def _run(self, method: str, rate: float, seed: int) -> dict[str, Any] | None:
        """Return the counts and the cost of one of the runs that the sweep is for; None if it is not finished."""
        job = self.training(method, rate, seed)
        if not job.done:
            return None
        report, test = job.report() or {}, self.test(method, rate, seed)
        measured = {**report.get("benchmarks", {}), **((test and test.benchmarks()) or {})}
        kept = ("score", "correct", "total", "missing", "errors", "metrics")
        counts = {name: {key: each[key] for key in kept if key in each} for name, each in measured.items()}
        cost = (
            "train_seconds",
            "peak_memory_gb",
            "tokens_per_second",
            "trainable_parameters",
            "steps",
            "train_loss",
        )
        training = report.get("train_info", {})
        return {
            "learning_rate": rate,
            "seed": seed,
            "diverged": job.diverged(),
            "benchmarks": counts,
            "train_info": {key: training[key] for key in cost if key in training},
        }

    def save_summary(self) -> None:
        """Write `summary.json`, and the tables as `summary.md`."""
        summary = self.summary()
        write_atomically(self.output_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        tables = [_markdown(title, *table) for title, table in self._tables(summary).items()]
        write_atomically(self.output_dir / "summary.md", "\n".join(tables))

    def tables(self) -> list[Table]:
        """Return the development scores and the final means as tables for a terminal."""
        rendered = []
        for title, (header, rows) in self._tables(self.summary()).items():
            table = Table(title=title, title_justify="left")
            for column in header:
                table.add_column(column, justify="left" if column in ("method", _GRID) else "right")
            for row in rows:
                table.add_row(*row)
            rendered.append(table)
        return rendered

    def _tables(self, summary: Mapping[str, Any]) -> dict[str, tuple[list[str], list[list[str]]]]:
        """Return header and rows by title; a star marks the chosen rate."""
        methods = summary["methods"].items()
        grid = [
            [name, "  ".join(_cell(row, method["chosen_learning_rate"]) for row in method["grid"])]
            for name, method in methods
        ]
        runs = [run for _, method in methods for run in method["runs"]]
        benchmarks = list(dict.fromkeys(name for run in runs for name in run["benchmarks"]))
        finals = []
        for name, method in methods:
            for rate in dict.fromkeys(run["learning_rate"] for run in method["runs"]):
                same = [run for run in method["runs"] if run["learning_rate"] == rate]
                finals.append([name, f"{rate:.6g}", *(_mean_and_sd(same, each) for each in benchmarks), *_costs(same)])
        return {
            f"{summary['select_on']}, % correct, seed {summary['seeds'][0]}": (["method", _GRID], grid),
            "Mean ± SD over seeds, % correct": (
                ["method", "learning rate", *benchmarks, "minutes", "GB"],
                finals,
            ),
        }


_GRID = "learning rate: score"


def _cell(row: Mapping[str, Any], chosen: float | None) -> str:
    score = "diverged" if row["diverged"] else "-" if row["score"] is None else f"{row['score']:.2f}"
    return f"{row['learning_rate']:.6g}: {score}{'*' if row['learning_rate'] == chosen else ''}"


def _mean_and_sd(runs: Sequence[Mapping[str, Any]], benchmark: str) -> str:
    """Return mean and sample standard deviation over the finished seeds, from counts of correct answers."""
    counts = [run["benchmarks"][benchmark] for run in runs if benchmark in run["benchmarks"]]
    scores = [
        each["score"] if each.get("correct") is None else 100 * each["correct"] / each["total"] for each in counts
    ]
    diverged = sum(run["diverged"] is not None for run in runs)
    number = f"{len(scores)}, {diverged} diverged" if diverged else str(len(scores))
    if not scores:
        return f"- ({number})" if diverged else "-"
    return f"{summarize(scores)} ({number})"


def _costs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the mean minutes of a training, and the most memory of any."""
    seconds = [run["train_info"]["train_seconds"] for run in runs if "train_seconds" in run["train_info"]]
    peaks = [peak for run in runs if (peak := run["train_info"].get("peak_memory_gb")) is not None]
    return [f"{summarize(seconds).mean / 60:.1f}" if seconds else "-", f"{max(peaks):.2f}" if peaks else "-"]


def _markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return f"{title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


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


_FIELDS_OF_TESTS = {f.name for cls in (ModelArguments, BenchmarkArguments) for f in fields(cls)} - {"benchmarks"}


def options_among(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return those options of a command line, `--name value ...` or `--name=value`, whose name is among `names`."""
    kept: list[str] = []
    keep = False
    for word in words:
        if word.startswith("--"):
            keep = word[2:].split("=")[0] in names
        if keep:
            kept.append(word)
    return kept


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
