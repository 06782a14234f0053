"""Rotary positions of channels (i, i + d / 2), from the configuration alone: float32 whatever the model is cast to.

    f_i = theta^(-2i / d);   the angle of pair i at position p is p f_i

Llama 3's scaling stretches the slow ones for longer contexts. With wavelength w = 2 pi / f, original length M, factor F, and
z = (M / w - low) / (high - low) cut to [0, 1]:   f' = (1 - z) f / F + z f
"""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from loopdropout_trainer.models.layers import StaysFloat32


ROPE_TYPES = ("default", "llama3")


def frequencies(config: PreTrainedConfig, device: torch.device | None = None) -> torch.Tensor:
    """Return the d / 2 frequencies, float32; `config` has `head_dim` and `rope_parameters` of one of the `ROPE_TYPES`."""
    rope, head_dim = config.rope_parameters, config.head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    plain = 1 / rope["rope_theta"] ** exponents
    if rope.get("rope_type", "default") == "default":
        return plain
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = plain * (rope["original_max_position_embeddings"] / (2 * math.pi))  # M / w
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / rope["factor"] + kept * plain


def rotations(
    config: PreTrainedConfig, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [..., d] of positions [...], computed in float32 and rounded to `dtype` at the end."""
    angles = positions[..., None].float() * frequencies(config, positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class ExactRotaryEmbedding(StaysFloat32, LlamaRotaryEmbedding):
    """transformers' rotary embedding, all its kinds, with frequencies that a cast of the model does not round."""
