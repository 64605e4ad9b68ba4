"""FP8 weights: e4m3 codes (four exponent bits, three of mantissa, largest value 448) with fp32 scales.

    w[i, j] = code[i, j] · scale[i // bm, j // bn]

Our own encoding has one scale a row (bm = 1, bn the whole row), absmax / 448; published checkpoints have blocks, mostly
of 128 × 128, the last ones of a row or column partial.

Codes are taken apart with integer operations instead of the GPU's conversions: e4m3 is the top of an fp32 with another
exponent bias, so that decoding is a shift and a multiplication by 2¹²⁰.  A kernel bound by memory has the instructions
to spare, and the bits are the same on every GPU and under the interpreter.  Encoding uses the GPU's conversion where it
has one (it is a fifth faster), and elsewhere rounds by adding, to the same bits.  Decoding takes up to three weights
side by side in one launch; the product with the scale is rounded once, to the dtype asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorarun.kernels.backend import converts_fp8, runs_triton, tl, triton

LARGEST = 448.0
TINY = 2.0**-117  # absmax of a row below which it is divided by this instead: 448 times the smallest normal fp32, about


class FP8(NamedTuple):
    """A weight [rows, cols]; see the formula above."""

    codes: Tensor  # float8_e4m3fn [rows, cols]
    scale: Tensor  # fp32 [⌈rows / bm⌉, ⌈cols / bn⌉]
    block: tuple[int, int]  # bm, bn


# --- reference -----------------------------------------------------------------------------------------------------


def fp8_quantize_reference(w: Tensor) -> FP8:
    """What :func:`fp8_quantize` computes."""
    x = w.detach().float()
    absmax = x.abs().amax(1, keepdim=True).clamp(min=TINY) if x.shape[1] else x.new_full((x.shape[0], 1), TINY)
    largest = torch.full_like(absmax, LARGEST)  # torch divides by and into a Python number in two roundings
    return FP8((x * (largest / absmax)).to(torch.float8_e4m3fn), absmax / largest, (1, w.shape[1]))


def fp8_quantize_blocks(w: Tensor, block: tuple[int, int]) -> FP8:
    """Encode ``w`` [rows, cols] as :func:`fp8_quantize` does, with a scale for each block.

    Plain torch on every device: only an export of weights that came in blocks needs it.
    """
    x, (bm, bn) = w.detach().float(), block
    (rows, cols), (high, wide) = x.shape, (-(-x.shape[0] // bm), -(-x.shape[1] // bn))
    blocks = F.pad(x, (0, wide * bn - cols, 0, high * bm - rows)).view(high, bm, wide, bn)
    absmax = blocks.abs().amax((1, 3)).clamp(min=TINY)
    largest = torch.full_like(absmax, LARGEST)
    codes = (blocks * (largest / absmax)[:, None, :, None]).view(high * bm, wide * bn)[:rows, :cols]
    return FP8(codes.to(torch.float8_e4m3fn), absmax / largest, block)


def fp8_dequantize_reference(parts: Sequence[FP8], out: Tensor) -> Tensor:
    """What :func:`fp8_dequantize` computes."""
    start = 0
    for codes, scale, (rows, cols) in parts:
        m, n = codes.shape
        wide = scale.repeat_interleave(rows, 0)[:m].repeat_interleave(cols, 1)[:, :n]
        out[start : start + m] = codes.float() * wide  # rounds to the dtype of `out`
        start += m
    return out


# --- Triton kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _encode(x):
    """The e4m3 byte nearest to fp32 x, |x| ≤ 464, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: drop 20 mantissa bits, rounding by the carry; the exponent's bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2⁻⁶ codes are multiples of 2⁻⁹: beside 2¹⁴ that is the last bit of an fp32, so the addition rounds.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _decode(code):
    """The value of an e4m3 byte, fp32; its two codes for NaN come out as ±480."""
    wide = code.to(tl.uint32)
    bits = (wide & 0x7F) << 20 | (wide & 0x80) << 24
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2¹²⁰


@triton.jit
def _code(x, NATIVE: tl.constexpr):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else _encode(x)


@triton.jit
def _largest(b_x):
    """The bits of the largest |x|: compared as integers they have the same order, and NaN stays on top."""
    return tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)


@triton.jit
def _factors(bits):
    """The scale of numbers whose largest has these bits, and what they are multiplied by."""
    absmax = tl.maximum(bits, 0x05000000).to(tl.float32, bitcast=True)  # TINY
    return tl.div_rn(absmax, 448.0), tl.div_rn(448.0, absmax)


@triton.jit
def _quantize(p_w, p_codes, p_scale, cols, COLS: tl.constexpr, ONCE: tl.constexpr, NATIVE: tl.constexpr):
    # one row: its largest value, then its codes
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, COLS)
    p_w += row * cols
    p_codes += row * cols
    b_x = tl.load(p_w + o, mask=o < cols, other=0.0).to(tl.float32)
    bits = _largest(b_x)
    if not ONCE:
        for start in range(COLS, cols, COLS):
            b_x = tl.load(p_w + start + o, mask=start + o < cols, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, _largest(b_x))
    scale, inverse = _factors(bits)
    tl.store(p_scale + row, scale)
    if ONCE:
        tl.store(p_codes + o, _code(b_x * inverse, NATIVE), mask=o < cols)
    else:
        for start in range(0, cols, COLS):
            b_x = tl.load(p_w + start + o, mask=start + o < cols, other=0.0).to(tl.float32)
            tl.store(p_codes + start + o, _code(b_x * inverse, NATIVE), mask=start + o < cols)


