"""What models, adapters and gate rules share: the running loop with its gates, and what is known of a looped model.

The three never import one another: they meet here, in one small tensor.
"""

from loopdropout_trainer.looped.model import (
    DESCRIPTIONS,
    LoopedModelMixin,
    NotLoopedError,
    check_num_loops,
    find_looped_model,
    project,
)
from loopdropout_trainer.looped.state import (
    Draw,
    LoopState,
    Part,
    applied_gates,
    as_gate_matrix,
    first_active_loops,
)


__all__ = [
    "DESCRIPTIONS",
    "Draw",
    "LoopState",
    "LoopedModelMixin",
    "NotLoopedError",
    "Part",
    "applied_gates",
    "as_gate_matrix",
    "check_num_loops",
    "find_looped_model",
    "first_active_loops",
    "project",
]
