"""The length of each row of W + s·B·A, which DoRA divides by, without ever making that sum.

    ‖w + s·b·A‖² = ‖w‖² + Σⱼ (2·(W·Aᵀ)ⱼ + s·(b·A·Aᵀ)ⱼ) · s·bⱼ      for a row w of W and its row b of B

(Liu et al. 2024, arXiv:2402.09353, section 4.3, where the length is a constant to the gradient.)  The usual way adds
B·A to a copy of W and takes the norm of that: three passes over weights that a projection's own product reads once.
Here W is read once, for a product as narrow as the rank; ‖w‖² is a constant and computed once.  Where the update almost
cancels the weight the terms cancel too, and a length has an absolute error of 2⁻¹² ‖w‖ in fp32: no adapter gets there.

One launch serves projections that share an input, up to three, and turns the lengths into DoRA's scales as well: done
with torch's operations this is some fifteen launches a projection, none of which takes a GPU as long as asking for it
takes the host.  Each program owns a block of rows and walks along their columns, so nothing is summed across programs.
Bytes: W once (2 an element in 16 bits), and A once a program, from the cache (4 · rank · in).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from lorarun.kernels.backend import autocast, runs_triton, tl, triton
from lorarun.kernels.lora import MAX_WIDTH, Branch, segment, slot, tile, triples

# (rows, columns of a tile, warps, pipeline stages) for 16 bits and a rank up to 16, which was compiled for an H200 (120
# registers) and not measured; slots of 64 columns take twice the warps, with which their registers suffice
TILE = (32, 256, 4, 3)


@torch.no_grad()
def row_squares(weight: Tensor) -> Tensor:
    """‖w‖² of each row, [out], in fp32 or fp64."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32)).square()


