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
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopdropout_trainer.data import SFTDataArguments
from loopdropout_trainer.errors import UserError, closest_match, join_command, run_script
from loopdropout_trainer.files import explain_unwritable
from loopdropout_trainer.jobs.runs import TRAINING_TYPES
from loopdropout_trainer.own_code import IMPORTED
from loopdropout_trainer.results.recipe_changes import MEASURED, UNCOMPARED, compare_recipes
from loopdropout_trainer.results.run_files import DEVELOPMENT, is_finished, write_run
from loopdropout_trainer.results.run_states import is_measured
from loopdropout_trainer.results.sweep_folder import SweepRun, describe_interruption, update_summary
from loopdropout_trainer.results.sweep_processes import working_on_sweep
from loopdropout_trainer.results.sweep_scores import NON_FINITE, find_accuracy, name_score, read_score
from loopdropout_trainer.settings.arguments import ModelArguments, option
from loopdropout_trainer.settings.command_fields import TRAININGS
from loopdropout_trainer.settings.field_hints import InnerFields
from loopdropout_trainer.settings.library_fields import SEED_BOUNDS, unsafe_names
from loopdropout_trainer.settings.recipe import dump_recipe, load_recipe, parse, without_option
from loopdropout_trainer.settings.recipe_folders import SETTINGS_FILE, has_started
from loopdropout_trainer.sweeps.changed_problems import is_outdated
from loopdropout_trainer.sweeps.choice import Choice, choose_rate
from loopdropout_trainer.sweeps.code import (
    PresentCode,
    accept_other_results,
    describe_failures,
    describe_fix,
    describe_other_results,
    find_kept_choices,
    find_uncounted_code,
    has_other_results,
    name_other_results,
)
from loopdropout_trainer.sweeps.counts import count_by_method, describe_uncounted, list_logs, read_progress
from loopdropout_trainer.sweeps.methods import SET_BY_SWEEP, check_fields, has_benchmarks, make_recipes, read_methods
from loopdropout_trainer.sweeps.plan import check_folder, print_commands, print_sweep_plan
from loopdropout_trainer.sweeps.run_times import RunKind, count_left, describe_left, find_kind, means_by_method
from loopdropout_trainer.sweeps.stopping import stopping_on_signals
from loopdropout_trainer.sweeps.workers import Workers
from loopdropout_trainer.terminal import print_sentences


_TRAINING_FIELDS = {
    name for cls in (*TRAINING_TYPES, ModelArguments, SFTDataArguments) for name in cls.__dataclass_fields__
} - SET_BY_SWEEP


