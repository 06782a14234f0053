"""Recomputation of pointwise operations: their results are not kept for the backward pass, but computed there once more.

A norm's result, and SwiGLU's, is kept only because the adapter reads it, while the operation keeps its own inputs anyway.
What goes into the backward pass instead is how to compute it: the operation and its inputs, which may be deferred
themselves. Results of matrix products and of attention are kept, so none of these runs twice, and every recomputed bit is the
same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


_PLAIN = (torch.Tensor, FakeTensor)  # the latter where memory is estimated without a device


class DeferredResult:
    """A result that can be computed again, once for all the nodes of the graph that ask for it.

    Args:
        operation: a deterministic function that makes a new tensor.
        inputs: what it was given.
    """

    def __init__(self, operation: Callable[..., torch.Tensor], inputs: tuple[Any, ...]) -> None:
        self.operation = operation
        self.inputs = inputs
        self.num_readers = 0
        self.num_waiting = 0
        self.result: torch.Tensor | None = None

    def add_reader(self, deferred: DeferredResults) -> DeferredResult:
        """Note that one more reader will ask; at the first, trade the inputs for how to compute them."""
        if self.num_readers == 0:
            self.inputs = tuple(deferred.pack(x.detach()) if torch.is_tensor(x) else x for x in self.inputs)
        self.num_readers += 1
        return self

    def compute(self) -> torch.Tensor:
        """Return the result, which is forgotten when all readers have asked."""
        if self.result is None:
            with torch.no_grad():
                self.result = self.operation(*map(unpack, self.inputs))
            self.num_waiting = self.num_readers
        result = self.result
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.result = None
        return result


class DeferredResults:
    """How to compute results that are alive: those whose memory cannot have been given to another tensor."""

    def __init__(self) -> None:
        self._alive: dict[
            int, tuple[weakref.ref, int, DeferredResult]
        ] = {}  # by storage: result, its version, its deferred

    def add(self, result: torch.Tensor, deferred: DeferredResult) -> None:
        """Remember how `result` was made, until it dies."""
        address = result.untyped_storage()._cdata
        self._alive[address] = (
            weakref.ref(result, lambda _: self._alive.pop(address, None)),
            result._version,
            deferred,
        )

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple:
        """Return what is kept of a tensor: it, or how to make what it is a view of, and the view."""
        known = self._alive.get(tensor.untyped_storage()._cdata) if type(tensor) in _PLAIN else None
        if known is None:
            return tensor
        reference, version, deferred = known
        result = reference()
        if result is None or result._version != version or result.dtype != tensor.dtype:
            return tensor
        return deferred.add_reader(self), tensor.shape, tensor.stride(), tensor.storage_offset()


def unpack(kept: Any) -> Any:
    """Return the tensor that was packed, or what else was kept."""
    if not isinstance(kept, tuple):
        return kept
    deferred, *view = kept
    return deferred.compute().as_strided(*view)


_deferred: ContextVar[DeferredResults | None] = ContextVar("deferred", default=None)


@contextmanager
def recomputation(enabled: bool = True) -> Iterator[None]:
    """Let the backward pass of what runs in the block recompute the results of `recomputable` operations."""
    if not enabled or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    deferred = DeferredResults()
    token = _deferred.set(deferred)
    try:
        with torch.autograd.graph.saved_tensors_hooks(deferred.pack, unpack):
            yield
    finally:
        _deferred.reset(token)


def recomputable(operation: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    """Return `operation(*inputs)`, a new tensor; in a block of `recomputation` the backward pass makes it once more.

    That is of use where the inputs are kept anyway.
    """
    result = operation(*inputs)
    if result.requires_grad and not torch.compiler.is_compiling() and (deferred := _deferred.get()) is not None:
        deferred.add(result, DeferredResult(operation, inputs))
    return result
