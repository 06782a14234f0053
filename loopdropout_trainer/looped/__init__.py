"""What models, adapters and gate rules share: the running loop with its gates, and what is known of a looped model.

The three never import one another: they meet here, in one small tensor.
"""

# ruff: noqa: F401  (handed on)
from loopdropout_trainer.looped.costs import launch_flops, launches_pay
from loopdropout_trainer.looped.model import (
    UNIT_GATES,
    BatchOptions,
    GatedBatch,
    GateState,
    LoopedModelMixin,
    NotLoopedError,
    RunningLoop,
    applied_gates,
    as_gate_matrix,
    check_num_loops,
    example_starts,
    find_looped_model,
    set_depth,
)
