"""The choice of training and held-out examples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


Indices = tuple[np.ndarray, np.ndarray]
"""Training examples, in order of preference, and held-out examples."""


def interleave(sizes: Sequence[int], shares: Sequence[float] | None = None) -> np.ndarray:
    """Return the indices of a mixture of data sets that are stored one behind the other.

    The mixture has the first examples of each data set, in an order in which also the first n of the mixture have the shares,
    for any n. It ends where the first data set is used up, so no example is repeated.

    For shares of 2/3 and 1/3, the examples of the first data set are at the places 0.75, 2.25, 3.75 and 5.25 of the mixture,
    and those of the second one at 1.5 and 4.5. So the order is a b a a b a.

    Args:
        sizes: Number of examples of each data set.
        shares: Share of each data set, whose sum is 1. Default: all examples of all of them.
    """
    if shares is None:
        shares = np.array(sizes) / sum(sizes)
    total = min(np.array(sizes) / np.array(shares))  # examples of the mixture, until the first data set is used up
    numbers = np.minimum(np.round(np.array(shares) * total).astype(int), sizes)
    indices, places = [], []
    start = 0
    for size, share, number in zip(sizes, shares, numbers, strict=True):
        own_numbers = np.arange(number)
        indices.append(start + own_numbers)
        places.append((own_numbers + 0.5) / share)  # evenly spread: one example every 1 / share places
        start += size
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(indices)[order]


def random_order(identity: str, seed: int) -> int:
    """Return a random integer in [0, 2^63) that depends on the identity of a row and the seed alone."""
    digest = hashlib.blake2b(f"{seed}\n{identity}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def hold_out_random(orders: np.ndarray, num_eval: int) -> Indices:
    """Hold out the examples that come first in `orders` [N]: the same examples for each order of the rows."""
    _, first_indices = np.unique(orders, return_index=True)
    held_out = np.sort(first_indices[:num_eval])
    return np.setdiff1d(np.arange(len(orders)), held_out), held_out


def hold_out_first(orders: np.ndarray, num_eval: int) -> Indices:
    """Hold out the first examples."""
    return hold_out_random(np.arange(len(orders)), num_eval)


def hold_out_after_100k(orders: np.ndarray, num_eval: int) -> Indices:
    """Train on the first 100,000 examples and hold out the next ones, or the last ones of a smaller dataset."""
    train, rest = np.split(np.arange(len(orders)), [100_000])
    rest = rest[~np.isin(orders[rest], orders[train])][:num_eval]
    # If the rest is too small, training examples at the end are held out instead of trained on.
    train, held_out = np.split(np.concatenate([train, rest]), [len(train) + len(rest) - num_eval])
    return train, held_out


def draw_random(orders: np.ndarray, num_eval: int) -> Indices:
    """Draw training examples by `orders`, and hold out the examples that come last."""
    train, held_out = np.split(np.argsort(orders, kind="stable"), [len(orders) - num_eval])
    return train, np.sort(held_out)
