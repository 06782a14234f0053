"""Launches against arithmetic: which of two exact ways to compute something takes less time.

Small tensors leave a device waiting for the next operation; large ones do not. Both are counted in floating-point operations
(FLOP): a launch costs as many as the device does meanwhile. The rates are nominal, not measured in the run, and a CPU's is
that of one core, so that neither a busy machine nor the number of cores changes what is computed together.

For example: on a CPU a launch is worth 5e-6 s * 50e9 FLOP/s = 250,000 FLOP. A product of 48 tokens by a 32 x 32 matrix is
98,304, less than half a launch, so that one product with zeros in it is worth more than two without.
"""

from __future__ import annotations

import torch


LAUNCH_SECONDS = 5e-6
"""Of one operation with its share of Python and autograd."""

CORE_FLOPS = 50e9
"""FLOP/s of one CPU core in products of matrices, float32."""

MULTIPROCESSOR_FLOPS = {torch.float16: 3e12, torch.bfloat16: 3e12, torch.float32: 0.3e12, torch.float64: 0.15e12}
"""FLOP/s of one multiprocessor of a GPU in products of matrices; not measured here."""

FLOPS_PER_COPY = 50
"""FLOP in the time that it takes to copy one number."""


def launch_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP that a device could do while one operation is launched."""
    if device.type == "cuda":
        # By the number of multiprocessors, since a slice of a GPU (MIG) has fewer of them.
        rate = MULTIPROCESSOR_FLOPS[dtype] * torch.cuda.get_device_properties(device).multi_processor_count
    else:
        rate = CORE_FLOPS
    return LAUNCH_SECONDS * rate


def launches_pay(launches: float, flops: float, like: torch.Tensor, copied: int = 0) -> bool:
    """Return whether saving `launches` operations is worth `flops` more arithmetic and `copied` numbers more to copy.

    Args:
        launches: saved, forward and backward together.
        flops: of the arithmetic that is done in vain, forward and backward.
        like: tensor of the device and dtype in question.
        copied: numbers, such as those of weights that are joined in one matrix.
    """
    # Copying is bound by memory, which has no rate of its own here: it counts as arithmetic that takes as long.
    return launches * launch_flops(like.device, like.dtype) > flops + FLOPS_PER_COPY * copied
