"""Dropout whose mask is computed, not drawn.

Whether element e of an input is kept is a function of (seed, stream, e) through Philox-4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"), not of a generator's state.  So a mask needs no storage, a recomputed
forward draws the same one, and a kernel that holds any tile of the input can draw its part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.kernels.backend import tl, triton

_LOW = 0xFFFFFFFF


class Dropout(NamedTuple):
    """Zero an element with probability ``p``; the mask is that of (seed, stream), of 63 and 31 bits.

    A seed on the device (an int64 scalar) is read when the mask is drawn, so that a CUDA graph can be given another.
    ``row`` is where the rows at hand start in the input that the mask belongs to, when they are a part of it.
    """

    p: float
    seed: int | Tensor
    stream: int
    row: int = 0


def philox_rounds(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Any, k1: Any) -> tuple[Tensor, ...]:
    """Ten rounds of Philox-4x32: four 32-bit words (held in int64) from a counter of four words and a key of two."""
    for _ in range(10):
        # 32 × 32 → 64 bits: int64 multiplication wraps, which leaves both halves right.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, ((p0 >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def philox(seed: int | Tensor, stream: int, count: int, device: torch.device, start: int = 0) -> Tensor:
    """``count`` random integers of 32 bits as int64 [count], on ``device``; the first has the number ``start``.

    Number e is word e % 4 of the block with counter (e // 4, stream), 64 bits each, and key ``seed`` (64 bits).
    """
    block = torch.arange(start // 4, (start + count + 3) // 4, dtype=torch.int64, device=device)
    high, low = torch.full_like(block, (stream >> 32) & _LOW), torch.full_like(block, stream & _LOW)
    words = philox_rounds(block & _LOW, block >> 32, low, high, seed & _LOW, (seed >> 32) & _LOW)
    return torch.stack(words, dim=-1).flatten()[start % 4 :][:count]


def threshold(p: float) -> int:
    """An element is dropped when its 32-bit number is below this."""
    return min(round(p * 2**32), _LOW)


def dropout(x: Tensor, p: float, seed: int | Tensor, stream: int, row: int = 0) -> Tensor:
    """Zero each element of ``x`` with probability ``p`` (a multiple of 2⁻³²) and divide the others by 1 − p."""
    mask = philox(seed, stream, x.numel(), x.device, row * x.shape[-1]).view(x.shape) >= threshold(p)
    return torch.where(mask, x / (1.0 - p), torch.zeros((), dtype=x.dtype, device=x.device))


@triton.jit
def kept(row, o_c, cols, seed, stream, cut, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """The mask [BLOCK_M, BLOCK_C] of elements row · cols + column that survive; columns start at o_c, a multiple of
    4."""
    o_b = (row[:, None] * cols + o_c) // 4 + tl.arange(0, BLOCK_C // 4)[None, :]
    low = (o_b & 0xFFFFFFFF).to(tl.uint32)
    high = (o_b >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    if tl.constexpr(seed.dtype.is_ptr()):
        seed = tl.load(seed)
    w0, w1, w2, w3 = tl.philox(seed, low, high, zero + stream.to(tl.uint32), zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [BLOCK_M, BLOCK_C / 4, 2, 2], in the order w0 w1 w2 w3
    return tl.reshape(words, [BLOCK_M, BLOCK_C]).to(tl.uint32) >= cut.to(tl.uint32)


def masking(drop: Dropout | None) -> tuple[int | Tensor, int, int, int, float]:
    """A mask as kernels take it: (seed, stream, first row, threshold, factor of what is kept)."""
    if drop is None:
        return 0, 0, 0, 0, 1.0
    return drop.seed, drop.stream, drop.row, threshold(drop.p), 1.0 / (1.0 - drop.p)
