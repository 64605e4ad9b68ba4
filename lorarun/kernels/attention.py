"""Causal attention under one contract: documents, sliding windows, soft-caps, grouped heads.

    o = softmax(cap(scale · q·kᵀ) + mask) · v          (Vaswani et al. 2017, arXiv:1706.03762, eq. 1)
    cap(s) = softcap · tanh(s / softcap)               (Gemma 2, arXiv:2408.00118, section 2)

Which keys a query sees is said by one integer per token: ``first``, the index of the first token of its document.  The
query at index i sees key j when

    first[i] ≤ j ≤ i   and   j > i − window.

That covers packed documents, left and right padding and sliding windows alike, needs no mask from the caller, and
leaves no query with nothing to see: a padding token is a document of its own and sees itself, so no row is ever 0/0.
Packed rows are usually described by cumulative lengths and a longest length, which are needed on the host and change
the launch with the packing; a vector of fixed shape does not, so one captured graph serves any packing.

Queries may be the last of a longer row of keys (decoding with a cache): index i then counts from the end.

Three things serve a call, and ``serves`` says which.  Dense causal rows on an NVIDIA GPU: cuDNN, the fastest there is
on Hopper, called as an operator of its own so that no global switch of torch is touched.  Everything else on a GPU: the
Triton kernels below.  Elsewhere, and for what neither takes: the reference, which is torch's SDPA where it can be.

The kernels are FlashAttention-2's two passes (Dao 2023, arXiv:2307.08691, algorithms 1 and 2), with the way back split
by owner: one kernel owns blocks of queries and makes dq, one owns blocks of keys and makes dk and dv for all query
heads of a group.  Scores are computed twice on the way back instead of once, and in return nothing is added atomically:
the same inputs give the same bits.  A program visits only blocks that some row of its own can see, and masks only those
that some row cannot see whole.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.autograd.function import once_differentiable

from lorarun.kernels.backend import INTERPRETED, autocast, runs_triton, tl, triton, why
from lorarun.kernels.decode_attention import Step, decode_attention
from lorarun.kernels.replay import decide, frame, keep


class Spans(NamedTuple):
    """Each token's document: the indices of its first and of its last token, int32 [batch, seq] each.

    Both are non-decreasing along a row.  ``last`` is what a backward pass asks about keys; None where nothing is
    differentiated (decoding), or to have it derived from ``first`` at every call.
    """

    first: Tensor
    last: Tensor | None = None


def document_starts(documents: Tensor) -> Tensor:
    """The index of the first token of each token's document.

    documents [batch, seq] integers, −1 for padding.  Neighbours with the same number belong together; each padding
    token stands alone.  Returns [batch, seq] int64.
    """
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = documents < 0
    starts[:, 0] = True
    starts[:, 1:] |= documents[:, 1:] != documents[:, :-1]
    return torch.where(starts, index, 0).cummax(dim=1).values


def document_ends(first: Tensor) -> Tensor:
    """The index of the last token of each token's document, int32 [batch, seq], from the index of its first."""
    first = first.contiguous()
    return torch.searchsorted(first, first, right=True, out_int32=True) - 1


def document_spans(documents: Tensor) -> Spans:
    """Both ends of each token's document; documents as in :func:`document_starts`."""
    first = document_starts(documents).to(torch.int32)
    return Spans(first, document_ends(first))


# --- reference -------------------------------------------------------------------------------------------------------


