"""Root-mean-square normalisation over the last dimension, with the residual addition that stands before it.

    y = x / sqrt(mean(x²) + eps) · w          (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)

Two conventions exist, and they differ in more than an offset.  Llama and Qwen round the normalised row to the input's
dtype before they multiply by ``w``; Gemma multiplies by ``1 + w`` in fp32 and rounds once, at the end.  Both are
followed to the bit, since a model was trained with one of them.

``add_rms_norm`` is what a block needs: it adds a branch to the residual stream, norms the sum, and returns both.  Its
backward adds the two gradients that come back in the same pass, so a stream that only passes through costs nothing.
One program serves one row, which is read once and written once; rows are at most a few thousand elements, so a row
lives in registers.  Backward reads the stream and one fp32 number a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorarun.kernels.backend import runs_triton, tl, triton


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """The specification of :func:`rms_norm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if plus_one:
        return (y * (1.0 + weight.to(wide))).to(x.dtype)
    return weight * y.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    plus_one: bool = False,
    post_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The specification of :func:`add_rms_norm`."""
    if delta is not None:
        x = x + (delta if post_weight is None else rms_norm_reference(delta, post_weight, eps, plus_one))
    return x, rms_norm_reference(x, weight, eps, plus_one)


@triton.jit
def _scaled(b_hat, b_w, PLUS_ONE: tl.constexpr, dtype: tl.constexpr):
    """The normalised row times its weight, rounded as the convention says; fp32 with a value of ``dtype``."""
    if PLUS_ONE:
        return (b_hat * (1.0 + b_w)).to(dtype).to(tl.float32)
    return (b_hat.to(dtype).to(tl.float32) * b_w).to(dtype).to(tl.float32)


@triton.jit
def _forward(
    p_x, p_delta, p_w, p_post, p_sum, p_y, p_rstd, p_rpost, stride, cols, eps,
    DELTA: tl.constexpr, POST: tl.constexpr, PLUS_ONE: tl.constexpr, SAVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < cols
    dtype: tl.constexpr = p_y.dtype.element_ty
    b_x = tl.load(p_x + row * stride + o_c, mask=m_c, other=0.0).to(tl.float32)
    if DELTA:
        b_d = tl.load(p_delta + row * cols + o_c, mask=m_c, other=0.0).to(tl.float32)
        if POST:
            rpost = tl.rsqrt(tl.sum(b_d * b_d, axis=0) / cols + eps)
            b_post = tl.load(p_post + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_d = _scaled(b_d * rpost, b_post, PLUS_ONE, dtype)
            if SAVE:
                tl.store(p_rpost + row, rpost)
        b_x = (b_x + b_d).to(dtype).to(tl.float32)
        tl.store(p_sum + row * cols + o_c, b_x.to(dtype), mask=m_c)
    rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / cols + eps)
    b_w = tl.load(p_w + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(p_y + row * cols + o_c, _scaled(b_x * rstd, b_w, PLUS_ONE, dtype).to(dtype), mask=m_c)
    if SAVE:
        tl.store(p_rstd + row, rstd)


@triton.jit
def _backward(
    p_dy, p_dsum, p_x, p_delta, p_w, p_post, p_rstd, p_rpost, p_dx, p_ddelta, stride, cols,
    DSUM: tl.constexpr, POST: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < cols
    b_w = tl.load(p_w + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_g = tl.load(p_dy + row * cols + o_c, mask=m_c, other=0.0).to(tl.float32) * (1.0 + b_w if PLUS_ONE else b_w)
    rstd = tl.load(p_rstd + row)
    b_hat = tl.load(p_x + row * stride + o_c, mask=m_c, other=0.0).to(tl.float32) * rstd
    b_dx = rstd * (b_g - b_hat * (tl.sum(b_g * b_hat, axis=0) / cols))
    if DSUM:
        b_dx += tl.load(p_dsum + row * cols + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(p_dx + row * cols + o_c, b_dx.to(p_dx.dtype.element_ty), mask=m_c)
    if POST:
        b_post = tl.load(p_post + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_g = b_dx * (1.0 + b_post if PLUS_ONE else b_post)
        rpost = tl.load(p_rpost + row)
        b_hat = tl.load(p_delta + row * cols + o_c, mask=m_c, other=0.0).to(tl.float32) * rpost
        b_dd = rpost * (b_g - b_hat * (tl.sum(b_g * b_hat, axis=0) / cols))
        tl.store(p_ddelta + row * cols + o_c, b_dd.to(p_ddelta.dtype.element_ty), mask=m_c)


def _warps(block: int) -> int:
    """Eight elements of 16 bits a thread and load: 32 a thread for a row of 4096 in 4 warps."""
    return max(1, min(16, block // 1024))


def _rows(x: Tensor) -> Tensor:
    """x as [rows, cols] with unit stride in a row, without a copy where the layout allows."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def add_rms_norm_forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, plus_one: bool, post: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x [rows, cols] → (sum, y, rstd, rstd of the post norm); sum is ``x`` itself without a delta."""
    rows, cols = x.shape
    y = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(y)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if save else None
    rpost = torch.empty_like(rstd) if rstd is not None and post is not None else None
    block = triton.next_power_of_2(cols)
    if rows:
        _forward[(rows,)](
            x, delta, weight, post, total, y, rstd, rpost, x.stride(0), cols, eps,
            DELTA=delta is not None, POST=post is not None, PLUS_ONE=plus_one, SAVE=save, BLOCK=block,
            num_warps=_warps(block),
        )  # fmt: skip
    return total, y, rstd, rpost


def add_rms_norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, rstd: Tensor, weight: Tensor, plus_one: bool,
    delta: Tensor | None = None, rpost: Tensor | None = None, post: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the stream and of the branch before its post norm (None without one), [rows, cols]."""
    rows, cols = x.shape
    dx = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    ddelta = None if post is None else torch.empty_like(dx)
    block = triton.next_power_of_2(cols)
    if rows:
        _backward[(rows,)](
            dy, dsum, x, delta, weight, post, rstd, rpost, dx, ddelta, x.stride(0), cols,
            DSUM=dsum is not None, POST=post is not None, PLUS_ONE=plus_one, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return dx, ddelta


class _AddRMSNorm(torch.autograd.Function):
    """Saves the stream, rstd (4 bytes a row), and with a post norm the branch and its rstd; recomputes nothing else."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, plus_one: bool, post: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        flat, branch = _rows(x), None if delta is None else _rows(delta).contiguous()
        total, y, rstd, rpost = add_rms_norm_forward(flat, branch, weight, eps, plus_one, post, save=True)
        ctx.plus_one, ctx.has_delta = plus_one, delta is not None
        ctx.save_for_backward(total, rstd, weight, branch if post is not None else None, rpost, post)
        ctx.set_materialize_grads(False)
        return x if delta is None else total.view(x.shape), y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum: Tensor | None, dy: Tensor | None) -> tuple[Any, ...]:
        total, rstd, weight, delta, rpost, post = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros_like(total)
        shape = dy.shape
        flat_dsum = None if dsum is None else _rows(dsum).contiguous()
        dy = _rows(dy).contiguous()
        dx, ddelta = add_rms_norm_backward(dy, flat_dsum, total, rstd, weight, ctx.plus_one, delta, rpost, post)
        dweight = _dweight(dy, total, rstd, weight) if ctx.needs_input_grad[2] else None
        dpost = _dweight(dx, delta, rpost, post) if ctx.needs_input_grad[5] else None
        dx = dx.view(shape)
        branch = None if not ctx.has_delta else dx if ddelta is None else ddelta.view(shape)
        return dx, branch, dweight, None, None, dpost


def _dweight(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a trained weight, [cols]; in torch, since norms are frozen under LoRA."""
    return (dy.float() * x.float() * rstd.unsqueeze(1)).sum(0).to(weight.dtype)


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    plus_one: bool = False,
    post_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream and norm the sum: (x + delta, norm(x + delta)).

    x, delta [..., dim] of one dtype; weight [dim].  With ``post_weight`` [dim] the branch is normed itself before it is
    added (Gemma 2 and 3).  With delta None the stream passes unchanged.  Bytes moved, forward: read x and delta, write
    both results; backward: read dy, dsum and the sum (and delta), write dx (and ddelta).
    """
    if not runs_triton(x) or x.dtype == torch.float64:
        return add_rms_norm_reference(x, delta, weight, eps, plus_one, post_weight)
    return _AddRMSNorm.apply(x, delta, weight, eps, plus_one, post_weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Normalise the rows of ``x`` and scale them.

    x [..., dim] in any floating dtype, weight [dim].  Statistics are taken in fp32 (fp64 for fp64 input).  ``plus_one``
    selects Gemma's ``1 + w``.  Returns [..., dim] in the dtype of ``x`` (the reference promotes to a wider weight).
    """
    if not runs_triton(x) or x.dtype == torch.float64:
        return rms_norm_reference(x, weight, eps, plus_one)
    return add_rms_norm(x, None, weight, eps, plus_one)[1]
