"""Codes of NF4 and FP8 to 16-bit values without leaving registers, for products that decode while they multiply.

At the speed of memory a GPU has about five instructions for a weight of four bits.  Decoding to fp32 and rounding would
take more than all of them; here eight codes become four pairs of 16-bit values, as tensor cores take them, by some 21
byte permutations and logical operations (NF4) or 4 to a pair (FP8), and bit for bit what :mod:`lorarun.kernels.nf4` and
:mod:`lorarun.kernels.fp8` say.

Triton moves what its loads bring to the layout in which it is used by way of shared memory, with a barrier for each
step of a loop.  The reads here are done in that layout to begin with.
"""

from __future__ import annotations

import struct

import torch

from lorarun.kernels.arithmetic import PTX
from lorarun.kernels.backend import tl, triton
from lorarun.kernels.fp8 import _decode
from lorarun.kernels.nf4 import VALUES

# --- reading ---------------------------------------------------------------------------------------------------------

READ = tl.constexpr("ld.global.nc.b32 $0, [$1];")
READ_BYTE = tl.constexpr("ld.global.nc.u8 $0, [$1];")
READ_TWO = tl.constexpr("ld.global.nc.v2.b32 {$0, $1}, [$2];")
READ_FOUR = tl.constexpr("ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];")
READ_EIGHT = tl.constexpr(
    "{.reg .b32 a, b, c, d; ld.global.nc.v4.b32 {a, b, c, d}, [$8];"
    " mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d;}"
)