@triton.jit
def _dequantize(
    p_out, cols,
    p_codes0, p_scale0, rows0, p_codes1, p_scale1, rows1, p_codes2, p_scale2,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # one row of one of the three weights, COLS of its columns; GROUP neighbours share a scale
    row = tl.program_id(0)
    first, second = row < rows0, row < rows0 + rows1
    p_codes = tl.where(first, p_codes0, tl.where(second, p_codes1, p_codes2))
    p_scale = tl.where(first, p_scale0, tl.where(second, p_scale1, p_scale2))
    own = row - tl.where(first, 0, tl.where(second, rows0, rows0 + rows1))
    start = tl.program_id(1) * COLS
    o = start + tl.arange(0, COLS)
    b_code = tl.load(p_codes + own.to(tl.int64) * cols + o, mask=o < cols, other=0)
    o_group = start + tl.arange(0, COLS // GROUP) * GROUP
    o_scale = (own // BM).to(tl.int64) * tl.cdiv(cols, BN) + o_group // BN
    b_scale = tl.load(p_scale + o_scale, mask=o_group < cols, other=0.0)
    b_w = tl.reshape(tl.reshape(_decode(b_code), [COLS // GROUP, GROUP]) * b_scale[:, None], [COLS])
    tl.store(p_out + row.to(tl.int64) * cols + o, b_w.to(p_out.dtype.element_ty), mask=o < cols)


# --- host functions ------------------------------------------------------------------------------------------------

COLS, WARPS = 4096, 8  # columns that one program decodes, and its warps
ROW = 16384  # columns that one program encodes at a time
WARP = 512  # columns for each of its warps
WHOLE = 1 << 30  # a block that is as wide as any row


def _launch_dequantize(parts: Sequence[FP8], out: Tensor) -> None:
    """Up to three weights of one width and one block size into ``out`` [sum of rows, cols]."""
    rows, cols = out.shape
    bm, bn = parts[0].block
    tile = min(COLS, triton.next_power_of_2(cols))
    if bn >= cols:
        bn = WHOLE
    a, b, c = [*parts, parts[-1], parts[-1]][:3]
    _dequantize[(rows, triton.cdiv(cols, tile))](
        out, cols, a.codes.view(torch.uint8), a.scale, a.codes.shape[0],
        b.codes.view(torch.uint8), b.scale, b.codes.shape[0], c.codes.view(torch.uint8), c.scale,
        BM=bm, BN=bn, GROUP=min(tile, bn & -bn), COLS=tile, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


# --- public functions ----------------------------------------------------------------------------------------------


def fp8_quantize(w: Tensor) -> FP8:
    """Encode ``w`` [rows, cols] (fp32, fp16 or bf16) with a scale a row: absmax / 448, and codes of w · (448 / absmax).

    NaN or infinity in a row makes its scale NaN or infinite; nothing is raised here, since that would wait for the
    device.  Bytes moved: 2 read (twice for rows over 16,384, mostly from cache) and 1 written a weight of 16 bits.
    """
    rows, cols = w.shape
    if w.is_meta or not w.numel() or not runs_triton(w) or w.dtype == torch.float64:
        return fp8_quantize_reference(w)
    codes = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=w.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=w.device)
    width = min(ROW, triton.next_power_of_2(cols))
    _quantize[(rows,)](
        w.detach().contiguous(), codes.view(torch.uint8), scale, cols,
        COLS=width, ONCE=width >= cols, NATIVE=converts_fp8(w.device), num_warps=max(1, min(16, width // WARP)),
        enable_fp_fusion=False,
    )  # fmt: skip
    return FP8(codes, scale, (1, cols))


def fp8_dequantize(parts: Sequence[FP8], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Decode weights of one width, one below the other, into [sum of rows, cols] of ``dtype``.

    Up to three weights share a launch.  out: a contiguous buffer to fill, by default a new one.  Bytes moved: 1 read
    and 2 written a weight in 16 bits.
    """
    if out is None:
        rows = sum(part.codes.shape[0] for part in parts)
        out = torch.empty((rows, parts[0].codes.shape[1]), dtype=dtype, device=parts[0].codes.device)
    if out.is_meta or not runs_triton(out) or dtype == torch.float64:
        return out if out.is_meta else fp8_dequantize_reference(parts, out)
    alike = len({part.block for part in parts}) == 1
    start = 0
    for i in range(0, len(parts), 3 if alike else 1):
        some = parts[i : i + (3 if alike else 1)]
        rows = sum(part.codes.shape[0] for part in some)
        if rows and out.shape[1]:
            _launch_dequantize(some, out[start : start + rows])
        start += rows
    return out
