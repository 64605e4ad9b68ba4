"""Attention of decoding: one query a row against that row's cache, whose newest key and value it puts in place.

    o = softmax(cap(scale · q·kᵀ)) · v over the first ``filled`` slots of a row

Every slot that is filled is one that the query may see (:mod:`lorarun.cache` keeps windows as rings), so their number
is all that masks.  Work is bound by reading keys and values, once each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """Where a step's keys go and what its queries see.

    keys, values [batch, slots, kv_heads, head_dim]: a layer's cache, written to.  slot, filled int32 [batch]: where the
    new key of a row goes, and how many slots are filled with it.  longest: no row has larger, as far as the host
    knows.
    """

    keys: Tensor
    values: Tensor
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
    step.keys[rows, step.slot], step.values[rows, step.slot] = k[:, 0], v[:, 0]
    keys, values = (held[:, : step.longest].transpose(1, 2) for held in (step.keys, step.values))  # [batch, kv, n, dim]
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


# --- public function -------------------------------------------------------------------------------------------------


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, step: Step, softcap: float | None = None, scale: float | None = None
) -> Tensor:
    """Write k, v [batch, 1, kv_heads, head_dim] into the cache and attend with q [batch, 1, heads, head_dim].

    Returns [batch, 1, heads, head_dim] in the dtype of q; not differentiable.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return decode_attention_reference(q, k, v, step, softcap, scale)