@triton.jit
def get(p):
    """Numbers of 32 bits."""
    if PTX:
        if p.dtype.element_ty == tl.float32:
            return tl.inline_asm_elementwise(READ, "=f,l", [p], dtype=tl.float32, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise(READ, "=r,l", [p], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.load(p)


@triton.jit
def get_byte(p):
    if PTX:
        return tl.inline_asm_elementwise(READ_BYTE, "=r,l", [p], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.load(p).to(tl.int32)


@triton.jit
def get_two(p):
    """Two words that lie side by side at a multiple of 8 bytes."""
    if PTX:
        a, b = tl.inline_asm_elementwise(READ_TWO, "=r,=r,l", [p], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
        return a, b
    else:
        return tl.load(p), tl.load(p + 1)


@triton.jit
def get_four(p):
    """Four fp32 numbers that lie side by side at a multiple of 16 bytes, [..., 2, 2]."""
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            READ_FOUR,
            "=f,=f,=f,=f,l",
            [p],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def get_eight(p):
    """Eight 16-bit numbers that lie side by side at a multiple of 16 bytes."""
    dtype: tl.constexpr = p.dtype.element_ty
    if PTX:
        x0, x1, x2, x3, x4, x5, x6, x7 = tl.inline_asm_elementwise(
            READ_EIGHT, "=h,=h,=h,=h,=h,=h,=h,=h,l", [p],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
        return _as(x0, x1, x2, x3, x4, x5, x6, x7, dtype)
    else:
        return (
            tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3),
            tl.load(p + 4), tl.load(p + 5), tl.load(p + 6), tl.load(p + 7),
        )  # fmt: skip


# --- decoding --------------------------------------------------------------------------------------------------------


def planes(dtype: torch.dtype) -> list[int]:
    """NF4's 16 values as eight words: their high bytes, four a word, then their low bytes."""
    values = torch.tensor(VALUES, dtype=torch.float32).to(dtype).view(torch.int16).tolist()
    found = [[(value >> shift) & 255 for value in values] for shift in (8, 0)]
    return [struct.unpack("<i", bytes(plane[i : i + 4]))[0] for plane in found for i in (0, 4, 8, 12)]


def _permutations(times: str = "") -> str:
    """PTX: a word of eight codes ($8) to eight 16-bit values ($0 to $7), from the tables $9 to $16; ``times``, a type
    of 16-bit pairs, multiplies them by the pair $17.

    A selector picks four bytes out of eight by three bits each, so that the halves of the table are asked both, and
    bit 3 of a code, spread over a byte, says which to take.  Of two codes in a byte the high one comes first.
    """
    lines = ["{.reg .b32 s, f, m, a, b, h, l, t, z; mov.b32 z, 0x80008000;"]  # z: a pair of -0
    lines.append("and.b32 s, $8, 0x77777777; shl.b32 f, $8, 4;")
    for half, spread in ((0, "0xD9C8"), (4, "0xFBEA")):
        lines += ["shr.u32 s, s, 16;"] * (half > 0) + [f"prmt.b32 m, f, $8, {spread};"]
        for plane, first in (("h", 9), ("l", 13)):
            lines.append(f"prmt.b32 a, ${first}, ${first + 1}, s; prmt.b32 b, ${first + 2}, ${first + 3}, s;")
            lines.append(f"lop3.b32 {plane}, a, b, m, 0xD8;")  # b where m, else a
        for i, pair in ((half, "0x4051"), (half + 2, "0x6273")):
            scaled = f"fma.rn.{times} t, t, $17, z; " if times else ""  # GPUs before Hopper have no mul.bf16x2
            lines.append(f"prmt.b32 t, l, h, {pair}; {scaled}mov.b32 {{${i}, ${i + 1}}}, t;")
    return " ".join([*lines, "}"])


def _shifts(places: int, mask: int, factor: int, times: str, scaled: bool) -> str:
    """PTX: a word of four e4m3 codes ($4) to 16-bit values ($0 to $3), where ``scaled`` times the pair $5.

    Sign, exponent and fraction are put where they belong; ``factor``, a power of two, makes up for the other bias of
    the exponent.  Its two codes for NaN come out as ±480.
    """
    lines = [f"{{.reg .b32 t, s, k, z; mov.b32 k, {factor}; mov.b32 z, 0x80008000;"]
    for i, pair in ((0, "0x1404"), (2, "0x3424")):
        lines.append(f"prmt.b32 t, $4, 0, {pair}; shr.u32 s, t, {places}; and.b32 s, s, {mask};")
        lines.append(f"lop3.b32 t, t, z, s, 0xEA; fma.rn.{times} t, t, k, z;")
        lines.append(f"fma.rn.{times} t, t, $5, z;" * scaled + f"mov.b32 {{${i}, ${i + 1}}}, t;")
    return " ".join([*lines, "}"])


NF4_PLAIN = tl.constexpr(_permutations())
NF4_BF16, NF4_FP16 = tl.constexpr(_permutations("bf16x2")), tl.constexpr(_permutations("f16x2"))
BF16, FP16 = (4, 0x07F007F0, 0x7B807B80, "bf16x2"), (1, 0x3F803F80, 0x5C005C00, "f16x2")  # 2¹²⁰ and 2⁸
FP8_BF16, FP8_FP16 = tl.constexpr(_shifts(*BF16, False)), tl.constexpr(_shifts(*FP16, False))
FP8_SCALED_BF16, FP8_SCALED_FP16 = tl.constexpr(_shifts(*BF16, True)), tl.constexpr(_shifts(*FP16, True))
PAIR_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")
PAIR_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")
EIGHT, FOUR = "=h,=h,=h,=h,=h,=h,=h,=h", "=h,=h,=h,=h"
NF4_OPERANDS = tl.constexpr(EIGHT + ",r" * 9)
NF4_SCALED = tl.constexpr(EIGHT + ",r" * 10)
FP8_OPERANDS = tl.constexpr(FOUR + ",r")
FP8_SCALED = tl.constexpr(FOUR + ",r,r")


@triton.jit
def _as(v0, v1, v2, v3, v4, v5, v6, v7, dtype: tl.constexpr):
    """Bits of 16 as numbers."""
    return (
        v0.to(dtype, bitcast=True), v1.to(dtype, bitcast=True), v2.to(dtype, bitcast=True),
        v3.to(dtype, bitcast=True), v4.to(dtype, bitcast=True), v5.to(dtype, bitcast=True),
        v6.to(dtype, bitcast=True), v7.to(dtype, bitcast=True),
    )  # fmt: skip


@triton.jit
def _pair(b_f, dtype: tl.constexpr):
    """fp32 rounded to 16 bits, twice in a word."""
    return tl.inline_asm_elementwise(
        PAIR_BF16 if dtype == tl.bfloat16 else PAIR_FP16, "=r,f", [b_f], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _look_up(p_values, code):
    return tl.load(p_values + (code & 15))


@triton.jit
def nf4_values(b_w, p_planes, p_values, dtype: tl.constexpr):
    """The eight values of each word in the order of the weight's columns.

    p_planes: to :func:`planes`; from several copies of it, so that the words are not taken for the same in all threads
    and kept where permutations do not reach them.  p_values: to the values in fp32.
    """
    if PTX:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            NF4_PLAIN, NF4_OPERANDS,
            [b_w, get(p_planes), get(p_planes + 1), get(p_planes + 2), get(p_planes + 3), get(p_planes + 4),
             get(p_planes + 5), get(p_planes + 6), get(p_planes + 7)],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
        return _as(v0, v1, v2, v3, v4, v5, v6, v7, dtype)
    else:
        return (
            _look_up(p_values, b_w >> 4).to(dtype), _look_up(p_values, b_w).to(dtype),
            _look_up(p_values, b_w >> 12).to(dtype), _look_up(p_values, b_w >> 8).to(dtype),
            _look_up(p_values, b_w >> 20).to(dtype), _look_up(p_values, b_w >> 16).to(dtype),
            _look_up(p_values, b_w >> 28).to(dtype), _look_up(p_values, b_w >> 24).to(dtype),
        )  # fmt: skip


@triton.jit
def nf4_scaled(b_w, b_f, p_planes, p_values, dtype: tl.constexpr):
    """:func:`nf4_values` times b_f, which is rounded to 16 bits first, and the products too."""
    if PTX:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            NF4_BF16 if dtype == tl.bfloat16 else NF4_FP16, NF4_SCALED,
            [b_w, get(p_planes), get(p_planes + 1), get(p_planes + 2), get(p_planes + 3), get(p_planes + 4),
             get(p_planes + 5), get(p_planes + 6), get(p_planes + 7), _pair(b_f, dtype)],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
        return _as(v0, v1, v2, v3, v4, v5, v6, v7, dtype)
    else:
        b_f = b_f.to(dtype)
        v0, v1, v2, v3, v4, v5, v6, v7 = nf4_values(b_w, p_planes, p_values, dtype)
        return v0 * b_f, v1 * b_f, v2 * b_f, v3 * b_f, v4 * b_f, v5 * b_f, v6 * b_f, v7 * b_f


@triton.jit
def fp8_values(b_w, dtype: tl.constexpr):
    """The four values of each word."""
    if PTX:
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            FP8_BF16 if dtype == tl.bfloat16 else FP8_FP16, FP8_OPERANDS, [b_w],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip
        return (
            v0.to(dtype, bitcast=True), v1.to(dtype, bitcast=True), v2.to(dtype, bitcast=True),
            v3.to(dtype, bitcast=True),
        )  # fmt: skip
    else:
        return (
            _decode(b_w & 255).to(dtype), _decode((b_w >> 8) & 255).to(dtype), _decode((b_w >> 16) & 255).to(dtype),
            _decode((b_w >> 24) & 255).to(dtype),
        )  # fmt: skip


@triton.jit
def fp8_scaled(b_w, b_f, dtype: tl.constexpr):
    """:func:`fp8_values` times b_f, which is rounded to 16 bits first, and the products too."""
    if PTX:
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            FP8_SCALED_BF16 if dtype == tl.bfloat16 else FP8_SCALED_FP16, FP8_SCALED, [b_w, _pair(b_f, dtype)],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip
        return (
            v0.to(dtype, bitcast=True), v1.to(dtype, bitcast=True), v2.to(dtype, bitcast=True),
            v3.to(dtype, bitcast=True),
        )  # fmt: skip
    else:
        b_f = b_f.to(dtype)
        v0, v1, v2, v3 = fp8_values(b_w, dtype)
        return v0 * b_f, v1 * b_f, v2 * b_f, v3 * b_f