def visible(queries: int, keys: int, first: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    """The mask of the contract: bool [batch or 1, 1, queries, keys], true where a query sees a key."""
    i = torch.arange(keys - queries, keys, device=device).view(1, queries, 1)
    j = torch.arange(keys, device=device).view(1, 1, keys)
    mask = j <= i
    if first is not None:
        mask = mask & (j >= first.unsqueeze(-1))
    if window is not None:
        mask = mask & (j > i - window)
    return mask.unsqueeze(1)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, window: int | None, softcap: float | None, scale: float
) -> Tensor:
    """The contract in plain PyTorch; arguments as in :func:`attention`, ``first`` alone for the spans."""
    if q.numel() == 0:
        return q.clone()
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    if window is not None and window >= keys:
        window = None  # everything is near enough
    plain = first is None and window is None and softcap is None and queries in (1, keys)
    mask = None if plain else visible(queries, keys, first, window, q.device)
    q, k, v = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # [batch, heads, ·, head_dim]
    grouped = plain and (q.device.type in ("cpu", "meta") or q.element_size() == 2)  # SDPA reads grouped heads
    if queries == 1:  # the heads of a group stand as queries of one head: a cache is not repeated
        q = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    elif heads > kv_heads and not grouped:
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    if softcap is None:
        causal = plain and queries > 1
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    else:
        assert mask is not None
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).transpose(2, 3)) * scale  # [batch, heads, queries, keys]
        scores = softcap * torch.tanh(scores / softcap)
        out = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).to(q.dtype) @ v
    return out.reshape(batch, heads, queries, head_dim).transpose(1, 2)


# --- Triton kernels --------------------------------------------------------------------------------------------------
#
# b batch, h query head, kv key-value head, m queries, n keys, d head_dim.  Tiles come through tensor descriptors
# [batch, heads, rows, head_dim], outside of which they read zeros and write nothing, so none is masked.  o_m indexes
# the queries given, o_n the keys; o_q = o_m + keys − queries places a query among the keys.  Exponents are base 2; unit
# is what turns scores into them.


