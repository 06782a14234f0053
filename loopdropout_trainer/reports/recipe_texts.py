"""The settings of the package's recipes and sweeps, which tables of the paper's settings show."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from loopdropout_trainer.errors import UserError, closest_match, short_repr
from loopdropout_trainer.files import recipe_names
from loopdropout_trainer.settings.command_fields import find_command_fields, find_default
from loopdropout_trainer.settings.recipe import load_recipe


@cache
def describe_recipe(name: str, num_fitting_examples: int | None = None) -> dict[str, Any]:
    """Return the settings of a recipe, `batch`, `steps`, and the `seeds`, `learning_rates` and `benchmarks` of its sweeps.

    The steps count the examples that fit into `max_length`, if their number is given, because the others are left out.
    """
    recipe = load_recipe(name)
    for field in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"):
        if field not in recipe:
            recipe[field] = find_default(find_command_fields("sft"), field)
    batch = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    num_examples = num_fitting_examples or recipe.get("num_train_examples")
    steps = recipe.get("max_steps", -1)
    if steps < 0 and num_examples:
        steps = recipe["num_train_epochs"] * math.ceil(num_examples / batch)
    values: dict[str, set] = {"learning_rates": set(), "seeds": set(), "benchmarks": set()}
    for sweep in measuring_sweeps():
        if sweep.get("recipe") == name:
            settings = {**sweep, **sweep["measure"]}
            for field, used in values.items():
                used.update(settings[field])
    texts = {field: ", ".join(map(str, sorted(used))) for field, used in values.items()}
    if steps > 0:  # else only the data tell them
        recipe["steps"] = steps
    return {**recipe, "batch": batch, **texts}


@cache
def measuring_sweeps() -> list[dict[str, Any]]:
    """Return the sweeps of the package that measure their final runs. It reads all recipes, which takes a second."""
    return [recipe for recipe in map(load_recipe, recipe_names()) if "measure" in recipe]


def is_benchmark(task: Any) -> bool:
    """Return whether a sweep of the package measures a task."""
    return any(task in sweep["measure"].get("benchmarks", ()) for sweep in measuring_sweeps())


def show_setting(recipe: str, show: str, num_fitting_examples: int | None) -> str:
    """Return a value of `describe_recipe` as a text. Raise UserError if it has none of this name."""
    settings = describe_recipe(recipe, num_fitting_examples)
    if show not in settings:
        raise UserError(
            f"`show` must be a setting of {recipe}, got {short_repr(show)}.{closest_match(show, settings)}"
        )
    return str(settings[show])
