"""The plan that a sweep prints: its trainings, what they cost as far as it is known, and what is measured."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from loopdropout_trainer.costs.evaluations import HOW_TO_TIME, add_answers, count_answers
from loopdropout_trainer.costs.paper import describe_paper_costs
from loopdropout_trainer.costs.trainings import Training, describe_costs, find_obstacle
from loopdropout_trainer.errors import UserError, count, join_command
from loopdropout_trainer.files import find_unwritable
from loopdropout_trainer.jobs.checks import check_measurements
from loopdropout_trainer.jobs.plan import (
    describe_early_stop,
    describe_length,
    describe_measurements,
    describe_model,
    describe_step,
)
from loopdropout_trainer.jobs.plan_settings import describe_depths, describe_other_settings, describe_rule_fields
from loopdropout_trainer.jobs.starts import describe_gates, make_training, read_start
from loopdropout_trainer.jobs.training_data import (
    CONFIGS,
    NotLoaded,
    TrainingExamples,
    are_all_loaded,
    count_sweep_examples,
    describe_sweep_examples,
    load_sweep_examples,
)
from loopdropout_trainer.results.run_files import is_of_training, read_own_results
from loopdropout_trainer.results.sweep_folder import ACCEPT
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, SFTArguments
from loopdropout_trainer.settings.recipe import build_part
from loopdropout_trainer.sweeps.changed_problems import describe_changed_problems
from loopdropout_trainer.sweeps.choice_plan import by_method, describe_choice_plan
from loopdropout_trainer.sweeps.code import (
    can_accept_other_results,
    describe_other_results,
    describe_planned_acceptance,
)
from loopdropout_trainer.sweeps.counts import (
    count_unmeasured,
    describe_earlier_failures,
    describe_existing_runs,
    describe_other_runs,
    describe_uncounted,
)
from loopdropout_trainer.sweeps.joining import count_workers, describe_joining, describe_work, find_running
from loopdropout_trainer.sweeps.methods import naming_method
from loopdropout_trainer.sweeps.run_times import describe_left, describe_means, find_means, name_time
from loopdropout_trainer.terminal import print_sentences, titled
from loopdropout_trainer.training.config import LoopDropoutConfig


def print_sweep_plan(sweep: Any, command: str | None = None) -> None:
    """Print the trainings, their folder, their cost as far as it is known, and the command that starts the sweep.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        command: Command line of the sweep. None: it has started, so that no next command is printed. If another process, such
            as another task of an array, works on it already, it has printed the plan, so that one line is enough.

    Raises:
        UserError: If there is a mistake in the data or in a recipe.
    """
    plan = describe_sweep_plan(sweep, _load_examples(sweep))
    running = find_running(sweep)
    joining = describe_joining(sweep, running) if command is None else ""
    if joining:
        print_sentences(joining)
        return
    plan["running"] = describe_work(sweep, running)
    if command is not None:  # else the sweep prints it before its first training
        other_code = [describe_planned_acceptance(sweep), describe_other_results(sweep)]
        plan["failed"] = describe_earlier_failures(sweep)
        plan["other code"] = "\n".join(filter(None, other_code))
    print(plan.pop("trainings"))
    for title, text in plan.items():
        if text:
            print(titled(title, text.splitlines(), width=16))
    if command is not None:
        print(f"\nNext:\n  {_complete_command(sweep, command)}")
        print(f"  {join_command('report', sweep.output_dir)}   # after the sweep")
        check_folder(sweep)


def check_folder(sweep: Any) -> None:
    """Raise UserError if the folder of a sweep cannot be written. A dry run ends with it, and a sweep begins with it."""
    conflict = find_unwritable(sweep.output_dir)
    if conflict is not None:
        raise UserError(conflict)


def _complete_command(sweep: Any, command: str) -> str:
    """Return the command of a sweep with the option that lets it finish, if there are results of other imported code."""
    if sweep.accept_changed_imports or not can_accept_other_results(sweep):
        return command
    return f"{command} {ACCEPT}   # if the change of the code does not concern the results"


def _load_examples(sweep: Any) -> dict[str, TrainingExamples | NotLoaded]:
    """Return the examples of each method of a sweep, or nothing for another script, whose examples are not known.

    Raises:
        UserError: If there is a mistake in the data, or in the tasks of a run, which are checked first because it is faster.
    """
    _check_measurements(sweep)
    return load_sweep_examples(sweep) if sweep.script in CONFIGS else {}


def describe_sweep_plan(sweep: Any, examples: Mapping[str, TrainingExamples | NotLoaded]) -> dict[str, str]:
    """Return the texts of the plan of a sweep by their titles, "" for titles that are left out.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        examples: From `_load_examples`.

    Raises:
        UserError: If there is a mistake in a recipe.
    """
    trainings = count_sweep_examples(examples, _read_trainings(sweep))  # with the numbers of the loaded examples
    models, sizes = {}, {}
    for method, training in trainings.items():
        models[method] = describe_model(training.model, training.depth)
        sizes[method] = _describe_size(sweep, training)
    example_lines = {}
    if examples:
        for title, texts in describe_sweep_examples(examples, trainings).items():
            example_lines[title] = by_method(texts)
    costs = _describe_costs(sweep, trainings)
    measured = _describe_measured_time(sweep)
    is_computed = find_obstacle([*trainings.values()]) is None
    if measured and not is_computed:  # the line would only say how to measure the time
        costs["time"] = ""
    num_ended, total = sweep.count()
    return {
        "trainings": count(total, "training"),
        "model": by_method(models),
        "methods": ", ".join(sweep.recipes),
        "rules": by_method({method: _describe_rule(method, training) for method, training in trainings.items()}),
        "learning rates": by_method({method: _describe_rates(sweep, method) for method in sweep.recipes}),
        "seeds": _describe_seeds(sweep),
        "folder": f"{sweep.output_dir}/METHOD/lr_X/seed_S",
        "each training": by_method(sizes),
        "depth": _describe_by_method(sweep, trainings, describe_depths),
        "settings": _describe_by_method(sweep, trainings, describe_other_settings),
        "gates": _describe_by_method(sweep, trainings, describe_gates),
        **example_lines,
        **costs,
        "choice": describe_choice_plan(sweep, examples, trainings),
        "evaluation": by_method(_describe_evaluations(sweep)),
        "answers": _describe_answers(sweep, trainings, is_timed=bool(measured)),
        "measured again": describe_changed_problems(sweep),
        "existing runs": describe_existing_runs(sweep),
        "also there": describe_other_runs(sweep),
        "done": _describe_done(sweep, num_ended, total, measured),
    }


def _describe_by_method(sweep: Any, trainings: Mapping[str, Training], describe: Callable[[Training], str]) -> str:
    """Return the text of a function about the training of each method. Errors of the user's rules name the method."""
    texts = {}
    for method, training in trainings.items():
        with naming_method(sweep, method):
            texts[method] = describe(training)
    return by_method(texts)


