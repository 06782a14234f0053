"""The gates under which a measurement runs, as its results and logs name them. Only this module decides it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.lora import is_enabled


def label_gates(model: nn.Module, num_loops: int, gates: Sequence[float] | None = None) -> str:
    """Return the gates of a measurement that runs now.

    Args:
        model: Looped model, with or without an adapter.
        num_loops: Recurrence depth K of the measurement.
        gates: Own gates [K] of the measurement, which apply instead of those of a block of `use_gates` around it.

    Returns:
        "none" without an adapter or if the adapter is disabled, "unit" for gates of 1, "loop 2" if the adapter is active in
        loop 2 only, else the gates, such as "1-0.5-0-0".

    Raises:
        UserError: If the measurement runs inside a block of `use_gates` whose gates differ between examples or
            modules, or do not fit its depth.
    """
    if not is_enabled(model):
        return "none"
    if gates is None:
        gates = find_gates_of_block(model, num_loops)
    if gates is None or all(gate == 1 for gate in gates):
        return "unit"
    gates = list(gates)[:num_loops]
    is_single_loop = gates.count(1) == 1 and gates.count(0) == num_loops - 1
    if is_single_loop and num_loops > 1:
        return f"loop {gates.index(1) + 1}"
    return "-".join(f"{gate:g}" for gate in gates)


def find_gates_of_block(model: nn.Module, num_loops: int) -> list[float] | None:
    """Return the gates [K] of the innermost block of `use_gates` that runs, or None for unit gates.

    Raises:
        UserError: If the gates differ between examples or modules, or if there is not one for each of K loops.
    """
    batch = find_looped_model(model).gate_state.batch
    if batch.gates is None or batch.rule is not None:  # those that a trainer has drawn apply to no measurement
        return None
    if batch.gates.shape[1:].numel() > 1:
        raise UserError(
            "Inside a block of `use_gates`, a measurement must have one gate for each loop, which its results name, got gates "
            f"of shape {list(batch.gates.shape)}. Give gates [K], or measure outside of the block."
        )
    batch.check_depth(num_loops)
    return batch.gates.detach().flatten().tolist()