@triton.jit
def _tile(tiles, b, h, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    return tiles.load([b, h, row, 0]).reshape(ROWS, BLOCK_D)


@triton.jit
def _tanh(b_x, factor):
    """tanh(factor · x) to a few fp32 roundings of 1; the hardware's own is off by 5e-4, which a soft-cap multiplies."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(b_x * (factor * 2.8853900817779268)))  # 2 log2(e)


@triton.jit
def _store(tiles, b_x, b, h, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    tiles.store([b, h, row, 0], b_x.to(tiles.dtype).reshape(1, 1, ROWS, BLOCK_D))


@triton.jit
def _first_seen(p_first, b, o_m, o_q, queries, window):
    """The first key that each query sees.  Rows past the end repeat the last one, so that they ask for nothing more."""
    b_start = tl.maximum(o_q - window + 1, 0)
    if p_first is not None:
        p_row = p_first + b.to(tl.int64) * queries
        b_start = tl.maximum(b_start, tl.load(p_row + tl.minimum(o_m, queries - 1)).to(tl.int32))
    return b_start


@triton.jit
def _row(b, h, heads, queries):
    """Where the numbers of a head start in lse and delta, whose rows are padded to 16 bytes."""
    return (b.to(tl.int64) * heads + h) * ((queries + 3) // 4 * 4)


@triton.jit(do_not_specialize=["queries", "keys", "window", "group"])
def _forward_kernel(
    q_tiles, o_tiles, k_tiles, v_tiles, p_first, p_lse, queries, keys, window, softcap, scale, group,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o and lse of one block of queries of one head."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows first
    h, b = tl.program_id(1), tl.program_id(2)
    heads, kv = tl.num_programs(1), h // group
    o_m = start + tl.arange(0, BLOCK_M)
    o_q = o_m + (keys - queries)
    b_start = _first_seen(p_first, b, o_m, o_q, queries, window)
    whole_from, whole_to = tl.max(b_start), start + (keys - queries)  # seen by every row
    b_q = _tile(q_tiles, b, h, start, BLOCK_M, BLOCK_D)
    b_top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    unit = (scale if softcap is None else 1.0) * 1.4426950408889634  # log2(e)
    for n in tl.range(tl.min(b_start), tl.minimum(whole_to + BLOCK_M, keys), BLOCK_N):
        b_k = _tile(k_tiles, b, kv, n, BLOCK_N, BLOCK_D)
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee")
        if softcap is not None:
            b_s = softcap * _tanh(b_s, scale / softcap)
        # At 256 ptxas would answer the branch by running the matrix products one at a time.
        if (BLOCK_D > 128) | (n < whole_from) | (n + BLOCK_N - 1 > whole_to):
            o_n = n + tl.arange(0, BLOCK_N)
            m_s = (o_n[None, :] >= b_start[:, None]) & (o_n[None, :] <= o_q[:, None])
            b_s = tl.where(m_s, b_s, -float("inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1) * unit)
        b_base = tl.where(b_new == -float("inf"), 0.0, b_new)  # rows that have seen nothing yet
        b_p = tl.exp2(b_s * unit - b_base[:, None])
        b_fade = tl.exp2(b_top - b_base)
        b_sum = b_sum * b_fade + tl.sum(b_p, 1)
        b_v = _tile(v_tiles, b, kv, n, BLOCK_N, BLOCK_D)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_fade[:, None], input_precision="ieee")
        b_top = b_new
    _store(o_tiles, b_o / b_sum[:, None], b, h, start, BLOCK_M, BLOCK_D)
    tl.store(p_lse + _row(b, h, heads, queries) + o_m, b_top + tl.log2(b_sum), mask=o_m < queries)


@triton.jit(do_not_specialize=["queries", "window", "group"])
def _dq_kernel(
    q_tiles, dq_tiles, k_tiles, v_tiles, p_first, p_o, p_do, p_lse, p_delta, queries, window, softcap, scale, group,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries of one head, and its delta = Σ_d o · do, which the other kernel reads."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    h, b = tl.program_id(1), tl.program_id(2)
    heads, kv = tl.num_programs(1), h // group
    o_m = start + tl.arange(0, BLOCK_M)
    row = _row(b, h, heads, queries)
    b_lse = tl.load(p_lse + row + o_m, mask=o_m < queries, other=0.0)
    o_d = tl.arange(0, BLOCK_D)
    o_o = (((b.to(tl.int64) * queries + o_m) * heads + h) * HEAD_DIM)[:, None] + o_d[None, :]
    m_o = (o_m < queries)[:, None] & (o_d < HEAD_DIM)[None, :]
    b_o = tl.load(p_o + o_o, mask=m_o, other=0.0)  # outside a loop, a tile is waited for before the next is asked for
    b_do = tl.load(p_do + o_o, mask=m_o, other=0.0)
    b_q = _tile(q_tiles, b, h, start, BLOCK_M, BLOCK_D)
    b_start = _first_seen(p_first, b, o_m, o_m, queries, window)
    whole_from, whole_to = tl.max(b_start), start
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    tl.store(p_delta + row + o_m, b_delta, mask=o_m < queries)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    unit = (scale if softcap is None else softcap) * 1.4426950408889634  # log2(e)
    for n in tl.range(tl.min(b_start), tl.minimum(start + BLOCK_M, queries), BLOCK_N):
        b_k = _tile(k_tiles, b, kv, n, BLOCK_N, BLOCK_D)
        b_v = _tile(v_tiles, b, kv, n, BLOCK_N, BLOCK_D)
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee")
        b_dp = tl.dot(b_do, b_v.T, input_precision="ieee")
        if softcap is not None:
            b_s = _tanh(b_s, scale / softcap)
        b_p = tl.exp2(b_s * unit - b_lse[:, None])
        if (n < whole_from) | (n + BLOCK_N - 1 > whole_to):
            o_n = n + tl.arange(0, BLOCK_N)
            m_p = (o_n[None, :] >= b_start[:, None]) & (o_n[None, :] <= o_m[:, None])
            b_p = tl.where(m_p, b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        if softcap is not None:
            b_ds *= 1.0 - b_s * b_s
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")
    _store(dq_tiles, b_dq * scale, b, h, start, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["queries", "window", "group"])
def _dkv_kernel(
    q_tiles, do_tiles, k_tiles, v_tiles, dk_tiles, dv_tiles, lse_tiles, delta_tiles, p_last,
    queries, window, softcap, scale, group, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv (or one of them: the other's tiles are None) of one block of keys of one key-value head.

    One loop walks the group's heads and, within each, the blocks of queries that see the keys, both upwards: the order
    of the sum is fixed, and short ranges (small documents) do not restart the pipeline at every head.  Scores are
    transposed, [keys, queries], so that both sums take them as they are.
    """
    start = tl.program_id(0) * BLOCK_N  # the first keys have most queries
    kv, b = tl.program_id(1), tl.program_id(2)
    o_n = start + tl.arange(0, BLOCK_N)
    b_end = tl.minimum(o_n + window, queries) - 1  # the last query that sees each key
    if p_last is not None:
        p_row = p_last + b.to(tl.int64) * queries
        b_end = tl.minimum(b_end, tl.load(p_row + tl.minimum(o_n, queries - 1)).to(tl.int32))
    whole_from, whole_to = start + BLOCK_N - 1, tl.min(b_end)  # these see every key
    blocks = tl.cdiv(tl.max(b_end) + 1 - start, BLOCK_M)
    b_k = _tile(k_tiles, b, kv, start, BLOCK_N, BLOCK_D)
    if dk_tiles is not None:
        b_v = _tile(v_tiles, b, kv, start, BLOCK_N, BLOCK_D)
        b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if dv_tiles is not None:
        b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    unit = (scale if softcap is None else softcap) * 1.4426950408889634  # log2(e)
    for i in tl.range(0, group * blocks):
        h = kv * group + i // blocks
        m = start + i % blocks * BLOCK_M
        o_m = m + tl.arange(0, BLOCK_M)
        b_q = _tile(q_tiles, b, h, m, BLOCK_M, BLOCK_D)
        b_lse = lse_tiles.load([b, h, m]).reshape(BLOCK_M)
        b_s = tl.dot(b_k, b_q.T, input_precision="ieee")
        if softcap is not None:
            b_s = _tanh(b_s, scale / softcap)
        b_p = tl.exp2(b_s * unit - b_lse[None, :])
        if (m < whole_from) | (m + BLOCK_M - 1 > whole_to):
            m_p = (o_m[None, :] >= o_n[:, None]) & (o_m[None, :] <= b_end[:, None])
            b_p = tl.where(m_p, b_p, 0.0)
        b_do = _tile(do_tiles, b, h, m, BLOCK_M, BLOCK_D)
        if dv_tiles is not None:
            b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision="ieee")
        if dk_tiles is not None:
            b_delta = delta_tiles.load([b, h, m]).reshape(BLOCK_M)
            b_dp = tl.dot(b_v, b_do.T, input_precision="ieee")
            b_ds = b_p * (b_dp - b_delta[None, :])
            if softcap is not None:
                b_ds *= 1.0 - b_s * b_s
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
    if dk_tiles is not None:
        _store(dk_tiles, b_dk * scale, b, kv, start, BLOCK_N, BLOCK_D)
    if dv_tiles is not None:
        _store(dv_tiles, b_dv, b, kv, start, BLOCK_N, BLOCK_D)


