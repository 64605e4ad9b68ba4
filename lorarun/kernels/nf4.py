"""NF4: weights in four bits, in the format that bitsandbytes writes.

    w[i] = value[code[i]] · absmax[i // block]                 (Dettmers et al. 2023, arXiv:2305.14314, section 3)
    absmax[j] = map[byte[j]] · nested_absmax[j // 256] + offset   with double quantisation, else stored in fp32

Blocks run over the flattened weight; the last may be short.  Two codes share a byte, the first in its high half.  The
4-bit values are quantiles of a normal distribution; the 8-bit map is the "dynamic" data type of arXiv:1511.04561, on
absmax minus its mean.

The usual library dequantises one weight at a time in two or three launches, the scales first.  Here up to three
weights go into one buffer in one launch, scales included, so that projections of one input become one matrix product.
All arithmetic is fp32 in the order of the formulas, without contraction to fused multiply-adds (which would change
absmax in the last bit), and is rounded once to the dtype asked for: what bitsandbytes stored comes out bit-equal.  A
code becomes its value by way of a table of 64 bytes, which stays in L1; shuffles are as fast, a tree of selections
slower.

Encoding gives the codes that bitsandbytes' CUDA kernel gives: x · (1 / absmax) against the midpoints between values,
the upper code above a midpoint.  One deviation: a block of zeros gets the code of zero, as on bitsandbytes' CPU path,
and stays zero; its CUDA path gives it the code of −1, which double quantisation turns into a small constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorarun.kernels.backend import runs_triton, tl, triton

VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)  # arXiv:2305.14314, appendix E
MIDPOINTS = (
    -0.8480964303016663,
    -0.6106328964233398,
    -0.4599952697753906,
    -0.33967941999435425,
    -0.23460739850997925,
    -0.13791173696517944,
    -0.045525018125772476,
    0.03979014977812767,
    0.1202552542090416,
    0.2035212516784668,
    0.2920137643814087,
    0.3893125355243683,
    0.5016633868217468,
    0.6427869200706482,
    0.8614783883094788,
)  # between neighbours, in fp32; where (a + b) / 2 is a tie, rounded to the side that bitsandbytes' source has
NESTED = 256  # scales in a block of double quantisation
TINY = 2.0**-126  # the smallest absmax that is divided by
CHUNK = 1 << 22  # weights that the reference encodes at a time, which bounds its memory


class NF4(NamedTuple):
    """A weight of n elements.  Without double quantisation absmax is fp32 and the last three are None."""

    codes: Tensor  # uint8 [⌈n / 2⌉]
    absmax: Tensor  # uint8 or fp32 [blocks], blocks = ⌈n / block⌉
    nested_absmax: Tensor | None = None  # fp32 [⌈blocks / 256⌉]
    nested_map: Tensor | None = None  # fp32 [256], ascending
    offset: Tensor | None = None  # fp32 [1]


# --- reference -----------------------------------------------------------------------------------------------------


def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The 16 values and the 15 midpoints between them, fp32 on ``device``."""
    values, midpoints = (torch.tensor(each, dtype=torch.float32, device="cpu") for each in (VALUES, MIDPOINTS))
    return values.to(device), midpoints.to(device)


@cache
def dynamic_map() -> Tensor:
    """The 8-bit map, fp32 [256] ascending on the CPU: 0, 1, and for each power of ten from 10⁻⁶ to 1, with both signs,
    the centres of twice as many parts of [0.1, 1] as for the power before."""
    parts = [torch.tensor([0.0, 1.0], device="cpu")]
    for i in range(7):
        edges = torch.linspace(0.1, 1.0, 2**i + 1, dtype=torch.float32, device="cpu")
        centres = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        parts += [centres, -centres]
    return torch.cat(parts).sort().values


def double_quantize(codes: Tensor, absmax: Tensor) -> NF4:
    """Replace fp32 scales by bytes: the nearest values of the map for (absmax − mean) in blocks of 256.

    Plain torch on every device: there are 64 times fewer scales than weights.
    """
    offset = (absmax.mean() if absmax.numel() else absmax.sum()).reshape(1)
    nested_map = dynamic_map().to(absmax.device, copy=True)
    blocks = F.pad(absmax - offset, (0, -absmax.numel() % NESTED)).view(-1, NESTED)
    nested_absmax = blocks.abs().amax(1)
    scaled = blocks * (1.0 / nested_absmax.clamp(min=TINY)).unsqueeze(1)
    nearest = torch.bucketize(scaled, (nested_map[:-1] + nested_map[1:]) / 2, out_int32=True).to(torch.uint8)
    return NF4(codes, nearest.flatten()[: absmax.numel()].clone(), nested_absmax, nested_map, offset)