def _describe_done(sweep: Any, num_ended: int, total: int, measured: str) -> str:
    """Return the number of trainings that have ended, with the time that is left and was measured.

    It is "" in a new folder. In a used one, the time of runs with other learning rates or seeds is known from the beginning.
    """
    if not num_ended and not measured:
        return ""
    parts = [f"{num_ended} of {count(total, 'training')}", describe_uncounted(sweep)]
    num_unmeasured = count_unmeasured(sweep)
    if num_unmeasured:
        parts.append(f"{num_unmeasured:,} of them still to be measured")
    parts.append(describe_left(sweep, count_workers(sweep)))
    return f"{', '.join(filter(None, parts))}\n{measured}".rstrip()


def print_commands(sweep: Any) -> None:
    """Print the command of each run that can start, and on stderr the runs that other processes train.

    Raises:
        UserError: If there is a mistake in the data or in a recipe, which would stop each run. A sweep checks the same.
    """
    pending = sweep.pending()
    if pending:
        _check_trainings(sweep)
    running = find_running(sweep)
    for run in pending:
        if run.name not in running:
            print(shlex.join(sweep.command(run)))
    if running:
        print(
            f"{count(len(running), 'run')} without a command, being trained now: {', '.join(running)}", file=sys.stderr
        )


def _check_trainings(sweep: Any) -> None:
    """Check the data and the fields of all trainings, as a sweep's plan does. Print warnings and unchecked data on stderr."""
    examples = _load_examples(sweep)
    plan = describe_sweep_plan(sweep, examples)
    if plan["gates"]:
        print(titled("gates", plan["gates"].splitlines()), file=sys.stderr)
    if not are_all_loaded(examples):
        print(titled("examples", plan["examples"].splitlines()), file=sys.stderr)