# --- host functions --------------------------------------------------------------------------------------------------

# (BLOCK_M, BLOCK_N, num_warps, num_stages) by head_dim, padded to a power of two, for 16-bit inputs on a GPU with the
# shared memory of Hopper.  At 256 the sums of dk and dv do not fit the registers together: a launch each.
BLOCKS: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (128, 32, 8, 4)},
    "dq": {64: (64, 128, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 4, 3)},
    "dkv": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2)},
    "dk": {256: (64, 64, 4, 2)},
    "dv": {256: (64, 128, 8, 2)},
}
# For GPUs with less (they fit 99 KiB) and for fp32, by bytes of an element and head_dim: the rows that a program owns,
# the rows that it visits at a time, num_warps.
TIGHT = {
    (2, 64): (64, 64, 4),
    (2, 128): (64, 32, 4),
    (2, 256): (32, 16, 4),
    (4, 64): (32, 32, 8),
    (4, 128): (16, 16, 8),
    (4, 256): (16, 16, 8),
}


@functools.cache
def _roomy(device: torch.device) -> bool:
    """Whether a program can have Hopper's 227 KiB of shared memory."""
    if INTERPRETED or device.type == "meta":
        return True
    properties = torch.get_device_module(device).get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= 227 * 1024


def _options(kernel: str, q: Tensor) -> dict[str, int] | None:
    """Block sizes and launch options of a kernel; None where dk and dv are made together, or apart, and this is not."""
    width = max(64, triton.next_power_of_2(q.shape[-1]))
    if q.element_size() == 2 and _roomy(q.device):
        row = BLOCKS[kernel].get(width)
    elif kernel in ("dk", "dv"):
        row = None
    else:
        own, visited, warps = TIGHT[q.element_size(), width]
        row = (visited, own, warps, 1) if kernel == "dkv" else (own, visited, warps, 1)
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    return None if row is None else dict(zip(names, row, strict=True), BLOCK_D=width, enable_fp_fusion=True)


