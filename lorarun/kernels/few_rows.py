"""Products of a few rows with weights in NF4 or FP8, adapters included: what decoding is made of.

    y = act(x · W₀ᵀ) · (x · W₁ᵀ)   or   y = x · [W₀; W₁; W₂]ᵀ,   each + bias + scale · x · Aᵀ · Bᵀ,   + residual

Every code is read once and nothing of the size of W is written.  The usual kernel for one row keeps tensor cores out of
it and is bound by instructions: at the speed of memory a GPU has about five for each weight, of which decoding to
fp32 and multiplying alone would take all.  So codes become 16-bit pairs by byte permutations (eight table look-ups are
14 of them and 7 more), which are what ``tl.dot`` takes, and 16 weights cost one instruction there, whether 1 row or 8.

That works without moving anything between threads because the sum over columns may be taken in any order.  A thread
holds whole 32-bit words of codes; the tensor core wants pairs of neighbouring columns from it.  So the first pairs of
eight words are one step, the second pairs the next, and x is read in that order.  Scales multiply the sum of their
block in fp32: values are rounded once, to 16 bits.

A short launch before the long one writes x in that order, so that it is read 16 bytes at a time and not in pairs
from all over x, 4 bytes a request, and makes u = x · Aᵀ on the way, in parts that the long one sums.

The warps of a program share its rows of W and divide the columns among them, in a fixed pattern that depends on tiles
alone: the same bits every time, and for a row whatever stands beside it in a tile of rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorarun.kernels.arithmetic import PTX
from lorarun.kernels.backend import INTERPRETED, runs_triton, tl, triton
from lorarun.kernels.fp8 import FP8, _decode, fp8_dequantize_reference
from lorarun.kernels.gated import ACTIVATIONS, _activation
from lorarun.kernels.lora import Branch, slot
from lorarun.kernels.nf4 import NF4, VALUES, nf4_dequantize_reference, tables

ROWS = 64  # the most that these kernels take
MAX_WIDTH = 64  # of adapters' slots
PARTS = 16  # of u, at the most
WHOLE = 1 << 30  # a block of scales as wide as any row


class Stored(NamedTuple):
    """A weight [rows, cols] in NF4 with blocks of ``block`` weights, or in FP8."""

    part: NF4 | FP8
    rows: int
    cols: int
    block: int = 64


# --- reference -------------------------------------------------------------------------------------------------------


def dequantized(weight: Stored, dtype: torch.dtype) -> Tensor:
    """The weight in ``dtype``."""
    if isinstance(weight.part, FP8):
        return fp8_dequantize_reference(
            [weight.part], torch.empty((weight.rows, weight.cols), dtype=dtype, device=weight.part.codes.device)
        )
    out = torch.empty(weight.rows * weight.cols, dtype=dtype, device=weight.part.codes.device)
    return nf4_dequantize_reference([weight.part], [len(out)], weight.block, out).view(weight.rows, weight.cols)


def few_rows_reference(
    x: Tensor,
    weights: Sequence[Stored],
    biases: Sequence[Tensor | None],
    branches: Sequence[Branch],
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """What :func:`few_rows` computes, in fp32 (fp64 for fp64) and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    ys = []
    for weight, bias, branch in zip(weights, biases, branches, strict=True):
        y = F.linear(x.to(wide), dequantized(weight, wide), None if bias is None else bias.to(wide))
        if branch.a is not None and branch.b is not None:
            y = y + F.linear(F.linear(x.to(wide), branch.a.to(wide)), branch.b.to(wide)) * branch.scale
        ys.append(y)
    out = torch.cat(ys, dim=1) if act is None else ACTIVATIONS[act](ys[0]) * ys[1]
    return (out if residual is None else out + residual.to(wide)).to(x.dtype)


# --- Triton kernels --------------------------------------------------------------------------------------------------
#
# u blocks of 8 words (64 codes of NF4, 32 of FP8), n rows of W, m rows of x.  A word's pairs j of codes take part in
# the products number j of its block.


