"""Sentences about examples that repeat another one, in the plan of a command and in the log of a trainer."""

from __future__ import annotations


OF_HELD_OUT = "a held-out example"
"""An example that one to train on can repeat."""


def describe_repeats(num_repeats: int, num_examples: int, place: str = "", repeated: str = "another one") -> str:
    """Return the part of a sentence that says how many examples repeat another one.

    Args:
        num_repeats: Number of training examples that repeat another one.
        num_examples: Number of training examples.
        place: Name of the dataset with them, or "" if there is only one.
        repeated: What they repeat.
    """
    verb = "repeats" if num_repeats == 1 else "repeat"
    dataset = f" in {place}" if place else ""
    return f"{num_repeats:,} of the {num_examples:,} examples{dataset} {verb} {repeated}"
