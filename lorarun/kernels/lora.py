"""The low-rank update of projections that share an input.

    Δyᵢ = scaleᵢ · drop(x) · Aᵢᵀ · Bᵢᵀ                 (Hu et al. 2021, arXiv:2106.09685, section 4.1)

A frozen product is bound by arithmetic, everything here by memory, so what counts is how often an activation is read.
x is read once for all of its projections (``lora_down``), a gradient dy once for both duᵢ and dBᵢ (``lora_grad``),
and x and dx once for dAᵢ and the adapter's part of dx (``lora_input_grad``).  A and B are read in their own dtype,
fp32 as a rule, and cast in registers: no 16-bit copies exist that could be stale.  dA and dB are summed in fp32 over
row groups, and the groups in a fixed order: no atomics, the same bits every time.

Several adapters stand side by side in u and du, [rows, n · width]: each has a slot of ``width`` columns, its rank
rounded up to what the tensor cores take; the columns beyond a rank are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.kernels.backend import runs_triton, tl, triton
from lorarun.kernels.dropout import Dropout, dropout, kept, masking

MAX_WIDTH = 64  # of a slot that the kernels take; wider adapters are served by plain products
ROW_GROUPS = 16  # over which gradients of A and B are summed apart

# (rows, columns of a tile, warps, pipeline stages) for 16 bits and a rank up to 16, measured on an H200 at 8192 rows
DOWN, UP, GRAD, INPUT_GRAD = (64, 256, 4, 3), (32, 128, 4, 3), (32, 256, 4, 3), (64, 128, 4, 3)


class Branch(NamedTuple):
    """One projection's adapter: its ``size`` (rows of the output), A [rank, in], B [size, rank], the scale of B·A.

    A and B are None where a projection has none.
    """

    size: int
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0]


def slot(branches: Sequence[Branch]) -> int:
    """The width of a slot for these adapters: a power of two that holds the largest rank, 16 at the least."""
    largest = max(branch.rank for branch in branches)
    return max(16, 1 << (largest - 1).bit_length()) if largest else 0


# --- references ---


def low_rank(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · x · Aᵀ · Bᵀ for x [..., in], a [rank, in], b [out, rank]; [..., out] in the dtype of ``x``.

    A and B are cast to the dtype of ``x`` for the products; their gradients arrive in their own dtype.  The composed
    form, which everything below is held to.
    """
    return torch.nn.functional.linear(torch.nn.functional.linear(x, a.to(x.dtype)), b.to(x.dtype)) * scale


# --- kernels ---


