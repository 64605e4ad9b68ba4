"""The low-rank update of a projection, and the dropout in front of it.

    Δy = scale · drop(x) · Aᵀ · Bᵀ                     (Hu et al. 2021, arXiv:2106.09685, section 4.1)

Dropout masks are not drawn from a generator's state but computed: whether element e of an input is kept is a function
of (seed, stream, e) through Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").  So a
mask needs no storage, a recomputed forward draws the same one, and a kernel that holds any tile of the input can draw
its part.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def philox_rounds(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int, k1: int) -> tuple[Tensor, ...]:
    """Ten rounds of Philox-4x32: four 32-bit words (held in int64) from a counter of four words and a key of two."""
    for _ in range(10):
        # 32 × 32 → 64 bits: int64 multiplication wraps, which leaves both halves right.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, ((p0 >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def philox(seed: int, stream: int, count: int, device: torch.device) -> Tensor:
    """``count`` random integers of 32 bits as int64 [count], on ``device``.

    Number e is word e % 4 of the block with counter (e // 4, stream), 64 bits each, and key ``seed`` (64 bits).
    """
    block = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    high, low = torch.full_like(block, (stream >> 32) & _LOW), torch.full_like(block, stream & _LOW)
    words = philox_rounds(block & _LOW, block >> 32, low, high, seed & _LOW, (seed >> 32) & _LOW)
    return torch.stack(words, dim=-1).flatten()[:count]


def dropout(x: Tensor, p: float, seed: int, stream: int) -> Tensor:
    """Zero each element of ``x`` with probability ``p`` (a multiple of 2⁻³²) and divide the others by 1 − p."""
    kept = philox(seed, stream, x.numel(), x.device).view(x.shape) >= round(p * 2**32)
    return torch.where(kept, x / (1.0 - p), torch.zeros((), dtype=x.dtype, device=x.device))


def low_rank(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · x · Aᵀ · Bᵀ for x [..., in], a [rank, in], b [out, rank]; [..., out] in the dtype of ``x``.

    A and B are cast to the dtype of ``x`` for the products; their gradients arrive in their own dtype.
    """
    return torch.nn.functional.linear(torch.nn.functional.linear(x, a.to(x.dtype)), b.to(x.dtype)) * scale
