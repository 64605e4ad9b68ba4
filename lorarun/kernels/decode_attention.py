"""Attention of decoding: one query a row against that row's cache, whose newest key and value it puts in place.

    o = softmax(cap(scale · q·kᵀ)) · v over the first ``filled`` slots of a row

Every slot that is filled is one that the query may see (:mod:`lorarun.cache` keeps windows as rings), so their number
is all that masks.  Work is bound by reading keys and values, once each, and one row has too few heads to keep a GPU
busy with: programs share a row's slots out among them, in parts of one length, and a second launch joins the parts in
their order.  The heads of a group stand as rows of one tile, so that their keys are read once.

A cache in FP8 is half as much to read: e4m3 codes with an fp32 scale for each vector, absmax / 448
(:mod:`lorarun.kernels.fp8`).  Tiles stay codes: a key's scale multiplies its scores, a value's its probabilities.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.kernels.arithmetic import PTX
from lorarun.kernels.backend import INTERPRETED, converts_fp8, runs_triton, tl, triton
from lorarun.kernels.fp8 import _code, _decode, _factors, _largest, fp8_quantize

BUSY = 528  # programs that a GPU wants at the least: four on each multiprocessor of an H200
SPLITS = 64  # parts of a row at the most
BLOCK, WARPS, STAGES = 64, 4, 3  # slots of a tile, half as many for heads wider than 128; not measured yet


class Held(NamedTuple):
    """Keys or values as a cache holds them: as they are, or in FP8.

    data [..., kv_heads, head_dim]: in the model's dtype, or e4m3 codes as uint8.  scale: of those codes, fp32
    [..., kv_heads].
    """

    data: Tensor
    scale: Tensor | None = None

    def at(self, where: Any) -> Held:
        """What an index of the leading dimensions finds."""
        return Held(self.data[where], None if self.scale is None else self.scale[where])

    def put(self, where: Any, new: Held) -> None:
        """Write ``new`` there."""
        self.data[where] = new.data
        if self.scale is not None and new.scale is not None:
            self.scale[where] = new.scale

    def longer(self, more: int) -> Held:
        """The same [batch, slots, kv_heads, ...] with so many more slots of zeros."""
        data = torch.nn.functional.pad(self.data, (0, 0, 0, 0, 0, more))
        if self.scale is None:
            return Held(data)
        return Held(data, torch.nn.functional.pad(self.scale.transpose(1, 2), (0, more)).transpose(1, 2))

    def encode(self, x: Tensor) -> Held:
        """x [..., kv_heads, head_dim] in the form of this one."""
        if self.scale is None:
            return Held(x)
        codes, scale, _ = fp8_quantize(x.reshape(-1, x.shape[-1]))
        return Held(codes.view(torch.uint8).view(x.shape), scale.view(x.shape[:-1]))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The vectors, rounded once to ``dtype``."""
        if self.scale is None:
            return self.data.to(dtype)
        return (self.data.view(torch.float8_e4m3fn).float() * self.scale.unsqueeze(-1)).to(dtype)


class Step(NamedTuple):
    """Where a step's keys go and what its queries see.

    keys, values [batch, slots, kv_heads, head_dim]: a layer's cache, written to; scales lie slot beside slot.  slot,
    filled int32 [batch]: where the new key of a row goes, and how many slots are filled with it.  longest: no row has
    larger, as far as the host knows.
    """

    keys: Held
    values: Held
    slot: Tensor
    filled: Tensor
    longest: int


# --- reference -------------------------------------------------------------------------------------------------------


def decode_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, step: Step, softcap: float | None, scale: float
) -> Tensor:
    """What :func:`decode_attention` computes."""
    batch, _, heads, dim = q.shape
    rows = torch.arange(batch, device=q.device)
    for held, new in ((step.keys, k), (step.values, v)):
        held.put((rows, step.slot), held.encode(new[:, 0]))
    seen = (slice(None), slice(step.longest))
    keys, values = (held.at(seen).decode(q.dtype).transpose(1, 2) for held in (step.keys, step.values))
    # [batch, kv, n, dim]
    mask = torch.arange(keys.shape[2], device=q.device) < step.filled.unsqueeze(1)  # [batch, n]
    mask = mask[:, None, None]
    q = q.reshape(batch, keys.shape[1], -1, dim)  # the heads of a group stand as queries of one head
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask, scale=scale)
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = softcap * torch.tanh((q.to(wide) @ keys.to(wide).transpose(2, 3)) * (scale / softcap))
        out = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).to(q.dtype) @ values
    return out.reshape(batch, 1, heads, dim)


# --- Triton kernels --------------------------------------------------------------------------------------------------


