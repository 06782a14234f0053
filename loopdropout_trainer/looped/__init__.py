"""What models, adapters and gate rules share: the running loop with its gates, and what is known of a looped model.

The three never import one another: they meet here, in one small tensor.
"""

from loopdropout_trainer.looped.costs import launch_flops, launches_pay
from loopdropout_trainer.looped.model import (
    LoopedModelMixin,
    NotLoopedError,
    TrainingPolicy,
    check_num_loops,
    find_looped_model,
)
from loopdropout_trainer.looped.plan import (
    UNIT_GATES,
    DrawKey,
    GatePlan,
    LoopStep,
    as_gate_matrix,
    example_starts,
    first_active_loops,
)
from loopdropout_trainer.looped.state import LoopState, applied_gates


__all__ = [
    "UNIT_GATES",
    "DrawKey",
    "GatePlan",
    "LoopState",
    "LoopStep",
    "LoopedModelMixin",
    "NotLoopedError",
    "TrainingPolicy",
    "applied_gates",
    "as_gate_matrix",
    "check_num_loops",
    "example_starts",
    "find_looped_model",
    "first_active_loops",
    "launch_flops",
    "launches_pay",
]
