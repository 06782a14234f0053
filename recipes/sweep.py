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
runs. If a run fails, the sweep goes on with the others, lists the failed runs at
its end and exits with code 2. It stops early if two runs in a row fail with the
same message.
"""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loopdropout_trainer.arguments import BenchmarkArguments, names_of, option
from loopdropout_trainer.errors import UserError, closest_match, count, run_script
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.library_fields import SEED_BOUNDS, unsafe_names
from loopdropout_trainer.recipe import IMPORTED, dump_recipe, load_recipe, override, parse
from loopdropout_trainer.results import (
    DEVELOPMENT,
    MEASURED,
    UNCOMPARED,
    compare_recipes,
    has_trained,
    is_finished,
    read_own_results,
    read_run,
    write_run,
)
from loopdropout_trainer.runs import RESTORE_CODE, find_other_code
from loopdropout_trainer.sweep_plan import print_sweep_plan
from loopdropout_trainer.sweeps import SETTINGS_FILE, describe_choice, describe_progress, update_summary
from loopdropout_trainer.workers import Workers


if TYPE_CHECKING:
    import pandas as pd

SET_BY_SWEEP = {"output_dir", "run_name", "learning_rate", "seed", "resume_from_checkpoint", "compare_with", "dry_run"}
"""Settings of a run that the sweep makes. The list is made by hand, because the fields do not say so: a sweep averages over
`seed`, for example, but keeps `gate_seed`."""

_OF_TASKS = {field.name for field in fields(BenchmarkArguments)} - {"eval_num_loops"}
FINAL_ONLY = names_of("measurement", "output") - _OF_TASKS
"""Settings that the runs that choose a learning rate leave out. They are measured on a task, but not at other depths."""

NON_FINITE = (-math.inf, -math.inf)


class SweepRun(NamedTuple):
    """One start of the training script. If `selects` is true, it only serves the choice of the learning rate."""

    method: str
    learning_rate: float
    seed: int
    selects: bool

    @property
    def name(self) -> str:
        return f"{self.method}/lr_{self.learning_rate:.6g}/seed_{self.seed}"


class Choice(NamedTuple):
    """The learning rates of a method in ascending order, the best one if it is known, and a remark about it."""

    rates: list[float]
    best: float | None
    remark: str = ""


class Recipes(NamedTuple):
    """The settings of a method's runs without learning rate and seed: of those that choose the rate, and of the final ones."""

    selecting: dict[str, Any]
    final: dict[str, Any]


