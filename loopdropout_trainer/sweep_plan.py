"""The plan that a sweep prints: its trainings, what they cost as far as it is known, and what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from loopdropout_trainer.arguments import SFTArguments
from loopdropout_trainer.errors import count
from loopdropout_trainer.plan import describe_measurements
from loopdropout_trainer.recipe import build


def print_sweep_plan(sweep: Any, command: str) -> None:
    """Print the trainings, their folder, their cost as far as it is known, and the command that starts the sweep.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        command: Command line of the sweep.
    """
    rates = ", ".join(f"{rate:g}" for rate in sorted(sweep.learning_rates))
    seeds = ", ".join(map(str, sweep.seeds))
    way = f"{seeds}, each with every learning rate"
    if not sweep.full_grid:
        way = f"{sweep.seeds[0]} with every learning rate, and {seeds} with the one that is best on {sweep.select_on}"
    num_ended, total = sweep.count()
    plan = {
        "methods": ", ".join(sweep.recipes),
        "learning rates": f"{rates}{' (and more at the edge of the grid)' if sweep.extend_grid else ''}",
        "seeds": way,
        "folder": f"{sweep.output_dir}/METHOD/lr_X/seed_S",
        "each training": _by_method(sweep, _describe_size),
        "tokens": _describe_tokens(sweep),
        "choice": _describe_choice(sweep),
        "evaluation": _by_method(sweep, _describe_evaluation),
        "done": f"{num_ended} of {count(total, 'training')}" if num_ended else "",
    }
    print(count(total, "training"))
    for title, text in plan.items():
        lines = text.replace("\n", "\n" + " " * 16)
        if text:
            print(f"{title:<16}{lines}")
    print(f"\nNext:\n  {command}\n  loopdropout report {sweep.output_dir}   # after the sweep")


def _by_method(sweep: Any, describe: Callable[[Any, str], str]) -> str:
    """Return the text about a method, once if it is the same for all methods, else under the name of each method."""
    texts = {method: describe(sweep, method) for method in sweep.recipes}
    if len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    return "\n".join(f"{method}: {text}" for method, text in texts.items())


def _describe_size(sweep: Any, method: str) -> str:
    """Return the steps and the examples of a step of a method's trainings, which are those of a process of a launcher."""
    size = _describe_training_size(sweep.recipes[method].selecting)
    return f"{size} and process" if sweep.launcher else size


def _describe_tokens(sweep: Any) -> str:
    """Return the largest number of tokens of the trainings, if the recipes say it before the data are loaded.

    The number of processes of a launcher and the length of an extended grid are not known.
    """
    if sweep.script in ("dpo", "grpo"):  # whose examples have several completions
        return ""
    bounds = {method: _bound_tokens(recipes.selecting) for method, recipes in sweep.recipes.items()}
    if None in bounds.values():
        return "known after the data are loaded"
    total = sum(bound * sweep.num_trainings(method) for method, bound in bounds.items())
    is_extended = sweep.extend_grid and not sweep.full_grid
    trainings = "these trainings, without those of further learning rates" if is_extended else "all trainings"
    return f"at most {total:,} in {trainings}{', for each process' if sweep.launcher else ''}"


def _describe_choice(sweep: Any) -> str:
    """Return the measurements that choose the learning rates."""
    if sweep.full_grid:
        return ""
    num_runs = sum(len(sweep.choice(method).rates) for method in sweep.recipes)
    if sweep.select_on == "eval_loss":
        return f"held-out losses of {count(num_runs, 'run')}"
    return f"{count(num_runs, 'evaluation')} of {sweep.select_on}"


def _describe_evaluation(sweep: Any, method: str) -> str:
    """Return the measurements of the final runs of a method, in plain words."""
    steps = _list_measurements(sweep, method)
    if not steps:
        return "none"
    num_runs = len(sweep.seeds)
    if sweep.full_grid:
        num_runs = sweep.num_trainings(method)
    is_shared = all(_list_measurements(sweep, other) == steps for other in sweep.recipes)
    whose = " of each method" if is_shared else ""
    return "\n".join([f"{count(num_runs, 'final run')}{whose}:", *steps])


def _list_measurements(sweep: Any, method: str) -> list[str]:
    """Return the measurements of a final run of a method, in plain words."""
    recipe = dict(sweep.recipes[method].final)
    for name in ("benchmarks", "eval_num_loops"):
        if isinstance(recipe.get(name), str | int):  # a list of one value
            recipe[name] = [recipe[name]]
    (options,) = build((SFTArguments,), {**recipe, "merge": False})
    return describe_measurements(options)


def _bound_steps(recipe: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the largest number of steps of a recipe's training in one process, if it is known, and the examples of a step."""
    from loopdropout_trainer.training.config import LoopDropoutConfig

    defaults = LoopDropoutConfig.__dataclass_fields__
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs")
    batch, accumulation, max_steps, num_epochs = (recipe.get(name) or defaults[name].default for name in names)
    per_step, num_examples = batch * accumulation, recipe.get("num_train_examples")
    if max_steps > 0:
        return max_steps, per_step
    if not num_examples:
        return None, per_step
    return math.ceil(num_epochs * math.ceil(num_examples / per_step)), per_step


def _describe_training_size(recipe: Mapping[str, Any]) -> str:
    """Return the largest number of steps of a recipe's training, as far as it is known, and the examples of a step."""
    num_steps, per_step = _bound_steps(recipe)
    if num_steps is None:
        num_epochs = recipe.get("num_train_epochs")
        length = "the default number of epochs" if num_epochs is None else f"{num_epochs:g} epochs"
    else:
        length = count(num_steps, "step")
        if (recipe.get("max_steps") or 0) <= 0:  # long examples are left out, so there can be fewer
            length = f"at most {length}"
    return f"{length}, {count(per_step, 'example')} per step"


def _bound_tokens(recipe: Mapping[str, Any]) -> int | None:
    """Return the largest number of tokens that a supervised training reads, or None if it is not known before."""
    from loopdropout_trainer.training.config import LoopDropoutConfig

    num_steps, per_step = _bound_steps(recipe)
    max_length = recipe.get("max_length", LoopDropoutConfig.max_length)
    if num_steps is None or not max_length:
        return None
    return num_steps * per_step * max_length
