"""Products of a few rows with weights in NF4 or FP8, adapters included: what decoding is made of.

    y = act(x · W₀ᵀ) · (x · W₁ᵀ)   or   y = x · [W₀; W₁; W₂]ᵀ,   each + bias + scale · x · Aᵀ · Bᵀ,   + residual

Every code is read once and nothing of the size of W is written.  The usual kernel for one row keeps tensor cores out of
it and is bound by instructions; here codes become 16-bit pairs in registers (:mod:`lorarun.kernels.codes`), which are
what ``tl.dot`` takes, and 16 weights cost one instruction there, whether 1 row or 8.

Nothing moves between threads for that, because the sum over columns may be taken in any order.  A thread holds whole
32-bit words of codes; the tensor core wants pairs of neighbouring columns from it.  So the first pairs of eight words
are one step, the second pairs the next, and x is read in that order.

Up to 16 rows each warp goes its own way: it reads codes of four blocks ahead of their use, and there is no barrier and
no shared memory until warps, which divide the columns among them, are summed.  Scales multiply the sum of their block
in fp32: values are rounded once, to 16 bits.  For more rows x is the larger part of what is read, so that all warps
share a tile of it.

u = x · Aᵀ is made by a short launch before the long one, in parts that the long one sums.  Sums are taken in a fixed
pattern that depends on tiles alone: the same bits every time, and for a row whatever stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorarun.kernels.backend import INTERPRETED, runs_triton, tl, triton
from lorarun.kernels.codes import (
    fp8_scaled,
    fp8_values,
    get,
    get_byte,
    get_eight,
    get_four,
    get_two,
    nf4_scaled,
    nf4_values,
    planes,
)
from lorarun.kernels.fp8 import FP8, fp8_dequantize_reference
from lorarun.kernels.gated import ACTIVATIONS, _activation
from lorarun.kernels.lora import Branch, slot
from lorarun.kernels.nf4 import NF4, nf4_dequantize_reference, tables

ROWS = 64  # the most that these kernels take
ALONE = 16  # rows up to which warps share nothing
MAX_WIDTH = 64  # of adapters' slots
PARTS = (8, 16)  # of u, at the most and a multiple of 4: for many rows and for few
FULL = 264  # programs that keep a GPU of 132 multiprocessors busy
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
# A block is 8 words of codes: 64 weights in NF4, 32 in FP8.  n rows of W, m rows of x.  A word's pairs j of codes take
# part in the products number j of its block.


@triton.jit
def _scale_of(
    p_scale, p_nested, p_map, offset, first, o_b, bn, FORMAT: tl.constexpr, GROUP: tl.constexpr, DOUBLE: tl.constexpr
):
    """Scales of blocks o_b of rows whose first block, or first scale in FP8, is number ``first``, fp32."""
    if FORMAT == "FP8":
        b_f = get(p_scale + first + o_b // bn)
    else:
        o_s = (first + o_b) // GROUP
        if DOUBLE:
            b_f = get(p_map + get_byte(p_scale + o_s)) * get(p_nested + o_s // 256) + offset
        else:
            b_f = get(p_scale + o_s)
    return b_f


@triton.jit
def _rows(a0, a1, b0, b1, U: tl.constexpr, N: tl.constexpr):
    """Pairs of neighbouring columns of the words 2q and 2q + 1, [U, n, 4 q], as one operand [U, n, 16]."""
    return tl.reshape(tl.join(tl.join(a0, b0), tl.join(a1, b1)), [U, N, 16])


@triton.jit
def _columns(a0, a1, b0, b1, U: tl.constexpr, M: tl.constexpr):
    """The same of x, [U, m, 4 q], as the other operand [U, 16, m]."""
    return tl.permute(_rows(a0, a1, b0, b1, U, M), (0, 2, 1))


@triton.jit
def _ahead(p_w, p_scale, p_nested, p_map, offset, first, at, blocks, bn,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, DOUBLE: tl.constexpr, RUNS: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes [U, n, 4] twice, and scales [U, n] or with RUNS what four of them are made of, [W, n] twice."""
    o_u = tl.arange(0, 4 * W)
    o_b = at + o_u % W * 4 + o_u // W  # a warp takes four neighbours: whole lines of 128 bytes
    if not EVEN:
        o_b = tl.minimum(o_b, blocks - 1)
    b_a, b_b = get_two(p_w + o_b[:, None, None] * 8)
    o_r = at + tl.arange(0, W) * 4
    o_s = first + (o_r if EVEN else tl.minimum(o_r, blocks - 4))[:, None]  # where RUNS, blocks are a multiple of 4
    if RUNS and not DOUBLE:
        b_s = tl.reshape(tl.permute(tl.reshape(get_four(p_scale + o_s), [W, N, 4]), (2, 0, 1)), [4 * W, N])
        b_n = b_s
    elif RUNS:
        b_s, b_n = get((p_scale + o_s).to(tl.pointer_type(tl.int32))), get(p_nested + o_s // 256)
    else:
        b_s = _scale_of(p_scale, p_nested, p_map, offset, first, o_b[:, None], bn, FORMAT, GROUP, DOUBLE)
        b_n = b_s
    return b_a, b_b, b_s, b_n


@triton.jit
def _alone(
    p_x, stride_x, rows, p_codes, p_scale, p_nested, p_map, offset, p_values, p_planes, o_n, first, blocks, bn,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, DOUBLE: tl.constexpr, RUNS: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """(x · Wᵀ)ᵀ for rows o_n of weights, fp32 [N, M], by W warps.  Pointers may differ from row to row.

    RUNS: the scales of four blocks are one word.  GROUP blocks share a scale.
    """
    dtype: tl.constexpr = p_x.dtype.element_ty
    U: tl.constexpr = 4 * W
    each: tl.constexpr = 64 if FORMAT == "NF4" else 32
    o_u, o_q, o_m = tl.arange(0, U), tl.arange(0, 4), tl.arange(0, M)
    p_w = (p_codes.to(tl.pointer_type(tl.int32)) + o_n.to(tl.int64) * blocks * 8)[None, :, None]
    p_w += (o_q * 2)[None, None, :]
    p_x += tl.minimum(o_m, rows - 1)[None, :, None] * stride_x + (o_q * (each // 4))[None, None, :]
    p_planes += o_q[None, None, :] * 8
    p_scale, p_nested, p_map = p_scale[None, :], p_nested[None, :], p_map[None, :]
    offset, first = offset[None, :], first[None, :]
    b_y = tl.zeros([U, N, M], tl.float32)
    b_a, b_b, b_s, b_n = _ahead(
        p_w, p_scale, p_nested, p_map, offset, first, 0, blocks, bn, FORMAT, GROUP, DOUBLE, RUNS, N, W, EVEN
    )  # fmt: skip
    for at in tl.range(0, blocks, U, num_stages=1):
        after = tl.minimum(at + U, (blocks - 1) // U * U)
        c_a, c_b, c_s, c_n = _ahead(
            p_w, p_scale, p_nested, p_map, offset, first, after, blocks, bn, FORMAT, GROUP, DOUBLE, RUNS, N, W, EVEN
        )  # fmt: skip
        b_f = b_s
        if RUNS and DOUBLE:
            code = (b_s[None, :, :] >> (tl.arange(0, 4) * 8)[:, None, None]) & 255
            b_f = tl.reshape(get(p_map[None, :, :] + code) * b_n[None, :, :] + offset[None, :, :], [U, N])
        o_b = at + o_u % W * 4 + o_u // W
        if not EVEN:
            b_f = tl.where((o_b < blocks)[:, None], b_f, 0.0)
            o_b = tl.minimum(o_b, blocks - 1)
        p_k = p_x + o_b[:, None, None] * each
        x0, x1, x2, x3, x4, x5, x6, x7 = get_eight(p_k)
        if FORMAT == "NF4":
            z0, z1, z2, z3, z4, z5, z6, z7 = get_eight(p_k + 8)
            v0, v1, v2, v3, v4, v5, v6, v7 = nf4_values(b_a, p_planes, p_values, dtype)
            w0, w1, w2, w3, w4, w5, w6, w7 = nf4_values(b_b, p_planes, p_values, dtype)
            b_p = tl.dot(_rows(v0, v1, w0, w1, U, N), _columns(x0, x1, z0, z1, U, M), input_precision=PRECISION)
            b_p = tl.dot(_rows(v2, v3, w2, w3, U, N), _columns(x2, x3, z2, z3, U, M), b_p, input_precision=PRECISION)
            b_p = tl.dot(_rows(v4, v5, w4, w5, U, N), _columns(x4, x5, z4, z5, U, M), b_p, input_precision=PRECISION)
            b_p = tl.dot(_rows(v6, v7, w6, w7, U, N), _columns(x6, x7, z6, z7, U, M), b_p, input_precision=PRECISION)
        else:
            v0, v1, v2, v3 = fp8_values(b_a, dtype)
            w0, w1, w2, w3 = fp8_values(b_b, dtype)
            b_p = tl.dot(_rows(v0, v1, w0, w1, U, N), _columns(x0, x1, x4, x5, U, M), input_precision=PRECISION)
            b_p = tl.dot(_rows(v2, v3, w2, w3, U, N), _columns(x2, x3, x6, x7, U, M), b_p, input_precision=PRECISION)
        b_y += b_p * b_f[:, :, None]
        b_a, b_b, b_s, b_n = c_a, c_b, c_s, c_n
    return tl.sum(b_y, axis=0)


@triton.jit
def _four(a0, a1, b0, b1, c0, c1, d0, d1):
    """Two pairs of each of two words, [..., 2 of a pair, 2 words, 2 pairs]."""
    return tl.join(tl.join(tl.join(a0, a1), tl.join(b0, b1)), tl.join(tl.join(c0, c1), tl.join(d0, d1)))


@triton.jit
def _ahead_together(
    p_w, p_scale, p_nested, p_map, offset, first, at, blocks, bn,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, DOUBLE: tl.constexpr, RUNS: tl.constexpr, N: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Codes [n, 16] twice, and scales [n, 4] or with RUNS what they are made of, [n, 1] twice."""
    o_b, o_w = at + tl.arange(0, 4), at + tl.arange(0, 16) // 4
    if not EVEN:
        o_b, o_w = tl.minimum(o_b, blocks - 1), tl.minimum(o_w, blocks - 1)
    b_a, b_b = get_two(p_w + (o_w * 8)[None, :])
    if RUNS and not DOUBLE:
        b_s = tl.reshape(get_four(p_scale + first + at), [N, 4])
        b_n = b_s
    elif RUNS:
        b_s, b_n = get((p_scale + first + at).to(tl.pointer_type(tl.int32))), get(p_nested + (first + at) // 256)
    else:
        b_s = _scale_of(p_scale, p_nested, p_map, offset, first, o_b[None, :], bn, FORMAT, GROUP, DOUBLE)
        b_n = b_s
    return b_a, b_b, b_s, b_n


@triton.jit
def _together(
    p_x, stride_x, p_codes, p_scale, p_nested, p_map, offset, p_values, p_planes, o_n, first, blocks, bn,
    start, stop,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, DOUBLE: tl.constexpr, RUNS: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for the blocks from ``start`` to ``stop``, four a round, of x as :func:`_prepare` leaves it.

    All warps share its tile, and codes are decoded while the tensor cores take earlier ones.  With more sums than
    weights a second set of them finds no registers, so scales multiply weights, which are rounded once more.
    """
    dtype: tl.constexpr = p_x.dtype.element_ty
    each: tl.constexpr = 64 if FORMAT == "NF4" else 32
    o_w, o_k, o_m = tl.arange(0, 16), tl.arange(0, 4 * each), tl.arange(0, M)
    p_w = (p_codes.to(tl.pointer_type(tl.int32)) + o_n.to(tl.int64) * blocks * 8)[:, None]
    p_w += (o_w % 4 * 2)[None, :]
    p_x += o_m[:, None] * stride_x + o_k[None, :]
    p_planes += (o_w % 4)[None, :] * 8
    p_scale, p_nested, p_map = p_scale[:, None], p_nested[:, None], p_map[:, None]
    offset, first = offset[:, None], first[:, None]
    b_y = tl.zeros([N, M], tl.float32)
    b_a, b_b, b_s, b_n = _ahead_together(
        p_w, p_scale, p_nested, p_map, offset, first, start, blocks, bn, FORMAT, GROUP, DOUBLE, RUNS, N, EVEN
    )  # fmt: skip
    for at in tl.range(start, stop, 4, num_stages=STAGES):
        after = tl.minimum(at + 4, (blocks - 1) // 4 * 4)
        c_a, c_b, c_s, c_n = _ahead_together(
            p_w, p_scale, p_nested, p_map, offset, first, after, blocks, bn, FORMAT, GROUP, DOUBLE, RUNS, N, EVEN
        )  # fmt: skip
        b_f = b_s
        if RUNS and DOUBLE:
            b_f = get(p_map + ((b_s >> (tl.arange(0, 4) * 8)[None, :]) & 255)) * b_n + offset
        if not EVEN:
            b_f = tl.where((at + tl.arange(0, 4) < blocks)[None, :], b_f, 0.0)
        b_f = tl.reshape(tl.broadcast_to(b_f[:, :, None], [N, 4, 4]), [N, 16])
        b_x = tl.load(p_x + at * each)
        if FORMAT == "NF4":
            v0, v1, v2, v3, v4, v5, v6, v7 = nf4_scaled(b_a, b_f, p_planes, p_values, dtype)
            w0, w1, w2, w3, w4, w5, w6, w7 = nf4_scaled(b_b, b_f, p_planes, p_values, dtype)
            b_v = tl.join(_four(v0, v1, w0, w1, v4, v5, w4, w5), _four(v2, v3, w2, w3, v6, v7, w6, w7))
            b_v = tl.permute(tl.reshape(b_v, [N, 4, 4, 2, 2, 2, 2]), (0, 5, 6, 1, 4, 2, 3))
        else:
            v0, v1, v2, v3 = fp8_scaled(b_a, b_f, dtype)
            w0, w1, w2, w3 = fp8_scaled(b_b, b_f, dtype)
            b_v = tl.permute(tl.reshape(_four(v0, v1, w0, w1, v2, v3, w2, w3), [N, 4, 4, 2, 2, 2]), (0, 5, 1, 4, 2, 3))
        b_v = tl.reshape(b_v, [N, 4 * each])
        b_y = tl.dot(b_v, tl.trans(b_x), b_y, input_precision=PRECISION)
        b_a, b_b, b_s, b_n = c_a, c_b, c_s, c_n
    return b_y


@triton.jit(do_not_specialize=["rows", "r0", "r1", "r2", "span", "parts"])
def _prepare(
    p_x, stride_x, rows, cols, p_ordered, wide, p_parts, parts, p_a0, p_a1, p_a2, r0, r1, r2, span,
    WORD: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One of the ``parts`` of uᵀ, [ALL, M]; in programs beyond these 32 words of x as :func:`_together` reads them.

    That is [M, wide], zeros below the last row and past the last column.  WORD: codes in a word.  Of four blocks the
    first pairs of all words come first, then the second ones; in a block the words 0, 2, 4, 6, 1, 3, 5, 7.
    """
    dtype: tl.constexpr = p_x.dtype.element_ty
    o_m = tl.arange(0, M)
    part = tl.program_id(0)
    if WIDTH > 0:
        if part < parts:
            o_c = tl.arange(0, ALL)
            which, within = o_c // WIDTH, o_c % WIDTH
            r = tl.where(which == 0, r0, tl.where(which == 1, r1, tl.where(which == 2, r2, 0)))
            p_a = tl.where(which == 0, p_a0, tl.where(which == 1, p_a1, p_a2))
            p_a += within.to(tl.int64) * cols
            b_u = tl.zeros([ALL, M], tl.float32)
            for at in range(0, span, BLOCK_K):
                o_k = part * span + at + tl.arange(0, BLOCK_K)
                m_k = o_k < cols
                mask = (o_m < rows)[None, :] & m_k[:, None]
                b_x = tl.load(p_x + o_m[None, :] * stride_x + o_k[:, None], mask=mask, other=0.0)
                b_a = tl.load(p_a[:, None] + o_k[None, :], mask=(within < r)[:, None] & m_k[None, :], other=0.0)
                b_u = tl.dot(b_a.to(dtype), b_x, b_u, input_precision=PRECISION)
            tl.store(p_parts + (part * ALL + o_c)[:, None] * M + o_m[None, :], b_u)
    if WORD > 0:
        if part >= parts:
            o_p = tl.arange(0, 16 * WORD)  # pairs as they are written
            block, slot = o_p // 8 % 4, o_p % 8
            word = slot % 4 * 2 + slot // 4
            o_k = (part - parts) * (32 * WORD) + (block * 8 + word) * WORD + o_p // 32 * 2
            mask = (o_m < rows)[:, None] & (o_k < cols)[None, :]
            b_0 = tl.load(p_x + o_m[:, None] * stride_x + o_k[None, :], mask=mask, other=0.0)
            b_1 = tl.load(p_x + o_m[:, None] * stride_x + o_k[None, :] + 1, mask=mask, other=0.0)
            o_o = (part - parts) * (32 * WORD) + tl.arange(0, 32 * WORD)
            tl.store(p_ordered + o_m[:, None] * wide + o_o[None, :], tl.reshape(tl.join(b_0, b_1), [M, 32 * WORD]))


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
        p_u = p_parts + o_r[:, None] * M + o_m[None, :]
        b_u = tl.zeros([WIDTH, M], tl.float32)
        for i in range(0, parts, 4):
            b_0, b_1 = tl.load(p_u + i * (ALL * M)), tl.load(p_u + (i + 1) * (ALL * M))
            b_2, b_3 = tl.load(p_u + (i + 2) * (ALL * M)), tl.load(p_u + (i + 3) * (ALL * M))
            b_u += (b_0 + b_1) + (b_2 + b_3)
        b_y += tl.dot(b_b.to(dtype), b_u.to(dtype), input_precision=PRECISION) * s
    return b_y


@triton.jit(do_not_specialize=["rows", "r0", "r1", "r2", "parts"])
def _few(
    p_x, stride_x, rows, p_y, stride_y, p_res, stride_res, p_sums, p_parts, parts, p_values, p_planes,
    blocks, bm, bn, grid_n,
    p_codes0, p_absmax0, p_nested0, p_map0, p_offset0, n0, p_bias0, p_b0, r0, s0,
    p_codes1, p_absmax1, p_nested1, p_map1, p_offset1, n1, p_bias1, p_b1, r1, s1,
    p_codes2, p_absmax2, p_nested2, p_map2, p_offset2, n2, p_bias2, p_b2, r2, s2,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, DOUBLE: tl.constexpr, RUNS: tl.constexpr, BIAS: tl.constexpr,
    WIDTH: tl.constexpr, ALL: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    ALONE: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of a weight; with ACT the same rows of two weights.

    SPLITS: how many programs share the columns of a tile.  They leave their sums to a second launch, the END.
    """
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
    b_0 = tl.zeros([N], tl.int32)  # pointers and offset for each row
    p_codes, p_absmax = p_codes + b_0, p_absmax + b_0
    p_nested, p_map, offset, scales = p_absmax, p_absmax, b_0, o_k.to(tl.int64) * blocks  # where there are none
    if FORMAT == "FP8":
        scales = (o_k // bm).to(tl.int64) * grid_n
    elif DOUBLE:
        p_nested = tl.where(own, p_nested0, tl.where(other, p_nested1, p_nested2)) + b_0
        p_map = tl.where(own, p_map0, tl.where(other, p_map1, p_map2)) + b_0
        offset = get(tl.where(own, p_offset0, tl.where(other, p_offset1, p_offset2)) + b_0)
    p_sum = p_sums + (tile * N + tl.arange(0, N))[:, None] * M + tl.arange(0, M)[None, :]
    between = tl.num_programs(0) * N * M
    if END:
        b_y = tl.load(p_sum)
        for i in tl.static_range(1, SPLITS):
            b_y += tl.load(p_sum + i * between)
    elif ALONE:
        b_y = _alone(
            p_x, stride_x, rows, p_codes, p_absmax, p_nested, p_map, offset, p_values, p_planes, o_k, scales, blocks,
            bn, FORMAT, GROUP, DOUBLE, RUNS, PRECISION, M, N, W, EVEN,
        )  # fmt: skip
    else:
        span = tl.cdiv(blocks, 4 * SPLITS) * 4
        b_y = _together(
            p_x, stride_x, p_codes, p_absmax, p_nested, p_map, offset, p_values, p_planes, o_k, scales, blocks, bn,
            tl.program_id(1) * span, tl.minimum(tl.program_id(1) * span + span, blocks),
            FORMAT, GROUP, DOUBLE, RUNS, PRECISION, M, N, EVEN, STAGES,
        )  # fmt: skip
    if SPLITS > 1 and not END:
        tl.store(p_sum + tl.program_id(1) * between, b_y)
    else:
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
            b_y, p_bias, p_b, p_parts + which * (WIDTH * M), parts, r, s, o_n, m_n, BIAS, WIDTH, ALL, dtype, PRECISION,
            M,
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
    """NF4's 16 values in fp32, rounded to ``dtype``, and four copies of their bytes."""
    values = tables(torch.device("cpu"))[0].to(dtype).float()
    return values.to(device), torch.tensor(planes(dtype) * 4, dtype=torch.int32, device="cpu").to(device)


# (BLOCK_N, warps, stages) by the rows of x up to which they serve, measured on an H200
Tile = tuple[int, int, int]
TILES: dict[int, Tile] = {8: (16, 4, 1), 16: (16, 4, 1), 32: (64, 4, 2), 64: (64, 4, 2)}


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
    held = [t for weight in weights for t in weight.part if isinstance(t, Tensor)]
    whole = all(t.is_contiguous() for t in (*held, *biases) if t is not None)
    wide = {x.shape[1]} == {weight.cols for weight in weights}  # if not, the reference says so
    width = slot(branches) <= MAX_WIDTH
    return shapes and aligned and whole and wide and adapters and width and len({bias is None for bias in biases}) == 1


def _launch(
    x: Tensor, weights: Sequence[Stored], biases: Sequence[Tensor | None], branches: Sequence[Branch],
    residual: Tensor | None, act: str | None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    rows, cols = x.shape
    m = max(8, triton.next_power_of_2(rows))
    block_n, warps, stages = TILES[m] if tile is None else tile
    if act is not None:
        block_n //= 2  # of each of the two weights
    wide = weights[0].rows if act is not None else sum(weight.rows for weight in weights)
    tiles = triton.cdiv(wide, block_n) if act is not None else sum(triton.cdiv(w.rows, block_n) for w in weights)
    if m == 8 and tile is None and tiles > 4 * FULL:
        warps = 2  # so many tiles keep a GPU busy by themselves
    if x.data_ptr() % 16 or x.stride(0) % 8:
        x = x.clone(memory_format=torch.contiguous_format)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    values, words = _constants(x.device, x.dtype)
    y = torch.empty((rows, wide), dtype=x.dtype, device=x.device)
    first = weights[0]
    nf4 = isinstance(first.part, NF4)
    blocks, width = cols // (64 if nf4 else 32), slot(branches)
    padded = [*branches, *[Branch(0)] * (3 - len(branches))]
    ranks = [branch.rank for branch in padded]
    present = next((branch for branch in branches if branch.rank), Branch(0))
    factors = [branch if branch.rank else present for branch in padded]
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    every = max(16, triton.next_power_of_2(len(weights) * width))
    least = triton.cdiv(cols, PARTS[m <= ALONE])  # columns of a part
    block_k = max(
        64, min(triton.next_power_of_2(least), (32768 if m <= ALONE else 16384) // triton.next_power_of_2(every + m))
    )
    span = triton.cdiv(least, block_k) * block_k
    parts = triton.cdiv(triton.cdiv(cols, span), 4) * 4 if width else 0
    hidden = torch.empty((parts, every, m), dtype=torch.float32, device=x.device) if width else y
    rounds = 0 if m <= ALONE else triton.cdiv(blocks, 4)  # of _together, 32 words of codes each
    read = torch.empty((m, rounds * (256 if nf4 else 128)), dtype=x.dtype, device=x.device) if rounds else x
    if parts + rounds:
        _prepare[(parts + rounds,)](
            x, x.stride(0), rows, cols, read, read.stride(0), hidden, parts, *[branch.a for branch in factors], *ranks,
            span, WORD=(8 if nf4 else 4) if rounds else 0, WIDTH=width, ALL=every, PRECISION=precision, M=m,
            BLOCK_K=block_k, num_warps=8, num_stages=1 if m <= ALONE else 3,
        )  # fmt: skip
    arguments: list[Any] = []
    for i in range(3):
        j = min(i, len(weights) - 1)
        part = weights[j].part
        held = part if isinstance(part, NF4) else (part.codes.view(torch.uint8), part.scale, None, None, None)
        size = weights[j].rows if i == j else 0
        arguments += [*held, size, biases[j], factors[i].b, ranks[i], padded[i].scale]
    bm, bn = first.part.block if isinstance(first.part, FP8) else (1, 32)
    double = isinstance(first.part, NF4) and first.part.offset is not None
    lined = blocks % 4 == 0 and all(w.part[1].data_ptr() % (4 if double else 16) == 0 for w in weights)
    runs = nf4 and first.block == 64 and lined
    splits = 1 if m <= ALONE else max(1, min(FULL // tiles, rounds // 4))
    n = block_n if act is None else 2 * block_n
    sums = torch.empty((splits, tiles, n, m), dtype=torch.float32, device=x.device) if splits > 1 else hidden
    for end in (False, True)[: 1 + (splits > 1)]:
        _few[(tiles, 1 if end else splits)](
            read, read.stride(0), rows, y, y.stride(0), residual, 0 if residual is None else residual.stride(0), sums,
            hidden, parts, values, words, blocks, bm, WHOLE if bn >= cols else bn // 32, triton.cdiv(cols, bn),
            *arguments,
            FORMAT="NF4" if nf4 else "FP8", GROUP=first.block // 64 if nf4 else 1, DOUBLE=double, RUNS=runs,
            BIAS=biases[0] is not None, WIDTH=width, ALL=every, RESIDUAL=residual is not None, ACT=act,
            PRECISION=precision, ALONE=m <= ALONE, M=m, BLOCK_N=block_n, W=warps,
            EVEN=blocks % (4 * warps if m <= ALONE else 4) == 0, STAGES=stages, SPLITS=splits, END=end,
            num_warps=warps, num_stages=stages,
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