@dataclass
class Sweep:
    """A sweep, whose state is in its folder.

    Raises:
        UserError: if a method or a field does not exist.
    """

    recipe: str = option("", "Recipe that all methods start from.")
    methods: list[Any] = option(
        ["lora", "loop_dropout"], "Rules, recipes (.yaml), or a mapping of names to a rule, a recipe or settings."
    )
    settings: dict[str, Any] = option({}, "Fields of every recipe (JSON).")
    measure: dict[str, Any] = option({}, "Fields of the evaluation of the final runs (JSON).")
    seeds: list[int] = option(
        [101, 102, 103], "Training seeds. The first one chooses the learning rate.", **SEED_BOUNDS
    )
    learning_rates: list[float] = option([], "Candidates for every method.", above=0)
    rate_factors: dict[str, Any] = option({}, "Factors on the learning rates by method (JSON).")
    full_grid: bool = option(False, "Train every seed with every learning rate and choose none.")
    extend_grid: bool = option(
        False, "Add up to four learning rates while the best one is the smallest or the largest."
    )
    select_on: str | None = option(
        None,
        "Task that chooses the learning rate, or `eval_loss`. Default: `development`, the accuracy on held-out examples, or "
        "`eval_loss` if `benchmarks` is not set.",
    )
    script: str = option("sft", "Training script: sft, dpo or grpo.")
    output_dir: str = option("outputs/sweep", "Folder of all runs.")
    launcher: str = option("", "Command that starts a training, such as `accelerate launch`. Default: Python.")
    workers: int = option(1, "Number of runs at a time, which divide the GPUs.", at_least=1, at_most=1024)
    print_commands: bool = option(False, "Print the commands of the runs that can start, and stop.")
    dry_run: bool = option(False, "Print the trainings, their folder and evaluation, and stop.")

    def __post_init__(self):
        methods = self._name_methods()
        for field, choices in (("rate_factors", methods), ("measure", MEASURED | {"benchmark_batch_size"})):
            for name in getattr(self, field):
                if name not in choices:
                    hint = closest_match(name, choices) or f" It takes {', '.join(sorted(choices))}."
                    raise UserError(f"`{field}` has no {name!r}.{hint}")
        if not self.learning_rates or not self.seeds:
            raise UserError("`learning_rates` and `seeds` must be set.")
        self.full_grid = self.full_grid or len(self.learning_rates) == 1
        self.loss_chooses_by_default = self.select_on is None and not self._has_benchmarks(methods)
        if self.select_on is None:
            self.select_on = "eval_loss" if self.loss_chooses_by_default else DEVELOPMENT
        self.recipes = {name: self._make_recipes(definition) for name, definition in methods.items()}
        self.scores: dict[str, tuple[float, float]] = {}  # by name of a run
        self.done: set[SweepRun] = set()
        self.pool = Workers(self, self.workers)

    def _name_methods(self) -> dict[str, Any]:
        """Return the definition of each method by its name. Without a mapping, it is the rule or the name of the recipe."""
        if len(self.methods) == 1 and isinstance(self.methods[0], dict):
            for name, definition in self.methods[0].items():
                if not isinstance(definition, str | dict):
                    raise UserError(f"`methods` must map {name} to a rule, a recipe or settings, got {definition!r}.")
            return self.methods[0]
        methods = {}
        for definition in self.methods:
            if not isinstance(definition, str):
                raise UserError(f"`methods` must be texts or one mapping, got {definition!r} in a list.")
            name = Path(definition).stem
            if name in methods:
                raise UserError(
                    f"`methods` must have different names, got {name!r} twice ({methods[name]} and {definition}). Give them "
                    f"names in a mapping, such as `methods: {{first: {methods[name]}, second: {definition}}}`."
                )
            methods[name] = definition
        if not methods:
            raise UserError("`methods` must name at least one method, such as lora.")
        return methods

    def _has_benchmarks(self, methods: dict[str, Any]) -> bool:
        """Return whether the final runs of a method have a benchmark."""
        for definition in methods.values():
            recipe, own = self._read_method(definition)
            if {**recipe, **self.measure, **own}.get("benchmarks"):
                return True
        return False

    def _make_recipes(self, definition: str | dict) -> Recipes:
        """Return the settings of a method's runs."""
        recipe, own = self._read_method(definition)
        has_held_out = _has_held_out(override(recipe, own))
        if self.loss_chooses_by_default and not self.full_grid and not has_held_out:
            raise UserError(
                "`num_eval_examples` or `eval_files` must be set, because without `benchmarks` the held-out loss chooses the "
                "learning rate."
            )
        if has_held_out and (self.script == "dpo" or self.select_on == "eval_loss"):
            recipe.setdefault("eval_strategy", "epoch")  # the held-out loss chooses, or breaks ties, and is reported
        final = override({**recipe, **self.measure}, own)
        for name in SET_BY_SWEEP & final.keys():
            raise UserError(f"`{name}` is set by the sweep. Remove it from `methods` and `settings`.")
        make_rule(final.get("rule", "loop_dropout"))  # raises UserError if there is no such rule
        return Recipes(self._make_selecting_recipe(override(recipe, own), has_held_out), final)

    def _read_method(self, definition: str | dict) -> tuple[dict, dict]:
        """Return the recipe that a method starts from, with the sweep's settings, and the method's own settings."""
        path, own = self.recipe, definition
        if isinstance(definition, str) and definition.endswith(".yaml"):
            path, own = definition, {}
        elif isinstance(definition, str):
            own = {"rule": definition}
        recipe = {name: value for name, value in load_recipe(path).items() if name not in SET_BY_SWEEP}
        return {**override(recipe, self.settings), "evaluate_base": False}, own

    def _make_selecting_recipe(self, recipe: dict, has_held_out: bool) -> dict:
        """Return the recipe of the runs that choose a learning rate, which are measured on what chooses only."""
        first = {name: value for name, value in recipe.items() if name not in FINAL_ONLY}
        first["evaluate_base"] = False
        first["benchmarks"] = [] if self.select_on == "eval_loss" else [self.select_on]
        if "own_benchmarks" in self.measure:
            first["own_benchmarks"] = self.measure["own_benchmarks"]
        if has_held_out and self.script not in ("dpo", "grpo"):
            first["single_loop_batches"] = 16  # the held-out loss chooses, or breaks ties
        return first

    def run_settings(self, run: SweepRun) -> dict:
        """Return the recipe of a run."""
        recipes = self.recipes[run.method]
        return {
            **(recipes.selecting if run.selects else recipes.final),
            "learning_rate": run.learning_rate,
            "seed": run.seed,
            "run_name": f"{Path(self.output_dir).name}/{run.name}",
            "resume_from_checkpoint": "true",
        }

    def folder(self, run: SweepRun) -> Path:
        """Return the folder of a run."""
        return Path(self.output_dir, run.name)

    # Learning rates and runs

    def choice(self, method: str) -> Choice:
        """Choose the learning rate with the best score of the first seed.

        Ties are broken by the held-out loss, then by the smaller rate. While the best one is at the edge of its grid,
        `extend_grid` adds the next one, in the ratio of the outermost two.
        """
        factor = self.rate_factors.get(method, 1.0)
        rates = sorted(_rounded(factor * rate) for rate in self.learning_rates)
        limit = len(rates)
        if self.extend_grid and not self.full_grid:
            limit += 4
        while True:
            scores = {rate: self.score(SweepRun(method, rate, self.seeds[0], True)) for rate in rates}
            if None in scores.values():
                return Choice(rates, None, "Not every learning rate has a score.")
            if max(scores.values()) == NON_FINITE:
                return Choice(rates, None, "No learning rate has a finite score.")
            best = max(scores, key=scores.get)  # the smallest one of equal scores, because the rates ascend
            if best not in (rates[0], rates[-1]) or len(rates) == limit:
                return Choice(rates, best, self._remark(scores, best))
            if best == rates[0]:
                outermost, neighbor = rates[0], rates[1]
            else:
                outermost, neighbor = rates[-1], rates[-2]
            rates = sorted([*rates, _rounded(outermost**2 / neighbor)])

    def _remark(self, scores: dict[float, tuple[float, float]], best: float) -> str:
        """Return a remark if the best learning rate is at the edge of its grid, or others have the same score."""
        remarks = []
        if best in (min(scores), max(scores)):
            side = "smaller" if best == min(scores) else "larger"
            remedy = f"a {side} one to `--learning_rates`"
            if not self.extend_grid:
                remedy = f"`--extend_grid true`, or {remedy}"
            remarks.append(f"It is at the edge of the grid. Add {remedy}.")
        ties = [f"{rate:g}" for rate, (score, _) in scores.items() if score == scores[best][0]]
        if len(ties) > 1:
            remarks.append(
                f"The selection was uninformative. {' and '.join(ties)} have equal scores on {self.select_on}. The tie was "
                "broken by the held-out loss, then by the smaller rate."
            )
        return " ".join(remarks)

    def runs(self, method: str) -> list[SweepRun]:
        """Return the runs of a method whose learning rate is known. The run that is chosen is there twice, to be measured."""
        choice = self.choice(method)
        if self.full_grid:
            return [SweepRun(method, rate, seed, False) for rate in choice.rates for seed in self.seeds]
        runs = [SweepRun(method, rate, self.seeds[0], True) for rate in choice.rates]
        if choice.best is not None:
            runs += [SweepRun(method, choice.best, seed, False) for seed in self.seeds]
        return runs

    def pending(self) -> list[SweepRun]:
        """Return the runs that have a learning rate and are not done, in the order of their seeds."""
        runs = [run for method in self.recipes for run in self.pending_of(method)]
        return sorted(runs, key=lambda run: self.seeds.index(run.seed))

    def pending_of(self, method: str) -> list[SweepRun]:
        """Return the runs of a method that have a learning rate and are not done. Without any, the method is finished."""
        return [run for run in self.runs(method) if not self.is_done(run)]

    def num_trainings(self, method: str) -> int:
        """Return the number of trainings of a method, as far as it is known: an extended grid grows."""
        choice = self.choice(method)
        num_rates, num_seeds = len(choice.rates), len(self.seeds)
        if self.full_grid:
            return num_rates * num_seeds
        if self.has_no_choice(method):
            return num_rates
        return num_rates + num_seeds - 1  # the chosen run of the first seed is trained once

    def has_no_choice(self, method: str) -> bool:
        """Return whether a method has no learning rate to choose, although all of its runs are done."""
        return self.choice(method).best is None and not self.pending_of(method)

    def count(self) -> tuple[int, int]:
        """Return the number of trainings that have ended, and of all trainings."""
        trainings = self.count_by_method().values()
        return sum(ended for ended, _ in trainings), sum(total for _, total in trainings)

    def count_starts(self) -> tuple[int, int]:
        """Return the number of runs that are done, and of all runs, also of those whose learning rate is not known yet.

        The chosen run of the first seed counts twice, because it is started again to be measured.
        """
        num_ended, total = 0, 0
        for method in self.recipes:
            num_ended += sum(self.is_done(run) for run in self.runs(method))
            total += self.num_trainings(method)
            if not (self.full_grid or self.has_no_choice(method)):
                total += 1
        return num_ended, total

    def count_by_method(self) -> dict[str, tuple[int, int]]:
        """Return the number of trainings of each method that have ended, and of all of its trainings.

        A training counts if one of its runs is done: it has its score, but its final measurement may be missing.
        """
        numbers = {}
        for method in self.recipes:
            ended = {run.name for run in self.runs(method) if self.is_done(run)}
            numbers[method] = (len(ended), self.num_trainings(method))
        return numbers

    def describe_score(self, run: SweepRun) -> str:
        """Return the score that chooses the learning rate, or the first accuracy of a final run, or its held-out loss."""
        score = self.score(run)
        if run.selects:
            return self._name_score(score)
        for row in read_own_results(self.folder(run)):
            is_default = row["gates"] == "unit" and row["metric"] == "accuracy"
            if is_default and row["task"] != DEVELOPMENT:
                return f"accuracy {row['value']:.2f}% on {row['task']} at K = {row['num_loops']}"
        return self._name_score(score)

    def _name_score(self, score: tuple[float, float] | None) -> str:
        if score is None:
            return ""
        if score == NON_FINITE:
            return "held-out loss not finite" if self.select_on == "eval_loss" else "loss not finite"
        if self.select_on == "eval_loss":
            return f"held-out loss {-score[1]:.4f} nats per token"
        return f"accuracy {score[0]:.2f}% on {self.select_on}"

    # The state of a run, from its folder

    def score(self, run: SweepRun) -> tuple[float, float] | None:
        """Return the score that chooses the learning rate and the negative held-out loss, or None before the run."""
        folder = self.folder(run)
        if run.name not in self.scores and folder.is_dir():
            score = self._read_score(folder)
            if score is not None:
                self.scores[run.name] = score
        return self.scores.get(run.name)

    def _read_score(self, folder: Path) -> tuple[float, float] | None:
        """Return the score of the run in a folder, `NON_FINITE` if its training failed, or None if it is not measured."""
        if read_run(folder).get("status") == "non-finite":
            return NON_FINITE
        rows = [row for row in read_own_results(folder) if row["gates"] == "unit"]
        values = {(row["metric"], row["task"]): row["value"] for row in rows}
        loss = values.get(("eval_loss", "training"), values.get(("loss", DEVELOPMENT), math.inf))
        score = values.get(("accuracy", self.select_on), -math.inf)
        if self.select_on == "eval_loss":
            score = -loss
        return (score, -loss) if score > -math.inf else None

    def is_done(self, run: SweepRun) -> bool:
        """Return whether a run has finished with its settings, or need not.

        It need not if it only serves the choice and has its score, or if its loss is not finite. `Run.is_complete` of a
        training script is stricter: a run with a damaged adapter is not complete. The sweep still has its results.

        Raises:
            UserError: if the run in the folder has other training settings, or was trained with other imported code.
        """
        folder = self.folder(run)
        path = folder / SETTINGS_FILE
        if run in self.done:
            return True
        if not path.exists():
            return False
        saved, new = load_recipe(path), self.run_settings(run)
        if difference := compare_recipes(saved, new, UNCOMPARED | MEASURED):
            raise UserError(f"{folder}: {difference}. Restore the setting, or set another `output_dir`.")
        score = self.score(run)
        if (has_trained(folder) or score == NON_FINITE) and (difference := find_other_code(folder)):
            raise UserError(f"{folder}: {difference}. {RESTORE_CODE}")
        has_score = run.selects and score is not None
        # A run may have further results, of fields that are no longer set.
        is_measured = is_finished(folder) and not compare_recipes(saved, new, fields=new)
        is_done = is_measured or has_score or score == NON_FINITE
        if is_done:
            self.done.add(run)
        return is_done

    # Training

    def train_all(self) -> None:
        """Train all runs that are not done, several at a time. The others go on if a run fails (`check_failures`).

        Raises:
            UserError: If two runs in a row fail with the same message.
        """
        self.save_progress()
        self.pool.train_all()

    def save_progress(self) -> None:
        """Write the chosen learning rates, the number of trainings and if they are finished to the summary of reports."""
        choices = {} if self.full_grid else {method: self.choice(method)._asdict() for method in self.recipes}
        grid = dict.fromkeys(self.recipes, self.full_grid)
        finished = {method: not self.pending_of(method) for method in self.recipes}
        update_summary(
            self.output_dir, choices=choices, full_grid=grid, trainings=self.count_by_method(), finished=finished
        )

    def check_failures(self) -> None:
        """Print the runs that have failed.

        Raises:
            UserError: If there are any.
        """
        failures = self.pool.failures
        if failures:
            print("\nFailed:", *failures.values(), sep="\n  ")
            raise UserError(
                f"{count(len(failures), 'run')} failed. Fix the cause. The same command then trains what is missing."
            )

    def command(self, run: SweepRun) -> list[str]:
        """Write the recipe of a run, let a finished one be measured again, and return its command."""
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        dump_recipe(self.run_settings(run), folder / SETTINGS_FILE)
        if is_finished(folder):
            write_run(folder, status="trained")
        launcher = shlex.split(self.launcher) or [sys.executable]
        script = Path(__file__).parent / f"{self.script}.py"
        imports = ["--import", *IMPORTED] if IMPORTED else []
        # Settings that can run code must not come from a recipe. The user gave them to the sweep.
        unsafe = []
        for name, value in self.run_settings(run).items():
            if unsafe_names({name: value}):
                unsafe.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
        return [*launcher, str(script), str(folder / SETTINGS_FILE), "--output_dir", str(folder), *unsafe, *imports]

    def write_summary(self) -> None:
        """Print the chosen learning rates, and the accuracies as mean ± SD over seeds or the lowest held-out loss.

        The table of accuracies is also written to `summary.json`.
        """
        from loopdropout_trainer.frames import final_results, load_results, select, tasks_of
        from loopdropout_trainer.printing import print_table
        from loopdropout_trainer.tables import (
            ACCURACY_TITLE,
            accuracy_numbers,
            accuracy_table,
            fit_title,
            loss_numbers,
        )

        if not self.full_grid:
            self._print_choices()
        num_ended, _ = self.count()
        if num_ended == 0:
            return
        self.save_progress()
        final = final_results(load_results(self.output_dir))
        trained = final[final["method"] != "base model"]
        numbers = accuracy_numbers(final)
        table = accuracy_table(numbers)
        if len(table):
            print_table(fit_title(ACCURACY_TITLE, numbers), table)
        if self.loss_chooses_by_default or not len(table):
            _print_lowest(loss_numbers(trained))
            score, best = "lowest held-out loss", select(trained, {"metric": "eval_loss", "task": "training"})
            best = best.assign(value=-best["value"])
        else:
            task = tasks_of(trained[trained["metric"] == "accuracy"])[0]
            score, best = f"highest accuracy on {task}", select(trained, {"metric": "accuracy", "task": task})
        if len(self.seeds) == 1 and len(self.recipes) > 1:
            print("With one seed, the spread over seeds is not known, so the order of the methods can be chance.")
        update_summary(self.output_dir, accuracy=table.reset_index().to_dict("records"))
        print(f"\nNext:\n  loopdropout report {self.output_dir}   # tables of losses, accuracies and costs")
        run = _find_best_run(best)
        if run is not None:
            folder = Path(self.output_dir, *Path(run).parts[-3:])  # METHOD/lr_X/seed_S
            print(f"  loopdropout chat {folder}   # ask the adapter with the {score}")

    def _print_choices(self) -> None:
        """Print the chosen learning rate of each method."""
        if self.loss_chooses_by_default:
            print("The held-out loss chooses the learning rate, because no `benchmarks` are set.")
        for method in self.recipes:
            choice = self.choice(method)
            if choice.best is None:
                print(f"{method}: no learning rate is chosen. {choice.remark}")
            else:
                print(describe_choice(method, choice.best, choice.remark))
            self._print_scores(method, choice.rates)

    def _print_scores(self, method: str, rates: list[float]) -> None:
        """Print the scores of a method's candidates."""
        for rate in rates:
            print(f"  {rate:<10g} {self._name_score(self.score(SweepRun(method, rate, self.seeds[0], True)))}")


