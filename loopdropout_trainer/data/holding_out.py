"""The choice of training and held-out examples."""

from __future__ import annotations

import hashlib

import numpy as np


Indices = tuple[np.ndarray, np.ndarray]
"""Training examples, in order of preference, and held-out examples."""


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
