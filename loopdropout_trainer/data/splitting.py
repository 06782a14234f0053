"""Which of the loaded examples are trained on, and which are held out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from loopdropout_trainer.data.arguments import DataArguments
from loopdropout_trainer.data.examples import Examples, LeftOut, read_numbers
from loopdropout_trainer.data.preparations import PREPARATIONS
from loopdropout_trainer.data.repeats import OF_HELD_OUT
from loopdropout_trainer.errors import UserError, count


class Split(NamedTuple):
    """Examples to train on, in the order of their source, and held-out examples, which may be none."""

    train: Examples
    held_out: Examples


def split_examples(
    args: DataArguments, examples: Examples, eval_examples: Examples | None, left_out: list[LeftOut]
) -> Split:
    """Choose the training and the held-out examples. None to train on repeats a held-out one.

    Args:
        args: How many examples are trained on and held out, and the preparation, which says which ones.
        examples: Usable examples of the training data.
        eval_examples: Examples of `eval_files`, or None to hold out some of `examples`.
        left_out: List to which the number of training examples that repeat a held-out one is added.

    Raises:
        UserError: If there are too few examples.
    """
    preparation = PREPARATIONS[args.preparation]
    orders = read_numbers(examples.rows, "order")
    # Indices of `examples`: those to train on by preference, and those to hold out, which are none with `eval_files`.
    train_indices, held_out_indices = preparation.split(orders, args.num_held_out)
    held_out = eval_examples
    if held_out is None:
        held_out = examples.select(held_out_indices)
    is_repeated = _find_repeats(examples, held_out)[train_indices]
    train_indices = train_indices[~is_repeated]
    if eval_examples is not None and not len(train_indices):
        raise UserError("The data must have an example that is not in `eval_files`, got none.")
    # Without repeats, because those of held-out examples are not trained on. Rows with other `id`s can be the same example.
    num_usable = len(np.unique(read_numbers(examples.rows, "content")))
    _check_numbers(args, len(train_indices), len(held_out_indices), num_usable)
    num_repeated = int(is_repeated.sum())
    if num_repeated:  # after the errors, in which nothing is held out
        left_out.append(LeftOut(num_repeated, "examples", f"they repeat {OF_HELD_OUT}"))
    # The first ones by preference are taken. They are trained on in the order of the source.
    num_train = args.num_train_examples or preparation.num_train_examples
    taken = np.sort(train_indices[:num_train])
    return Split(examples.select(taken), held_out)


def _find_repeats(examples: Examples, held_out: Examples) -> np.ndarray:
    """Return for each example whether a held-out one is the same [N]."""
    # Equal rows have equal numbers in `order`. Rows with other `id`s or the like can be the same example, with the same
    # number in `content`.
    is_repeated = np.zeros(len(examples.rows), dtype=bool)
    for name in ("order", "content"):
        is_repeated |= np.isin(read_numbers(examples.rows, name), read_numbers(held_out.rows, name))
    return is_repeated


def _check_numbers(args: DataArguments, num_left: int, num_chosen: int, num_usable: int) -> None:
    """Raise UserError if there are too few examples for the numbers that the arguments ask for.

    Args:
        args: Arguments with `num_train_examples` and the number of examples to hold out.
        num_left: Number of examples that can be trained on.
        num_chosen: Number of examples that are held out of the training data.
        num_usable: Number of different examples in the training data.
    """
    if num_usable < 2 and args.num_held_out:
        raise UserError(
            "The data must have at least 2 different usable examples, one to train on and one to hold out, got "
            f"{num_usable}. Add examples, or set `num_eval_examples` to 0."
        )
    if num_left == 0 or num_chosen < args.num_held_out:
        raise UserError(
            f"`num_eval_examples` must be at most {num_usable - 1:,}, because the data has "
            f"{count(num_usable, 'different usable example')} and one must be left to train on, got {args.num_held_out:,}."
        )
    if num_left < (args.num_train_examples or 1):
        raise UserError(
            f"`num_train_examples` must be at most {num_left:,}, the number of usable examples that are not held out, "
            f"got {args.num_train_examples:,}."
        )