def _planes(dtype: torch.dtype) -> list[int]:
    """The 16 values as eight words: their high bytes, four a word, then their low bytes."""
    values = torch.tensor(VALUES, dtype=torch.float32).to(dtype).view(torch.int16).tolist()
    planes = [[(value >> shift) & 255 for value in values] for shift in (8, 0)]
    return [struct.unpack("<i", bytes(plane[i : i + 4]))[0] for plane in planes for i in (0, 4, 8, 12)]


def _permutations() -> str:
    """PTX: a word of eight codes ($8) to eight 16-bit values ($0 to $7), from the tables $9 to $16.

    A selector picks four bytes out of eight by three bits each, so that the halves of the table are asked both, and
    bit 3 of a code, spread over a byte, says which to take.  Of two codes in a byte the high one comes first.
    """
    lines = ["{.reg .b32 s, f, m, a, b, h, l, t;", "and.b32 s, $8, 0x77777777;", "shl.b32 f, $8, 4;"]
    for half, spread in ((0, "0xD9C8"), (4, "0xFBEA")):
        lines += ["shr.u32 s, s, 16;"] * (half > 0) + [f"prmt.b32 m, f, $8, {spread};"]
        for plane, first in (("h", 9), ("l", 13)):
            lines.append(f"prmt.b32 a, ${first}, ${first + 1}, s; prmt.b32 b, ${first + 2}, ${first + 3}, s;")
            lines.append(f"lop3.b32 {plane}, a, b, m, 0xD8;")  # b where m, else a
        for i, pair in ((half, "0x4051"), (half + 2, "0x6273")):
            lines.append(f"prmt.b32 t, l, h, {pair}; mov.b32 {{${i}, ${i + 1}}}, t;")
    return " ".join([*lines, "}"])


PERMUTE = tl.constexpr(_permutations())
OPERANDS = tl.constexpr(",".join(["=h"] * 8 + ["r"] * 9))


@triton.jit
def _look_up(p_values, code):
    return tl.load(p_values + (code & 15))


@triton.jit
def _values(b_w, t0, t1, t2, t3, t4, t5, t6, t7, p_values, dtype: tl.constexpr):
    """The eight values of each word, 16 bits, in the order of the weight's columns."""
    if PTX:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            PERMUTE, OPERANDS, [b_w, t0, t1, t2, t3, t4, t5, t6, t7],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
        return (
            v0.to(dtype, bitcast=True), v1.to(dtype, bitcast=True), v2.to(dtype, bitcast=True),
            v3.to(dtype, bitcast=True), v4.to(dtype, bitcast=True), v5.to(dtype, bitcast=True),
            v6.to(dtype, bitcast=True), v7.to(dtype, bitcast=True),
        )  # fmt: skip
    else:
        return (
            _look_up(p_values, b_w >> 4).to(dtype), _look_up(p_values, b_w).to(dtype),
            _look_up(p_values, b_w >> 12).to(dtype), _look_up(p_values, b_w >> 8).to(dtype),
            _look_up(p_values, b_w >> 20).to(dtype), _look_up(p_values, b_w >> 16).to(dtype),
            _look_up(p_values, b_w >> 28).to(dtype), _look_up(p_values, b_w >> 24).to(dtype),
        )  # fmt: skip


