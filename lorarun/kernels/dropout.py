"""Dropout whose mask is computed, not drawn.

Whether element e of an input is kept is a function of (seed, stream, e) through Philox-4x32-7 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3": seven rounds are the fewest that pass BigCrush), not of a generator's
state.  So a mask needs no storage, a recomputed forward draws the same one, and a kernel that holds any tile of the
input can draw its part.  15 bits decide on an element, eight elements share a block of Philox: drawing has to be cheap
beside reading an element, so a probability is a multiple of 2⁻¹⁵.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.kernels.arithmetic import PTX, once
from lorarun.kernels.backend import tl, triton

_LOW = 0xFFFFFFFF
ROUNDS = tl.constexpr(7)
# Two 15-bit numbers $2 plus 2¹⁵ − cut have their bit 15 set where they reach cut; that bit, spread, masks the pair $1.
MASK = tl.constexpr(
    "{.reg .b32 t; and.b32 t, $2, 0x7FFF7FFF; add.u32 t, t, $3; prmt.b32 t, t, t, 0xBB99; and.b32 $0, $1, t;}"
)


class Dropout(NamedTuple):
    """Zero an element with probability ``p``, to 15 bits; the mask is that of (seed, stream), of 63 and 31 bits.

    A seed on the device (an int64 scalar) is read when the mask is drawn, so that a CUDA graph can be given another.
    ``row`` is where the rows at hand start in the input that the mask belongs to, when they are a part of it.
    """

    p: float
    seed: int | Tensor
    stream: int
    row: int = 0


def philox_rounds(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Any, k1: Any) -> tuple[Tensor, ...]:
    """Seven rounds of Philox-4x32: four 32-bit words (held in int64) from a counter of four words and a key of two."""
    for _ in range(7):
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
    """An element is dropped when its 15-bit number is below this."""
    return min(round(p * 2**15), 2**15 - 1)


def dropout(x: Tensor, p: float, seed: int | Tensor, stream: int, row: int = 0) -> Tensor:
    """Zero each element of ``x`` with probability ``p``, rounded to a multiple of 2⁻¹⁵, and divide the others by 1 − p.

    Element e takes the low 15 bits of half e % 2, the low half first, of word e // 2.
    """
    cut, first = threshold(p), row * x.shape[-1]
    words = philox(seed, stream, x.numel() // 2 + 2, x.device, first // 2)
    numbers = torch.stack((words, words >> 16), dim=-1).flatten()[first % 2 :][: x.numel()] & 0x7FFF
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(numbers.view(x.shape) >= cut, x / (1.0 - cut / 2**15), zero)


@triton.jit
def drawn(row, o_c, cols, seed, stream, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """The numbers int16 [BLOCK_M, BLOCK_C] of elements row · cols + column, for columns from o_c, a multiple of 8, on.
    Of each the low 15 bits count."""
    o_b = (row[:, None] * cols + o_c) // 8 + tl.arange(0, BLOCK_C // 8)[None, :]
    if tl.constexpr(seed.dtype.is_ptr()):
        seed = tl.load(seed)
    seed = seed.to(tl.int64)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = (o_b & 0xFFFFFFFF).to(tl.uint32), (o_b >> 32).to(tl.uint32)
    c3 = tl.zeros_like(c0)
    c2 = c3 + stream.to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        # One product of 64 bits, where tl.philox takes its halves apart.
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    words = once(tl.join(tl.join(c0, c2), tl.join(c1, c3)))  # [BLOCK_M, BLOCK_C / 8, 2, 2], in the order 0 1 2 3
    return tl.reshape(tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)), [BLOCK_M, BLOCK_C])


@triton.jit
def masked(b_x, b_n, cut):
    """b_x, and 0 where the number that was drawn is below ``cut``."""
    if PTX and b_x.dtype.primitive_bitwidth == 16:
        b_c = tl.full(b_x.shape, 0, tl.int32) + (0x8000 - cut) * 0x10001
        return tl.inline_asm_elementwise(MASK, "=r,r,r,r,r", [b_x, b_n, b_c], dtype=b_x.dtype, is_pure=True, pack=2)
    else:
        return tl.where((b_n & 0x7FFF) >= cut, b_x, 0.0).to(b_x.dtype)


def masking(drop: Dropout | None) -> tuple[int | Tensor, int, int, int, float]:
    """A mask as kernels take it: (seed, stream, first row, threshold, factor of what is kept)."""
    if drop is None:
        return 0, 0, 0, 0, 1.0
    cut = threshold(drop.p)
    return drop.seed, drop.stream, drop.row, cut, 1.0 / (1.0 - cut / 2**15)