@triton.jit(do_not_specialize=["seed", "stream", "first", "cut"])
def _down(
    p_x, p_a0, p_a1, p_a2, p_u, rows, cols, stride_x, r0, r1, r2, seed, stream, first, cut, keep,
    N: tl.constexpr, WIDTH: tl.constexpr, DROP: tl.constexpr, IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < rows
    o_r = tl.arange(0, WIDTH)
    acc0 = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    acc1 = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    acc2 = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for k in range(0, cols, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < cols
        b_x = tl.load(p_x + o_m[:, None] * stride_x + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
        if DROP:
            b_kept = kept(first + o_m, k, cols, seed, stream, cut, BLOCK_M, BLOCK_K)
            b_x = tl.where(b_kept, b_x.to(tl.float32) * keep, 0.0).to(p_x.dtype.element_ty)
        o_a = o_r[None, :] * cols + o_k[:, None]  # [BLOCK_K, WIDTH]
        b_a = tl.load(p_a0 + o_a, mask=(o_r < r0)[None, :] & m_k[:, None], other=0.0)
        acc0 = tl.dot(b_x, b_a.to(b_x.dtype), acc0, input_precision=precision)
        if N > 1:
            b_a = tl.load(p_a1 + o_a, mask=(o_r < r1)[None, :] & m_k[:, None], other=0.0)
            acc1 = tl.dot(b_x, b_a.to(b_x.dtype), acc1, input_precision=precision)
        if N > 2:
            b_a = tl.load(p_a2 + o_a, mask=(o_r < r2)[None, :] & m_k[:, None], other=0.0)
            acc2 = tl.dot(b_x, b_a.to(b_x.dtype), acc2, input_precision=precision)
    o_u = o_m[:, None] * (N * WIDTH) + o_r[None, :]
    dtype: tl.constexpr = p_u.dtype.element_ty
    tl.store(p_u + o_u, acc0.to(dtype), mask=m_m[:, None])
    if N > 1:
        tl.store(p_u + o_u + WIDTH, acc1.to(dtype), mask=m_m[:, None])
    if N > 2:
        tl.store(p_u + o_u + 2 * WIDTH, acc2.to(dtype), mask=m_m[:, None])


@triton.jit
def _segment(block, p_0, p_1, p_2, n0, n1, n2, r0, r1, r2, s0, s1, s2, BLOCK_N: tl.constexpr):
    """Which output a block of columns belongs to: (its B, columns, rank, scale, first column of all, block within,
    number)."""
    c0, c1 = tl.cdiv(n0, BLOCK_N), tl.cdiv(n1, BLOCK_N)
    p_b, n, r, s, start, within, which = p_0, n0, r0, s0, n0 * 0, block, block * 0
    if block >= c0:
        p_b, n, r, s, start, within, which = p_1, n1, r1, s1, n0, block - c0, block * 0 + 1
    if block >= c0 + c1:
        p_b, n, r, s, start, within, which = p_2, n2, r2, s2, n0 + n1, block - c0 - c1, block * 0 + 2
    return p_b, n, r, s, start, within, which


@triton.jit(do_not_specialize=["r0", "r1", "r2"])
def _up(
    p_y, p_res, p_u, p_b0, p_b1, p_b2, rows, stride_y, stride_res, group, n0, n1, n2, r0, r1, r2, s0, s1, s2,
    N: tl.constexpr, WIDTH: tl.constexpr, RESIDUAL: tl.constexpr, IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    p_b, n, r, s, start, within, which = _segment(
        tl.program_id(0), p_b0, p_b1, p_b2, n0, n1, n2, r0, r1, r2, s0, s1, s2, BLOCK_N
    )
    o_n = within * BLOCK_N + tl.arange(0, BLOCK_N)
    o_r = tl.arange(0, WIDTH)
    m_n = o_n < n
    b_b = tl.load(p_b + o_n[None, :] * r + o_r[:, None], mask=m_n[None, :] & (o_r < r)[:, None], other=0.0)
    b_b = b_b.to(p_u.dtype.element_ty)
    for at in range(0, group, BLOCK_M):
        o_m = tl.program_id(1).to(tl.int64) * group + at + tl.arange(0, BLOCK_M)
        m_m = o_m < rows
        mask = m_m[:, None] & m_n[None, :]
        b_u = tl.load(p_u + o_m[:, None] * (N * WIDTH) + which * WIDTH + o_r[None, :], mask=m_m[:, None], other=0.0)
        o_y = o_m[:, None] * stride_y + start + o_n[None, :]
        b_y = tl.load(p_y + o_y, mask=mask, other=0.0).to(tl.float32)
        b_y += tl.dot(b_u, b_b, input_precision=precision) * s
        if RESIDUAL:
            b_y = b_y.to(p_y.dtype.element_ty).to(tl.float32)
            b_y += tl.load(p_res + o_m[:, None] * stride_res + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["r0", "r1", "r2"])
def _grad(
    p_dy, p_u, p_b0, p_b1, p_b2, p_du, p_db, rows, stride_dy, total, group, n0, n1, n2, r0, r1, r2, s0, s1, s2,
    N: tl.constexpr, WIDTH: tl.constexpr, IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of columns over one group of rows: its part of du, and the group's part of dB."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    block, part = tl.program_id(0), tl.program_id(1)
    p_b, n, r, s, start, within, which = _segment(block, p_b0, p_b1, p_b2, n0, n1, n2, r0, r1, r2, s0, s1, s2, BLOCK_N)
    o_n = within * BLOCK_N + tl.arange(0, BLOCK_N)
    o_r = tl.arange(0, WIDTH)
    m_n = o_n < n
    b_b = tl.load(p_b + o_n[:, None] * r + o_r[None, :], mask=m_n[:, None] & (o_r < r)[None, :], other=0.0)
    b_b = b_b.to(p_u.dtype.element_ty)
    b_db = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for at in range(0, group, BLOCK_M):
        o_m = part.to(tl.int64) * group + at + tl.arange(0, BLOCK_M)
        m_m = o_m < rows
        b_dy = tl.load(
            p_dy + o_m[:, None] * stride_dy + start + o_n[None, :], mask=m_m[:, None] & m_n[None, :], other=0.0
        )
        b_u = tl.load(p_u + o_m[:, None] * (N * WIDTH) + which * WIDTH + o_r[None, :], mask=m_m[:, None], other=0.0)
        b_du = tl.dot(b_dy, b_b, input_precision=precision) * s
        tl.store(p_du + (block.to(tl.int64) * rows + o_m[:, None]) * WIDTH + o_r[None, :], b_du, mask=m_m[:, None])
        b_db = tl.dot(tl.trans(b_dy), b_u, b_db, input_precision=precision)
    o_db = (part.to(tl.int64) * total + start + o_n[:, None]) * WIDTH + o_r[None, :]
    tl.store(p_db + o_db, b_db * s, mask=m_n[:, None])


@triton.jit(do_not_specialize=["c0", "c1", "c2"])
def _gather(
    p_du, p_out, size, c0, c1, c2, N: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum the column blocks' parts of du, in their order: slot ``program_id(1)`` of the output."""
    which = tl.program_id(1)
    begin, count = c0 * 0, c0
    if which == 1:
        begin, count = c0, c1
    if which == 2:
        begin, count = c0 + c1, c2
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # of [rows, WIDTH]
    o_p = tl.arange(0, PARTS)
    m_e = o_e < size
    b_sum = tl.zeros([BLOCK], tl.float32)
    for at in range(begin, begin + count, PARTS):
        o_i = at + o_p
        mask = (o_i < begin + count)[:, None] & m_e[None, :]
        b_sum += tl.sum(tl.load(p_du + o_i.to(tl.int64)[:, None] * size + o_e[None, :], mask=mask, other=0.0), axis=0)
    o_out = (o_e // WIDTH) * (N * WIDTH) + which * WIDTH + o_e % WIDTH
    tl.store(p_out + o_out, b_sum.to(p_out.dtype.element_ty), mask=m_e)


@triton.jit(do_not_specialize=["seed", "stream", "first", "cut"])
def _input_grad(
    p_x, p_dx, p_du, p_a0, p_a1, p_a2, p_da, rows, cols, stride_x, stride_dx, group,
    r0, r1, r2, seed, stream, first, cut, keep,
    N: tl.constexpr, WIDTH: tl.constexpr, DX: tl.constexpr, DROP: tl.constexpr, IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of columns of x over one group of rows: dx += Σ du·A, and the group's part of dA."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    part = tl.program_id(1)
    o_k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    o_r = tl.arange(0, WIDTH)
    m_k = o_k < cols
    dtype: tl.constexpr = p_x.dtype.element_ty
    o_a = o_r[:, None] * cols + o_k[None, :]  # [WIDTH, BLOCK_K]
    b_a0 = tl.load(p_a0 + o_a, mask=(o_r < r0)[:, None] & m_k[None, :], other=0.0).to(dtype)
    b_a1, b_a2 = b_a0, b_a0
    if N > 1:
        b_a1 = tl.load(p_a1 + o_a, mask=(o_r < r1)[:, None] & m_k[None, :], other=0.0).to(dtype)
    if N > 2:
        b_a2 = tl.load(p_a2 + o_a, mask=(o_r < r2)[:, None] & m_k[None, :], other=0.0).to(dtype)
    b_da0 = tl.zeros([WIDTH, BLOCK_K], tl.float32)
    b_da1 = tl.zeros([WIDTH, BLOCK_K], tl.float32)
    b_da2 = tl.zeros([WIDTH, BLOCK_K], tl.float32)
    for at in range(0, group, BLOCK_M):
        o_m = part.to(tl.int64) * group + at + tl.arange(0, BLOCK_M)
        m_m = o_m < rows
        mask = m_m[:, None] & m_k[None, :]
        b_x = tl.load(p_x + o_m[:, None] * stride_x + o_k[None, :], mask=mask, other=0.0)
        if DROP:
            b_kept = kept(first + o_m, tl.program_id(0) * BLOCK_K, cols, seed, stream, cut, BLOCK_M, BLOCK_K)
            b_x = tl.where(b_kept, b_x.to(tl.float32) * keep, 0.0).to(dtype)
        o_u = o_m[:, None] * (N * WIDTH) + o_r[None, :]
        b_du = tl.load(p_du + o_u, mask=m_m[:, None], other=0.0)
        b_da0 = tl.dot(tl.trans(b_du), b_x, b_da0, input_precision=precision)
        if DX:
            b_dx = tl.dot(b_du, b_a0, input_precision=precision)
        if N > 1:
            b_du = tl.load(p_du + o_u + WIDTH, mask=m_m[:, None], other=0.0)
            b_da1 = tl.dot(tl.trans(b_du), b_x, b_da1, input_precision=precision)
            if DX:
                b_dx = tl.dot(b_du, b_a1, b_dx, input_precision=precision)
        if N > 2:
            b_du = tl.load(p_du + o_u + 2 * WIDTH, mask=m_m[:, None], other=0.0)
            b_da2 = tl.dot(tl.trans(b_du), b_x, b_da2, input_precision=precision)
            if DX:
                b_dx = tl.dot(b_du, b_a2, b_dx, input_precision=precision)
        if DX:
            if DROP:
                b_dx = tl.where(b_kept, b_dx * keep, 0.0)
            o_dx = o_m[:, None] * stride_dx + o_k[None, :]
            b_dx += tl.load(p_dx + o_dx, mask=mask, other=0.0).to(tl.float32)
            tl.store(p_dx + o_dx, b_dx.to(dtype), mask=mask)
    o_da = (part.to(tl.int64) * (N * WIDTH) + o_r[:, None]) * cols + o_k[None, :]
    step = WIDTH * cols
    tl.store(p_da + o_da, b_da0, mask=m_k[None, :])
    if N > 1:
        tl.store(p_da + o_da + step, b_da1, mask=m_k[None, :])
    if N > 2:
        tl.store(p_da + o_da + 2 * step, b_da2, mask=m_k[None, :])


# --- host functions ---


def serves(x: Tensor, branches: Sequence[Branch], drop: Dropout | None = None) -> bool:
    """Whether the kernels take these adapters; plain products of the same values serve the others."""
    shapes = slot(branches) <= MAX_WIDTH and len(branches) <= 3 and all(branch.size > 1 for branch in branches)
    dtypes = {t.dtype for branch in branches for t in branch[1:3] if t is not None}
    whole = all(t.is_contiguous() for branch in branches for t in branch[1:3] if t is not None)
    return runs_triton(x) and shapes and len(dtypes) == 1 and whole and (drop is None or x.shape[1] % 4 == 0)


def _triples(branches: Sequence[Branch]) -> tuple[list[Any], list[Any], list[int], list[int], list[float]]:
    """(A, B, ranks, sizes, scales), three of each; a missing adapter borrows another's pointer and has rank 0."""
    present = next(branch for branch in branches if branch.a is not None)
    padded = [*branches, *[Branch(0)] * (3 - len(branches))]
    a = [present.a if branch.a is None else branch.a for branch in padded]
    b = [present.b if branch.b is None else branch.b for branch in padded]
    return a, b, [br.rank for br in padded], [br.size for br in padded], [br.scale for br in padded]


def row_groups(rows: int, block: int) -> tuple[int, int]:
    """(rows of a group, a multiple of ``block``; how many groups there are), about ROW_GROUPS of them."""
    size = max(block, triton.cdiv(triton.cdiv(rows, ROW_GROUPS), block) * block)
    return size, max(1, triton.cdiv(rows, size))


def tile(best: tuple[int, int, int, int], width: int, x: Tensor) -> tuple[int, int, int, int]:
    """A measured tile with fewer columns for wider slots and wider elements, which take the same memory then."""
    rows, columns, warps, stages = best
    return rows, max(32, columns * 16 // width * 2 // x.element_size()), warps, stages


def _dropped(x: Tensor, drop: Dropout | None) -> Tensor:
    return x if drop is None else dropout(x, *drop)


def lora_down(x: Tensor, branches: Sequence[Branch], drop: Dropout | None = None) -> Tensor:
    """u = drop(x) · Aᵢᵀ side by side, [rows, n · width] in the dtype of x [rows, in]; reads x once."""
    n, width = len(branches), slot(branches)
    if not serves(x, branches, drop):
        u = x.new_zeros(len(x), n * width)
        dropped = _dropped(x, drop)
        for i, branch in enumerate(branches):
            if branch.a is not None:
                u[:, i * width : i * width + branch.rank] = dropped @ branch.a.to(x.dtype).T
        return u
    u = torch.empty((len(x), n * width), dtype=x.dtype, device=x.device)
    a, _, ranks, _, _ = _triples(branches)
    block_m, block_k, warps, stages = tile(DOWN, width, x)
    if len(x):
        _down[(triton.cdiv(len(x), block_m),)](
            x, *a, u, *x.shape, x.stride(0), *ranks, *masking(drop),
            N=n, WIDTH=width, DROP=drop is not None, IEEE=x.dtype == torch.float32, BLOCK_M=block_m, BLOCK_K=block_k,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return u


def lora_up_(y: Tensor, u: Tensor, branches: Sequence[Branch], residual: Tensor | None = None) -> Tensor:
    """Add scaleᵢ · uᵢ · Bᵢᵀ to the columns of y [rows, Σ size] in place, then ``residual`` [rows, size] of a single
    one."""
    n, width = len(branches), slot(branches)
    if not serves(y, branches):
        start = 0
        for i, branch in enumerate(branches):
            if branch.b is not None:
                part = y[:, start : start + branch.size]
                part += (u[:, i * width : i * width + branch.rank] @ branch.b.to(y.dtype).T) * branch.scale
            start += branch.size
        return y if residual is None else y.add_(residual)
    _, b, ranks, sizes, scales = _triples(branches)
    block_m, block_n, warps, stages = tile(UP, width, y)
    group, groups = row_groups(len(y), block_m)
    if len(y):
        _up[(sum(triton.cdiv(size, block_n) for size in sizes), groups)](
            y, residual, u, *b, len(y), y.stride(0), 0 if residual is None else residual.stride(0), group,
            *sizes, *ranks, *scales, N=n, WIDTH=width, RESIDUAL=residual is not None,
            IEEE=y.dtype == torch.float32, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y


def lora_grad(dy: Tensor, u: Tensor, branches: Sequence[Branch]) -> tuple[Tensor, list[Tensor | None]]:
    """du = scaleᵢ · dyᵢ · Bᵢ side by side, [rows, n · width] in the dtype of dy, and dBᵢ = scaleᵢ · dyᵢᵀ · uᵢ in fp32.

    dy [rows, Σ size], read once: each program takes a block of columns over a group of rows.
    """
    n, width, rows = len(branches), slot(branches), len(dy)
    if not serves(dy, branches):
        du, dbs, start = dy.new_zeros(rows, n * width), [], 0
        for i, branch in enumerate(branches):
            part = dy[:, start : start + branch.size]
            at = slice(i * width, i * width + branch.rank)
            if branch.b is not None:
                du[:, at] = (part @ branch.b.to(dy.dtype)) * branch.scale
            dbs.append(None if branch.b is None else (part.T.float() @ u[:, at].float()) * branch.scale)
            start += branch.size
        return du, dbs
    _, b, ranks, sizes, scales = _triples(branches)
    block_m, block_n, warps, stages = tile(GRAD, width, dy)
    total, counts = sum(sizes), [triton.cdiv(size, block_n) for size in sizes]
    group, groups = row_groups(rows, block_m)
    parts = torch.empty((sum(counts), rows, width), dtype=torch.float32, device=dy.device)
    sums = torch.empty((groups, total, width), dtype=torch.float32, device=dy.device)
    du = torch.empty((rows, n * width), dtype=dy.dtype, device=dy.device)
    _grad[(sum(counts), groups)](
        dy, u, *b, parts, sums, rows, dy.stride(0), total, group, *sizes, *ranks, *scales,
        N=n, WIDTH=width, IEEE=dy.dtype == torch.float32, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if rows:
        size = rows * width
        _gather[(triton.cdiv(size, 128), n)](
            parts, du, size, *counts, N=n, WIDTH=width, PARTS=8, BLOCK=128, num_warps=4
        )
    columns = sums.sum(0).split(sizes[:n])
    return du, [None if br.b is None else db[:, : br.rank] for br, db in zip(branches, columns, strict=True)]


def lora_input_grad(
    x: Tensor, dx: Tensor | None, du: Tensor, branches: Sequence[Branch], drop: Dropout | None = None
) -> list[Tensor | None]:
    """dAᵢ = duᵢᵀ · drop(x) in fp32; adds Σ drop'(duᵢ · Aᵢ) to dx [rows, in] in place where it is given."""
    n, width, (rows, cols) = len(branches), slot(branches), x.shape
    if not serves(x, branches, drop):
        dropped, das = _dropped(x, drop), []
        for i, branch in enumerate(branches):
            part = du[:, i * width : i * width + branch.rank]
            das.append(None if branch.a is None else part.T.float() @ dropped.float())
            if branch.a is not None and dx is not None:
                dx += _dropped(part @ branch.a.to(x.dtype), drop)
        return das
    a, _, ranks, _, _ = _triples(branches)
    block_m, block_k, warps, stages = tile(INPUT_GRAD, width, x)
    group, groups = row_groups(rows, block_m)
    sums = torch.empty((groups, n * width, cols), dtype=torch.float32, device=x.device)
    _input_grad[(triton.cdiv(cols, block_k), groups)](
        x, dx, du, *a, sums, rows, cols, x.stride(0), 0 if dx is None else dx.stride(0), group, *ranks, *masking(drop),
        N=n, WIDTH=width, DX=dx is not None, DROP=drop is not None, IEEE=x.dtype == torch.float32,
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    slots = sums.sum(0).split(width)
    return [None if br.a is None else da[: br.rank] for br, da in zip(branches, slots, strict=True)]
