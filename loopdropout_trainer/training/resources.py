"""What a run takes of the machine."""

from __future__ import annotations

import sys

import torch


try:
    import resource
except ImportError:  # Windows
    resource = None


def peak_memory_bytes() -> int | None:
    """Return the most memory that this process has held so far: of the GPU if there is one, of the machine otherwise."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def device_name() -> str:
    """Return the name of the GPU that this process uses, or `cpu`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
