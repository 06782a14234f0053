"""Random initial states without a random state: a pure function of (key, position, channel), on any device.

The source is Philox-4x32-10 (Salmon et al. 2011): 64-bit key, counter (channel // 4, position, 0, 0). A token's state
depends on nothing but its key and its position, so that decoding with a cache, another batch size, padding, another
number of processes or a resumed run start from the same states; and the global random stream is never touched.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


_WORD = 0xFFFFFFFF


@torch.compiler.assume_constant_result
def stream_key(*parts: str | int) -> int:
    """Return the 64-bit key, as a signed number, of the stream that `parts` name: a purpose, a seed, an optimizer step."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four 32-bit words of Philox-4x32-10, as int64 tensors, for broadcastable counter and key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + 0x9E3779B9) & _WORD
        k1 = (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a 32 x 32 bit product."""
    product = word * factor  # of 64 bits, the highest of which int64 takes for a sign
    return (product >> 32) & _WORD, product & _WORD


def truncated_normals(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """Return standard normals, truncated at 3 sigma, [..., width] float32; a longer request starts with the shorter one's.

    Args:
        keys: int64 of 64-bit stream keys, of any shape that broadcasts with positions [...] int64.
    """
    blocks = torch.arange(math.ceil(width / 4), device=positions.device)
    positions = positions.unsqueeze(-1)
    keys = keys.unsqueeze(-1)
    zero = torch.zeros_like(positions)
    key = (keys & _WORD, (keys >> 32) & _WORD)
    words = philox((blocks, positions, zero, zero), key)
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., :width]
    uniforms = ((words >> 8).to(torch.float32) + 0.5) * 2.0**-24  # the middle of each cell
    inside = math.erf(3 / math.sqrt(2))  # probability of |z| < 3
    quantiles = torch.erfinv(inside * (2 * uniforms - 1))
    return math.sqrt(2) * quantiles