def _readable(x: Tensor) -> Tensor:
    """x, or a contiguous copy where the copy engine cannot read it: it wants multiples of 16 bytes between rows."""
    unit = 16 // x.element_size()
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % unit == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _tiles(x: Tensor, *block: int) -> Any:
    """A descriptor from which kernels load tiles ``block`` of x [batch, heads, rows, …] with strides as they are."""
    unit = 16 // x.element_size()
    strides = [stride if size > 1 else unit for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return triton.tools.tensor_descriptor.TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, *block])


def _inputs(options: dict[str, int], queries: list[Tensor], keys: list[Tensor]) -> list[Any]:
    """Descriptors of tensors [batch, seq, heads, head_dim] for blocks of queries and of keys."""
    rows = [(x, options["BLOCK_M"]) for x in queries] + [(x, options["BLOCK_N"]) for x in keys]
    return [_tiles(x.transpose(1, 2), count, options["BLOCK_D"]) for x, count in rows]


def _forward(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, numbers: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """o like q but contiguous, and lse [batch, heads, queries padded to 4] fp32, the base-2 logarithm of Σ exp."""
    batch, queries, heads, _ = q.shape
    o = q.new_empty(q.shape)
    lse = q.new_empty(batch, heads, (queries + 3) // 4 * 4, dtype=torch.float32)
    options = _options("forward", q) or {}
    grid = (triton.cdiv(queries, options["BLOCK_M"]), heads, batch)
    _forward_kernel[grid](*_inputs(options, [q, o], [k, v]), first, lse, queries, k.shape[1], **numbers, **options)
    return o, lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, first: Tensor | None, last: Tensor | None,
    numbers: dict[str, Any], keys_too: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """dq, and with ``keys_too`` dk and dv, all contiguous."""
    batch, queries, heads, head_dim = q.shape
    # Zeros, since a tensor map needs a device context, and autograd's thread has none before its first launch.
    dq, delta = q.new_empty(q.shape), torch.zeros_like(lse)
    options = _options("dq", q) or {}
    grid = (triton.cdiv(queries, options["BLOCK_M"]), heads, batch)
    tiles = _inputs(options, [q, dq], [k, v])
    _dq_kernel[grid](*tiles, first, o, do, lse, delta, queries, HEAD_DIM=head_dim, **numbers, **options)
    if not keys_too:
        return dq, None, None
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    for kernel in ("dkv", "dk", "dv"):
        if options := _options(kernel, q) or {}:
            grid = (triton.cdiv(queries, options["BLOCK_N"]), k.shape[2], batch)
            tiles = _inputs(options, [q, do], [k, v, dk, dv])
            tiles[4:] = [x if letter in kernel else None for letter, x in zip("kv", tiles[4:], strict=True)]
            tiles += [_tiles(x[..., :queries], options["BLOCK_M"]) for x in (lse, delta)]
            _dkv_kernel[grid](*tiles, last, queries, **numbers, **options)
    return dq, dk, dv


# --- autograd Function -----------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Saves q, k, v, o, lse and the spans; the way back recomputes the scores.  A replay may have kept o and lse.

    Bytes moved: forward q, o, and k, v once per block of queries, mostly from L2; backward q, o, do, dq, and k, v
    likewise, then k, v, dk, dv, and q, do once per block of keys.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, last: Tensor | None, numbers: dict[str, Any]
    ) -> Tensor:
        q, k, v = _readable(q), _readable(k), _readable(v)
        o, lse = keep("attention", lambda: _forward(q, k, v, first, numbers))
        ctx.save_for_backward(q, k, v, o, lse, first, last)
        ctx.numbers = numbers
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, first, last = ctx.saved_tensors
        do, keys_too = _readable(do.contiguous()), any(ctx.needs_input_grad[1:3])
        dq, dk, dv = _backward(q, k, v, o, do, lse, first, last, ctx.numbers, keys_too)
        return dq, dk, dv, None, None, None


TAKEN = operator.itemgetter(0, 1, 6, 7)  # of what cuDNN returns: o, lse, seed and offset of a dropout that is off


class _CuDNN(torch.autograd.Function):
    """cuDNN's attention of dense causal rows [batch, heads, seq, head_dim]; saves q, k, v, o, lse, as above.

    The operators themselves: SDPA would want a global switch to choose them, and could not leave the forward out.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        made = keep("attention", lambda: TAKEN(op(q, k, v, None, True, 0.0, True, False, scale=scale)))
        ctx.save_for_backward(q, k, v, *made)
        ctx.scale = scale
        return made[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, *random = ctx.saved_tensors
        op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        # No bias; lengths: cumulative ones of ragged rows, and the longest; no dropout; causal.
        rest = (*random, None, None, None, q.shape[2], k.shape[2], 0.0, True)
        group, kv_heads = q.shape[1] // k.shape[1], k.shape[1]
        few = _heads_at_once(q.shape[2], group)
        if few >= kv_heads:
            return *op(do, q, k, v, o, lse, *rest, scale=ctx.scale), None
        grads = [torch.empty_like(t) for t in (q, k, v)]
        for at in range(0, kv_heads, few):
            k_heads, q_heads = slice(at, at + few), slice(at * group, (at + few) * group)
            own = [t[:, heads] for t, heads in ((q, q_heads), (k, k_heads), (v, k_heads), (o, q_heads))]
            made = op(do[:, q_heads], *own, lse[:, q_heads].contiguous(), *rest, scale=ctx.scale)
            for whole, heads, part in zip(grads, (q_heads, k_heads, k_heads), made, strict=True):
                whole[:, heads] = part
            del made, part
        return *grads, None


def _heads_at_once(seq: int, group: int) -> int:
    """How many key heads cuDNN's backward is given at a time.

    Its workspace is 8 bytes × heads × head_dim a token, 32 KiB for 32 heads of 128, which would be a third of what a
    long row needs under the policy that needs least.  131,072 rows (queries × heads) a call are to keep the GPU busy.
    """
    return max(1, -(-131_072 // (seq * group))) if seq >= 16_384 else 2**31


# --- public function -------------------------------------------------------------------------------------------------


@functools.cache
def _cudnn_takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN's attention serves grouped causal heads of this size here, by torch's own rules."""
    if device.type == "meta":  # stands for the accelerator, or where there is none for a Hopper
        device = torch.accelerator.current_accelerator() or device
        if device.type == "meta":
            return head_dim % 8 == 0 and head_dim <= 256
    if device.type != "cuda":
        return False
    q = torch.empty(1, 2, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
    parameters = torch.backends.cuda.SDPAParams(q, q[:, :1], q[:, :1], None, 0.0, True, True)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> str:
    """What serves :func:`attention` with these arguments, and why: "Triton: documents, sliding window".

    Looks at shapes, dtypes, the device and whether gradients are wanted, never at values; what stands before the colon
    is "cuDNN", "Triton" or "torch".
    """
    queries, keys, head_dim = q.shape[1], k.shape[1], q.shape[-1]
    half = q.dtype in (torch.float16, torch.bfloat16)
    if not runs_triton(q):
        return "torch: " + why(q.device).removeprefix("torch reference: ")
    if not q.dtype == k.dtype == v.dtype or autocast(q.device):
        return "torch: it has its own rules for mixed dtypes and autocast"
    features = {
        "documents": spans is not None,
        "sliding window": window is not None and window < keys,
        "soft-cap": softcap is not None,
        "more keys than queries": queries < keys,
    }
    reasons = [name for name, wanted in features.items() if wanted]
    if not reasons and not INTERPRETED:
        if half and decide("deterministic", lambda: frame().deterministic or are_deterministic_algorithms_enabled()):
            reasons = ["deterministic algorithms"]
        elif half and queries % 128:
            reasons = ["cuDNN would build a plan for this length, no multiple of 128"]
        elif half and torch.backends.cuda.cudnn_sdp_enabled() and _cudnn_takes(q.device, q.dtype, head_dim):
            return "cuDNN: dense causal rows"
        else:
            return "torch: dense causal rows that cuDNN does not take"
    if not half and q.dtype != torch.float32:
        return f"torch: the kernel does not take {q.dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"torch: head_dim {head_dim} is not a multiple of 8 up to 256"
    if queries <= 1 or q.numel() == 0:
        return "torch: one query a row, or none"
    if queries < keys and _graded(q, k, v):
        return "torch: gradients of the last queries of longer rows"
    return "Triton: " + (", ".join(reasons) or "whatever the interpreter can")


def _graded(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans | Step | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend causally.

    q [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim] with heads a multiple of kv_heads and
    keys ≥ queries; the last query stands at the last key.  spans: where the documents of the queries start and end
    (:func:`document_spans`), or where they start alone, [batch, queries] integers; None: one document, from 0.  window
    and softcap None: none; scale (positive) None: head_dim ** -0.5.  fp64, fp32, bf16 or fp16; softmax and sums in
    fp32 (fp64 for fp64).  Any strides; views of one wider product are read as they are.  A step of decoding
    (:mod:`lorarun.kernels.decode_attention`) is told by its ``spans``; the window is in its cache.

    Returns [batch, queries, heads, head_dim] in the dtype of q.  Differentiable once in q, k and v.
    """
    if isinstance(spans, Step):
        return decode_attention(q, k, v, spans, softcap, scale)
    queries, keys = q.shape[1], k.shape[1]
    if k.shape != v.shape or q.shape[2] % k.shape[2] or q.shape[-1] != k.shape[-1] or queries > keys:
        raise ValueError(
            "attention wants q [batch, queries, heads, head_dim] and k, v [batch, keys, kv_heads, head_dim], heads a "
            f"multiple of kv_heads and keys >= queries; got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}."
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if min(x for x in (scale, window, softcap) if x is not None) <= 0:
        raise ValueError(f"scale, window and softcap must be positive; got {scale}, {window}, {softcap}.")
    backend = serves(q, k, v, spans, window, softcap).partition(":")[0]
    first, last = spans if isinstance(spans, Spans) else (spans, None)
    if backend == "torch":
        return attention_reference(q, k, v, first, window, softcap, scale)
    v = v.contiguous()  # it is kept for backward, and a view would keep the whole product that it was cut from
    if backend == "cuDNN":
        return _CuDNN.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale).transpose(1, 2)
    if first is not None:
        first = first.expand(q.shape[:2]).contiguous()
        if _graded(q, k, v):
            last = document_ends(first) if last is None else last.expand(q.shape[:2]).contiguous()
    window = keys if window is None else min(window, keys)
    softcap = None if softcap is None else float(softcap)
    numbers = dict(window=window, softcap=softcap, scale=float(scale), group=q.shape[2] // k.shape[2])
    return _Attention.apply(q, k, v, first, last, numbers)
