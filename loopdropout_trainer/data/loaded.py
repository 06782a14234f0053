"""The loaded examples of a training, with the numbers and the losses that its plan shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np


if TYPE_CHECKING:
    from datasets import DatasetDict


class LoadedExamples(NamedTuple):
    """Examples of a training, and the numbers that its plan shows.

    Attributes:
        datasets: As from `load_datasets`.
        lengths: [N] numbers of tokens of the training examples, or None if they were not counted.
        sources: The data sets of a mixture.
        source_numbers: [N] the numbers of the data sets that the training examples come from, from 0.
        prompts: Settings of `find_prompts` if the examples are of several formats, which their tokens do not tell, else none.
        num_repeats: Number of training examples that repeat an earlier one.
        held_out_loss: Tokens of the examples of `eval_files` on which the loss is measured, if those examples have another
            format than the ones to train on, else "".
        train_loss: Tokens that are trained on in such a training, if the examples to train on have one format, else "".
    """

    datasets: DatasetDict
    lengths: np.ndarray | None
    sources: list[MixedSource]
    source_numbers: np.ndarray
    prompts: dict[str, Any]
    num_repeats: int = 0
    held_out_loss: str = ""
    train_loss: str = ""

    @property
    def trained_shares(self) -> list[float]:
        """Shares of the data sets of a mixture in the training examples."""
        total = sum(source.num_train for source in self.sources)
        return [source.num_train / total for source in self.sources]

    def find_examples(self, number: int) -> dict[str, int]:
        """Return the index of the training example with a number, from 0: in a mixture, of each data set that has so many.

        The key is the name of the data set, or "" without a mixture.
        """
        if not self.sources:
            return {"": number} if number < len(self.source_numbers) else {}
        found = {}
        for source_number, source in enumerate(self.sources):
            own = np.flatnonzero(self.source_numbers == source_number)
            if number < len(own):
                found[source.title] = int(own[number])
        return found


class MixedSource(NamedTuple):
    """A data set of a mixture.

    Attributes:
        title: Name.
        num_train: Number of its training examples.
        num_held_out: Number of its held-out examples.
        size: Number of its usable examples, of which the mixture may have a part.
        loss: Tokens that are trained on, if the data sets have several formats, else "".
        share: Share in the recipe, or None if all of its usable examples are used.
    """

    title: str
    num_train: int
    num_held_out: int
    size: int
    loss: str
    share: float | None = None


def count_sources(
    titles: Sequence[str],
    sizes: Sequence[int],
    losses: Sequence[str],
    shares: Sequence[float] | None,
    train_numbers: np.ndarray,
    held_out_numbers: np.ndarray,
) -> list[MixedSource]:
    """Return the data sets of a mixture with the numbers of their examples that are trained on and held out.

    Args:
        titles, sizes, losses, shares: Fields of each data set as in `MixedSource`. The shares are None without fractions.
        train_numbers: [N] the number of the data set of each training example, from 0.
        held_out_numbers: The same of the held-out examples.
    """
    shares = shares or [None] * len(titles)
    num_train = np.bincount(train_numbers, minlength=len(titles)).tolist()
    num_held_out = np.bincount(held_out_numbers, minlength=len(titles)).tolist()
    fields = zip(titles, num_train, num_held_out, sizes, losses, shares, strict=True)
    return [MixedSource(*values) for values in fields]
