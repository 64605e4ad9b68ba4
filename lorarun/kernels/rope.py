"""Rotary position embedding of queries and keys, with the per-head norm that some families put before it.

    (x₁, x₂) → (x₁·cos − x₂·sin, x₂·cos + x₁·sin)      (Su et al. 2021, arXiv:2104.09864, eq. 34)

where x₁ and x₂ are the halves of a head (Hugging Face's layout, not the interleaved one of the paper).  Angles and
products are fp32 and rounded once, which is closer to exact than the usual way of rounding the tables to 16 bits first.

One launch serves q and k.  They may be slices of one wider product, as ``project`` returns them; what comes out is
contiguous.  The rotation is orthogonal, so its backward is the rotation by the opposite angle and saves nothing; with
norms, q and k before the norm are saved, and the norm's statistics are computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorarun.kernels.backend import runs_triton, tl, triton
from lorarun.kernels.rms_norm import rms_norm_reference

TOKENS, HEADS, WARPS = 2, 8, 4  # that one program handles


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, seq, heads, head_dim] by tables [batch or 1, seq, head_dim / 2], in fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x1, x2 = x.to(wide).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [batch, seq, 1, head_dim / 2]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-6, plus_one: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The specification of :func:`rope`."""
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_reference(q, q_weight, eps, plus_one), rms_norm_reference(k, k_weight, eps, plus_one)
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)