@torch.no_grad()
def row_norms_reference(weight: Tensor, a: Tensor, b: Tensor, scale: float, squares: Tensor | None = None) -> Tensor:
    """The specification of :func:`row_norms`."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    with torch.autocast(weight.device.type, enabled=False) if autocast(weight.device) else nullcontext():
        if squares is None:
            squares = row_squares(weight)
        a = a.to(weight.dtype)
        if weight.dtype != wide and weight.is_cuda:
            along = torch.mm(weight, a.T, out_dtype=wide)
        else:
            along = (weight @ a.T).to(wide)  # [out, rank]
        a, b = a.to(wide), b.to(wide) * scale
        total = squares + ((2 * along + b @ (a @ a.T)) * b).sum(1)
        return total.clamp_min_(torch.finfo(wide).tiny).sqrt_()  # a row of zeros has a length to divide by


@triton.jit(do_not_specialize=["n0", "n1", "n2", "r0", "r1", "r2"])
def _row_norms(
    p_w0, p_w1, p_w2, p_a0, p_a1, p_a2, p_b0, p_b1, p_b2, p_q0, p_q1, p_q2, p_m0, p_m1, p_m2, p_norms, p_scales, cols,
    n0, n1, n2, r0, r1, r2, s0, s1, s2,
    SCALES: tl.constexpr, WIDTH: tl.constexpr, IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block of one projection's rows: their lengths, and where SCALES magnitude / length; 1 for a rank of 0."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    p_b, n, r, s, start, within, which = segment(
        tl.program_id(0), p_b0, p_b1, p_b2, n0, n1, n2, r0, r1, r2, s0, s1, s2, BLOCK_M
    )
    p_w, p_a, p_q, p_m = p_w0, p_a0, p_q0, p_m0
    if which == 1:
        p_w, p_a, p_q, p_m = p_w1, p_a1, p_q1, p_m1
    if which == 2:
        p_w, p_a, p_q, p_m = p_w2, p_a2, p_q2, p_m2
    o_m = within * BLOCK_M + tl.arange(0, BLOCK_M)
    o_r = tl.arange(0, WIDTH)
    m_m, m_r = o_m < tl.where(r > 0, n, 0), o_r < r
    b_along = tl.zeros([BLOCK_M, WIDTH], tl.float32)  # W · Aᵀ
    b_gram = tl.zeros([WIDTH, WIDTH], tl.float32)  # A · Aᵀ
    for k in range(0, tl.where(r > 0, cols, 0), BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < cols
        o_w = o_m.to(tl.int64)[:, None] * cols + o_k[None, :]
        b_w = tl.load(p_w + o_w, mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_a = tl.load(p_a + o_r[:, None] * cols + o_k[None, :], mask=m_r[:, None] & m_k[None, :], other=0.0)
        b_a = b_a.to(b_w.dtype)
        b_along = tl.dot(b_w, tl.trans(b_a), b_along, input_precision=precision)
        b_gram = tl.dot(b_a, tl.trans(b_a), b_gram, input_precision=precision)
    o_b = o_m.to(tl.int64)[:, None] * r + o_r[None, :]
    b_b = tl.load(p_b + o_b, mask=m_m[:, None] & m_r[None, :], other=0.0).to(tl.float32) * s
    b_sum = tl.sum((2 * b_along + tl.dot(b_b, b_gram, input_precision="ieee")) * b_b, axis=1)
    b_total = tl.load(p_q + o_m, mask=m_m, other=1.0) + b_sum
    b_norms = tl.sqrt_rn(tl.maximum(b_total, 1.1754943508222875e-38))  # a row of zeros has a length to divide by
    tl.store(p_norms + start + o_m, b_norms, mask=o_m < n)
    if SCALES:
        b_m = tl.load(p_m + o_m, mask=m_m, other=1.0)
        tl.store(p_scales + start + o_m, tl.div_rn(b_m, b_norms), mask=o_m < n)


def _launch(
    weights: Sequence[Tensor], branches: Sequence[Branch], squares: Sequence[Tensor | None],
    magnitudes: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(lengths, scales), [Σ size] fp32; 1 where a branch has no rank.  Without magnitudes both are the lengths."""
    scaled = any(magnitude is not None for magnitude in magnitudes)
    a, b, ranks, sizes, factors = triples(branches)
    first, width = weights[0], slot(branches)
    block_m, block_k, warps, stages = tile(TILE, width, first)
    out = torch.empty((1 + scaled, sum(sizes)), dtype=torch.float32, device=first.device)
    _row_norms[(sum(triton.cdiv(size, block_m) for size in sizes),)](
        *_three(weights), *a, *b, *_three(squares), *_three(magnitudes if scaled else squares), out[0], out[-1],
        first.shape[1], *sizes, *ranks, *factors, SCALES=scaled, WIDTH=width, IEEE=first.dtype == torch.float32,
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=2 * warps if width == MAX_WIDTH else warps, num_stages=stages,
    )  # fmt: skip
    return out[0], out[-1]


def _three(parts: Sequence[Tensor | None]) -> list[Tensor]:
    """Three pointers; those that are missing are borrowed and not read."""
    present = next(part for part in parts if part is not None)
    return [(present if part is None else part).contiguous() for part in (*parts, None, None)[:3]]


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float, squares: Tensor | None = None) -> Tensor:
    """‖W + scale·B·A‖ of each row, [out], in fp32 (fp64 for a weight of that).

    weight [out, in] dense, a [rank, in], b [out, rank].  W·Aᵀ is taken in the dtype of ``weight`` with A cast to it, as
    the adapter's own product does.  squares [out]: ‖w‖², where it is known.
    """
    branch = Branch(len(weight), a.contiguous(), b.contiguous(), scale)
    if not runs_triton(weight) or weight.dtype == torch.float64 or slot([branch]) > MAX_WIDTH:
        return row_norms_reference(weight, a, b, scale, squares)
    return _launch([weight], [branch], [row_squares(weight) if squares is None else squares], [None])[0]


@torch.no_grad()
def row_scales(
    weights: Sequence[Tensor], branches: Sequence[Branch], squares: Sequence[Tensor | None],
    magnitudes: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`row_norms` of projections side by side, and magnitude / length: [Σ size] each, fp32, in one launch.

    Weights of one 16-bit dtype or fp32, with adapters that :func:`lorarun.kernels.lora.serves`; squares and magnitudes
    [size].  Both results are 1 for a projection without a magnitude.
    """
    learned = [Branch(br.size) if m is None else br for br, m in zip(branches, magnitudes, strict=True)]
    return _launch(weights, learned, squares, [None if m is None else m.float() for m in magnitudes])
