"""The line of a sweep's plan about the measurements that choose the learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loopdropout_trainer.costs.trainings import Training
from loopdropout_trainer.data.arguments import count_held_out
from loopdropout_trainer.errors import count
from loopdropout_trainer.jobs.training_data import NotLoaded, TrainingExamples
from loopdropout_trainer.results.run_files import DEVELOPMENT
from loopdropout_trainer.training.evaluation_fields import packs_evaluation, word_of


FEW_EXAMPLES = 100
"""Number of held-out examples below which the order of losses is mostly noise."""


def by_method(texts: Mapping[str, str]) -> str:
    """Return the text about each method, under the names of all methods with the same text unless it is of all methods."""
    methods: dict[str, list[str]] = {}
    for method, text in texts.items():
        methods.setdefault(text, []).append(method)
    if len(methods) == 1:
        return next(iter(methods))
    return "\n".join(f"{', '.join(names)}: {text}" for text, names in methods.items() if text)


def describe_choice_plan(
    sweep: Any, examples: Mapping[str, TrainingExamples | NotLoaded], trainings: Mapping[str, Training]
) -> str:
    """Return the measurements that choose the learning rates, with the number of examples, or "" if none is chosen.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        examples: Examples of each method, from `load_sweep_examples`.
        trainings: Training of each method.
    """
    if sweep.full_grid:
        return ""
    num_runs = sum(len(sweep.choice(method).rates) for method in sweep.recipes)
    if sweep.select_on != "eval_loss":
        text = f"{count(num_runs, 'evaluation')} of {sweep.select_on}"
        if sweep.select_on != DEVELOPMENT:
            text += (
                f"\nthe report then has no test on {sweep.select_on}, because its problems choose the learning rates"
            )
        return text
    places, warnings = {}, {}
    for method, training in trainings.items():
        num_held_out = _count_held_out(examples.get(method), training)
        places[method] = _describe_examples(training, num_held_out)
        warnings[method] = _warn_of_few_examples(training, num_held_out)
    lines = [f"held-out losses of {count(num_runs, 'run')}", by_method(places), by_method(warnings)]
    return "\n".join(filter(None, lines))


def _measures_in_training(training: Training) -> bool:
    """Return whether the training itself measures the held-out loss that chooses, which then is of all examples."""
    return word_of(training.args.eval_strategy) != "no" or not training.recipe.get("single_loop_batches")


def _count_held_out(examples: TrainingExamples | NotLoaded | None, training: Training) -> int | None:
    """Return the number of held-out examples, as far as it is known before the runs load them."""
    if isinstance(examples, TrainingExamples) and hasattr(examples.loaded.datasets.get("eval"), "__len__"):
        return len(examples.loaded.datasets["eval"])
    return count_held_out(training.recipe) or None


def _count_measured(training: Training, num_held_out: int | None) -> int:
    """Return the number of examples, or of packed rows, in the first batches, which the losses are measured on."""
    number = training.recipe["single_loop_batches"] * training.args.per_device_eval_batch_size
    if num_held_out is not None and not packs_evaluation(training.args):
        number = min(number, num_held_out)
    return number


def _describe_examples(training: Training, num_held_out: int | None) -> str:
    """Return which held-out examples the losses that choose are measured on."""
    if _measures_in_training(training):
        examples = "all held-out examples"
        if num_held_out == 1:
            examples = "the only held-out example"
        elif num_held_out is not None:
            examples = f"all {num_held_out:,} held-out examples"
        return f"each on {examples}, during the training"
    num_batches, num_rows = training.recipe["single_loop_batches"], _count_measured(training, num_held_out)
    batches = "the first batch" if num_batches == 1 else f"the first {num_batches:,} batches"
    if packs_evaluation(training.args):
        rows = f"at most {count(num_rows, 'packed row')}"
    elif num_held_out is None:
        rows = f"at most {count(num_rows, 'example')}"
    else:
        rows = f"{num_rows:,} of {count(num_held_out, 'held-out example')}"
    return f"each on {batches} ({rows}), as `single_loop_batches` says"


def _warn_of_few_examples(training: Training, num_held_out: int | None) -> str:
    """Return a warning with its remedy if the losses that choose are measured on few held-out examples, or ""."""
    if _measures_in_training(training):
        number, num_at_most = num_held_out, num_held_out
    elif packs_evaluation(training.args):
        return ""
    else:
        number, num_at_most = _count_measured(training, num_held_out), _count_measured(training, None)
    if number is None or number >= FEW_EXAMPLES:
        return ""
    remedies = []
    if num_held_out is not None and num_held_out < FEW_EXAMPLES:
        remedies.append(f"hold out at least {FEW_EXAMPLES} examples ({_name_held_out_field(training)})")
        if num_at_most < FEW_EXAMPLES and not _measures_in_training(training):
            remedies.append("raise `single_loop_batches` until the runs measure all of them")
    else:
        remedies.append(f"raise `single_loop_batches` until the runs measure at least {FEW_EXAMPLES} examples")
    return f"Losses on {count(number, 'example')} differ mostly by chance, so {' and '.join(remedies)}."


def _name_held_out_field(training: Training) -> str:
    """Return the field of a recipe that decides how many examples are held out."""
    if training.recipe.get("eval_files"):
        return "`eval_files`"
    return "`num_eval_examples`"