def nf4_quantize_reference(w: Tensor, block: int = 64, nested: bool = True) -> NF4:
    """What :func:`nf4_quantize` computes."""
    flat = w.detach().reshape(-1)
    n = flat.numel()
    _, midpoints = tables(flat.device)
    codes = torch.empty((n + 1) // 2, dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(-(-n // block), dtype=torch.float32, device=flat.device)
    for start in range(0, n, CHUNK):
        x = flat[start : start + CHUNK].float()
        blocks = F.pad(x, (0, -x.numel() % block)).view(-1, block)
        top = blocks.abs().amax(1)
        scaled = (blocks * (1.0 / top.clamp(min=TINY)).unsqueeze(1)).flatten()
        code = torch.bucketize(scaled, midpoints, out_int32=True).to(torch.uint8)
        packed = code[0::2] << 4 | code[1::2]  # padding counts as zeros, whose code fills the last half byte
        codes[start // 2 : (start + CHUNK) // 2] = packed[: (x.numel() + 1) // 2]
        absmax[start // block : -(-(start + CHUNK) // block)] = top
    return double_quantize(codes, absmax) if nested else NF4(codes, absmax)


def scales(part: NF4) -> Tensor:
    """absmax in fp32 [blocks], double quantisation undone."""
    if part.nested_absmax is None or part.nested_map is None or part.offset is None:
        return part.absmax
    nested_absmax = part.nested_absmax.repeat_interleave(NESTED)[: part.absmax.numel()]
    return part.nested_map[part.absmax.int()] * nested_absmax + part.offset


def nf4_dequantize_reference(parts: Sequence[NF4], sizes: Sequence[int], block: int, out: Tensor) -> Tensor:
    """What :func:`nf4_dequantize` computes."""
    start = 0
    for part, n in zip(parts, sizes, strict=True):
        values, _ = tables(part.codes.device)
        code = torch.stack((part.codes >> 4, part.codes & 15), dim=1).flatten()[:n]
        absmax = scales(part).repeat_interleave(block)[:n]
        out[start : start + n] = values[code.int()] * absmax  # rounds to the dtype of `out`
        start += n
    return out


# --- Triton kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _quantize(p_w, p_midpoints, p_codes, p_absmax, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(n - base, TILE).to(tl.int32)
    o = tl.arange(0, TILE)
    x = tl.load(p_w + base + o, mask=o < left, other=0.0).to(tl.float32)
    blocks = tl.reshape(x, [TILE // BLOCK, BLOCK])
    # |x| compared as integers: the same order, and NaN stays on top
    bits = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    b_absmax = bits.to(tl.float32, bitcast=True)
    o_block = tl.arange(0, TILE // BLOCK)
    tl.store(p_absmax + base // BLOCK + o_block, b_absmax, mask=o_block * BLOCK < left)
    scaled = blocks * (1.0 / tl.maximum(b_absmax, 1.1754943508222875e-38))[:, None]
    # binary search: how many midpoints lie below
    code = tl.where(scaled > tl.load(p_midpoints + 7), 8, 0)
    code += tl.where(scaled > tl.load(p_midpoints + code + 3), 4, 0)
    code += tl.where(scaled > tl.load(p_midpoints + code + 1), 2, 0)
    code += tl.where(scaled > tl.load(p_midpoints + code), 1, 0)
    high, low = tl.split(tl.reshape(code, [TILE // 2, 2]))
    o_byte = tl.arange(0, TILE // 2)
    tl.store(p_codes + base // 2 + o_byte, (high << 4 | low).to(tl.uint8), mask=o_byte * 2 < left)


@triton.jit
def _dequantize(
    p_out, p_values,
    p_codes0, p_absmax0, p_nested0, p_map0, p_offset0, n0,
    p_codes1, p_absmax1, p_nested1, p_map1, p_offset1, n1,
    p_codes2, p_absmax2, p_nested2, p_map2, p_offset2, n2,
    BLOCK: tl.constexpr, DOUBLE: tl.constexpr, PER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # which of the three weights this tile belongs to
    pid = tl.program_id(0)
    end0 = tl.cdiv(n0, TILE)
    end1 = end0 + tl.cdiv(n1, TILE)
    first, second = pid < end0, pid < end1
    n = tl.where(first, n0, tl.where(second, n1, n2))
    p_codes = tl.where(first, p_codes0, tl.where(second, p_codes1, p_codes2))
    p_absmax = tl.where(first, p_absmax0, tl.where(second, p_absmax1, p_absmax2))
    start = tl.where(first, 0, tl.where(second, n0, tl.cast(n0, tl.int64) + n1))
    base = (pid - tl.where(first, 0, tl.where(second, end0, end1))).to(tl.int64) * TILE
    left = tl.minimum(n - base, TILE).to(tl.int32)

    # An item is what one load brings, PER codes.  Loads of neighbouring items must not be merged: then each thread
    # holds whole items, and what it makes of one leaves it as one 16-byte store, not by way of shared memory.
    o_item = tl.max_contiguous(tl.arange(0, TILE // PER), 1)
    m_item = o_item * PER < left
    if PER == 8:
        p_codes = p_codes.to(tl.pointer_type(tl.uint32))
    b = tl.load(p_codes + base // PER + o_item, mask=m_item, other=0).to(tl.int32)
    first_block = base // BLOCK
    o_block = o_item // (BLOCK // PER)
    b_absmax = tl.load(p_absmax + first_block + o_block, mask=m_item, other=0)
    if DOUBLE:
        p_nested = tl.where(first, p_nested0, tl.where(second, p_nested1, p_nested2))
        p_map = tl.where(first, p_map0, tl.where(second, p_map1, p_map2))
        p_offset = tl.where(first, p_offset0, tl.where(second, p_offset1, p_offset2))
        b_nested = tl.load(p_nested + (first_block.to(tl.int32) + o_block) // 256, mask=m_item, other=0.0)
        b_absmax = tl.load(p_map + b_absmax.to(tl.int32)) * b_nested + tl.load(p_offset)
    if PER == 8:  # little-endian: the first byte is the lowest
        x0 = tl.load(p_values + ((b >> 4) & 15)) * b_absmax
        x1 = tl.load(p_values + (b & 15)) * b_absmax
        x2 = tl.load(p_values + ((b >> 12) & 15)) * b_absmax
        x3 = tl.load(p_values + ((b >> 8) & 15)) * b_absmax
        x4 = tl.load(p_values + ((b >> 20) & 15)) * b_absmax
        x5 = tl.load(p_values + ((b >> 16) & 15)) * b_absmax
        x6 = tl.load(p_values + ((b >> 28) & 15)) * b_absmax
        x7 = tl.load(p_values + ((b >> 24) & 15)) * b_absmax
        even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
        odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    else:
        even = tl.load(p_values + (b >> 4)) * b_absmax
        odd = tl.load(p_values + (b & 15)) * b_absmax
    w = tl.reshape(tl.join(even, odd), [TILE])
    o = tl.arange(0, TILE)
    tl.store(p_out + start + base + o, w.to(p_out.dtype.element_ty), mask=o < left)


# --- host functions ------------------------------------------------------------------------------------------------

_tables = cache(tables)  # a kernel's launch must not wait for a copy to the device
TILE, WARPS = 2048, 2  # weights of one program, and its warps


def _launch_dequantize(parts: Sequence[NF4], sizes: Sequence[int], block: int, out: Tensor) -> None:
    """Up to three weights, alike in double quantisation, into ``out`` [sum of sizes]."""
    values, _ = _tables(out.device)
    whole = all(n % 8 == 0 and part.codes.data_ptr() % 4 == 0 for part, n in zip(parts, sizes, strict=True))
    arguments: list[Any] = []
    for i in range(3):
        arguments += [*(parts[i] if i < len(parts) else parts[0]), sizes[i] if i < len(parts) else 0]
    _dequantize[(sum(triton.cdiv(n, TILE) for n in sizes),)](
        out, values, *arguments,
        BLOCK=block, DOUBLE=parts[0].offset is not None, PER=8 if whole else 2, TILE=TILE, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


# --- public functions ----------------------------------------------------------------------------------------------


def check_block(block: int) -> None:
    """Refuse block sizes that the format does not have."""
    if block not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"NF4: the block size is {block}; expected a power of two from 32 to 4096.")


def nf4_quantize(w: Tensor, block: int = 64, nested: bool = True) -> NF4:
    """Encode ``w`` (fp32, fp16 or bf16, any shape, taken row by row) in blocks of ``block`` elements.

    ``nested``: double quantisation of the scales.  NaN or infinity in ``w`` makes the scale of its block, and with
    double quantisation the offset, NaN or infinite; nothing is raised here, since that would wait for the device.
    Bytes moved: 2 read and ½ written a weight of 16 bits; nothing of the size of ``w`` is held in between on a GPU.
    """
    check_block(block)
    n = w.numel()
    if w.is_meta or not n or not runs_triton(w) or w.dtype == torch.float64:
        return nf4_quantize_reference(w, block, nested)
    flat = w.detach().contiguous()
    codes = torch.empty((n + 1) // 2, dtype=torch.uint8, device=w.device)
    absmax = torch.empty(triton.cdiv(n, block), dtype=torch.float32, device=w.device)
    _quantize[(triton.cdiv(n, 4096),)](
        flat, _tables(w.device)[1], codes, absmax, n, BLOCK=block, TILE=4096, num_warps=8, enable_fp_fusion=False
    )
    return double_quantize(codes, absmax) if nested else NF4(codes, absmax)


def nf4_dequantize(
    parts: Sequence[NF4], sizes: Sequence[int], block: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Decode weights of ``sizes`` elements, one behind the other, into one flat buffer [sum of sizes] of ``dtype``.

    Up to three weights share a launch.  out: a contiguous buffer to fill, by default a new one.  Bytes moved: ½ + 1 /
    block (+ 4 / 256 / block) read and 2 written a weight in 16 bits.
    """
    if out is None:
        out = torch.empty(sum(sizes), dtype=dtype, device=parts[0].codes.device)
    flat = out.view(-1)
    if out.is_meta or not runs_triton(out) or dtype == torch.float64:
        return out if out.is_meta else nf4_dequantize_reference(parts, sizes, block, flat)
    alike = len({part.offset is None for part in parts}) == 1
    for i in range(0, len(parts), 3 if alike else 1):
        some = slice(i, i + (3 if alike else 1))
        if count := sum(sizes[some]):
            start = sum(sizes[:i])
            _launch_dequantize(parts[some], sizes[some], block, flat[start : start + count])
    return out