@dataclass
class Sweep:
    """A sweep, whose state is in its folder.

    Raises:
        UserError: if a method or a field does not exist.
    """

    inner_fields = {
        "measure": InnerFields(MEASURED | {"benchmark_batch_size"}, "the evaluation"),
        "settings": InnerFields(_TRAINING_FIELDS, "trainings"),
    }

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
    accept_changed_imports: bool = option(
        False,
        "Count the results of finished runs also if files of `--import` have changed since. Their `run.json` says so.",
    )
    print_commands: bool = option(False, "Print the commands of the runs that can start, and stop.")
    dry_run: bool = option(False, "Print the trainings, their folder and evaluation, and stop.")

    def __post_init__(self):
        if not self.script_file.is_file():
            choices = f"{', '.join(TRAININGS[:-1])} or {TRAININGS[-1]}"
            raise UserError(f"`script` must be {choices}, got {self.script!r}.{closest_match(self.script, TRAININGS)}")
        methods = read_methods(self.methods)
        for field, choices in (("rate_factors", methods), ("measure", self.inner_fields["measure"].names)):
            for name in getattr(self, field):
                if name not in choices:
                    hint = closest_match(name, choices) or f" It takes {', '.join(sorted(choices))}."
                    raise UserError(f"`{field}` has no {name!r}.{hint}")
        check_fields(self, methods)
        for field, example in (("learning_rates", "1e-4 3e-4"), ("seeds", "101 102 103")):
            if not getattr(self, field):
                raise UserError(f"`{field}` must have at least one value, such as `--{field} {example}`.")
        self.full_grid = self.full_grid or len(self.learning_rates) == 1
        self.loss_chooses_by_default = self.select_on is None and not has_benchmarks(self, methods)
        if self.select_on is None:
            self.select_on = "eval_loss" if self.loss_chooses_by_default else DEVELOPMENT
        self.recipes = make_recipes(self, methods)
        # Both are kept with the digests of `--import` that they hold for, because a file can change during the sweep.
        self.scores: dict[str, tuple[dict[str, str], tuple[float, float]]] = {}  # by name of a run
        self.done: dict[SweepRun, dict[str, str]] = {}
        self.remarks: dict[tuple, str] = {}  # about the choice of a learning rate, by method and scores
        self.code = PresentCode()
        self.pool = Workers(self, self.workers)
        self.command_line = ""  # with which the user continues the sweep

    @property
    def script_file(self) -> Path:
        """File of the training script. `script` can also be the path of another script, without its ending."""
        return Path(__file__).parent / f"{self.script}.py"

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

    def choice(self, method: str, with_other_code: bool = False) -> Choice:
        """Return the choice of the learning rate of a method, as `choose_rate` does."""
        return choose_rate(self, method, with_other_code)

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
        """Return the runs that have a learning rate and can be trained or measured now, in the order of their seeds."""
        runs = [run for method in self.recipes for run in self.pending_of(method)]
        ready = [run for run in runs if not has_other_results(self, self.folder(run))]
        return sorted(ready, key=lambda run: self.seeds.index(run.seed))

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
        trainings = count_by_method(self).values()
        return sum(ended for ended, _ in trainings), sum(total for _, total in trainings)

    def describe_uncounted(self) -> str:
        """Return words about the trainings that `count` leaves out because of other imported code, or ""."""
        return describe_uncounted(self)

    def kind(self, run: SweepRun) -> RunKind:
        """Return the method and the kind of a run that is not done, which decide its time."""
        return find_kind(self, run)

    def count_done(self) -> int:
        """Return the number of runs that are done. The chosen run of the first seed counts twice: it is measured later."""
        return sum(self.is_done(run) for method in self.recipes for run in self.runs(method))

    def count_left(self) -> dict[RunKind, int]:
        """Return the number of runs of each method and kind that this start of the sweep still has."""
        return count_left(self)

    def describe_left(self, speed: float) -> str:
        """Return the time that is left with a number of runs at a time, or "" if nothing is left."""
        return describe_left(self, speed)

    def describe_score(self, run: SweepRun) -> str:
        """Return the score that chooses the learning rate, or the first accuracy of a final run, or its held-out loss."""
        accuracy = None if run.selects else find_accuracy(self.folder(run), self.select_on)
        return accuracy or name_score(self.score(run), self.select_on, self.folder(run))

    # The state of a run, from its folder

    def score(self, run: SweepRun) -> tuple[float, float] | None:
        """Return the score that chooses the learning rate and the negative held-out loss, or None before the run."""
        imports = self.code.digests()
        known = self.scores.get(run.name)
        if known is not None and known[0] == imports:
            return known[1]
        score = self.read_any_score(run)
        # The code of the run is read last, because every worker asks each second for the runs that are trained.
        if score is None or is_outdated(self, run):
            return None
        self.scores[run.name] = (imports, score)
        return score

    def read_any_score(self, run: SweepRun) -> tuple[float, float] | None:
        """Return the score of a run of any code. A loss on another number of batches does not count, as before the run."""
        num_batches = self.recipes[run.method].selecting.get("single_loop_batches")
        return read_score(self.folder(run), self.select_on, num_batches)

    def is_done(self, run: SweepRun) -> bool:
        """Return whether a run has finished with its settings, or need not finish.

        It need not if it only serves the choice and has its score, or if its loss is not finite. `Run.is_complete` of a
        training script is stricter: a run with a damaged adapter is not complete. The sweep still has its results. A run that
        was trained with other imported code, or measured on other problems of an own benchmark, is not done.

        Raises:
            UserError: if the run in the folder has other training settings.
        """
        imports = self.code.digests()
        if self.done.get(run) == imports:
            return True
        folder = self.folder(run)
        path = folder / SETTINGS_FILE
        if not path.exists() or not has_started(folder):
            return False
        saved, new = load_recipe(path), self.run_settings(run)
        if difference := compare_recipes(saved, new, UNCOMPARED | MEASURED):
            raise UserError(f"{folder}: {difference}. Restore the setting, or set another `output_dir`.")
        score = self.score(run)
        has_score = run.selects and score is not None
        has_results = is_measured(folder, saved, new) or has_score or score == NON_FINITE
        is_done = has_results and not is_outdated(self, run)
        if is_done:
            self.done[run] = imports
        return is_done

    # Training

    def train_all(self) -> None:
        """Train all runs that are not done, several at a time. The others go on if a run fails (`check_failures`).

        Raises:
            UserError: If two runs in a row fail with the same message.
        """
        self.save_progress()
        other_results = describe_other_results(self)
        if other_results:
            print_sentences(f"The sweep trains the other runs. {other_results}")
        self.pool.train_all()

    def save_progress(self) -> None:
        """Write the chosen learning rates, the number of trainings, and which finished, failed or wait, to `summary.json`.

        Also the mean seconds of a run of each kind.
        """
        choices = {} if self.full_grid else {method: self.choice(method)._asdict() for method in self.recipes}
        choices |= find_kept_choices(self)
        grid, task = dict.fromkeys(self.recipes, self.full_grid), dict.fromkeys(self.recipes, self.select_on)
        update_summary(
            self.output_dir,
            methods=[*self.recipes],
            choices=choices,
            select_on=task,
            full_grid=grid,
            **read_progress(self),
            other_code=name_other_results(self),
            run_seconds=means_by_method(self),
        )

    def describe_fix(self) -> str:
        """Return how the sweep goes on after a failure."""
        return describe_fix(self)

    def check_failures(self) -> None:
        """Print the runs that have failed. Their errors were printed when they ended.

        Raises:
            UserError: If there are any, or runs with results of other imported code.
        """
        failures, other_results = self.pool.failures, describe_other_results(self)
        if failures:
            print_sentences(*list_logs(failures, self.folder, other_results))
            raise UserError(describe_failures(self))
        if other_results:
            raise UserError(other_results)

    def command(self, run: SweepRun) -> list[str]:
        """Write the recipe of a run, let a finished one be measured again, and return its command."""
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        settings = self.run_settings(run)
        if find_uncounted_code(self, folder) is not None:
            settings["resume_from_checkpoint"] = "false"  # its checkpoints are of the former code
        if is_finished(folder):  # before its new recipe is there, by which a finished run counts as measured
            write_run(folder, status="trained")
        dump_recipe(settings, folder / SETTINGS_FILE)
        launcher = shlex.split(self.launcher) or [sys.executable]
        imports = ["--import", *IMPORTED] if IMPORTED else []
        # Settings that can run code must not come from a recipe. The user gave them to the sweep.
        unsafe = []
        for name, value in self.run_settings(run).items():
            if unsafe_names({name: value}):
                text = value if isinstance(value, str) else json.dumps(value)
                unsafe.append(f"--{name}={text}")
        words = [str(self.script_file), str(folder / SETTINGS_FILE), "--output_dir", str(folder)]
        return [*launcher, *words, *unsafe, *imports]


