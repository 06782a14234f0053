"""Blocks such as `with use_gates(...)`, which set values of a model, and end in the reverse order of their beginnings."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from transformers.utils import logging

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.keywords import explain_unknown


logger = logging.get_logger(__name__)

_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")


class Block(AbstractContextManager[_Value]):
    """What a function such as `use_gates` returns. Outside of a `with` statement, it says that it has no effect."""

    _is_settled = False
    """Whether the block was used, or a notebook has shown how to use it."""

    def __init__(self, name: str, manager: Any) -> None:
        self._name, self._manager = name, manager

    def __repr__(self) -> str:
        """Return the sentence that a notebook shows if the call is the last line of a cell."""
        self._is_settled = True
        return self._describe_use()

    def __del__(self) -> None:
        """Warn if nothing has used the block, as after a line `use_gates(...)` without `with`."""
        if not self._is_settled and not sys.is_finalizing():
            logger.warning(self._describe_use())

    def _describe_use(self) -> str:
        return f"`{self._name}(...)` has an effect inside of its block only. Write `with {self._name}(...):`."

    def __enter__(self) -> _Value:
        self._is_settled = True
        return self._manager.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._manager.__exit__(*error)

    def __call__(self, function: Callable) -> Callable:
        """Return a function whose calls run in such a block, as of `@use_depth(model, 2)`."""
        self._is_settled = True
        return self._manager(function)


def as_block(function: Callable[_Arguments, Iterator[_Value]]) -> Callable[_Arguments, Block[_Value]]:
    """Return a generator function as `contextlib.contextmanager` does, which makes a `Block`."""
    make = contextmanager(function)

    @explain_unknown
    @functools.wraps(function)
    def make_block(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Block[_Value]:
        return Block(function.__name__, make(*args, **kwargs))

    return make_block


@dataclass(eq=False)
class _Block:
    """A block that runs: the object whose attributes it has set, and their values before it."""

    owner: Any
    before: dict[str, Any]


class OpenBlocks:
    """The blocks of one model that run, in the order of their beginnings.

    A block restores at its end the values from before its beginning. Generators that run in turns can end blocks in another
    order, in which the values of a block that has ended would stay:

        begins   a    b    ends   a    b                                  (the values inside of the blocks are a and b)
        value    a    b           0    a                                  without this class: a stays
        value    a    b           b    0                                  with it, after an error at the end of a

    So a block that ends before a later one hands the values from before it to the later one. Then it raises an error, because
    the passes of one of the two blocks may have had the values of the other.
    """

    def __init__(self) -> None:
        self._running: list[_Block] = []

    @contextmanager
    def setting(self, owner: Any, **values: Any) -> Iterator[None]:
        """Set attributes of an object inside the block.

        Args:
            owner: Object of the model.
            **values: Values by the names of the attributes, which no other object of the model has.

        Raises:
            UserError: At the end of the block, if a later one still runs.
        """
        block = _Block(owner, {name: getattr(owner, name) for name in values})
        for name, value in values.items():
            setattr(owner, name, value)
        self._running.append(block)
        try:
            yield
        except BaseException:
            self._end(block)
            raise
        if not self._end(block):
            raise UserError(
                "Blocks of `use_gates` and `use_depth` on one model must end in the reverse order of their beginnings, but "
                "one has ended before a later one. Results since the later one began may have other gates or another depth, "
                "so compute them again with one block at a time."
            )

    def value_outside(self, owner: Any, name: str) -> Any:
        """Return the value that an attribute of an object has outside of all blocks that run."""
        for block in self._running:
            if block.owner is owner and name in block.before:
                return block.before[name]
        return getattr(owner, name)

    def _end(self, block: _Block) -> bool:
        """Restore the values from before a block, and return whether it is the last one that runs."""
        place = self._running.index(block)
        later_blocks = self._running[place + 1 :]
        del self._running[place]
        for name, value in block.before.items():
            heirs = [later for later in later_blocks if name in later.before]
            if heirs:
                heirs[0].before[name] = value
            else:
                setattr(block.owner, name, value)
        return not later_blocks
