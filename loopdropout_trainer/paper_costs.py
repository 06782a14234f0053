"""The minutes and the memory that the paper's authors measured for its recipes, next to the computed bounds of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from loopdropout_trainer.arguments import names_of
from loopdropout_trainer.costs import Training, estimate_training_memory, name_range
from loopdropout_trainer.errors import count
from loopdropout_trainer.files import recipes_folder
from loopdropout_trainer.published import PAPER_COSTS, PaperCost
from loopdropout_trainer.recipe import load_recipe
from loopdropout_trainer.recipe_changes import MEASURED, UNCOMPARED, compare_recipes


WITHOUT_COST = UNCOMPARED | MEASURED | names_of("repetition", "monitoring") | {"learning_rate"}
"""Fields in which a training may differ from the paper's recipe and still take as long and as much memory."""


def find_paper_cost(recipe: Mapping[str, Any]) -> PaperCost | None:
    """Return the cost that the paper has for a training with the settings of a recipe, or None."""
    for name, cost in PAPER_COSTS.items():
        if compare_recipes(_load_own_recipe(name), recipe, WITHOUT_COST) is None:
            return cost
    return None


@cache
def _load_own_recipe(name: str) -> dict[str, Any]:
    """Return a recipe of the package, also if the working folder has a file of this name, once for all methods of a sweep."""
    return load_recipe(recipes_folder() / name)


def describe_paper_costs(trainings: Sequence[tuple[Training, int]]) -> str:
    """Return the lines of a plan about the costs that the paper has for these trainings, or "" without any.

    Args:
        trainings: Kinds of trainings, and the number of trainings of each kind.
    """
    if any(training.args.world_size > 1 for training, _ in trainings):
        return ""  # the recipes are for one GPU
    costs = [(find_paper_cost(training.recipe), training, number) for training, number in trainings]
    known = [(cost, training, number) for cost, training, number in costs if cost is not None]
    if not known:
        return ""
    first, training, _ = known[0]
    known = [(cost, training, number) for cost, training, number in known if cost.place == first.place]
    shortest, longest = min(cost.shortest for cost, _, _ in known), max(cost.longest for cost, _, _ in known)
    text = f"{name_range([f'{shortest:g}', f'{longest:g}'])} minutes"
    num_known, num_all = sum(number for _, _, number in known), sum(number for _, number in trainings)
    if num_all > 1:
        low, high = (sum(getattr(cost, end) * number for cost, _, number in known) for end in ("shortest", "longest"))
        whose = count(num_all, "training") if num_known == num_all else f"{num_known} of the {num_all} trainings"
        text = f"{name_range([f'{low / 60:.3g}', f'{high / 60:.3g}'])} hours in {whose}: {text} each"
    sizes = sorted(cost.gigabytes for cost, _, _ in known if cost.gigabytes is not None)
    if sizes:
        text += f", {name_range([f'{size:.2f}' for size in (sizes[0], sizes[-1])])} GB"
    return "\n".join([f"{text} {first.place}", *_explain_memory(training, sizes)])


def _explain_memory(training: Training, sizes: Sequence[float]) -> list[str]:
    """Return the line about the length of the examples at which the estimate has the paper's memory, if it is known."""
    bound, fixed = (estimate_training_memory(training, length).get("total") for length in (None, 0))
    if not sizes or bound is None:
        return []
    max_length = training.args.max_length
    length = max_length * (sizes[-1] - fixed) / (bound - fixed)
    return [
        f"the bound is for examples of {max_length:,} tokens, and the estimate for {length:.0f} is {sizes[-1]:.2f} GB"
    ]
