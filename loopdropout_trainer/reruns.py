"""Passes that a checkpoint around the whole model runs again, which must have the gates of their first run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import checkpoint

from loopdropout_trainer.blocks import OpenBlocks
from loopdropout_trainer.errors import UserError


class Reruns:
    """The passes of blocks of `use_gates` that a checkpoint around the whole model will run again.

    A checkpoint around a layer keeps the gates of its pass, as an argument of the layer. A checkpoint around the whole model
    cannot, because the model reads the current gates itself. In the backward pass it runs the model again, under the gates of
    that moment. So the gradient is right only inside of the block that the first run was in. For two passes in one block:

        block of `use_gates`   begins   forward   forward   backward   backward   ends
        due                    0        1         2         1          0          None

    The numbers cannot tell which pass runs again. So every rerun raises an error while a pass of another block may still run
    again, be it a block around this one or one that has ended.

    Passes under unit gates are not counted, because they may run outside of any block, where the search for a checkpoint
    would cost every training time. So a rerun under gates also raises an error if no rerun is due in its block. It may be one
    of such a pass, or the second backward pass of one graph.

    Attributes:
        due: Number of passes of the running block that will run again. None outside of blocks, and in a block without
            gradient.
        due_outside: Number of such passes in the blocks around it.
        is_missed: Whether a block ended before such a pass ran again, and no error has said so yet.
    """

    def __init__(self, blocks: OpenBlocks) -> None:
        self._blocks = blocks
        self.due: int | None = None
        self.due_outside = 0
        self.is_missed = False

    @contextmanager
    def counting(self, has_gradient: bool) -> Iterator[None]:
        """Count the passes of a block of `use_gates` apart from those of the blocks around it.

        Args:
            has_gradient: Whether gradients are enabled. Without them, no pass of the block runs again.
        """
        due_outside = self.due_outside + (self.due or 0)
        with self._blocks.setting(self, due=0 if has_gradient else None, due_outside=due_outside):
            try:
                yield
            finally:
                if self.due:
                    self.is_missed = True

    def begin_pass(self, has_gates: bool) -> None:
        """Count a pass that begins under gates or unit gates.

        Raises:
            UserError: If the pass runs again, and may belong to another block or to none.
        """
        can_run_again = self.due is not None or self.due_outside > 0 or self.is_missed
        if not can_run_again or not is_checkpointed():
            return
        is_rerun = torch._C._current_graph_task_id() >= 0  # -1 outside of a backward pass
        if is_rerun:
            self._count_rerun(has_gates)
        elif self.due is not None and has_gates:
            self.due += 1

    def _count_rerun(self, has_gates: bool) -> None:
        """Subtract a pass that runs again from those that are due, or raise UserError if it may be a pass of another block."""
        if self.is_missed or self.due_outside > 0:
            # A pass that never runs again, because it has no backward pass, raises one error and not one in each later block.
            # If passes stayed due here, the end of this block would set `is_missed` again.
            self.is_missed = False
            if self.due is not None:
                self.due = 0
            raise UserError(
                "`backward()` must be called inside of its block of `use_gates` if the whole model is checkpointed, because "
                "the model runs again there under its gates. Run passes without a backward pass under `torch.no_grad()`. Or "
                "checkpoint the layers by `model.gradient_checkpointing_enable()`."
            )
        if self.due:
            self.due -= 1
        elif has_gates:
            raise UserError(
                "`backward()` of a pass outside of `use_gates` must not be called inside of a block if the whole model is "
                "checkpointed, and of a pass inside only once, because the model runs again there under the gates of the "
                "block. Or checkpoint the layers by `model.gradient_checkpointing_enable()`."
            )


@torch.compiler.disable
def is_checkpointed() -> bool:
    """Return whether `torch.utils.checkpoint` calls this function, now or again in the backward pass.

    A checkpointed function cannot ask torch for it, but it has torch's module among its callers.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None