def _describe_rates(sweep: Any, method: str) -> str:
    """Return the learning rates of a method, with its factor and what is known of an extended grid."""
    text = ", ".join(f"{rate:g}" for rate in sweep.choice(method).rates)
    if not sweep.extend_grid:
        return text
    if sweep.full_grid:
        return f"{text} (`extend_grid` adds none, because no learning rate is chosen)"
    return f"{text} (and more at the edge of the grid)"


def _describe_seeds(sweep: Any) -> str:
    """Return the seeds, the learning rates that each one is trained with, and what two seeds cannot show."""
    text = _describe_order(sweep)
    if len(sweep.seeds) == 2:
        text += "\ntwo seeds: a 95% interval reaches 12.7 standard errors to each side, with three 4.3, with five 2.8"
    return text


def _describe_order(sweep: Any) -> str:
    """Return the seeds with the learning rates that each one is trained with."""
    first, *others = sweep.seeds
    seeds = ", ".join(map(str, sweep.seeds))
    if len(sweep.learning_rates) == 1:
        return seeds
    if sweep.full_grid:
        return f"{seeds}, each with every learning rate" if others else f"{first}, with every learning rate"
    if not others:
        return f"{first}, with every learning rate. The one that is best on {sweep.select_on} is then measured"
    later = ", ".join(map(str, others))
    return f"{first} with every learning rate, then {later} with the one that is best on {sweep.select_on}"


def _describe_rule(method: str, training: Training) -> str:
    """Return the rule of a method with its fields, or "" if the name of the method is that of a rule without fields."""
    rule = training.args.make_rule()
    text = f"{rule.name}{describe_rule_fields(rule)}"
    return "" if text == method else text


def _describe_size(sweep: Any, training: Training) -> str:
    """Return the length of a method's trainings and the examples of a step, which are those of a process of a launcher."""
    length = describe_length(training.args, training.recipe.get("num_train_examples"))
    size = f"{length}, {describe_step(training.args, training.num_rows)}"
    if sweep.launcher:
        size += " and process"
    return ", ".join([size, *describe_early_stop(training.args)])


def _describe_costs(sweep: Any, trainings: Mapping[str, Training]) -> dict[str, str]:
    """Return the lines about the costs of the trainings by method, which a single training's plan has too.

    The number of processes of a launcher and the length of an extended grid are not known.
    """
    numbers = [(training, sweep.num_trainings(method)) for method, training in trainings.items()]
    whose = " in all trainings"
    if sweep.extend_grid and not sweep.full_grid:
        whose = " in these trainings, without those of further learning rates"
    if sweep.launcher:
        return {**describe_costs(numbers, f"{whose}, for each process"), "paper": ""}
    return {**describe_costs(numbers, whose), "paper": describe_paper_costs(numbers)}


def _read_trainings(sweep: Any) -> dict[str, Training]:
    """Return what the cost of each method's training depends on, by method. Methods with one model and adapter read it once.

    Raises:
        UserError: If a field of a recipe has a wrong value.
    """
    trainings, starts = {}, {}
    kinds = (ModelArguments, AdapterArguments, CONFIGS.get(sweep.script, LoopDropoutConfig))
    for method, recipes in sweep.recipes.items():
        recipe = {**recipes.selecting, "output_dir": sweep.output_dir}
        # `num_threads` would set the threads of the sweep itself.
        with naming_method(sweep, method):
            model, adapter, args = build_part(kinds, {**recipe, "num_threads": None})
            key = repr((model, adapter))
            if key not in starts:
                starts[key] = read_start(model, adapter)
            trainings[method] = make_training(args, recipe, starts[key])
    return trainings