@triton.jit
def _rope(
    p_q, p_k, p_dq, p_dk, p_oq, p_ok, p_cos, p_sin, p_wq, p_wk,
    tokens, seq, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_dqb, stride_dqt, stride_dqh, stride_dkb, stride_dkt, stride_dkh, stride_cb, q_heads, k_heads, half, eps,
    NORM: tl.constexpr, PLUS_ONE: tl.constexpr, BACKWARD: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of some tokens.  Forward reads q or k; backward their gradients, and with NORM q or k as well."""
    q_groups = tl.cdiv(q_heads, HEADS)
    groups = q_groups + tl.cdiv(k_heads, HEADS)
    group = tl.program_id(0) % groups  # neighbours read neighbouring heads and the same angles: 3 % over tokens first
    o_r = tl.arange(0, TOKENS * HEADS)
    token = (tl.program_id(0) // groups).to(tl.int64) * TOKENS + o_r // HEADS
    b, t = token // seq, token % seq
    o_e = tl.arange(0, HALF)
    m_e = o_e < half
    heads = tl.where(group < q_groups, q_heads, k_heads)
    o_h = tl.where(group < q_groups, group, group - q_groups) * HEADS + o_r % HEADS
    if group < q_groups:
        p_x, o_x = p_q, b * stride_qb + t * stride_qt + o_h.to(tl.int64) * stride_qh
        p_d, o_d = p_dq, b * stride_dqb + t * stride_dqt + o_h.to(tl.int64) * stride_dqh
        p_o = p_oq
    else:
        p_x, o_x = p_k, b * stride_kb + t * stride_kt + o_h.to(tl.int64) * stride_kh
        p_d, o_d = p_dk, b * stride_dkb + t * stride_dkt + o_h.to(tl.int64) * stride_dkh
        p_o = p_ok
    m_t = token < tokens
    mask = (m_t & (o_h < heads))[:, None] & m_e[None, :]
    o_out = ((token * heads + o_h) * (2 * half))[:, None] + o_e[None, :]
    o_cos = (b * stride_cb + t * half)[:, None] + o_e[None, :]
    b_cos = tl.load(p_cos + o_cos, mask=m_t[:, None] & m_e[None, :], other=0.0)
    b_sin = tl.load(p_sin + o_cos, mask=m_t[:, None] & m_e[None, :], other=0.0)
    dtype: tl.constexpr = p_oq.dtype.element_ty
    dim = 2 * half
    if NORM or not BACKWARD:
        o_1 = o_x[:, None] + o_e[None, :]
        b_x1 = tl.load(p_x + o_1, mask=mask, other=0.0).to(tl.float32)
        b_x2 = tl.load(p_x + o_1 + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        if group < q_groups:
            p_w = p_wq
        else:
            p_w = p_wk
        rstd = tl.rsqrt((tl.sum(b_x1 * b_x1, axis=1) + tl.sum(b_x2 * b_x2, axis=1)) / dim + eps)[:, None]
        b_w1 = tl.load(p_w + o_e, mask=m_e, other=0.0).to(tl.float32)[None, :]
        b_w2 = tl.load(p_w + half + o_e, mask=m_e, other=0.0).to(tl.float32)[None, :]
        if PLUS_ONE:
            b_w1, b_w2 = 1.0 + b_w1, 1.0 + b_w2
        b_x1, b_x2 = b_x1 * rstd, b_x2 * rstd
    if BACKWARD:
        o_1 = o_d[:, None] + o_e[None, :]
        b_d1 = tl.load(p_d + o_1, mask=mask, other=0.0).to(tl.float32)
        b_d2 = tl.load(p_d + o_1 + half, mask=mask, other=0.0).to(tl.float32)
        b_y1, b_y2 = b_d1 * b_cos + b_d2 * b_sin, b_d2 * b_cos - b_d1 * b_sin
        if NORM:
            b_y1, b_y2 = b_y1 * b_w1, b_y2 * b_w2
            mean = ((tl.sum(b_y1 * b_x1, axis=1) + tl.sum(b_y2 * b_x2, axis=1)) / dim)[:, None]
            b_y1, b_y2 = rstd * (b_y1 - b_x1 * mean), rstd * (b_y2 - b_x2 * mean)
    else:
        if NORM:
            if PLUS_ONE:
                b_x1, b_x2 = (b_x1 * b_w1).to(dtype).to(tl.float32), (b_x2 * b_w2).to(dtype).to(tl.float32)
            else:
                b_x1 = (b_x1.to(dtype).to(tl.float32) * b_w1).to(dtype).to(tl.float32)
                b_x2 = (b_x2.to(dtype).to(tl.float32) * b_w2).to(dtype).to(tl.float32)
        b_y1, b_y2 = b_x1 * b_cos - b_x2 * b_sin, b_x2 * b_cos + b_x1 * b_sin
    tl.store(p_o + o_out, b_y1.to(dtype), mask=mask)
    tl.store(p_o + o_out + half, b_y2.to(dtype), mask=mask)


def _launch(
    q: Tensor, k: Tensor, grads: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, plus_one: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Forward of q and k, or the backward of ``grads`` (then q and k matter with weights only)."""
    dq, dk = grads or (q, k)
    batch, seq, q_heads, dim = dq.shape
    out_q, out_k = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (dq, dk))
    groups = triton.cdiv(q_heads, HEADS) + triton.cdiv(k.shape[2], HEADS)
    if batch * seq:
        half = triton.next_power_of_2(dim // 2)
        _rope[(triton.cdiv(batch * seq, TOKENS) * groups,)](
            q, k, dq, dk, out_q, out_k, cos, sin, q_weight, k_weight,
            batch * seq, seq, *q.stride()[:3], *k.stride()[:3], *dq.stride()[:3], *dk.stride()[:3],
            0 if cos.shape[0] == 1 else cos.stride(0), q_heads, dk.shape[2], dim // 2, eps,
            NORM=q_weight is not None, PLUS_ONE=plus_one, BACKWARD=grads is not None,
            TOKENS=TOKENS, HEADS=HEADS, HALF=half, num_warps=WARPS,
        )  # fmt: skip
    return out_q, out_k


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Rope(torch.autograd.Function):
    """Saves the tables (4 bytes × head_dim a token), and q and k before their norm where there is one."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor,
        q_weight: Tensor | None, k_weight: Tensor | None, eps: float, plus_one: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, cos, sin = _unit(q), _unit(k), cos.contiguous(), sin.contiguous()
        kept = (q, k) if q_weight is not None else (None, None)
        ctx.save_for_backward(*kept, cos, sin, q_weight, k_weight)
        ctx.eps, ctx.plus_one = eps, plus_one
        return _launch(q, k, None, cos, sin, q_weight, k_weight, eps, plus_one)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
        q, k, cos, sin, q_weight, k_weight = ctx.saved_tensors
        grads = (_unit(dq), _unit(dk))
        q, k = grads if q is None else (q, k)
        out = _launch(q, k, grads, cos, sin, q_weight, k_weight, ctx.eps, ctx.plus_one)
        return (*out, None, None, None, None, None, None)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise the heads of q and k where weights are given, then rotate them.

    q [batch, seq, heads, head_dim], k [batch, seq, kv_heads, head_dim]; cos, sin [batch or 1, seq, head_dim / 2] fp32;
    q_weight, k_weight [head_dim] are the scales of an RMSNorm over each head.  Returns both in their own dtype and
    shape, contiguous.  Bytes moved: q and k read and written once and the tables read, in each direction.  Weights that
    are trained take the reference.
    """
    trained = q_weight is not None and (q_weight.requires_grad or (k_weight is not None and k_weight.requires_grad))
    if not runs_triton(q) or q.dtype == torch.float64 or trained:
        return rope_reference(q, k, cos, sin, q_weight, k_weight, eps, plus_one)
    return _Rope.apply(q, k, cos, sin, q_weight, k_weight, eps, plus_one)
