"""The gated activation of an MLP: act(gate) · up  (Shazeer 2020, arXiv:2002.05202: SwiGLU and GeGLU).

Three activations occur in the families here.  ``gelu_pytorch_tanh`` is the tanh approximation that Gemma was trained
with; ``gelu`` is the exact one.  They differ by up to 5e-4, so a name is never replaced by another.

Gate and up may be the halves of one product [rows, 2·inner], which is how ``gated_mlp`` makes them; the kernels take
any row stride.  Backward saves gate and up and computes the activation again.

For ``gated_mlp`` the adapters of gate and up are finished here (``adapted_forward``), and so are the part of the
gradient that comes through the down projection's adapter and that adapter's dA (``adapted_backward``): each would be
a pass of its own over the widest tensors of the model, and is a small product on a tile that is in registers anyway.
dB and du of gate and up are left to ``lora_grad``: made here as well they took 1.09 ms instead of 0.63, for want of
registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorarun.kernels.arithmetic import rounded, sigmoid
from lorarun.kernels.backend import runs_triton, tl, triton
from lorarun.kernels.dropout import Dropout, drawn, masked, masking
from lorarun.kernels.lora import Branch, row_groups, tile

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")
}  # fmt: skip
BLOCK = 1024
# Tiles of the adapted kernels, as in lora.py.
FORWARD, BACKWARD, BACKWARD_DROP = (32, 64, 4, 2, 32), (16, 128, 4, 3, 16), (16, 64, 4, 3, 16)


def gated_reference(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """The specification of :func:`gated`; torch computes a 16-bit activation in fp32 and rounds it, too."""
    return ACTIVATIONS[act](gate) * up


@triton.jit
def _activation(b_g, ACT: tl.constexpr):
    """(act(g), act'(g)) in fp32."""
    if ACT == "silu":
        b_s = sigmoid(b_g)
        return b_g * b_s, b_s * (1.0 + b_g * (1.0 - b_s))
    elif ACT == "gelu":
        b_cdf = 0.5 * (1.0 + tl.erf(b_g * 0.7071067811865476))
        return b_g * b_cdf, b_cdf + b_g * 0.3989422804014327 * tl.exp(-0.5 * b_g * b_g)
    else:
        b_z = 0.7978845608028654 * (b_g + 0.044715 * b_g * b_g * b_g)
        b_t = 2.0 * sigmoid(2.0 * b_z) - 1.0  # tanh, without overflow on either side
        b_dz = 0.7978845608028654 * (1.0 + 0.134145 * b_g * b_g)
        return 0.5 * b_g * (1.0 + b_t), 0.5 * (1.0 + b_t) + 0.5 * b_g * (1.0 - b_t * b_t) * b_dz


@triton.jit
def _forward(p_g, p_u, p_y, cols, stride_g, stride_u, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < cols
    b_g = tl.load(p_g + row * stride_g + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_u = tl.load(p_u + row * stride_u + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_a, _ = _activation(b_g, ACT)
    b_a = rounded(b_a, p_y.dtype.element_ty)
    tl.store(p_y + row * cols + o_c, (b_a * b_u).to(p_y.dtype.element_ty), mask=m_c)


@triton.jit
def _backward(
    p_dy, p_g, p_u, p_dg, p_du, cols, stride_g, stride_u, stride_d, ACT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < cols
    dtype: tl.constexpr = p_dg.dtype.element_ty
    b_dy = tl.load(p_dy + row * cols + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + row * stride_g + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_u = tl.load(p_u + row * stride_u + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_a, b_da = _activation(b_g, ACT)
    b_a = rounded(b_a, dtype)
    tl.store(p_dg + row * stride_d + o_c, (b_dy * b_u * b_da).to(dtype), mask=m_c)
    tl.store(p_du + row * stride_d + o_c, (b_dy * b_a).to(dtype), mask=m_c)


def gated_forward(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) · up for [rows, inner] tensors with unit stride in a row; contiguous."""
    rows, cols = gate.shape
    y = torch.empty((rows, cols), dtype=gate.dtype, device=gate.device)
    if rows:
        grid = (rows, triton.cdiv(cols, BLOCK))
        _forward[grid](gate, up, y, cols, gate.stride(0), up.stride(0), ACT=act, BLOCK=BLOCK, num_warps=4)
    return y


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> Tensor:
    """d gate | d up side by side, [rows, 2·inner]."""
    rows, cols = gate.shape
    grads = torch.empty((rows, 2 * cols), dtype=gate.dtype, device=gate.device)
    if rows:
        grid = (rows, triton.cdiv(cols, BLOCK))
        _backward[grid](
            dy, gate, up, grads, grads[:, cols:], cols, gate.stride(0), up.stride(0), 2 * cols,
            ACT=act, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return grads


@triton.jit
def _adapter_columns(p_b, o_n, m_n, r, dtype: tl.constexpr, WIDTH: tl.constexpr):
    """The rows of B that belong to a block of columns, transposed: [WIDTH, BLOCK_N]."""
    o_r = tl.arange(0, WIDTH)
    return tl.load(p_b + o_n[None, :] * r + o_r[:, None], mask=m_n[None, :] & (o_r < r)[:, None], other=0.0).to(dtype)


@triton.jit
def _adapted(p_x, p_u, o_x, o_m, m_m, mask, b_b, scale, SLOT: tl.constexpr, WIDTH: tl.constexpr, IEEE: tl.constexpr):
    """A tile of a product in fp32, its adapter's term added and rounded as a product of its own would be."""
    b_x = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
    if WIDTH > 0:
        precision: tl.constexpr = "ieee" if IEEE else "tf32"
        o_u = o_m[:, None] * (2 * WIDTH) + SLOT * WIDTH + tl.arange(0, WIDTH)[None, :]
        b_l = tl.load(p_u + o_u, mask=m_m[:, None], other=0.0)
        b_x = rounded(b_x + tl.dot(b_l, b_b, input_precision=precision) * scale, p_x.dtype.element_ty)
    return b_x


@triton.jit(do_not_specialize=["r_g", "r_u"])
def _adapted_forward(
    p_gu, p_u, p_bg, p_bu, p_y, rows, inner, stride, group, r_g, r_u, s_g, s_u,
    ACT: tl.constexpr, WIDTH: tl.constexpr, IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of columns over a group of rows."""
    dtype: tl.constexpr = p_gu.dtype.element_ty
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < inner
    b_bg, b_bu = 0.0, 0.0
    if WIDTH > 0:
        b_bg = _adapter_columns(p_bg, o_n, m_n, r_g, dtype, WIDTH)
        b_bu = _adapter_columns(p_bu, o_n, m_n, r_u, dtype, WIDTH)
    for at in range(0, group, BLOCK_M):
        o_m = tl.program_id(1).to(tl.int64) * group + at + tl.arange(0, BLOCK_M)
        m_m = o_m < rows
        mask = m_m[:, None] & m_n[None, :]
        o_gu = o_m[:, None] * stride + o_n[None, :]
        b_g = _adapted(p_gu, p_u, o_gu, o_m, m_m, mask, b_bg, s_g, 0, WIDTH, IEEE)
        b_u = _adapted(p_gu + inner, p_u, o_gu, o_m, m_m, mask, b_bu, s_u, 1, WIDTH, IEEE)
        b_a, _ = _activation(b_g, ACT)
        b_a = rounded(b_a, dtype)
        tl.store(p_y + o_m[:, None] * inner + o_n[None, :], (b_a * b_u).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["r_g", "r_u", "r_d", "seed", "stream", "first", "cut"])
def _adapted_backward(
    p_da, p_gu, p_u, p_bg, p_bu, p_dud, p_ad, p_dgu, p_dad, rows, inner, stride, group, r_g, r_u, r_d, s_g, s_u,
    seed, stream, first, cut, keep,
    ACT: tl.constexpr, WIDTH: tl.constexpr, DOWN: tl.constexpr, DROP: tl.constexpr, IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of columns over a group of rows: d gate, d up, and the group's part of dA of the down projection."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    dtype: tl.constexpr = p_gu.dtype.element_ty
    column = tl.program_id(0) * BLOCK_N
    o_n = column + tl.arange(0, BLOCK_N)
    m_n = o_n < inner
    if DOWN > 0:
        o_d = tl.arange(0, DOWN)
        o_ad = o_d[:, None] * inner + o_n[None, :]
        b_ad = tl.load(p_ad + o_ad, mask=(o_d < r_d)[:, None] & m_n[None, :], other=0.0).to(dtype)
        b_sum = tl.zeros([DOWN, BLOCK_N], tl.float32)
    b_bg, b_bu = 0.0, 0.0
    if WIDTH > 0:
        b_bg = _adapter_columns(p_bg, o_n, m_n, r_g, dtype, WIDTH)
        b_bu = _adapter_columns(p_bu, o_n, m_n, r_u, dtype, WIDTH)
    for at in range(0, group, BLOCK_M):
        o_m = tl.program_id(1).to(tl.int64) * group + at + tl.arange(0, BLOCK_M)
        m_m = o_m < rows
        mask = m_m[:, None] & m_n[None, :]
        o_gu = o_m[:, None] * stride + o_n[None, :]
        b_g = _adapted(p_gu, p_u, o_gu, o_m, m_m, mask, b_bg, s_g, 0, WIDTH, IEEE)
        b_u = _adapted(p_gu + inner, p_u, o_gu, o_m, m_m, mask, b_bu, s_u, 1, WIDTH, IEEE)
        b_a, b_slope = _activation(b_g, ACT)
        b_a = rounded(b_a, dtype)
        b_da = tl.load(p_da + o_m[:, None] * inner + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        if DOWN > 0:
            b_dud = tl.load(p_dud + o_m[:, None] * DOWN + o_d[None, :], mask=m_m[:, None], other=0.0)
            b_y = (b_a * b_u).to(dtype)
            b_more = tl.dot(b_dud, b_ad, input_precision=precision)
            if DROP:
                b_n = drawn(first + o_m, column, inner, seed, stream, BLOCK_M, BLOCK_N)
                b_y = masked(b_y, b_n, cut)
                b_more = masked(b_more * keep, b_n, cut)
            b_da = rounded(b_da + b_more, dtype)
            b_sum = tl.dot(tl.trans(b_dud), b_y, b_sum, input_precision=precision)
        o_dgu = o_m[:, None] * (2 * inner) + o_n[None, :]
        tl.store(p_dgu + o_dgu, (b_da * b_u * b_slope).to(dtype), mask=mask)
        tl.store(p_dgu + o_dgu + inner, (b_da * b_a).to(dtype), mask=mask)
    if DOWN > 0:
        if DROP:
            b_sum *= keep
        o_sum = (tl.program_id(1).to(tl.int64) * DOWN + o_d[:, None]) * inner + o_n[None, :]
        tl.store(p_dad + o_sum, b_sum, mask=m_n[None, :])


def adapted_forward(gu: Tensor, u: Tensor | None, gate: Branch, up: Branch, act: str) -> Tensor:
    """act(gate + its adapter) · (up + its adapter), [rows, inner].

    gu [rows, 2·inner] are both products without adapters; u [rows, 2·width] from ``lora_down``, None without adapters.
    """
    rows, inner = len(gu), gu.shape[1] // 2
    y = torch.empty((rows, inner), dtype=gu.dtype, device=gu.device)
    width, pointers = (0, [gu, gu]) if u is None else (u.shape[1] // 2, _borrowed(gate, up))
    block_m, block_n, warps, stages, groups = tile(FORWARD, max(16, width), gu)
    group, groups = row_groups(rows, block_m, groups)
    if rows:
        _adapted_forward[(triton.cdiv(inner, block_n), groups)](
            gu, u, *pointers, y, rows, inner, gu.stride(0), group, gate.rank, up.rank, gate.scale, up.scale,
            ACT=act, WIDTH=width, IEEE=gu.dtype == torch.float32, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y


def _borrowed(gate: Branch, up: Branch) -> list[Tensor]:
    """Pointers to both B; a missing one borrows the other's and has rank 0."""
    pair = [gate.b if gate.b is not None else up.b, up.b if up.b is not None else gate.b]
    return [b for b in pair if b is not None]


def adapted_backward(
    da: Tensor, gu: Tensor, u: Tensor | None, gate: Branch, up: Branch, act: str,
    du_down: Tensor | None = None, down: Branch | None = None, drop: Dropout | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """d gate | d up side by side, [rows, 2·inner], and dA of the down projection in fp32.

    da [rows, inner] is the gradient through the down projection's frozen weight; du_down [rows, width] comes from
    ``lora_grad`` of its adapter, whose input dropout is ``drop``.  Gate, up and their activation are computed again.
    """
    rows, inner = da.shape
    dgu = torch.empty((rows, 2 * inner), dtype=gu.dtype, device=gu.device)
    width, pointers = (0, [gu, gu]) if u is None else (u.shape[1] // 2, _borrowed(gate, up))
    slot_down = 0 if du_down is None else du_down.shape[1]
    best = BACKWARD if drop is None else BACKWARD_DROP
    block_m, block_n, warps, stages, groups = tile(best, max(16, width, slot_down), gu)
    group, groups = row_groups(rows, block_m, groups)
    sums = torch.empty((groups, slot_down, inner), dtype=torch.float32, device=gu.device)
    _adapted_backward[(triton.cdiv(inner, block_n), groups)](
        da, gu, u, *pointers, du_down, None if down is None else down.a, dgu, sums, rows, inner, gu.stride(0), group,
        gate.rank, up.rank, 0 if down is None else down.rank, gate.scale, up.scale, *masking(drop),
        ACT=act, WIDTH=width, DOWN=slot_down, DROP=drop is not None, IEEE=gu.dtype == torch.float32,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dgu, None if down is None or not slot_down else sums.sum(0)[: down.rank]


class _Gated(torch.autograd.Function):
    """Saves gate and up; the activation is computed again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: str) -> Tensor:
        rows = [t.reshape(-1, t.shape[-1]) for t in (gate, up)]
        rows = [t if t.stride(-1) == 1 else t.contiguous() for t in rows]
        ctx.save_for_backward(*rows)
        ctx.act, ctx.shape = act, gate.shape
        return gated_forward(rows[0], rows[1], act).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        grads = gated_backward(dy.reshape(gate.shape).contiguous(), gate, up, ctx.act)
        dgate, dup = grads.chunk(2, dim=1)
        return dgate.reshape(ctx.shape), dup.reshape(ctx.shape), None


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) · up, elementwise, for two tensors of one shape and dtype; ``act`` is a name of :data:`ACTIVATIONS`.

    The activation is taken in fp32 and rounded to the dtype before the product.  Bytes moved: forward reads two tensors
    and writes one, backward reads three and writes two.
    """
    if not runs_triton(gate) or gate.dtype == torch.float64:
        return gated_reference(gate, up, act)
    return _Gated.apply(gate, up, act)
