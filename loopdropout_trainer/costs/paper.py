"""The minutes and the memory that the paper's authors measured for its recipes, next to the computed bounds of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from loopdropout_trainer.costs.published import PAPER_COSTS, PaperCost
from loopdropout_trainer.costs.trainings import Training, estimate_training_memory, name_range
from loopdropout_trainer.errors import count
from loopdropout_trainer.files import recipes_folder
from loopdropout_trainer.results.recipe_changes import MEASURED, UNCOMPARED, compare_recipes
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, names_of
from loopdropout_trainer.settings.recipe import load_recipe, read_part
from loopdropout_trainer.training.config import LoopDropoutConfig


WITHOUT_COST = UNCOMPARED | MEASURED | names_of("repetition", "monitoring") | {"learning_rate"}
"""Fields in which a training may differ from the paper's recipe and still take as long and as much memory."""

_FIELDS_WITH_COST = (ModelArguments, AdapterArguments, LoopDropoutConfig)


def find_paper_cost(recipe: Mapping[str, Any]) -> PaperCost | None:
    """Return the cost that the paper has for a training with the settings of a recipe, or None."""
    read = _read_fields(recipe)
    for name, cost in PAPER_COSTS.items():
        if compare_recipes(_load_own_recipe(name), read, WITHOUT_COST) is None:
            return cost
    return None


def _read_fields(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe whose fields have the values that a training reads. A sweep has recipes as they are written."""
    return {**recipe, **read_part(_FIELDS_WITH_COST, recipe)}


@cache
def _load_own_recipe(name: str) -> dict[str, Any]:
    """Return a recipe of the package, also if the working folder has a file of this name, once for all methods of a sweep."""
    return _read_fields(load_recipe(recipes_folder() / name))


def describe_paper_costs(trainings: Sequence[tuple[Training, int]]) -> str:
    """Return the lines of a plan about the costs that the paper has for these trainings, or "" without any.

    Args:
        trainings: Kinds of trainings, and the number of trainings of each kind.
    """
    if any(training.args.world_size > 1 for training, _ in trainings):
        return ""  # the recipes are for one GPU
    found = []
    for training, number in trainings:
        if not training.is_supervised:  # as all recipes of `PAPER_COSTS` are
            continue
        cost = find_paper_cost(training.recipe)
        if cost is not None:
            found.append((training, cost, number))
    if not found:
        return ""
    first_training, first_cost, _ = found[0]
    known = [(cost, number) for _, cost, number in found if cost.place == first_cost.place]  # others cannot be added
    costs = [cost for cost, _ in known]
    shortest, longest = min(cost.shortest for cost in costs), max(cost.longest for cost in costs)
    text = f"{name_range([f'{shortest:g}', f'{longest:g}'])} minutes"
    num_known = sum(number for _, number in known)
    num_all = sum(number for _, number in trainings)
    if num_all > 1:
        low = sum(cost.shortest * number for cost, number in known)
        high = sum(cost.longest * number for cost, number in known)
        whose = f"{num_known} of the {num_all} trainings"
        if num_known == num_all:
            whose = count(num_all, "training")
        text = f"{name_range([f'{low / 60:.3g}', f'{high / 60:.3g}'])} hours in {whose}: {text} each"
    sizes = sorted(cost.gigabytes for cost in costs if cost.gigabytes is not None)
    if sizes:
        text += f", {name_range([f'{sizes[0]:.2f}', f'{sizes[-1]:.2f}'])} GB"
    return "\n".join([f"{text} {first_cost.place}", *_explain_memory(first_training, sizes)])


def _explain_memory(training: Training, sizes: Sequence[float]) -> list[str]:
    """Return the line about the length of the examples at which the estimate has the paper's memory, if it is known."""
    bound = estimate_training_memory(training).get("total")  # of examples of `max_length` tokens
    if not sizes or bound is None:
        return []
    fixed = estimate_training_memory(training, length=0)["total"]  # the rest grows with the tokens
    max_length = training.args.max_length
    length = max_length * (sizes[-1] - fixed) / (bound - fixed)
    return [
        f"the bound is for examples of {max_length:,} tokens, and the estimate for {length:.0f} is {sizes[-1]:.2f} GB"
    ]
