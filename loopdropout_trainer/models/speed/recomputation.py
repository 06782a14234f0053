"""Recomputation of pointwise operations: their results are not kept for the backward pass, but computed there once more.

A norm's result, and SwiGLU's, is kept only because the adapter reads it, while the operation keeps its own inputs anyway.
What goes into the backward pass instead is how to compute it: the operation and its inputs, which may be deferred
themselves. Results of matrix products and of attention are kept, so none of these runs twice, and every recomputed bit is the
same. In y = Linear(norm(x)), for example,

    kept by autograd    x (by the norm), norm(x) (by the adapter's dA = dz' norm(x))
    kept here           x, and in the place of norm(x) the pair (norm, x)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from loopdropout_trainer.models.operations import results_to_defer


_PLAIN = (torch.Tensor, FakeTensor)  # the latter where memory is estimated without a device


class DeferredResult:
    """The result of a deterministic operation, computed again once for all the nodes of the graph that ask for it."""

    def __init__(self, operation: Callable[..., torch.Tensor], inputs: tuple[Any, ...]) -> None:
        self.operation = operation
        self.inputs = inputs
        self.num_readers = 0  # nodes that will ask for the result in one backward pass
        self.num_waiting = 0  # of them, how many have not asked yet in the backward pass that runs
        self.result: torch.Tensor | None = None

    def add_reader(self, deferred: DeferredResults) -> DeferredResult:
        """Note that one more reader will ask; at the first, trade the inputs for how to compute them."""
        if self.num_readers == 0:
            # Only now: a result that nothing saves must not make its own inputs wait for a reader that never comes.
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
        if self.num_waiting == 0:  # a second backward pass over the same graph starts again
            self.result = None
        return result


class DeferredResults:
    """How to compute results that are alive: those whose memory cannot have been given to another tensor."""

    def __init__(self) -> None:
        # By the storage's address. Autograd saves other tensor objects than the result itself, views and detached ones,
        # but all of them share its storage.
        self._alive: dict[int, tuple[weakref.ref, int, DeferredResult]] = {}

    def add(self, result: torch.Tensor, operation: Callable[..., torch.Tensor], inputs: tuple[Any, ...]) -> None:
        """Remember that `result` is `operation(*inputs)`, until it dies."""
        address = result.untyped_storage()._cdata
        forget = lambda _: self._alive.pop(address, None)  # the next tensor may get the same address
        reference = weakref.ref(result, forget)
        self._alive[address] = (reference, result._version, DeferredResult(operation, inputs))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple:
        """Return what is kept of a tensor: it, or how to make what it is a view of, and the view."""
        known = self._alive.get(tensor.untyped_storage()._cdata) if type(tensor) in _PLAIN else None
        if known is None:
            return tensor
        reference, version, deferred = known
        result = reference()
        # A result that was written to in place since (another version) is no longer what its operation would make.
        if result is None or result._version != version or result.dtype != tensor.dtype:
            return tensor
        return deferred.add_reader(self), tensor.shape, tensor.stride(), tensor.storage_offset()


def unpack(kept: Any) -> Any:
    """Return the tensor that was packed, or what else was kept."""
    if not isinstance(kept, tuple):
        return kept
    deferred, *view = kept
    return deferred.compute().as_strided(*view)


@contextmanager
def recomputation(enabled: bool = True) -> Iterator[None]:
    """Let the backward pass of what runs in the block recompute the results of `recomputable` operations."""
    if not enabled or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    deferred = DeferredResults()
    token = results_to_defer.set(deferred)
    try:
        with torch.autograd.graph.saved_tensors_hooks(deferred.pack, unpack):
            yield
    finally:
        results_to_defer.reset(token)