@triton.jit
def _joined(b_a, b_b, U: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pairs of neighbouring columns [U, n, 8 words] as one operand [U, n, 16]."""
    return tl.reshape(tl.join(b_a, b_b), [U, BLOCK_N, 16])


@triton.jit
def _block(at, o_u, blocks, EVEN: tl.constexpr):
    """The numbers of U blocks; the last one again for those past the end, whose scales are 0 then."""
    return at + o_u if EVEN else tl.minimum(at + o_u, blocks - 1)


@triton.jit
def _byte(p, o):
    """Bytes by way of the words that they lie in.  Where a weight is multiplied by a scale, Triton (3.6, 3.9) takes the
    narrowest load of both for the width of the codes, and gives each thread more columns than these products have."""
    at = (p + o).to(tl.int64)
    return (tl.load((at & -4).to(tl.pointer_type(tl.int32))) >> ((at & 3) * 8).to(tl.int32)) & 255


@triton.jit
def _nf4(
    p_x, cols, p_codes, p_absmax, p_nested, p_map, p_offset, p_values, p_planes, o_n, blocks,
    GROUP: tl.constexpr, DOUBLE: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    U: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(x · Wᵀ)ᵀ for rows o_n of weights in NF4, fp32 [N, M]; GROUP blocks of 64 share a scale.  Pointers may differ
    from row to row.

    From 32 rows of x on there are more sums than weights, and the registers of a second set of them: then scales
    multiply the weights, which are rounded twice more.
    """
    FOLD: tl.constexpr = M >= 32
    dtype: tl.constexpr = p_x.dtype.element_ty
    # As loads of tensors, which Triton lets pass where it looks for a layout in which codes become operands in place.
    p_t = p_planes + tl.zeros([1, 1, 1], tl.int32)
    t0, t1, t2, t3 = tl.load(p_t), tl.load(p_t + 1), tl.load(p_t + 2), tl.load(p_t + 3)
    t4, t5, t6, t7 = tl.load(p_t + 4), tl.load(p_t + 5), tl.load(p_t + 6), tl.load(p_t + 7)
    o_u, o_c, o_m = tl.arange(0, U), tl.arange(0, 16), tl.arange(0, M)
    first = o_n.to(tl.int64) * blocks  # the number of a row's first block in the weight
    p_w = (p_codes.to(tl.pointer_type(tl.int32)) + first * 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    p_x += o_m[None, None, :] * cols + o_c[None, :, None]
    if DOUBLE:
        offset = tl.load(p_offset)
    b_y = tl.zeros([U, N, M], tl.float32)
    for at in tl.range(0, blocks, U, num_stages=STAGES):
        o_b = _block(at, o_u, blocks, EVEN)
        b_w = tl.load(p_w + o_b[:, None, None] * 8)
        o_s = (first[None, :] + o_b[:, None]) // GROUP
        if DOUBLE:
            b_s = tl.load(p_map + _byte(p_absmax, o_s)) * tl.load(p_nested + o_s // 256) + offset
        else:
            b_s = tl.load(p_absmax + o_s)
        if not EVEN:
            b_s = tl.where((at + o_u < blocks)[:, None], b_s, 0.0)
        v0, v1, v2, v3, v4, v5, v6, v7 = _values(b_w, t0, t1, t2, t3, t4, t5, t6, t7, p_values, dtype)
        p_k = p_x + o_b[:, None, None] * 64
        x0, x1, x2, x3 = tl.load(p_k), tl.load(p_k + 16), tl.load(p_k + 32), tl.load(p_k + 48)
        w0, w1 = _joined(v0, v1, U, N), _joined(v2, v3, U, N)
        w2, w3 = _joined(v4, v5, U, N), _joined(v6, v7, U, N)
        if FOLD:
            b_f = b_s.to(dtype)[:, :, None]
            b_y = tl.dot(w0 * b_f, x0, b_y, input_precision=PRECISION)
            b_y = tl.dot(w1 * b_f, x1, b_y, input_precision=PRECISION)
            b_y = tl.dot(w2 * b_f, x2, b_y, input_precision=PRECISION)
            b_y = tl.dot(w3 * b_f, x3, b_y, input_precision=PRECISION)
        else:
            b_p = tl.dot(w0, x0, input_precision=PRECISION)
            b_p = tl.dot(w1, x1, b_p, input_precision=PRECISION)
            b_p = tl.dot(w2, x2, b_p, input_precision=PRECISION)
            b_p = tl.dot(w3, x3, b_p, input_precision=PRECISION)
            b_y += b_p * b_s.to(tl.float32)[:, :, None]
    return tl.sum(b_y, axis=0)


@triton.jit
def _fp8(
    p_x, cols, p_codes, p_scale, o_n, blocks, bm, bn, grid_n,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, U: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As :func:`_nf4` for e4m3 codes in blocks of 32, whose scales are for blocks of bm × 32 · bn."""
    dtype: tl.constexpr = p_x.dtype.element_ty
    o_u, o_c, o_m = tl.arange(0, U), tl.arange(0, 16), tl.arange(0, M)
    first = o_n.to(tl.int64) * (blocks * 8)
    p_w = (p_codes.to(tl.pointer_type(tl.int32)) + first)[None, :, None] + tl.arange(0, 8)[None, None, :]
    p_x += o_m[None, None, :] * cols + o_c[None, :, None]
    p_s = (p_scale + (o_n // bm) * grid_n)[None, :]
    b_y = tl.zeros([U, N, M], tl.float32)
    for at in tl.range(0, blocks, U, num_stages=STAGES):
        o_b = _block(at, o_u, blocks, EVEN)
        b_w = tl.load(p_w + o_b[:, None, None] * 8)
        b_s = tl.load(p_s + (o_b // bn)[:, None])
        if not EVEN:
            b_s = tl.where((at + o_u < blocks)[:, None], b_s, 0.0)
        v0, v1 = _decode(b_w & 255).to(dtype), _decode((b_w >> 8) & 255).to(dtype)
        v2, v3 = _decode((b_w >> 16) & 255).to(dtype), _decode((b_w >> 24) & 255).to(dtype)
        p_k = p_x + o_b[:, None, None] * 32
        x0, x1 = tl.load(p_k), tl.load(p_k + 16)
        b_p = tl.dot(_joined(v0, v1, U, N), x0, input_precision=PRECISION)
        b_p = tl.dot(_joined(v2, v3, U, N), x1, b_p, input_precision=PRECISION)
        b_y += b_p * b_s[:, :, None]
    return tl.sum(b_y, axis=0)


@triton.jit(do_not_specialize=["rows", "r0", "r1", "r2", "span"])
def _prepare(
    p_x, stride_x, rows, cols, p_ordered, p_parts, p_a0, p_a1, p_a2, r0, r1, r2, span,
    WORD: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns of x, as the products read them, [M, cols], zeros below the last row; and their part of uᵀ [ALL, M].

    WORD: codes in a word.  Of eight words the first pairs come first, then the second ones.
    """
    dtype: tl.constexpr = p_x.dtype.element_ty
    block: tl.constexpr = 8 * WORD
    o_c, o_m = tl.arange(0, ALL), tl.arange(0, M)
    if WIDTH > 0:
        which, within = o_c // WIDTH, o_c % WIDTH
        r = tl.where(which == 0, r0, tl.where(which == 1, r1, tl.where(which == 2, r2, 0)))
        p_a = tl.where(which == 0, p_a0, tl.where(which == 1, p_a1, p_a2))
        p_a += within.to(tl.int64) * cols
        b_u = tl.zeros([ALL, M], tl.float32)
    for at in range(0, span, BLOCK_K):
        o_k = tl.program_id(0) * span + at + tl.arange(0, BLOCK_K)
        m_k = o_k < cols
        b_x = tl.load(
            p_x + o_m[None, :] * stride_x + o_k[:, None], mask=(o_m < rows)[None, :] & m_k[:, None], other=0.0
        )
        at_word, in_word = o_k % block // WORD, o_k % WORD
        ordered = o_k // block * block + in_word // 2 * 16 + at_word * 2 + in_word % 2
        tl.store(p_ordered + o_m[None, :] * cols + ordered[:, None], b_x, mask=m_k[:, None])
        if WIDTH > 0:
            b_a = tl.load(p_a[:, None] + o_k[None, :], mask=(within < r)[:, None] & m_k[None, :], other=0.0)
            b_u = tl.dot(b_a.to(dtype), b_x, b_u, input_precision=PRECISION)
    if WIDTH > 0:
        tl.store(p_parts + (tl.program_id(0) * ALL + o_c)[:, None] * M + o_m[None, :], b_u)


@triton.jit
def _up(
    b_y, p_bias, p_b, p_parts, parts, r, s, o_n, m_n, BIAS: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr,
    dtype: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """b_y [BLOCK_N, M] with the bias and the adapter's part, whose uᵀ is the sum of ``parts``."""
    if BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if WIDTH > 0:
        o_r, o_m = tl.arange(0, WIDTH), tl.arange(0, M)
        b_b = tl.load(p_b + o_n[:, None] * r + o_r[None, :], mask=m_n[:, None] & (o_r < r)[None, :], other=0.0)
        step: tl.constexpr = min(16, max(1, 8192 // (WIDTH * M)))  # parts that are read at a time
        o_i, o_u = tl.arange(0, step)[:, None, None], (o_r[:, None] * M + o_m[None, :])[None, :, :]
        b_u = tl.zeros([WIDTH, M], tl.float32)
        for i in range(0, parts, step):
            b_u += tl.sum(tl.load(p_parts + (i + o_i) * (ALL * M) + o_u, mask=i + o_i < parts, other=0.0), axis=0)
        b_y += tl.dot(b_b.to(dtype), b_u.to(dtype), input_precision=PRECISION) * s
    return b_y


@triton.jit(do_not_specialize=["rows", "r0", "r1", "r2", "parts"])
def _few(
    p_x, rows, cols, p_y, stride_y, p_res, stride_res, p_parts, parts, p_values, p_planes, blocks, bm, bn, grid_n,
    p_codes0, p_absmax0, p_nested0, p_map0, p_offset0, n0, p_bias0, p_b0, r0, s0,
    p_codes1, p_absmax1, p_nested1, p_map1, p_offset1, n1, p_bias1, p_b1, r1, s1,
    p_codes2, p_absmax2, p_nested2, p_map2, p_offset2, n2, p_bias2, p_b2, r2, s2,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, DOUBLE: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr,
    ALL: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, U: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of a weight; with ACT the same rows of two weights."""
    dtype: tl.constexpr = p_x.dtype.element_ty
    tile = tl.program_id(0)
    t0, t1 = tl.cdiv(n0, BLOCK_N), tl.cdiv(n0, BLOCK_N) + tl.cdiv(n1, BLOCK_N)
    N: tl.constexpr = BLOCK_N if ACT is None else 2 * BLOCK_N
    first, second = tile < t0, (tile >= t0) & (tile < t1)
    own, other = first, second
    if ACT is not None:
        first, second = tile >= 0, tile < 0
        own, other = tl.arange(0, N) < BLOCK_N, tl.arange(0, N) >= BLOCK_N  # rows of the first and of the second weight
    within = tile - tl.where(first, 0, tl.where(second, t0, t1))
    n = tl.where(first, n0, tl.where(second, n1, n2))
    start = tl.where(first, 0, tl.where(second, n0, n0 + n1))
    which = tl.where(first, 0, tl.where(second, 1, 2))
    o_n = within * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    o_k = tl.minimum(within * BLOCK_N + tl.arange(0, N) % BLOCK_N, n - 1)  # rows past the end repeat the last one
    p_codes = tl.where(own, p_codes0, tl.where(other, p_codes1, p_codes2))
    p_absmax = tl.where(own, p_absmax0, tl.where(other, p_absmax1, p_absmax2))
    if FORMAT == "NF4":
        p_nested, p_map, p_offset = p_nested0, p_map0, p_offset0
        if DOUBLE:
            p_nested = tl.where(own, p_nested0, tl.where(other, p_nested1, p_nested2))
            p_map = tl.where(own, p_map0, tl.where(other, p_map1, p_map2))
            p_offset = tl.where(own, p_offset0, tl.where(other, p_offset1, p_offset2))
        b_y = _nf4(
            p_x, cols, p_codes, p_absmax, p_nested, p_map, p_offset, p_values, p_planes, o_k, blocks,
            GROUP, DOUBLE, PRECISION, M, N, U, EVEN, STAGES,
        )  # fmt: skip
    else:
        b_y = _fp8(p_x, cols, p_codes, p_absmax, o_k, blocks, bm, bn, grid_n, PRECISION, M, N, U, EVEN, STAGES)
    p_bias, p_b, r, s = p_bias0, p_b0, r0, s0
    if ACT is not None:
        b_y, b_z = tl.split(tl.permute(tl.reshape(b_y, [2, BLOCK_N, M]), [1, 2, 0]))
    else:
        if BIAS:
            p_bias = tl.where(first, p_bias0, tl.where(second, p_bias1, p_bias2))
        if WIDTH > 0:
            p_b = tl.where(first, p_b0, tl.where(second, p_b1, p_b2))
            r = tl.where(first, r0, tl.where(second, r1, r2))
            s = tl.where(first, s0, tl.where(second, s1, s2))
    b_y = _up(
        b_y, p_bias, p_b, p_parts + which * (WIDTH * M), parts, r, s, o_n, m_n, BIAS, WIDTH, ALL, dtype, PRECISION, M
    )  # fmt: skip
    if ACT is not None:
        b_z = _up(
            b_z, p_bias1, p_b1, p_parts + WIDTH * M, parts, r1, s1, o_n, m_n, BIAS, WIDTH, ALL, dtype, PRECISION, M
        )  # fmt: skip
        b_a, _ = _activation(b_y, ACT)
        b_y = b_a * b_z
    o_m = tl.arange(0, M)
    mask = m_n[:, None] & (o_m < rows)[None, :]
    o_c = start + o_n
    if RESIDUAL:
        b_y += tl.load(p_res + o_m[None, :] * stride_res + o_c[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(p_y + o_m[None, :] * stride_y + o_c[:, None], b_y.to(dtype), mask=mask)


# --- host functions --------------------------------------------------------------------------------------------------


@cache
def _constants(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The 16 values in fp32, rounded to ``dtype``, and their bytes as the permutations want them."""
    values = tables(torch.device("cpu"))[0].to(dtype).float()
    return values.to(device), torch.tensor(_planes(dtype), dtype=torch.int32, device="cpu").to(device)


# (BLOCK_N, U, warps, stages) by the rows of x up to which they serve; what compiles well, not measured yet
Tile = tuple[int, int, int, int]
TILES: dict[int, Tile] = {8: (16, 8, 4, 4), 16: (16, 8, 4, 4), 32: (16, 8, 8, 3), 64: (32, 8, 8, 2)}


def serves(x: Tensor, weights: Sequence[Stored], biases: Sequence[Tensor | None], branches: Sequence[Branch]) -> bool:
    """Whether the kernel takes this product; dequantising and a plain product serve the others."""
    formats = {(type(weight.part), weight.block) for weight in weights}
    first = weights[0]
    if not runs_triton(x) or not 0 < len(x) <= ROWS or len(formats) > 1 or len(weights) > 3:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) and not (INTERPRETED and x.dtype == torch.float32):
        return False
    if isinstance(first.part, FP8):
        blocks = {weight.part.block for weight in weights if isinstance(weight.part, FP8)}
        shapes = (
            first.cols % 32 == 0 and len(blocks) == 1 and (min(blocks)[1] % 32 == 0 or min(blocks)[1] >= first.cols)
        )
    else:
        doubles = {weight.part.offset is None for weight in weights if isinstance(weight.part, NF4)}
        shapes = first.cols % 64 == 0 and first.block % 64 == 0 and len(doubles) == 1
    aligned = all(weight.part.codes.data_ptr() % 16 == 0 for weight in weights) and x.stride(1) == 1
    factors = [t for branch in branches for t in branch[1:3] if t is not None]
    adapters = len({t.dtype for t in factors}) <= 1 and all(t.is_contiguous() for t in factors)
    width = slot(branches) <= MAX_WIDTH
    return shapes and aligned and adapters and width and len({bias is None for bias in biases}) == 1


def _launch(
    x: Tensor, weights: Sequence[Stored], biases: Sequence[Tensor | None], branches: Sequence[Branch],
    residual: Tensor | None, act: str | None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    rows, cols = x.shape
    m = max(8, triton.next_power_of_2(rows))
    block_n, u, warps, stages = TILES[m] if tile is None else tile
    if act is not None:
        block_n = max(16, block_n // 2)  # of each of the two weights
    values, planes = _constants(x.device, x.dtype)
    wide = weights[0].rows if act is not None else sum(weight.rows for weight in weights)
    y = torch.empty((rows, wide), dtype=x.dtype, device=x.device)
    width = slot(branches)
    every = max(16, triton.next_power_of_2(len(weights) * width))
    block_k = max(64, min(256, 8192 // triton.next_power_of_2(every + m)))
    span = triton.cdiv(triton.cdiv(cols, PARTS), block_k) * block_k
    parts = triton.cdiv(cols, span)
    ordered = torch.empty((m, cols), dtype=x.dtype, device=x.device)
    hidden = torch.empty((parts, every, m), dtype=torch.float32, device=x.device) if width else y
    present = next((branch for branch in branches if branch.rank), Branch(0))
    padded = [*branches, *[Branch(0)] * (3 - len(branches))]
    factors = [branch if branch.rank else present for branch in padded]
    ranks = [branch.rank for branch in padded]
    first = weights[0]
    nf4 = isinstance(first.part, NF4)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    _prepare[(parts,)](
        x, x.stride(0), rows, cols, ordered, hidden, *[branch.a for branch in factors], *ranks, span,
        WORD=8 if nf4 else 4, WIDTH=width, ALL=every, PRECISION=precision, M=m, BLOCK_K=block_k, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    arguments: list[Any] = []
    for i in range(3):
        j = min(i, len(weights) - 1)
        part = weights[j].part
        held = part if isinstance(part, NF4) else (part.codes.view(torch.uint8), part.scale, None, None, None)
        size = weights[j].rows if i == j else 0
        arguments += [*held, size, biases[j], factors[i].b, ranks[i], padded[i].scale]
    bm, bn = first.part.block if isinstance(first.part, FP8) else (1, 32)
    blocks = cols // (64 if nf4 else 32)
    tiles = triton.cdiv(wide, block_n) if act is not None else sum(triton.cdiv(w.rows, block_n) for w in weights)
    _few[(tiles,)](
        ordered, rows, cols, y, y.stride(0), residual, 0 if residual is None else residual.stride(0), hidden, parts,
        values, planes, blocks, bm, WHOLE if bn >= cols else bn // 32, triton.cdiv(cols, bn), *arguments,
        FORMAT="NF4" if nf4 else "FP8", GROUP=first.block // 64 if nf4 else 1,
        DOUBLE=isinstance(first.part, NF4) and first.part.offset is not None, BIAS=biases[0] is not None, WIDTH=width,
        ALL=every, RESIDUAL=residual is not None, ACT=act, PRECISION=precision, M=m, BLOCK_N=block_n, U=u,
        EVEN=blocks % u == 0, STAGES=stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


# --- public function -------------------------------------------------------------------------------------------------


def few_rows(
    x: Tensor,
    weights: Sequence[Stored],
    biases: Sequence[Tensor | None],
    branches: Sequence[Branch],
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """x [rows, in] with up to three weights side by side → [rows, Σ out], or with ``act`` act(first) · second.

    biases [out] or None and branches as in :class:`lorarun.kernels.lora.Branch` for each weight; residual [rows, Σ out]
    is added at the end.  Not differentiable.
    Bytes moved: codes and scales once, A and B once.
    """
    if serves(x, weights, biases, branches):
        return _launch(x, weights, biases, branches, residual, act)
    return few_rows_reference(x, weights, biases, branches, residual, act)