# A byte's bits below the sign, four places up, are 2⁻¹²⁰ times its value in bf16.  Four codes in ten instructions;
# not pure, so that Triton decodes before it moves a tile to where its product wants it, and not byte by byte behind.
UNPACK = tl.constexpr(
    "{.reg .b32 a, b, c, m, z; mov.b32 m, 0x7B807B80; mov.b32 z, 0x80008000;"
    " prmt.b32 a, $2, 0, 0x1404; shr.u32 c, a, 4; and.b32 c, c, 0x07F007F0; lop3.b32 a, a, z, c, 0xEA;"
    " prmt.b32 b, $2, 0, 0x3424; shr.u32 c, b, 4; and.b32 c, c, 0x07F007F0; lop3.b32 b, b, z, c, 0xEA;"
    " fma.rn.bf16x2 $0, a, m, z; fma.rn.bf16x2 $1, b, m, z;}"
)


@triton.jit
def _values(b_x, dtype: tl.constexpr):
    """Codes as numbers of ``dtype``, exactly; anything else as it is."""
    if b_x.dtype != tl.uint8:
        return b_x
    elif PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(UNPACK, "=r,=r,r", [b_x], dtype=tl.bfloat16, is_pure=False, pack=4)
    else:
        return _decode(b_x).to(dtype)


@triton.jit
def _put(p_x, p_held, p_scales, slot, o_d, m_d, NATIVE: tl.constexpr):
    """Write a vector where it belongs."""
    b_x = tl.load(p_x + o_d, mask=m_d, other=0.0)
    if p_scales is None:
        tl.store(p_held + o_d, b_x, mask=m_d)
    else:
        b_x = b_x.to(tl.float32)
        scale, inverse = _factors(_largest(b_x))
        tl.store(p_scales + slot, scale)
        tl.store(p_held + o_d, _code(b_x * inverse, NATIVE), mask=m_d)


@triton.jit(do_not_specialize=["chunk"])
def _attend(
    p_q, p_k, p_v, p_keys, p_values, p_key_scales, p_value_scales, p_slot, p_filled, p_o, p_lse, stride_qb, stride_qh,
    stride_kb, stride_kh, stride_vb, stride_vh, stride_cb, stride_ct, stride_ch, stride_sb, stride_sh, kv_heads, group,
    head_dim, chunk, softcap, scale, SPLIT: tl.constexpr, NATIVE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One part of one row's slots for the query heads of one key-value head; whose part the new key is in writes it."""
    b, h, part = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads, tl.program_id(0)
    filled = tl.load(p_filled + b)
    start = part * chunk
    if start < filled:
        slot = tl.load(p_slot + b)
        o_g, o_d = tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
        m_g, m_d = o_g < group, o_d < head_dim
        base = b.to(tl.int64) * stride_cb + h * stride_ch
        end = tl.minimum(start + chunk, filled)
        if p_key_scales is not None:
            p_key_scales += b.to(tl.int64) * stride_sb + h * stride_sh
            p_value_scales += b.to(tl.int64) * stride_sb + h * stride_sh
        if (slot >= start) & (slot < end):
            new = base + slot.to(tl.int64) * stride_ct
            p_k += b.to(tl.int64) * stride_kb + h * stride_kh
            p_v += b.to(tl.int64) * stride_vb + h * stride_vh
            _put(p_k, p_keys + new, p_key_scales, slot, o_d, m_d, NATIVE)
            _put(p_v, p_values + new, p_value_scales, slot, o_d, m_d, NATIVE)
            tl.debug_barrier()
        o_q = b.to(tl.int64) * stride_qb + (h * group + o_g)[:, None] * stride_qh + o_d[None, :]
        b_q = tl.load(p_q + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0)
        b_top = tl.full([GROUP], -float("inf"), tl.float32)
        b_sum = tl.zeros([GROUP], tl.float32)
        b_o = tl.zeros([GROUP, BLOCK_D], tl.float32)
        unit = (scale if softcap is None else 1.0) * 1.4426950408889634  # log2(e)
        for n in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            o_n = n + tl.arange(0, BLOCK_N)
            m_n = o_n < end
            o_c = base + o_n.to(tl.int64)[:, None] * stride_ct + o_d[None, :]
            mask = m_n[:, None] & m_d[None, :]
            b_k = _values(tl.load(p_keys + o_c, mask=mask, other=0), b_q.dtype)
            b_v = _values(tl.load(p_values + o_c, mask=mask, other=0), b_q.dtype)
            b_s = tl.dot(b_q, b_k.T, input_precision="ieee")
            if p_key_scales is not None:
                b_s *= tl.load(p_key_scales + o_n, mask=m_n, other=0.0)[None, :]
            if softcap is not None:
                b_s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(b_s * (scale / softcap * 2.8853900817779268))))  # tanh
            b_s = tl.where(m_n[None, :], b_s, -float("inf"))
            b_new = tl.maximum(b_top, tl.max(b_s, 1) * unit)
            b_p = tl.exp2(b_s * unit - b_new[:, None])
            b_fade = tl.exp2(b_top - b_new)
            b_sum = b_sum * b_fade + tl.sum(b_p, 1)
            b_o *= b_fade[:, None]
            if p_value_scales is not None:
                b_scale = tl.load(p_value_scales + o_n, mask=m_n, other=0.0)
                if b_q.dtype == tl.float16:  # has no room for small scales
                    top = tl.max(b_scale, 0)
                    b_p *= (b_scale / top)[None, :]
                    b_o += tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee") * top
                else:
                    b_o = tl.dot((b_p * b_scale[None, :]).to(b_v.dtype), b_v, b_o, input_precision="ieee")
            else:
                b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")
            b_top = b_new
        b_o = b_o / b_sum[:, None]
        o_h = b * (kv_heads * group) + h * group + o_g  # of all rows' query heads
        o_p = o_h * tl.num_programs(0) + part
        tl.store(
            p_o + o_p.to(tl.int64)[:, None] * head_dim + o_d[None, :], b_o.to(p_o.dtype.element_ty),
            mask=m_g[:, None] & m_d[None, :],
        )  # fmt: skip
        if SPLIT:
            tl.store(p_lse + o_p, b_top + tl.log2(b_sum), mask=m_g)


