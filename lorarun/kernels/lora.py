"""The low-rank update of projections that share an input.

    Δyᵢ = scaleᵢ · drop(x) · Aᵢᵀ · Bᵢᵀ                 (Hu et al. 2021, arXiv:2106.09685, section 4.1)

A frozen product is bound by arithmetic, everything here by memory, so what counts is how often an activation is read.
x is read once for all of its projections (``lora_down``), a gradient dy once for both duᵢ and dBᵢ (``lora_grad``),
and x once more for dAᵢ (``lora_input_grad``), which writes the adapters' part of dx on the way: the frozen product is
then added to it, which costs that product nothing, where adding the other way round would read and write dx again.  A
and B are read in their own dtype, fp32 as a rule, and cast in registers: no 16-bit copies exist that could be stale.
dA and dB are summed in fp32 over row groups, and the groups in a fixed order: no atomics, the same bits every time.

Several adapters stand side by side in u and du, [rows, n · width]: each has a slot of ``width`` columns, its rank
rounded up to what the tensor cores take; the columns beyond a rank are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.kernels.arithmetic import rounded
from lorarun.kernels.backend import runs_triton, tl, triton
from lorarun.kernels.dropout import Dropout, drawn, dropout, masked, masking

MAX_WIDTH = 64  # of a slot that the kernels take; wider adapters are served by plain products

# (rows, columns of a tile, warps, pipeline stages, groups of rows that are summed apart) for 16 bits and a rank up to
# 16, measured on an H200 at 8192 rows
FILL = 128  # programs that a GPU wants at the least: few rows share their columns out among several
GATHER = 512  # numbers that one program sums
SHORT = 128  # rows of a group at the least, so that what groups write stays small beside what they read
DOWN, DOWN_DROP = (64, 256, 4, 3, 1), (32, 256, 4, 3, 1)
UP, GRAD, INPUT_GRAD = (32, 128, 4, 3, 16), (32, 256, 4, 3, 16), (64, 128, 4, 3, 16)


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


@triton.jit
def _slots(o_c, p_0, p_1, p_2, r0, r1, r2, WIDTH: tl.constexpr):
    """Columns of u: (the matrix of the adapter that a column belongs to, its rank's index there, whether it exists)."""
    which, within = o_c // WIDTH, o_c % WIDTH
    r = tl.where(which == 0, r0, tl.where(which == 1, r1, tl.where(which == 2, r2, 0)))
    return tl.where(which == 0, p_0, tl.where(which == 1, p_1, p_2)), within, within < r


@triton.jit(do_not_specialize=["r0", "r1", "r2", "seed", "stream", "first", "cut"])
def _down(
    p_x, p_a0, p_a1, p_a2, p_u, rows, cols, span, stride_x, r0, r1, r2, seed, stream, first, cut, keep,
    N: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, DROP: tl.constexpr, IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block of rows over a span of columns: u, or where there are several spans a part of it."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < rows
    o_c = tl.arange(0, ALL)
    p_a, o_r, m_r = _slots(o_c, p_a0, p_a1, p_a2, r0, r1, r2, WIDTH)
    b_u = tl.zeros([BLOCK_M, ALL], tl.float32)
    begin = tl.program_id(1) * span
    for k in range(begin, begin + span, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < cols
        b_x = tl.load(p_x + o_m[:, None] * stride_x + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
        if DROP:
            b_x = masked(b_x, drawn(first + o_m, k, cols, seed, stream, BLOCK_M, BLOCK_K), cut)
        b_a = tl.load(p_a[None, :] + o_r[None, :] * cols + o_k[:, None], mask=m_r[None, :] & m_k[:, None], other=0.0)
        b_u = tl.dot(b_x, b_a.to(b_x.dtype), b_u, input_precision=precision)
    if DROP:
        b_u *= keep
    o_u = (tl.program_id(1).to(tl.int64) * rows + o_m[:, None]) * (N * WIDTH) + o_c[None, :]
    tl.store(p_u + o_u, b_u.to(p_u.dtype.element_ty), mask=m_m[:, None] & (o_c < N * WIDTH)[None, :])


@triton.jit
def segment(block, p_0, p_1, p_2, n0, n1, n2, r0, r1, r2, s0, s1, s2, BLOCK_N: tl.constexpr):
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
    p_b, n, r, s, start, within, which = segment(
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
            b_y = rounded(b_y, p_y.dtype.element_ty)
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
    p_b, n, r, s, start, within, which = segment(block, p_b0, p_b1, p_b2, n0, n1, n2, r0, r1, r2, s0, s1, s2, BLOCK_N)
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


@triton.jit(do_not_specialize=["c0", "c1", "c2", "groups"])
def _gather(
    p_parts, p_sums, p_du, p_db, size, size_db, c0, c1, c2, groups,
    N: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum in their order the column blocks' parts of du, a slot for each ``program_id(1)``, and the last of those the
    row groups' parts of dB."""
    which = tl.program_id(1)
    p_in, begin, count = p_parts, c0 * 0, c0
    if which == 1:
        begin, count = c0, c1
    if which == 2:
        begin, count = c0 + c1, c2
    if which == N:
        p_in, size, begin, count = p_sums, size_db, groups * 0, groups
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # of [rows, WIDTH], or of dB
    o_p = tl.arange(0, PARTS)
    m_e = o_e < size
    b_sum = tl.zeros([BLOCK], tl.float32)
    for at in range(begin, begin + count, PARTS):
        o_i = at + o_p
        mask = (o_i < begin + count)[:, None] & m_e[None, :]
        b_sum += tl.sum(tl.load(p_in + o_i.to(tl.int64)[:, None] * size + o_e[None, :], mask=mask, other=0.0), axis=0)
    if which == N:
        tl.store(p_db + o_e, b_sum, mask=m_e)
    else:
        o_out = (o_e // WIDTH) * (N * WIDTH) + which * WIDTH + o_e % WIDTH
        tl.store(p_du + o_out, b_sum.to(p_du.dtype.element_ty), mask=m_e)


@triton.jit(do_not_specialize=["r0", "r1", "r2", "seed", "stream", "first", "cut"])
def _input_grad(
    p_x, p_dx, p_du, p_a0, p_a1, p_a2, p_da, rows, cols, stride_x, group, r0, r1, r2, seed, stream, first, cut, keep,
    N: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, DX: tl.constexpr, DA: tl.constexpr, DROP: tl.constexpr,
    IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of columns of x over one group of rows: dx = Σ du·A, and the group's part of dA; or one of both."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    dtype: tl.constexpr = p_du.dtype.element_ty
    part = tl.program_id(1).to(tl.int64)
    o_k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    o_c = tl.arange(0, ALL)
    m_k, m_c = o_k < cols, o_c < N * WIDTH
    if DX:
        p_a, o_r, m_r = _slots(o_c, p_a0, p_a1, p_a2, r0, r1, r2, WIDTH)
        b_a = tl.load(p_a[:, None] + o_r[:, None] * cols + o_k[None, :], mask=m_r[:, None] & m_k[None, :], other=0.0)
        b_a = b_a.to(dtype)
    b_da = tl.zeros([ALL, BLOCK_K], tl.float32)
    for at in range(0, group, BLOCK_M):
        o_m = part * group + at + tl.arange(0, BLOCK_M)
        m_m = o_m < rows
        mask = m_m[:, None] & m_k[None, :]
        b_du = tl.load(p_du + o_m[:, None] * (N * WIDTH) + o_c[None, :], mask=m_m[:, None] & m_c[None, :], other=0.0)
        if DROP:
            b_n = drawn(first + o_m, tl.program_id(0) * BLOCK_K, cols, seed, stream, BLOCK_M, BLOCK_K)
        if DA:
            b_x = tl.load(p_x + o_m[:, None] * stride_x + o_k[None, :], mask=mask, other=0.0)
            if DROP:
                b_x = masked(b_x, b_n, cut)
            b_da = tl.dot(tl.trans(b_du), b_x, b_da, input_precision=precision)
        if DX:
            b_dx = (tl.dot(b_du, b_a, input_precision=precision) * (keep if DROP else 1.0)).to(dtype)
            if DROP:
                b_dx = masked(b_dx, b_n, cut)
            tl.store(p_dx + o_m[:, None] * cols + o_k[None, :], b_dx, mask=mask)
    if DA:
        if DROP:
            b_da *= keep
        o_da = (part * (N * WIDTH) + o_c[:, None]) * cols + o_k[None, :]
        tl.store(p_da + o_da, b_da, mask=m_c[:, None] & m_k[None, :])


# --- host functions ---


def serves(x: Tensor, branches: Sequence[Branch], drop: Dropout | None = None) -> bool:
    """Whether the kernels take these adapters; plain products of the same values serve the others."""
    shapes = slot(branches) <= MAX_WIDTH and len(branches) <= 3 and all(branch.size > 1 for branch in branches)
    dtypes = {t.dtype for branch in branches for t in branch[1:3] if t is not None}
    whole = all(t.is_contiguous() for branch in branches for t in branch[1:3] if t is not None)
    even = drop is None or all(branch.a is None or branch.a.shape[1] % 8 == 0 for branch in branches)
    return runs_triton(x) and shapes and len(dtypes) == 1 and whole and even


def triples(branches: Sequence[Branch]) -> tuple[list[Any], list[Any], list[int], list[int], list[float]]:
    """(A, B, ranks, sizes, scales), three of each; a missing adapter borrows another's pointer and has rank 0."""
    present = next(branch for branch in branches if branch.a is not None)
    padded = [*branches, *[Branch(0)] * (3 - len(branches))]
    a = [present.a if branch.a is None else branch.a for branch in padded]
    b = [present.b if branch.b is None else branch.b for branch in padded]
    return a, b, [br.rank for br in padded], [br.size for br in padded], [br.scale for br in padded]


def row_groups(rows: int, block: int, groups: int) -> tuple[int, int]:
    """(rows of a group, a multiple of ``block``; how many groups there are), about ``groups`` of them."""
    size = triton.cdiv(min(max(SHORT, triton.cdiv(rows, groups)), max(1, rows)), block) * block
    return size, max(1, triton.cdiv(rows, size))


def tile(best: tuple[int, ...], width: int, x: Tensor) -> tuple[int, ...]:
    """A measured tile with fewer columns for wider slots and wider elements, which take the same memory then."""
    rows, columns, *rest = best
    return rows, max(32, columns * 16 // width * 2 // x.element_size()), *rest


def _gather_parts(
    parts: Tensor, out: Tensor, counts: list[int], width: int, sums: Tensor | None = None, db: Tensor | None = None
) -> None:
    """Sum parts [Σ counts, rows, width] into the slots of ``out``, and ``sums`` [groups, …] into ``db``."""
    size, size_db = parts[0].numel(), 0 if db is None else db.numel()
    _gather[(triton.cdiv(max(size, size_db), GATHER), len(counts) + (db is not None))](
        parts, parts if sums is None else sums, out, parts if db is None else db, size, size_db,
        *[*counts, 0, 0][:3], 0 if sums is None else len(sums),
        N=len(counts), WIDTH=width, PARTS=8, BLOCK=GATHER, num_warps=4,
    )  # fmt: skip


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
    a, _, ranks, _, _ = triples(branches)
    every = triton.next_power_of_2(n * width)
    block_m, block_k, warps, stages, _ = tile(DOWN if drop is None else DOWN_DROP, max(16, every // 2), x)
    rows, cols = x.shape
    blocks = triton.cdiv(rows, block_m)
    span = triton.cdiv(triton.cdiv(cols, max(1, FILL // max(1, blocks))), block_k) * block_k
    spans = triton.cdiv(cols, span)
    parts = u if spans == 1 else torch.empty((spans, rows, n * width), dtype=torch.float32, device=x.device)
    if rows:
        _down[(blocks, spans)](
            x, *a, parts, rows, cols, span, x.stride(0), *ranks, *masking(drop), N=n, WIDTH=width, ALL=every,
            DROP=drop is not None, IEEE=x.dtype == torch.float32, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
        if spans > 1:
            _gather_parts(parts, u, [spans], n * width)
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
    _, b, ranks, sizes, scales = triples(branches)
    block_m, block_n, warps, stages, groups = tile(UP, width, y)
    group, groups = row_groups(len(y), block_m, groups)
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
    _, b, ranks, sizes, scales = triples(branches)
    block_m, block_n, warps, stages, groups = tile(GRAD, width, dy)
    total, counts = sum(sizes), [triton.cdiv(size, block_n) for size in sizes]
    group, groups = row_groups(rows, block_m, groups)
    parts = torch.empty((sum(counts), rows, width), dtype=torch.float32, device=dy.device)
    sums = torch.empty((groups, total, width), dtype=torch.float32, device=dy.device)
    du = torch.empty((rows, n * width), dtype=dy.dtype, device=dy.device)
    _grad[(sum(counts), groups)](
        dy, u, *b, parts, sums, rows, dy.stride(0), total, group, *sizes, *ranks, *scales,
        N=n, WIDTH=width, IEEE=dy.dtype == torch.float32, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    db = torch.empty((total, width), dtype=torch.float32, device=dy.device)
    _gather_parts(parts, du, counts[:n], width, sums, db)
    columns = db.split(sizes[:n])
    return du, [None if br.b is None else part[:, : br.rank] for br, part in zip(branches, columns, strict=True)]


def lora_input_grad(
    x: Tensor | None, du: Tensor, branches: Sequence[Branch], drop: Dropout | None = None, needs_dx: bool = True
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The adapters' part of dx, Σ drop'(duᵢ · Aᵢ) [rows, in] in the dtype of du (None unless ``needs_dx``), and dAᵢ =
    duᵢᵀ · drop(x) in fp32 (None without x, where every A is frozen); reads x once."""
    n, width, rows = len(branches), slot(branches), len(du)
    cols = next(branch.a.shape[1] for branch in branches if branch.a is not None)
    if not serves(du, branches, drop):
        dropped, das = None if x is None else _dropped(x, drop).float(), []
        dx = du.new_zeros(rows, cols) if needs_dx else None
        for i, branch in enumerate(branches):
            part = du[:, i * width : i * width + branch.rank]
            das.append(None if branch.a is None or dropped is None else part.T.float() @ dropped)
            if branch.a is not None and dx is not None:
                dx += _dropped(part @ branch.a.to(du.dtype), drop)
        return dx, das
    if x is None and not needs_dx:
        return None, [None] * n
    a, _, ranks, _, _ = triples(branches)
    block_m, block_k, warps, stages, groups = tile(INPUT_GRAD, width, du)
    group, groups = row_groups(rows, block_m, groups)
    sums = torch.empty((groups if x is not None else 0, n * width, cols), dtype=torch.float32, device=du.device)
    dx = torch.empty((rows, cols), dtype=du.dtype, device=du.device) if needs_dx else None
    _input_grad[(triton.cdiv(cols, block_k), groups)](
        x, dx, du, *a, sums, rows, cols, 0 if x is None else x.stride(0), group, *ranks, *masking(drop),
        N=n, WIDTH=width, ALL=triton.next_power_of_2(n * width), DX=needs_dx, DA=x is not None, DROP=drop is not None,
        IEEE=du.dtype == torch.float32, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if x is None:
        return dx, [None] * n
    slots = sums.sum(0).split(width)
    return dx, [None if br.a is None else da[: br.rank] for br, da in zip(branches, slots, strict=True)]
