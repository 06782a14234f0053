"""Compare methods over learning rates and seeds.

    loopdropout sweep sweeps/metamath_gsm.yaml --dry_run true
    loopdropout sweep sweeps/metamath_gsm.yaml --workers 8
    loopdropout sweep --recipe gsm8k.yaml --learning_rates 1e-4 3e-4 \\
        --methods lora loop_dropout --seeds 101 102 \\
        --measure '{"benchmarks": ["gsm8k"]}'

A run is one subprocess of a training script in `output_dir/METHOD/lr_X/seed_S`.
The learning rate of each method is chosen on held-out examples with the first
seed. All seeds are then trained with it and evaluated as `measure` says.

The folder holds the whole state. The same command continues an interrupted
sweep, and any number of processes and machines that share the folder divide the
runs.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

from report import ACCURACY_TITLE, accuracy_table, load_results, print_table

from loopdropout_trainer.errors import UserError, closest_match, run_script
from loopdropout_trainer.evaluation import DEVELOPMENT
from loopdropout_trainer.recipe import IMPORTED, dump_recipe, load_recipe, option, override, parse
from loopdropout_trainer.results import UNCOMPARED, compare_recipes, is_finished, read_results, read_run, write_run


SET_BY_SWEEP = {"output_dir", "run_name", "learning_rate", "seed", "resume_from_checkpoint", "compare_with", "dry_run"}

FINAL_ONLY = {"depths", "single_loop_batches", "single_loop_accuracy", "merge", "push_to_hub", "push_merged_to_hub"}
"""Settings that the runs that choose a learning rate leave out."""

MEASURED = FINAL_ONLY | {
    *("benchmarks", "benchmark_limit", "own_benchmarks", "benchmark_revisions", "benchmark_batch_size"),
    *("evaluate_base", "hub_model_id", "hub_private_repo"),
}
"""Settings of the steps after the training, which `measure` may set. They may change after a run has finished."""

SETTINGS_FILE = "sweep_recipe.yaml"
NON_FINITE = (-math.inf, -math.inf)


@dataclass
class Part:
    """The runs of one comparison. A sweep has these fields for all of its parts, and a part may replace them."""

    learning_rates: list[float] = option([], "Candidates for every method.")
    methods: list[dict[str, Any]] = option(
        ["lora", "loop_dropout"],
        "Rules, recipes (.yaml), or a mapping of names to a rule, a recipe or settings. A part lists names.",
    )
    seeds: list[int] = option([101, 102, 103], "Training seeds. The first one chooses the learning rate.")
    full_grid: bool = option(False, "Train every seed with every learning rate and choose none.")
    extend_grid: bool = option(
        False, "Add up to four learning rates while the best one is the smallest or the largest."
    )
    settings: dict[str, Any] = option({}, "Fields of every recipe (JSON). With its own, a part renames its methods.")
    measure: dict[str, Any] = option({}, "Fields of the evaluation of the final runs (JSON).")


@dataclass
class SweepArguments(Part):
    """A sweep."""

    recipe: str = option("", "Recipe that all methods start from.")
    script: str = option("sft", "Training script: sft, dpo or grpo.")
    parts: dict[str, Any] = option({}, "Comparisons by name, in order of priority.")
    only: list[str] = option([], "Parts to run. Default: all.")
    rate_factors: dict[str, Any] = option({}, "Factors on the learning rates by method (JSON).")
    select_on: str = option(DEVELOPMENT, "Task that chooses the learning rate, or `eval_loss`.")
    output_dir: str = option("outputs/sweep", "Folder of all runs.")
    launcher: str = option("", "Command that starts a training, such as `accelerate launch`. Default: Python.")
    workers: int = option(1, "Number of runs at a time, each on its own GPU.")
    print_commands: bool = option(False, "Print the commands of the runs that can start, and stop.")
    dry_run: bool = option(False, "Print the number of trainings, and stop.")


class Run(NamedTuple):
    """One start of the training script. If `selects` is true, it only serves the choice of the learning rate."""

    method: str
    learning_rate: float
    seed: int
    selects: bool

    @property
    def name(self) -> str:
        return f"{self.method}/lr_{self.learning_rate:.6g}/seed_{self.seed}"


class Choice(NamedTuple):
    """The learning rates of a method in ascending order, the best one if it is known, and remarks about it."""

    rates: list[float]
    best: float | None
    edge: str | None  # "smallest" or "largest"
    tie: str = ""


class Sweep:
    """The runs of a sweep, and their state in its folder.

    Args:
        arguments: fields of the sweep.

    Raises:
        UserError: if a part, a method or a field does not exist.
    """

    def __init__(self, arguments: SweepArguments) -> None:
        self.arguments = arguments
        self.output_dir = Path(arguments.output_dir)
        self.script = Path(__file__).with_name(f"{arguments.script}.py")
        self.recipes: dict[str, dict] = {}  # by method
        self.measured: dict[str, dict] = {}
        methods = arguments.methods
        self.definitions = methods[0] if isinstance(methods[0], dict) else {Path(name).stem: name for name in methods}
        parts = arguments.parts or {"all": {}}
        _check_names("only", arguments.only, parts)
        _check_names("rate_factors", arguments.rate_factors, self.definitions)
        self.parts = {name: self._part(name, own or {}) for name, own in parts.items()}
        self.selected_parts = [self.parts[name] for name in arguments.only or parts]
        self.scores: dict[str, tuple[float, float]] = {}  # by name of a run
        self.done: set[Run] = set()
        self.stopped = threading.Event()
        self.processes: set[subprocess.Popen] = set()

    def _part(self, name: str, own: dict) -> Part:
        """Return a part, with the fields of the sweep where it has none, and add its methods to `recipes`."""
        _check_names(f"parts.{name}", own, Part.__dataclass_fields__)
        shared = {field: getattr(self.arguments, field) for field in Part.__dataclass_fields__}
        part = Part(**{**shared, "methods": [*self.definitions], "settings": {}, **own})
        part.measure = {**shared["measure"], **part.measure}
        part.learning_rates = sorted(part.learning_rates)
        part.full_grid |= len(part.learning_rates) == 1
        _check_names(f"parts.{name}.methods", part.methods, self.definitions)
        _check_names(f"parts.{name}.measure", part.measure, MEASURED)
        if not part.learning_rates or not part.seeds:
            raise UserError(f"The part `{name}` must have `learning_rates` and `seeds`.")
        suffix = f"@{name}" * bool(part.settings)
        for method in part.methods:
            self.recipes.setdefault(method + suffix, self._recipe(self.definitions[method], part.settings))
            self.measured.setdefault(method + suffix, part.measure)
        part.methods = [method + suffix for method in part.methods]
        return part

    def _recipe(self, definition: str | dict, of_part: dict) -> dict:
        """Return the settings of a method, without learning rate and seed."""
        path = self.arguments.recipe
        if isinstance(definition, str):
            path, definition = (definition, {}) if definition.endswith(".yaml") else (path, {"rule": definition})
        recipe = {name: value for name, value in load_recipe(path).items() if name not in SET_BY_SWEEP}
        for changes in (self.arguments.settings, definition, of_part):
            recipe = override(recipe, changes)
        for name in SET_BY_SWEEP & recipe.keys():
            raise UserError(f"`{name}` is set by the sweep. Remove it from `methods` and `settings`.")
        return recipe

    def settings(self, run: Run) -> dict:
        """Return the recipe of a run."""
        recipe, measure = self.recipes[run.method], self.measured[run.method]
        if run.selects:
            select_on = self.arguments.select_on
            recipe = {name: value for name, value in recipe.items() if name not in FINAL_ONLY}
            measure = {name: value for name, value in measure.items() if name == "own_benchmarks"}
            measure["benchmarks"] = [] if select_on == "eval_loss" else [select_on]
            has_held_out = recipe.get("num_eval_examples") or recipe.get("eval_files")
            if select_on == DEVELOPMENT or has_held_out and self.arguments.script == "sft":
                measure["single_loop_batches"] = 16  # the held-out loss chooses, or breaks ties
        return {
            **recipe,
            "evaluate_base": False,
            **measure,
            "learning_rate": run.learning_rate,
            "seed": run.seed,
            "run_name": f"{self.output_dir.name}/{run.name}",
            "resume_from_checkpoint": "true",
        }

    # Learning rates and runs

    def choice(self, part: Part, method: str) -> Choice:
        """Choose the learning rate with the best score of the first seed. Ties are broken by held-out loss, then by size.

        While the best one is at the edge of its grid, `extend_grid` adds the next one, in the ratio of the outermost two.
        """
        factor = self.arguments.rate_factors.get(method.split("@")[0], 1.0)
        rates = [_rounded(factor * rate) for rate in part.learning_rates]
        limit = len(rates) + (4 if part.extend_grid and not part.full_grid else 0)
        while True:
            scores = {rate: self.score(Run(method, rate, part.seeds[0], True)) for rate in rates}
            is_known = None not in scores.values() and max(scores.values()) > NON_FINITE
            best = max(scores, key=scores.get) if is_known else None
            edge = {rates[0]: "smallest", rates[-1]: "largest"}.get(best)
            if edge is None or len(rates) == limit:
                return Choice(rates, best, edge, self._describe_tie(scores, best) if best else "")
            last, outermost = rates[1::-1] if edge == "smallest" else rates[-2:]
            rates = sorted([*rates, _rounded(outermost**2 / last)])

    def _describe_tie(self, scores: dict[float, tuple[float, float]], best: float) -> str:
        """Return a remark if other learning rates have the score of the best one."""
        equal = {rate: loss for rate, (score, loss) in scores.items() if score == scores[best][0]}
        if len(equal) == 1:
            return ""
        names = " and ".join(f"{rate:g}" for rate in equal)
        reason = "The held-out loss decided." if len({*equal.values()}) > 1 else "The smallest one was chosen."
        return f"The selection was uninformative. {names} have equal scores on {self.arguments.select_on}. {reason}"

    def runs_of(self, part: Part) -> list[Run]:
        """Return the runs of a part that have a learning rate, in the order of their seeds."""
        runs = []
        for method in part.methods:
            rates, best, *_ = self.choice(part, method)
            if not part.full_grid:
                runs += [Run(method, rate, part.seeds[0], True) for rate in rates]
                rates = [] if best is None else [best]
            runs += [Run(method, rate, seed, False) for rate in rates for seed in part.seeds]
        return sorted(runs, key=lambda run: part.seeds.index(run.seed))

    def pending(self) -> list[Run]:
        """Return the runs that can start or have started, in order of priority."""
        pending = {}
        for part in self.selected_parts:
            for run in self.runs_of(part):
                if not self.is_done(run):
                    pending.setdefault(run.name, run)
        return [*pending.values()]

    def num_trainings(self) -> int:
        """Return the number of trainings, without extended grids."""
        trainings = set()
        for part in self.selected_parts:
            for method, seed in product(part.methods, part.seeds):
                tries_all = part.full_grid or seed == part.seeds[0]
                trainings |= {
                    (method, rate, seed) for rate in (self.choice(part, method).rates if tries_all else [None])
                }
        return len(trainings)

    # The state of a run, from its folder

    def score(self, run: Run) -> tuple[float, float] | None:
        """Return the score that chooses the learning rate and the negative held-out loss, or None before the run."""
        folder, select_on = self.output_dir / run.name, self.arguments.select_on
        rows = read_results(folder) if run.name not in self.scores and folder.is_dir() else []
        find = lambda **columns: [row["value"] for row in rows if columns.items() <= row.items()]
        losses = find(metric="eval_loss") or find(metric="loss", task=DEVELOPMENT, gates="unit")
        accuracies = find(metric="accuracy", task=select_on, gates="unit")
        if scores := [-loss for loss in losses] if select_on == "eval_loss" else accuracies:
            self.scores[run.name] = (scores[-1], -min(losses, default=math.inf))
        if read_run(folder).get("status") == "non-finite":
            self.scores[run.name] = NON_FINITE
        return self.scores.get(run.name)

    def is_done(self, run: Run) -> bool:
        """Return whether a run has finished with its settings.

        Raises:
            UserError: if the run in the folder has other training settings.
        """
        folder = self.output_dir / run.name
        path = folder / SETTINGS_FILE
        if run not in self.done and path.exists():
            saved, new = load_recipe(path), self.settings(run)
            if difference := compare_recipes(saved, new, UNCOMPARED | MEASURED):
                raise UserError(f"{folder}: {difference}. Restore the setting, or set another `output_dir`.")
            score = self.score(run)
            is_measured = is_finished(folder) and not compare_recipes(saved, new)
            if is_measured or score == NON_FINITE or run.selects and score is not None:
                self.done.add(run)
        return run in self.done

    # Training

    def train_all(self) -> None:
        """Train all runs that are not done.

        Raises:
            UserError: if a run fails.
        """
        number = self.arguments.workers
        gpus = cycle(_gpus() if number > 1 else [{}])
        with ThreadPoolExecutor(number) as pool:
            workers = [pool.submit(self._work, next(gpus)) for _ in range(number)]
            try:
                for worker in workers:
                    worker.result()
            except BaseException:
                self.stopped.set()
                for process in self.processes.copy():
                    os.killpg(process.pid, signal.SIGTERM)  # each training saves a checkpoint
                raise

    def _work(self, gpu: dict[str, str]) -> None:
        """Train one run after the other until none is left."""
        while (runs := self.pending()) and not self.stopped.is_set():
            for run in runs:
                folder = self.output_dir / run.name
                folder.mkdir(parents=True, exist_ok=True)
                with open(folder / "sweep.lock", "w") as lock, suppress(BlockingIOError):  # another worker trains it
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if not self.is_done(run):
                        self._train(run, gpu, lock.fileno())
                        break
            else:
                self.stopped.wait(1)

    def command(self, run: Run) -> list[str]:
        """Write the recipe of a run, and return its command."""
        folder = self.output_dir / run.name
        folder.mkdir(parents=True, exist_ok=True)
        dump_recipe(self.settings(run), folder / "new.yaml")
        (folder / "new.yaml").replace(folder / SETTINGS_FILE)  # in one step, for other workers
        if is_finished(folder):  # it is measured again
            write_run(folder, **{**read_run(folder), "status": "trained"})
        launcher = shlex.split(self.arguments.launcher) or [sys.executable]
        imports = ["--import", *IMPORTED] if IMPORTED else []
        return [*launcher, str(self.script), str(folder / SETTINGS_FILE), "--output_dir", str(folder), *imports]

    def _train(self, run: Run, gpu: dict[str, str], lock: int) -> None:
        path = self.output_dir / run.name / "log.txt"
        with open(path, "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                self.command(run),
                stdout=log,
                stderr=log,
                env={**os.environ, **gpu},
                pass_fds=[lock],  # the training keeps the lock, even if the sweep is killed
                start_new_session=True,
            )
        self.processes.add(process)
        status = process.wait()
        self.processes.remove(process)
        if not self.is_done(run) and not self.stopped.is_set():
            last_line = path.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            raise UserError(f"{run.name} ended with exit code {status}: {last_line} (log: {path})")
        print(f"{run.name}: {read_run(path.parent).get('status', 'stopped')}", flush=True)

    def write_summary(self) -> None:
        """Print the chosen learning rates and a table of mean ± SD over seeds, and write them to `summary.json`."""
        choices = [
            {"part": name, "method": method, **self.choice(part, method)._asdict()}
            for name, part in self.parts.items()
            for method in (() if part.full_grid else part.methods)
        ]
        for choice in choices:
            edge = f", the {choice['edge']} one of the grid" if choice["edge"] else ""
            print(f"{choice['method']}: learning rate {choice['best']}{edge}. {choice['tie']}")
        table = accuracy_table(load_results(self.output_dir))
        print_table(table, ACCURACY_TITLE)
        summary = {"choices": choices, "accuracy": table.to_dict("records")}
        (self.output_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _check_names(field: str, names: Iterable[str], choices: Iterable[str]) -> None:
    for name in names:
        if name not in choices:
            raise UserError(f"`{field}` has no {name!r}.{closest_match(name, choices)}")


def _gpus() -> list[dict[str, str]]:
    """Return an environment for each GPU."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names.split(",")]


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")  # as in the name of the folder


def main(argv: list[str] | None = None) -> None:
    (arguments,) = parse((SweepArguments,), argv, __doc__)
    sweep = Sweep(arguments)
    if arguments.dry_run:
        print(f"{sweep.num_trainings()} trainings")
    elif arguments.print_commands:
        print(*(shlex.join(sweep.command(run)) for run in sweep.pending()), sep="\n")
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        sweep.train_all()
        sweep.write_summary()


if __name__ == "__main__":
    run_script(main)