def _print_lowest(losses: pd.DataFrame) -> None:
    """Print the method with the lowest held-out loss, and by how much the losses of the others are higher.

    Methods with different numbers of seeds, as after a failed run, are not compared, because seeds differ.

    Args:
        losses: From `loss_numbers`.
    """
    means = losses["mean"].sort_values(kind="stable")
    if losses["num_seeds"].nunique() > 1:
        seeds = ", ".join(f"{name}: {number:.0f}" for name, number in losses["num_seeds"].items())
        print(f"The held-out losses are not compared, because the methods have different numbers of seeds ({seeds}).")
    elif len(means):
        others = [f"{name}: {mean - means.iloc[0]:+.4f}" for name, mean in means.iloc[1:].items()]
        higher = f" ({', '.join(others)})" if others else ""
        print(f"Lowest held-out loss: {means.index[0]} {means.iloc[0]:.4f} nats per token{higher}")


def _find_best_run(scores: pd.DataFrame) -> str | None:
    """Return the folder of the first seed of the method with the highest mean score.

    There is none without scores, or if the methods have different numbers of seeds, as after a failed run.

    Args:
        scores: Results of final runs, of which a higher `value` is better.
    """
    from loopdropout_trainer.frames import labelled

    if scores.empty:
        return None
    methods = labelled(scores).groupby("label", sort=False)
    if methods["seed"].nunique().nunique() > 1:
        return None
    best = methods.get_group(methods["value"].mean().idxmax())
    return best.sort_values("seed", kind="stable")["run"].iloc[0]


