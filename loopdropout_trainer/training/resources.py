"""What a run takes of the machine."""

from __future__ import annotations

import sys

import torch


try:
    import resource
except ImportError:  # Windows
    resource = None


def peak_memory_gb() -> float | None:
    """Return the most memory that this process has held so far, in 10^9 bytes: of its GPU, or where there is none its own."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, on a Mac in bytes
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def forget_peak_memory() -> None:
    """Count a GPU's peak from here on; the peak of a process cannot be taken back."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def device_name() -> str:
    """Return the name of the GPU that this process uses, or `cpu`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