@triton.jit(do_not_specialize=["chunk", "splits"])
def _join(
    p_parts, p_lse, p_filled, p_o, heads, head_dim, chunk, splits, PARTS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One query head of one row from its parts, weighted by their shares of the sum."""
    head = tl.program_id(0).to(tl.int64)
    count = tl.cdiv(tl.load(p_filled + head // heads), chunk)
    o_p, o_d = tl.arange(0, PARTS), tl.arange(0, BLOCK_D)
    m_p, m_d = o_p < count, o_d < head_dim
    b_lse = tl.load(p_lse + head * splits + o_p, mask=m_p, other=-float("inf"))
    b_w = tl.exp2(b_lse - tl.max(b_lse, 0))
    o_part = (head * splits + o_p)[:, None] * head_dim + o_d[None, :]
    b_parts = tl.load(p_parts + o_part, mask=m_p[:, None] & m_d[None, :], other=0.0)
    b_o = tl.sum(b_parts * b_w[:, None], 0) / tl.sum(b_w, 0)
    tl.store(p_o + head * head_dim + o_d, b_o.to(p_o.dtype.element_ty), mask=m_d)


# --- host functions --------------------------------------------------------------------------------------------------


def _launch(q: Tensor, k: Tensor, v: Tensor, step: Step, softcap: float | None, scale: float) -> Tensor:
    batch, _, heads, dim = q.shape
    kv_heads = k.shape[2]
    block_d = triton.next_power_of_2(dim)
    block = BLOCK if block_d <= 128 else BLOCK // 2
    wanted = min(SPLITS, max(1, BUSY // (batch * kv_heads)), triton.cdiv(step.longest, block))
    chunk = triton.cdiv(triton.cdiv(step.longest, wanted), block) * block
    splits = triton.cdiv(step.longest, chunk)
    out = torch.empty((batch, 1, heads, dim), dtype=q.dtype, device=q.device)
    parts, lse = out, None
    if splits > 1:
        parts = torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    scales, native = step.keys.scale, converts_fp8(q.device)
    assert scales is None or scales.stride(1) == 1, "scales lie slot beside slot"
    _attend[(splits, batch * kv_heads)](
        q, k, v, step.keys.data, step.values.data, scales, step.values.scale, step.slot, step.filled, parts, lse,
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2), *step.keys.data.stride()[:3],
        *((0, 0) if scales is None else (scales.stride(0), scales.stride(2))), kv_heads, heads // kv_heads, dim, chunk,
        softcap, scale, SPLIT=splits > 1, NATIVE=native, GROUP=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK_D=block_d, BLOCK_N=block, STAGES=STAGES, num_warps=WARPS, num_stages=STAGES,
        enable_fp_fusion=scales is None or native,  # rounding by adding must not be joined with the product before it
    )  # fmt: skip
    if splits > 1:
        _join[(batch * heads,)](
            parts, lse, step.filled, out, heads, dim, chunk, splits, PARTS=triton.next_power_of_2(splits),
            BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return out


# --- public functions ------------------------------------------------------------------------------------------------


def serves(q: Tensor) -> bool:
    """Whether the kernels take queries [..., head_dim] like these; the reference serves the others."""
    exact = (torch.bfloat16, torch.float16, torch.float32) if INTERPRETED else (torch.bfloat16, torch.float16)
    return runs_triton(q) and q.dtype in exact and q.shape[-1] <= 256


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, step: Step, softcap: float | None = None, scale: float | None = None
) -> Tensor:
    """Write k, v [batch, 1, kv_heads, head_dim] into the cache and attend with q [batch, 1, heads, head_dim].

    Returns [batch, 1, heads, head_dim] in the dtype of q; not differentiable.
    """
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    softcap = None if softcap is None else float(softcap)
    alike = q.dtype == k.dtype == v.dtype and (step.keys.scale is not None or step.keys.data.dtype == q.dtype)
    alike = alike and max(x.stride(-1) for x in (q, k, v)) == 1
    if serves(q) and alike:
        return _launch(q, k, v, step, softcap, scale)
    return decode_attention_reference(q, k, v, step, softcap, scale)