ARGUMENTS = (Sweep,)


def _has_held_out(recipe: dict) -> bool:
    """Return whether a training with this recipe has held-out examples. Some preparations hold out examples by default."""
    from loopdropout_trainer.data.arguments import count_held_out

    return bool(recipe.get("eval_files") or count_held_out(recipe))


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")  # as in the name of the folder


def without_option(words: Sequence[str], name: str) -> list[str]:
    """Return a command line without an option and its value."""
    kept, is_value = [], False
    for word in words:
        is_option = word.startswith("--")
        is_value = word == f"--{name}" or is_value and not is_option
        if not is_value and not word.startswith(f"--{name}="):
            kept.append(word)
    return kept


class Terminated(KeyboardInterrupt):
    """SIGTERM stopped a sweep."""

    signal = signal.SIGTERM  # which decides the exit code


def _interrupt(number: int, frame: Any) -> None:
    raise Terminated


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    (sweep,) = parse(ARGUMENTS, words, __doc__)
    if sweep.dry_run:
        print_sweep_plan(sweep, f"loopdropout sweep {shlex.join(without_option(words, 'dry_run'))}")
    elif sweep.print_commands:
        print(*(shlex.join(sweep.command(run)) for run in sweep.pending()), sep="\n")
    else:
        former = signal.signal(signal.SIGTERM, _interrupt)  # a stop is one sentence, as after Ctrl-C
        try:
            sweep.train_all()
            sweep.write_summary()
            sweep.check_failures()
        except KeyboardInterrupt as error:
            error.args = (describe_progress(sweep.output_dir) or "interrupted.",)
            raise
        finally:
            signal.signal(signal.SIGTERM, former)


if __name__ == "__main__":
    run_script(main)
