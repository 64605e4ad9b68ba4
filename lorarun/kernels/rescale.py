"""Each column of a product times a number of its own, plus a bias: what DoRA does to the output of a projection.

    y = z · s + b           z [rows, cols], s and b [cols]

One pass over z forward (read, write), one over z and dy backward (read both, write dz), with ds = Σ dy·z and db = Σ dy
on the way.  Written with torch's operations, fp32 copies of z and dy would come and go.  s and b are fp32 and the
result is rounded once: a scale near 1 rounded to 16 bits would not show what a step of training changed.  ds and db are
summed in fp32 over groups of rows, and the groups in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorarun.kernels.backend import runs_triton, tl, triton

FORWARD, BACKWARD = (32, 128), (8, 512)  # tiles
GROUPS, WARPS = 16, 4


def rescale_reference(z: Tensor, s: Tensor, b: Tensor | None = None) -> Tensor:
    """The specification of :func:`rescale`."""
    y = z.to(torch.promote_types(z.dtype, s.dtype)) * s
    return (y if b is None else y + b).to(z.dtype)


@triton.jit
def _rescale(
    p_z, p_s, p_b, p_y, rows, cols, stride, group,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of columns over a group of rows."""
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < cols
    b_s = tl.load(p_s + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_b = tl.zeros([BLOCK_N], tl.float32)
    if BIAS:
        b_b = tl.load(p_b + o_n, mask=m_n, other=0.0).to(tl.float32)
    for at in range(0, group, BLOCK_M):
        o_m = tl.program_id(1).to(tl.int64) * group + at + tl.arange(0, BLOCK_M)
        mask = (o_m < rows)[:, None] & m_n[None, :]
        b_z = tl.load(p_z + o_m[:, None] * stride + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        b_y = b_z * b_s[None, :] + b_b[None, :]
        tl.store(p_y + o_m[:, None] * cols + o_n[None, :], b_y.to(p_y.dtype.element_ty), mask=mask)


@triton.jit
def _rescale_backward(
    p_dy, p_z, p_s, p_n, p_dz, p_ds, p_db, rows, cols, stride_dy, stride_z, group,
    NORMS: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of columns over a group of rows: dz, and the group's parts of ds (with NORMS ds / n) and db."""
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < cols
    b_s = tl.load(p_s + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_ds, b_db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, group, BLOCK_M):
        o_m = tl.program_id(1).to(tl.int64) * group + at + tl.arange(0, BLOCK_M)
        mask = (o_m < rows)[:, None] & m_n[None, :]
        b_dy = tl.load(p_dy + o_m[:, None] * stride_dy + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        b_z = tl.load(p_z + o_m[:, None] * stride_z + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        b_ds += b_dy * b_z
        if BIAS:
            b_db += b_dy
        b_dz = b_dy * b_s[None, :]
        tl.store(p_dz + o_m[:, None] * cols + o_n[None, :], b_dz.to(p_dz.dtype.element_ty), mask=mask)
    o_part = tl.program_id(1).to(tl.int64) * cols + o_n
    b_sum = tl.sum(b_ds, axis=0)
    if NORMS:
        b_sum /= tl.load(p_n + o_n, mask=m_n, other=1.0)
    tl.store(p_ds + o_part, b_sum, mask=m_n)
    if BIAS:
        tl.store(p_db + o_part, tl.sum(b_db, axis=0), mask=m_n)


def _grid(rows: int, cols: int, block_m: int, block_n: int) -> tuple[tuple[int, int], int]:
    """The grid, and the rows of a group."""
    size = max(1, triton.cdiv(triton.cdiv(rows, GROUPS), block_m)) * block_m
    return (triton.cdiv(cols, block_n), triton.cdiv(rows, size)), size


def columns(parts: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Vectors of these sizes one behind the other in fp32, zeros where there is none; None where there is none at
    all."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    pairs = zip(parts, sizes, strict=True)
    return torch.cat([there[0].new_zeros(n) if part is None else part for part, n in pairs]).float()


def rescale_forward(z: Tensor, s: Tensor, b: Tensor | None = None) -> Tensor:
    """z · s + b for z [rows, cols] of any row stride, in a tensor of its own."""
    y = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if len(z):
        block_m, block_n = FORWARD
        grid, group = _grid(len(z), z.shape[1], block_m, block_n)
        _rescale[grid](
            z, s, b, y, *z.shape, z.stride(0), group,
            BIAS=b is not None, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=WARPS,
        )  # fmt: skip
    return y


def rescale_backward(
    dy: Tensor, z: Tensor, s: Tensor, norms: Tensor | None = None, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dz in the dtype of z [rows, cols], ds and db in fp32 (db None unless ``bias``).

    norms [cols], fp32: for s = m / norms, which are constant, dm = ds / norms takes the place of ds.
    """
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    block_m, block_n = BACKWARD
    grid, group = _grid(len(z), z.shape[1], block_m, block_n)
    sums = torch.empty((1 + bias, grid[1], z.shape[1]), dtype=torch.float32, device=z.device)
    if len(z):
        _rescale_backward[grid](
            dy, z, s, norms, dz, sums[0], sums[-1], *z.shape, dy.stride(0), z.stride(0), group,
            NORMS=norms is not None, BIAS=bias, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=WARPS,
        )  # fmt: skip
    totals = sums.sum(1)
    return dz, totals[0], totals[1] if bias else None


class _Rescale(torch.autograd.Function):
    """Saves z and s."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, s: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(z, s)
        ctx.bias = None if b is None else b.dtype
        return rescale_forward(z, s, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        z, s = ctx.saved_tensors
        rows = dy if dy.stride(1) == 1 else dy.contiguous()
        dz, ds, db = rescale_backward(rows, z, s, bias=ctx.bias is not None)
        return dz, ds.to(s.dtype), None if db is None else db.to(ctx.bias)


def rescale(z: Tensor, s: Tensor, b: Tensor | None = None) -> Tensor:
    """z · s + b in the dtype of z [..., cols], whose rows may lie in wider ones; s and b [cols], fp32 as a rule."""
    if not runs_triton(z) or z.dtype == torch.float64:
        return rescale_reference(z, s, b)
    rows = z.flatten(0, -2)
    return _Rescale.apply(rows if rows.stride(1) == 1 else rows.contiguous(), s, b).view(z.shape)
