"""Random factors that a layer expands from a seed, on the device where they are used.

They are too large to be drawn beforehand and passed in (a weight noise of Ouro-1.4B is 460 million normals for a
micro-batch of 8). Expanding them again from the same seed gives the same numbers, so that checkpoint recomputation is
exact and the global random state stays untouched. CPUs and GPUs expand one seed differently.
"""

from __future__ import annotations

import torch


def seeded_normals(seed: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return float32 standard normals."""
    return torch.randn(shape, generator=_generator(seed, device), device=device)


def seeded_masks(seed: int, size: int, p: float, device: torch.device) -> torch.Tensor:
    """Return [size] float32 zeros with probability p, and ones."""
    return (torch.rand(size, generator=_generator(seed, device), device=device) >= p).to(torch.float32)


def _generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