def _describe_measured_time(sweep: Any) -> str:
    """Return the mean time of the runs that have ended, or "" if none has.

    A sweep measures its own runs. A scheduler may run the commands of `print_commands` instead. Then only the time of the
    trainings is known.
    """
    means = find_means(sweep)
    if means:
        return describe_means(means)
    train_seconds = _read_train_seconds(sweep)
    if not train_seconds:
        return ""
    mean = sum(train_seconds) / len(train_seconds)
    return f"measured: {name_time(mean)} on average for a training without its start and evaluation"


def _read_train_seconds(sweep: Any) -> list[float]:
    """Return the seconds of each training that has ended, from the results in its folder."""
    folders = set()
    for method in sweep.recipes:
        folders.update(sweep.folder(run) for run in sweep.runs(method) if sweep.is_done(run))
    seconds = []
    for folder in folders:
        for row in read_own_results(folder):
            if is_of_training(row) and row["metric"] == "train_seconds":
                seconds.append(row["value"])
    return seconds


def _describe_evaluations(sweep: Any) -> dict[str, str]:
    """Return the measurements of the final runs of each method, in plain words."""
    measurements = {method: _list_measurements(sweep, method) for method in sweep.recipes}
    all_steps = [*measurements.values()]
    texts = {}
    for method, steps in measurements.items():
        if not steps:
            texts[method] = "none"
            continue
        runs = count(_count_final_runs(sweep, method), "final run")
        is_shared = all_steps.count(steps) > 1
        if is_shared or len(all_steps) == 1:  # else the text has the name of its only method
            runs += " of each method"
        texts[method] = "\n  ".join([f"{runs}:", *steps])
    return texts


def _describe_answers(sweep: Any, trainings: Mapping[str, Training], is_timed: bool) -> str:
    """Return the lines about the problems and the generated tokens of all evaluations, or "" without any.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        trainings: Training of each method.
        is_timed: Whether another line has the time with evaluations.
    """
    parts = []
    for method, training in trainings.items():
        recipes, num_final = sweep.recipes[method], _count_final_runs(sweep, method)
        of_final = count_answers(_read_options(recipes.final), recipes.final, training.depth)
        parts.append(of_final.times(num_final))
        if not sweep.full_grid:
            of_selecting = count_answers(_read_options(recipes.selecting), recipes.selecting, training.depth)
            parts.append(of_selecting.times(len(sweep.choice(method).rates)))
    is_extended = sweep.extend_grid and not sweep.full_grid
    text = add_answers(parts).describe(", without further learning rates" if is_extended else "")
    if text and not is_timed:
        text += f"\n{HOW_TO_TIME}"
    return text


def _count_final_runs(sweep: Any, method: str) -> int:
    return sweep.num_trainings(method) if sweep.full_grid else len(sweep.seeds)


def _read_options(recipe: Mapping[str, Any]) -> SFTArguments:
    """Return the steps after the trainings of a recipe, of which a plan reads the measurements."""
    (options,) = build_part((SFTArguments,), recipe)
    return options


def _check_measurements(sweep: Any) -> None:
    """Raise UserError for a measurement that a run of a sweep would refuse after others have been trained."""
    checked = set()
    for method, recipes in sweep.recipes.items():
        runs = [recipes.final]
        if not sweep.full_grid:
            runs.append(recipes.selecting)
        for recipe in runs:
            with naming_method(sweep, method):
                options = _read_options(recipe)
            data = [recipe.get(name) for name in ("preparation", "num_eval_examples", "eval_files", "rule")]
            key = repr((options, data))
            if key not in checked:  # own benchmarks read their files
                checked.add(key)
                check_measurements(options, recipe)


def _list_measurements(sweep: Any, method: str) -> list[str]:
    """Return the measurements of a final run of a method, in plain words."""
    return describe_measurements(_read_options(sweep.recipes[method].final))
