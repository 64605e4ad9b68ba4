"""Causal attention under one contract: documents, sliding windows, soft-caps, grouped heads.

    o = softmax(cap(scale · q·kᵀ) + mask) · v          (Vaswani et al. 2017, arXiv:1706.03762, eq. 1)
    cap(s) = softcap · tanh(s / softcap)               (Gemma 2, arXiv:2408.00118, section 2)

Which keys a query sees is said by one integer per token: ``first``, the index of the first token of its document.  The query at
index i sees key j when

    first[i] ≤ j ≤ i   and   j > i − window.

That covers packed documents, left and right padding and sliding windows alike, needs no mask from the caller, and leaves no
query with nothing to see: a padding token is a document of its own and sees itself, so no row is ever 0/0.

Queries may be the last of a longer row of keys (decoding with a cache): index i then counts from the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def document_starts(documents: Tensor) -> Tensor:
    """The index of the first token of each token's document.

    documents [batch, seq] integers, −1 for padding.  Neighbours with the same number belong together; each padding token
    stands alone.  Returns [batch, seq] int64.
    """
    seq = documents.shape[1]
    index = torch.arange(seq, device=documents.device).expand_as(documents)
    starts = documents < 0
    starts[:, 0] = True
    starts[:, 1:] |= documents[:, 1:] != documents[:, :-1]
    return torch.where(starts, index, 0).cummax(dim=1).values


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


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend causally.

    q [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim] with heads a multiple of kv_heads and
    keys ≥ queries; the last query stands at the last key.  first [batch, queries] as in the contract above (None: 0 for
    all); window and softcap None: none; scale None: head_dim ** -0.5.  Softmax in fp32 (fp64 for fp64 input).
    Returns [batch, queries, heads, head_dim] in the dtype of q.
    """
    queries, keys = q.shape[1], k.shape[1]
    if window is not None and window >= keys:
        window = None  # everything is near enough
    groups = q.shape[2] // k.shape[2]
    q, k, v = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # [batch, heads, ·, head_dim]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    plain = first is None and window is None and queries in (1, keys)
    mask = None if plain else visible(queries, keys, first, window, q.device)
    if softcap is None:
        causal = plain and queries > 1
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
        return out.transpose(1, 2)
    if mask is None:
        mask = visible(queries, keys, first, window, q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(2, 3)) * scale  # [batch, heads, queries, keys]
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).to(q.dtype)
    return (weights @ v).transpose(1, 2)