ARGUMENTS = (Sweep,)


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    (sweep,) = parse(ARGUMENTS, words, __doc__)
    sweep.command_line = join_command("sweep", *without_option(words, "dry_run"))
    if sweep.dry_run:
        print_sweep_plan(sweep, sweep.command_line)
        return
    check_folder(sweep)
    if sweep.accept_changed_imports:
        accepted = accept_other_results(sweep)
        # The standard output of `print_commands` has commands only.
        print_sentences(accepted, file=sys.stderr if sweep.print_commands else None)
    if sweep.print_commands:
        print_commands(sweep)
        sweep.check_failures()
    else:
        from loopdropout_trainer.sweeps.summary import print_summary

        with stopping_on_signals():
            try:
                if sweep.pending():
                    print_sweep_plan(sweep)  # a mistake in the data, which would stop each run, is an error here
                    print(flush=True)
                with (
                    explain_unwritable(
                        sweep.output_dir, "Free space there. The same command then continues the sweep."
                    ),
                    working_on_sweep(sweep.output_dir, sweep.recipes, sweep.workers),
                ):
                    sweep.train_all()
                    print_summary(sweep)
                sweep.check_failures()
            except KeyboardInterrupt as error:
                stopping = [run.name for run in [*sweep.pool.processes]]
                error.args = (describe_interruption(sweep.output_dir, sweep.recipes, stopping),)
                raise


if __name__ == "__main__":
    run_script(main)
