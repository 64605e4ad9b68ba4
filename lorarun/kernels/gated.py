"""The gated activation of an MLP: act(gate) · up  (Shazeer 2020, arXiv:2002.05202: SwiGLU and GeGLU).

Three activations occur in the families here.  ``gelu_pytorch_tanh`` is the tanh approximation that Gemma was trained
with; ``gelu`` is the exact one.  They differ by up to 5e-4, so a name is never replaced by another.

Gate and up may be the halves of one product [rows, 2·inner], which is how ``gated_mlp`` makes them; the kernels take
any row stride.  Backward saves gate and up and computes the activation again: with it in hand, the product that the
next projection needs for its adapter costs one more store, not one more pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorarun.kernels.backend import runs_triton, tl, triton


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": _gelu_tanh}
BLOCK = 1024


def gated_reference(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """The specification of :func:`gated`; torch computes a 16-bit activation in fp32 and rounds it, too."""
    return ACTIVATIONS[act](gate) * up


@triton.jit
def _activation(b_g, ACT: tl.constexpr):
    """(act(g), act'(g)) in fp32."""
    if ACT == "silu":
        b_s = 1.0 / (1.0 + tl.exp(-b_g))
        return b_g * b_s, b_s * (1.0 + b_g * (1.0 - b_s))
    elif ACT == "gelu":
        b_cdf = 0.5 * (1.0 + tl.erf(b_g * 0.7071067811865476))
        return b_g * b_cdf, b_cdf + b_g * 0.3989422804014327 * tl.exp(-0.5 * b_g * b_g)
    else:
        b_z = 0.7978845608028654 * (b_g + 0.044715 * b_g * b_g * b_g)
        b_t = 2.0 / (1.0 + tl.exp(-2.0 * b_z)) - 1.0  # tanh, without overflow on either side
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
    b_a = b_a.to(p_y.dtype.element_ty).to(tl.float32)
    tl.store(p_y + row * cols + o_c, (b_a * b_u).to(p_y.dtype.element_ty), mask=m_c)


@triton.jit
def _backward(
    p_dy, p_g, p_u, p_dg, p_du, p_y, cols, stride_g, stride_u, stride_d, ACT: tl.constexpr, Y: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < cols
    dtype: tl.constexpr = p_dg.dtype.element_ty
    b_dy = tl.load(p_dy + row * cols + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + row * stride_g + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_u = tl.load(p_u + row * stride_u + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_a, b_da = _activation(b_g, ACT)
    b_a = b_a.to(dtype).to(tl.float32)
    tl.store(p_dg + row * stride_d + o_c, (b_dy * b_u * b_da).to(dtype), mask=m_c)
    tl.store(p_du + row * stride_d + o_c, (b_dy * b_a).to(dtype), mask=m_c)
    if Y:
        tl.store(p_y + row * cols + o_c, (b_a * b_u).to(dtype), mask=m_c)


def gated_forward(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) · up for [rows, inner] tensors with unit stride in a row; contiguous."""
    rows, cols = gate.shape
    y = torch.empty((rows, cols), dtype=gate.dtype, device=gate.device)
    if rows:
        grid = (rows, triton.cdiv(cols, BLOCK))
        _forward[grid](gate, up, y, cols, gate.stride(0), up.stride(0), ACT=act, BLOCK=BLOCK, num_warps=4)
    return y


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, act: str, product: bool = False
) -> tuple[Tensor, Tensor | None]:
    """d gate | d up side by side, [rows, 2·inner], and with ``product`` act(gate) · up again."""
    rows, cols = gate.shape
    grads = torch.empty((rows, 2 * cols), dtype=gate.dtype, device=gate.device)
    y = torch.empty((rows, cols), dtype=gate.dtype, device=gate.device) if product else None
    if rows:
        grid = (rows, triton.cdiv(cols, BLOCK))
        _backward[grid](
            dy, gate, up, grads, grads[:, cols:], y, cols, gate.stride(0), up.stride(0), 2 * cols,
            ACT=act, Y=product, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return grads, y


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
        grads, _ = gated_backward(dy.reshape(gate.shape).contiguous(), gate, up, ctx.act)
        dgate, dup = grads.chunk(2, dim=1)
        return dgate.reshape(ctx.shape), dup.reshape(ctx.shape), None


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) · up, elementwise, for two tensors of one shape and dtype; ``act`` is a name of :data:`ACTIVATIONS`.

    The activation is taken in fp32 and rounded to the dtype before the product.  Bytes moved: forward reads two tensors
    and writes one, backward reads three and writes two.
    """
    if not runs_triton(gate) or gate.dtype == torch.float64:
        return gated_reference(gate, up, act)
    y: Tensor = _Gated.apply(gate, up, act)  # type: ignore[no-untyped-call]
    return y
