"""Products on FP8 tensor cores: both operands in e4m3 with one fp32 scale a row.

    q(x)[i, j] = round_e4m3(x[i, j] · 448 / aᵢ),  sᵢ = aᵢ / 448,  aᵢ = max_j |x[i, j]|
    (x · Wᵀ)[i, n] ≈ sᵢ · tₙ · Σ_j q(x)[i, j] · q(W)[n, j]

A row of x is a token, a row of W an output, so that the scales leave the sum and the tensor cores' rate is reached.
The sum must run along rows in both operands.  So a frozen weight is kept twice, once for each direction: W with a scale
an output for y = x·Wᵀ, and Wᵀ with a scale an input for dx = dy·W, each rounded from the fp32 values of the weight and
never one from the other.  One scale for a whole tensor is what most libraries take; it is no faster, and doubles the
error of gradients.  e5m2 for gradients, the usual choice, has half the precision for a range that rows do not need.

Two bytes a weight for both copies are given up; the weight itself stays where it is, for everything that is not a
training step's product.  Sums are exact enough either way; with ``fast`` the tensor cores add with fewer bits, which
is 10 % faster and used forward only.

The cast reads a row once, keeps it in registers, and writes one byte a number.  A row with NaN or infinity gets the
scale NaN and codes of zero: every product with it is NaN, on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lorarun.kernels.backend import INTERPRETED, converts_fp8, runs_triton, tl, triton
from lorarun.kernels.fp8 import LARGEST, TINY, _code

MULTIPLE = 16  # rows and columns of a weight: what the tensor cores take


class Scaled(NamedTuple):
    """A matrix [rows, cols] in e4m3; its values are codes · scale."""

    codes: Tensor  # float8_e4m3fn [rows, cols], contiguous
    scale: Tensor  # fp32 [rows, 1]


class ScaledWeight(NamedTuple):
    """A frozen weight W [out, in] for both directions."""

    forward: Scaled  # W
    backward: Scaled  # Wᵀ


# --- references ----------------------------------------------------------------------------------------------------


def quantize_rows_reference(x: Tensor) -> Scaled:
    """What :func:`quantize_rows` computes."""
    wide = x.detach().float()
    absmax = wide.abs().amax(1, keepdim=True)
    finite = torch.isfinite(absmax)
    absmax = absmax.clamp(min=TINY)
    largest = torch.full_like(absmax, LARGEST)  # torch divides by and into a Python number in two roundings
    codes = torch.where(finite, wide * (largest / absmax), 0.0).to(torch.float8_e4m3fn)
    return Scaled(codes, torch.where(finite, absmax / largest, torch.nan))


def scaled_mm_reference(x: Scaled, w: Scaled, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """What :func:`scaled_mm` computes, summed in fp32: the emulation on hardware without FP8."""
    y = (x.codes.float() @ w.codes.float().T) * x.scale * w.scale.T
    return (y if bias is None else y + bias.float()).to(dtype)


# --- Triton kernel -------------------------------------------------------------------------------------------------


@triton.jit
def _rows(p_x, p_codes, p_scale, cols, stride, COLS: tl.constexpr, NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, COLS)
    b_x = tl.load(p_x + row * stride + o, mask=o < cols, other=0.0).to(tl.float32)
    # |x| compared as integers: the same order, and infinity and NaN on top
    bits = tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    finite = bits < 0x7F800000
    absmax = tl.maximum(bits, 0x05000000).to(tl.float32, bitcast=True)  # TINY
    tl.store(p_scale + row, tl.where(finite, tl.div_rn(absmax, 448.0), float("nan")))
    b_x = tl.where(finite, b_x * tl.div_rn(448.0, absmax), 0.0)
    tl.store(p_codes + row * cols + o, _code(b_x, NATIVE), mask=o < cols)


# --- host functions ------------------------------------------------------------------------------------------------

WARP = 1024  # columns for each warp of a program
WIDEST = 65536  # columns that a program's registers hold

_emulated = False


@contextmanager
def _emulation() -> Iterator[None]:
    """Let hardware without FP8 tensor cores serve inside a ``with`` block, by emulation: for tests, it is slow."""
    global _emulated
    before, _emulated = _emulated, True
    try:
        yield
    finally:
        _emulated = before


def unavailable(device: torch.device) -> str | None:
    """Why there are no FP8 products on ``device``, in words; None where there are."""
    if converts_fp8(device) or device.type == "meta" or _emulated or INTERPRETED:
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device} has no FP8 tensor cores that this serves"
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)} has compute capability {capability}, without FP8 tensor cores"


# --- public functions ----------------------------------------------------------------------------------------------


def quantize_rows(x: Tensor) -> Scaled:
    """x [rows, cols] (fp32, fp16 or bf16, unit stride in a row) in e4m3 with a scale a row, see the formula above.

    A row of zeros has codes of zero.  Bytes moved: 2 read and 1 written for a number of 16 bits.
    """
    rows, cols = x.shape
    served = runs_triton(x) and cols <= WIDEST and x.dtype != torch.float64
    if not x.is_meta and x.numel() and not served:
        return quantize_rows_reference(x)
    codes = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if x.numel() and not x.is_meta:
        x = x if x.stride(1) == 1 else x.contiguous()
        width = triton.next_power_of_2(cols)
        _rows[(rows,)](
            x, codes.view(torch.uint8), scale, cols, x.stride(0),
            COLS=width, NATIVE=converts_fp8(x.device), num_warps=max(1, min(32, width // WARP)),
            enable_fp_fusion=False,
        )  # fmt: skip
    return Scaled(codes, scale)


def scale_weight(w: Tensor) -> ScaledWeight:
    """Both copies of W [out, in], from its values in fp32 (which a weight in any store has, and 16 bits are)."""
    return ScaledWeight(quantize_rows(w), quantize_rows(w.T.contiguous()))


def scaled_mm(x: Scaled, w: Scaled, dtype: torch.dtype, bias: Tensor | None = None, fast: bool = False) -> Tensor:
    """x [m, k] · wᵀ [k, n] (+ bias [n]) in ``dtype``, which the tensor cores' is bf16; k and n multiples of 16.

    fast: sums with fewer bits.  Where the device is no GPU, the emulation.
    """
    m, n = len(x.codes), len(w.codes)
    if x.codes.is_meta or not m:
        return torch.empty((m, n), dtype=dtype, device=x.codes.device)
    if x.codes.device.type != "cuda" or _emulated:
        return scaled_mm_reference(x, w, dtype, bias)
    return torch._scaled_mm(
        x.codes, w.codes.T, scale_a=x.scale, scale_b=w.scale.T, bias=bias, out_dtype=dtype, use_fast_accum=fast
    )
