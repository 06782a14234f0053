"""Python values as JSON and back, so that what a program returns leaves its box as data and never as code.

Lists, texts, truth values, floats and small integers are themselves; all else is an object with one key that names its
type. A value of a type that is not known here is `opaque`: read back, it equals nothing but itself.
"""

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np


DEEPEST = 200
"""Most levels of a value; one that is deeper, or contains itself, is an error."""

MOST_ITEMS = 1_000_000
"""Most items that are taken out of an opaque value."""

SIMPLE = (bool, str, float, type(None))
COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}
SMALL = 1 << 53


def encode(value: Any, items: bool = False, depth: int = 0) -> Any:
    """Return a value as JSON.

    Args:
        value: anything.
        items: take along what iterating over an opaque value gives.
        depth: levels above this one.

    Raises:
        ValueError: if the value is too deep.
    """
    if depth > DEEPEST:
        raise ValueError(f"a value of more than {DEEPEST} levels")
    kind, below = type(value), depth + 1
    if kind in SIMPLE:
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else {"int": hex(value)}
    if kind is list:
        return [encode(item, depth=below) for item in value]
    for name, collection in COLLECTIONS.items():
        if kind is collection:
            return {name: [encode(item, depth=below) for item in value]}
    if kind is dict:
        return {"dict": [[encode(key, depth=below), encode(item, depth=below)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: bytes(value).hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is Decimal:
        return {"Decimal": str(value)}
    if kind is Fraction:
        return {"Fraction": [encode(value.numerator), encode(value.denominator)]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcUS":
        return {"numpy": [value.dtype.str, list(value.shape), np.asarray(value).tobytes().hex(), kind is np.ndarray]}
    for plain in SUBCLASSES:
        if isinstance(value, plain):
            return {"subclass": encode(plain(value), depth=below)}
    found = [encode(item, depth=below) for item in islice(value, MOST_ITEMS)] if items else None
    return {"opaque": found}


class Opaque:
    """A value of a type that is not known here."""

    def __init__(self, items: list | None) -> None:
        self.items = items

    def __iter__(self) -> Iterator:
        if self.items is None:
            raise TypeError("not iterable")
        return iter(self.items)


class _List(list): ...


class _Tuple(tuple): ...


class _Dict(dict): ...


class _Set(set): ...


class _FrozenSet(frozenset): ...


class _Str(str): ...


class _Int(int): ...


class _Float(float): ...


SUBCLASSES = {
    list: _List,
    tuple: _Tuple,
    dict: _Dict,
    set: _Set,
    frozenset: _FrozenSet,
    str: _Str,
    int: _Int,
    float: _Float,
}
"""What stands for a subclass of each: equal where the plain value is equal, and of another type."""


def decode(data: Any) -> Any:
    """Return the value that `encode` gave as `data`.

    Raises:
        ValueError, TypeError, RecursionError and the like: for what `encode` does not give.
    """
    if isinstance(data, (*SIMPLE, int)):
        return data
    if isinstance(data, list):
        return [decode(item) for item in data]
    ((name, content),) = data.items()
    if name in COLLECTIONS:
        return COLLECTIONS[name](decode(item) for item in content)
    if name == "dict":
        return {decode(key): decode(item) for key, item in content}
    if name == "subclass":
        value = decode(content)
        return SUBCLASSES[type(value)](value)
    if name == "opaque":
        return Opaque(None if content is None else [decode(item) for item in content])
    return _DECODERS[name](content)


def _numpy(content: list) -> Any:
    dtype, shape, data, is_array = content
    if np.dtype(dtype).kind not in "biufcUS":
        raise ValueError(f"no numbers or texts: {dtype}")
    array = np.frombuffer(bytes.fromhex(data), dtype=dtype).reshape(shape).copy()
    return array if is_array else array[()]


_DECODERS = {
    "int": lambda content: int(content, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda content: complex(*content),
    "Decimal": Decimal,
    "Fraction": lambda content: Fraction(*map(decode, content)),
    "numpy": _numpy,
}
