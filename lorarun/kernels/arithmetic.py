"""Arithmetic of kernels that Triton writes out at length, in the few instructions that NVIDIA's GPUs have for it.

Passes that only move bytes have about 70 instructions for a step of 32 elements before these take longer than the
memory.  Triton's rounding to bf16 and back goes through the unit for special functions, which has few lanes; much
of its sigmoid is for numbers that fp32 only just holds.
"""

from __future__ import annotations

import torch

from lorarun.kernels.backend import HAS_TRITON, INTERPRETED, tl, triton

PTX = tl.constexpr(HAS_TRITON and not INTERPRETED and torch.version.cuda is not None)
ROUND = tl.constexpr(
    "{.reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000;}"
)  # two at a time
SIGMOID = tl.constexpr(
    "{.reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
    " rcp.approx.ftz.f32 $0, t;}"
)  # the first factor is -log2(e)
MOVE = tl.constexpr("mov.b32 $0, $1;")


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """fp32 rounded to ``dtype`` and back."""
    if PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(ROUND, "=f,=f,f,f", [b_x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return b_x.to(dtype).to(tl.float32)


@triton.jit
def sigmoid(b_x):
    """1 / (1 + exp(-x)) in fp32."""
    if PTX:
        return tl.inline_asm_elementwise(SIGMOID, "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / (1.0 + tl.exp(-b_x))


@triton.jit
def once(b_x):
    """32-bit integers as they are.  Triton computes cheap looking operations again for each layout in which their
    result is used; what goes through here it computes once and moves."""
    if PTX:
        return tl.inline_asm_elementwise(MOVE, "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=1)
    else:
        return b_x
